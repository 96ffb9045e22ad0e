"""Kinds of parameters: how a step gathers one, forms its gradient, and carries it to the next step.

:func:`kind_of` chooses by what a ``ParamSpec`` says. Methods run inside ``shard_map``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jspeed.model.layers import Fp32Accumulated
from jspeed.parallel import sparse_rows
from jspeed.parallel.layout import owned, reduce_gradient, sharded_dim
from jspeed.parallel.sparse_rows import Pending, Sink, pending, sink_size
from jspeed.recipe import ParamSpec

EACH_DEVICE: Any = PartitionSpec("data")


class Dense:
    """A parameter whose gradient is an array like it, in its compute dtype."""

    def __init__(self, spec: ParamSpec):
        self.spec = spec
        self.dtype = spec.compute or spec.dtype
        self.sums = self.dtype  # of accumulated gradients
        self.specs: Any = EACH_DEVICE  # of these on a mesh
        self.accumulates = spec.every > 1  # whether a step leaves any for the next

    # --- The parameter as the forward pass sees it ---

    def computed(self, p: Any) -> Any:
        """Return it in its compute dtype."""
        return p.astype(self.dtype)

    def gathered(
        self, p: Any, cut: PartitionSpec, gather: Callable[..., jax.Array], *rest: Any
    ) -> Any:
        """Return it whole, unless its rows are fetched from their owners."""
        return p if owned(self.spec, cut) else gather(p, cut, *rest)

    # --- Its gradient of one micro-batch, and the sum over those of a step ---

    def leaf(self, p: Any, tokens: int, owners: int) -> Any:
        """Return what a loss of so many ``tokens`` is differentiated with respect to."""
        return p

    def read(self, p: Any, leaf: Any) -> Any:
        """Return what the recipe is given of a leaf."""
        return leaf

    def first(self, p: Any) -> Any:
        """Return the sum before the first micro-batch, in fp32."""
        return jnp.zeros(p.shape, jnp.float32)

    def seeded(self, p: Any, total: Any) -> Any:
        """Return ``p`` for the next micro-batch, where its gradient starts from the sum."""
        return p

    def added(self, total: Any, grad: Any) -> Any:
        """Return the sum with one more gradient."""
        return total + grad.astype(jnp.float32)

    def listed(self, grad: Any) -> Any:
        """Return what is kept of each micro-batch apart."""
        return None

    def joined(self, p: Any, total: Any, lists: Any) -> Any:
        """Return the gradient of a step, as of one micro-batch."""
        return total.astype(p.dtype)

    def reduced(self, mesh: Mesh, grad: Any, cut: PartitionSpec, done: bool) -> Any:
        """Return the sum over devices that an optimizer is given."""
        return grad if owned(self.spec, cut) else reduce_gradient(mesh, grad, cut, done)

    # --- What a step leaves for the next, until a parameter that is updated every few is due ---

    def keeps_copy(self, cut: PartitionSpec) -> bool:
        """Whether the gathered copy is not the parameter itself, which a step could read."""
        return sharded_dim(cut) is not None or self.dtype != self.spec.dtype

    def zeros(self, cut: PartitionSpec, devices: int, most: int) -> Any:
        """Return accumulated gradients of no step, ``[devices, ...]``, of ``most`` tokens each."""
        shape = self.spec.shape
        if owned(self.spec, cut):
            shape = shape[0] // devices, *shape[1:]
        return jnp.zeros((devices, *shape), self.sums)

    def loaded(self, copy: Any, sums: Any) -> Any:
        """Return a step's parameter from its gathered copy; None: no gradients are accumulated."""
        return copy

    def copy_of(self, loaded: Any) -> Any:
        """Undo :meth:`loaded`."""
        return loaded

    def accumulated(self, loaded: Any, old: Any, grad: Any, age: int, due: bool) -> tuple[Any, Any]:
        """Return (gradient since the last update, ``age`` steps ago; what accumulates for the next
        step, which reads nothing where this one is ``due``)."""
        grad = old[0] + grad if age else grad
        return grad, old if due else grad[None]


