"""Tables too large for a dense gradient: only rows that tokens have named since the last update are
ever touched.

The gradient of such a table is a :class:`Sink`: a list of rows and their gradients. It is what
arrives at the rows' owner by the all-to-all of :mod:`jspeed.parallel.sharded_table`, without the
dense sum after it.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspeed.model.custom_kernels import Kernel
from jspeed.parallel.sharded_table import Slots, capacity, fetch, look_up, return_gradients

HIGH = 4096  # row numbers travel as two fp32 numbers, exact up to 2**31


class Sink(NamedTuple):
    """Rows of a device's part of a table, fp32 ``[R, 2]`` (number // 4096, number % 4096), and
    gradients ``[R, D]``.

    A row may be there several times; numbers past the part mean nothing.
    """

    rows_R2: jax.Array
    grads_RD: jax.Array


class SparseTable(NamedTuple):
    """A device's part of a table, and the zeros whose gradient is the table's."""

    part_VD: jax.Array
    sink: Sink


class Given(NamedTuple):
    """The rows of a look-up, ``[B, ids, D]``, as the host has found them: the table is there."""

    rows_BID: jax.Array


def sink_size(ids: int, part: int, owners: int) -> int:
    """Return R of a look-up of so many ids on each of ``owners`` devices."""
    return owners * capacity(ids, part, owners)


def empty(part_VD: jax.Array, ids: int, owners: int) -> Sink:
    """Return zeros for a look-up of so many ids in ``part_VD``."""
    size = sink_size(ids, part_VD.shape[0], owners)
    return Sink(
        jnp.zeros((size, 2), jnp.float32), jnp.zeros((size, part_VD.shape[1]), part_VD.dtype)
    )


def read(
    table: jax.Array | SparseTable | Given,
    ids_BT: jax.Array,
    axis: str | None,
    kernel: Kernel | None = None,
) -> jax.Array:
    """Return rows ``ids_BT`` of a table as :func:`~jspeed.parallel.sharded_table.fetch` does.

    A :class:`SparseTable` can be read once in a program, since gradients of its sink do not
    add up.
    """
    if isinstance(table, Given):
        assert table.rows_BID.shape[:2] == ids_BT.shape, "the host was told of other rows"
        return table.rows_BID
    if not isinstance(table, SparseTable):
        return fetch(table, ids_BT, axis, kernel)
    return _read(table.sink, jax.lax.stop_gradient(table.part_VD), ids_BT, axis, kernel)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _read(
    sink: Sink, part_VD: jax.Array, ids_BT: jax.Array, axis: str | None, kernel: Kernel | None
) -> jax.Array:
    return look_up(part_VD, ids_BT, axis)[0]


def _forward(
    sink: Sink, part_VD: jax.Array, ids_BT: jax.Array, axis: str | None, kernel: Kernel | None
):
    x_BTD, slots = look_up(part_VD, ids_BT, axis)
    return x_BTD, (slots, part_VD[:0])


def _backward(
    axis: str | None, kernel: Kernel | None, saved: tuple[Slots, jax.Array], grad_BTD: jax.Array
):
    slots, part_0D = saved
    sums = return_gradients(slots, grad_BTD, part_0D.dtype, axis, kernel)
    rows_R = slots.received_ids.reshape(-1)
    rows_R2 = jnp.stack([rows_R // HIGH, rows_R % HIGH], axis=-1).astype(jnp.float32)
    return Sink(rows_R2, sums.reshape(rows_R.size, -1)), None, None


_read.defvjp(_forward, _backward)


class Pending(NamedTuple):
    """As :class:`Sink`, with row numbers in int32 ``[..., R]``: what waits for the next update."""

    rows_R: jax.Array
    grads_RD: jax.Array


def pending(sink: Sink, part: int, size: int) -> Pending:
    """Return ``sink`` in ``size`` rows, at most its own: where these are fewer, equal rows are
    summed.

    Gradients are NaN where more than ``size`` different rows are in it.
    """
    high, low = jnp.moveaxis(sink.rows_R2, -1, 0).astype(jnp.int32)
    rows_R, grads_RD = HIGH * high + low, sink.grads_RD
    if size == len(rows_R):
        return Pending(rows_R, grads_RD)
    rows_R, sums_RD = distinct(Pending(rows_R, grads_RD), part)
    fits = jnp.where(rows_R[size] < part, jnp.nan, 1)
    return Pending(jnp.minimum(rows_R[:size], part), (fits * sums_RD[:size]).astype(grads_RD.dtype))


def joined(parts: Sequence[Pending]) -> Pending:
    """Return one list of several."""
    return Pending(*(jnp.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def distinct(found: Pending, part: int) -> Pending:
    """Sum the gradients of equal rows, in fp32: ascending rows, then numbers past the ``part``, all
    different, whose gradients mean nothing."""
    groups = grouped(found.rows_R, part)
    to_R = (
        jnp.zeros_like(groups.order_R).at[groups.order_R].set(groups.number_R, unique_indices=True)
    )
    sums_RD = (
        jnp.zeros(found.grads_RD.shape, jnp.float32)
        .at[to_R]
        .add(found.grads_RD.astype(jnp.float32))
    )
    return Pending(groups.rows_R, sums_RD)


class Groups(NamedTuple):
    """Equal rows of a list of R, all int32: ``rows_R`` are those of :func:`distinct`.

    Row ``rows_R[r]`` is at the places ``order_R[starts_R1[r] : starts_R1[r + 1]]`` of the list, at
    none if it is past the part; what is at ``order_R[n]`` is row ``rows_R[number_R[n]]``.
    """

    rows_R: jax.Array
    order_R: jax.Array
    starts_R1: jax.Array
    number_R: jax.Array


def grouped(rows_R: jax.Array, part: int) -> Groups:
    """Find equal rows."""
    count = jnp.arange(len(rows_R), dtype=jnp.int32)
    order_R = jnp.argsort(rows_R)
    sorted_R = rows_R[order_R]
    number_R = jnp.cumsum(jnp.diff(sorted_R, prepend=-1) > 0, dtype=jnp.int32) - 1
    first_R = jnp.searchsorted(number_R, count, method="scan_unrolled")
    last = len(rows_R) - 1
    first_rows_R = jnp.where(first_R <= last, sorted_R[jnp.minimum(first_R, last)], part)
    named = jnp.sum(rows_R < part, dtype=jnp.int32)
    starts_R1 = jnp.append(jnp.minimum(first_R, named), named)
    return Groups(
        jnp.where(first_rows_R < part, first_rows_R, part + count), order_R, starts_R1, number_R
    )