class Fp32AccumulatedTables(Dense):
    """Tables side by side whose accumulated gradient is fp32 and grows in place, by the rows that
    tokens name (:func:`jspeed.model.layers.look_up_all`): it holds that of earlier steps too."""

    def __init__(self, spec: ParamSpec):
        super().__init__(spec)
        self.sums = jnp.float32

    def leaf(self, p: Fp32Accumulated, tokens: int, owners: int) -> Any:
        return p.sums_VND

    def read(self, p: Fp32Accumulated, leaf: Any) -> Fp32Accumulated:
        return p._replace(sums_VND=leaf)

    def first(self, p: Fp32Accumulated) -> Any:
        return p.sums_VND

    def seeded(self, p: Fp32Accumulated, total: Any) -> Fp32Accumulated:
        return p._replace(sums_VND=total)

    def added(self, total: Any, grad: Any) -> Any:
        return grad

    def joined(self, p: Fp32Accumulated, total: Any, lists: Any) -> Any:
        return total

    def loaded(self, copy: Any, sums: Any) -> Fp32Accumulated:
        return Fp32Accumulated(
            copy, jnp.zeros(self.spec.shape, jnp.float32) if sums is None else sums[0]
        )

    def copy_of(self, loaded: Fp32Accumulated) -> Any:
        return loaded.tables_VND

    def accumulated(
        self, loaded: Fp32Accumulated, old: Any, grad: Any, age: int, due: bool
    ) -> tuple[Any, Any]:
        return grad.astype(loaded.tables_VND.dtype), grad[None]


class Rows(Dense):
    """A sparse table (:mod:`jspeed.parallel.sparse_rows`): its gradient is a list of rows,
    and one such list of each step until an optimizer of its own changes these rows alone."""

    def __init__(self, spec: ParamSpec):
        super().__init__(spec)
        self.specs = [Pending(EACH_DEVICE, EACH_DEVICE)] * (spec.every - 1)

    def leaf(self, p: jax.Array, tokens: int, owners: int) -> Sink:
        return sparse_rows.empty(p, tokens * self.spec.sparse_rows, owners)

    def read(self, p: jax.Array, leaf: Sink) -> sparse_rows.SparseTable:
        return sparse_rows.SparseTable(p, leaf)

    def first(self, p: Any) -> None:
        return None

    def added(self, total: Any, grad: Any) -> None:
        return None

    def listed(self, grad: Any) -> Any:
        return grad

    def joined(self, p: Any, total: Any, lists: Any) -> Any:
        return jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), lists)

    def keeps_copy(self, cut: PartitionSpec) -> bool:
        return False

    def zeros(self, cut: PartitionSpec, devices: int, most: int) -> list[Pending]:
        rows, width = self.spec.shape
        owners = devices if owned(self.spec, cut) else 1
        size = sink_size(most * self.spec.sparse_rows // devices, rows // owners, owners)
        grads = jnp.zeros((devices, size, width), self.dtype)
        steps = range(self.spec.every - 1)
        return [Pending(jnp.zeros((devices, size), jnp.int32), grads) for _ in steps]

    def accumulated(
        self, loaded: jax.Array, old: Any, grad: Sink, age: int, due: bool
    ) -> tuple[list[Pending], Any]:
        # the same in all steps of a stage
        size = min(len(grad.rows_R2), old[0].rows_R.shape[-1])
        new = pending(grad, loaded.shape[0], size)
        found = [*(Pending(*(a[0, :size] for a in each)) for each in old[:age]), new]
        if due:
            return found, old
        last = Pending(*(a.at[0, :size].set(b) for a, b in zip(old[age], new, strict=True)))
        return found, [*old[:age], last, *old[age + 1 :]]

    def updated(
        self, mesh: Mesh, cut: PartitionSpec, update: Callable[..., Any], grads: Any, *rest: Any
    ) -> tuple[jax.Array, Any]:
        """Return ``update(lists of rows, *rest)``: the table and its optimizer's state. Where each
        device has the whole table, each makes the updates of all."""
        if mesh.size > 1 and not owned(self.spec, cut):
            grads = jax.tree.map(lambda a: jax.lax.all_gather(a, "data", tiled=True), grads)
        return update(grads, *rest)


class OnHost:
    """A table in the host's memory, in no state and no program: whatever is asked of it is None."""

    accumulates = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        getattr(Rows, name)  # which all methods have: others are mistakes
        return lambda *args: None


def kind_of(spec: ParamSpec) -> Any:
    """Return the kind of a parameter."""
    if spec.on_host:
        return OnHost()
    if spec.sparse_rows:
        return Rows(spec)
    return Fp32AccumulatedTables(spec) if spec.grad_accum_fp32 else Dense(spec)
