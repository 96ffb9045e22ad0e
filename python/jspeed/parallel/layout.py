"""Layouts: over which mesh axis each logical axis of a parameter is sharded, and when parameters
are gathered."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from jspeed.errors import BadInput, first_line, nearest
from jspeed.parallel.mesh import LANE_AXES
from jspeed.parallel.pipeline import pipeline
from jspeed.recipe import (
    SMALL,
    Context,
    ParamSpec,
    Recipe,
    entries_of,
    leaves,
    map_specs,
    run_blocks,
)


@dataclass(frozen=True)
class Layout:
    """How parameters and their optimizer state are sharded over a mesh.

    ``rules`` maps logical axes to mesh axes. Over each mesh axis an array is sharded along the
    first of the logical axes mapped to it that it has, if that divides; else it is replicated. With
    ``gather_per_layer`` a layer's parameters are gathered over ``data`` when the layer runs, and
    again for its gradient: not all at the start of a step; with ``remat`` only a layer's input is
    saved for its gradient, and the rest is recomputed; with ``scan`` the layers are one loop of the
    compiled program, which is then no larger for many layers than for one.
    """

    rules: Mapping[str, str]
    gather_per_layer: bool = False
    remat: bool = False
    scan: bool = False

    @property
    def shards_matrices(self) -> bool:
        """Whether single matrices of a bank are sharded, not only the bank between them."""
        return bool(self.rules) and "matrix" not in self.rules


# Shoeybi et al. 2019, arXiv 1909.08053
MEGATRON = {"heads": "model", "mlp": "model", "vocab": "model"}
LAYOUTS = {
    # Every device holds every parameter and the whole optimizer state.
    "dp": Layout({}),
    # Each holds an equal shard and gathers to compute (ZeRO, arXiv 1910.02054). Banks are sharded
    # between matrices, as Muon needs.
    "zero1": Layout(
        {"matrix": "data", "row": "data", "token": "data", "vocab": "data", "model": "data"}
    ),
    "fsdp": Layout({"model": "data"}, gather_per_layer=True),
    # Matmuls are sharded: heads, hidden units and vocabulary; activations between them are
    # replicated.
    "tp": Layout(MEGATRON),
    "fsdp+tp": Layout({"model": "data"} | MEGATRON, gather_per_layer=True),
    # Each group of devices along ``pipe`` holds some of the layers.
    "pp": Layout({"layer": "pipe", "matrix": "pipe"}),
}
MODES = {"+remat": "remat", "+scan": "scan"}  # endings of any layout
WHOLE = PartitionSpec()
# What a layer saves for its gradient when it gathers its parameters again: results of expensive
# primitives. ffi_call is how JAX calls kernels of other libraries.
KEPT = ("dot_general", "dot_product_attention_fwd_wrapper", "ffi_call")


def find_layout(name: str) -> Layout:
    """Return layout ``name`` with the flags that its suffixes set (+remat, +scan). Raises
    :class:`BadInput`."""
    base: str = name
    modes: dict[str, Any] = {}
    while ending := next(
        (e for e, mode in MODES.items() if base.endswith(e) and mode not in modes), None
    ):
        base, modes[MODES[ending]] = base.removesuffix(ending), True
    if base not in LAYOUTS:
        raise BadInput(
            f"--layout {name} is unknown{nearest(base, LAYOUTS)}; known layouts:"
            f" {', '.join(LAYOUTS)}, and each with {' or '.join(MODES)} at its end, or both"
        )
    return replace(LAYOUTS[base], **modes)


def with_remat(layout: str) -> str:
    """Return the name of ``layout`` with remat."""
    return layout if find_layout(layout).remat else layout + "+remat"


def loops_over_layers(recipe: Recipe) -> bool:
    """Whether ``recipe`` runs its layers through ``ctx.layer``, so that remat can recompute
    them."""
    asked = []

    def layer(f: Callable[..., Any]) -> Callable[..., Any]:
        asked.append(f)
        return f

    _trace_loss(recipe, layer=layer)
    return bool(asked)


def _trace_loss(recipe: Recipe, mesh: Mesh | None = None, **how: Any) -> None:
    """Trace the loss on shapes alone, in a context of ``how``; on ``mesh`` as a step does, its
    parameters gathered."""
    ctx = Context(recipe.stages[0], training=True, **how)
    params = map_specs(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.compute or spec.dtype), recipe.parameters
    )
    ids, weights = (
        jax.ShapeDtypeStruct((1, ctx.stage.lane_len), dtype) for dtype in ("int32", "float32")
    )

    def loss(*arrays: Any) -> Any:
        return recipe.loss(*arrays, ctx)

    if mesh is not None:
        lanes = {axis for axis in LANE_AXES if axis in mesh.shape}
        loss = jax.shard_map(
            loss, mesh=mesh, in_specs=WHOLE, out_specs=WHOLE, axis_names=lanes, check_vma=False
        )
    jax.eval_shape(loss, params, ids, ids, weights)


def _run_one_block(
    block: Any, table: Mapping[str, ParamSpec], layers: int, params: Mapping[str, jax.Array], x: Any
) -> Any:
    """:func:`run_blocks` of the first layer alone, which stands for the others where nothing is
    computed."""
    first = {
        name: params[name][: spec.shape[0] // layers]
        for name, spec in table.items()
        if spec.stacks_layers
    }
    return run_blocks(block, table, layers, first, x)


def check_layout(layout: str, mesh: Mesh, recipe: Recipe) -> None:
    """Raise :class:`BadInput` for a ``layout`` that is unknown, or does not fit ``mesh`` or
    ``recipe``."""
    found = find_layout(layout)
    needed = set(found.rules.values()) - {"data"}
    for axis in needed - set(mesh.axis_names):
        raise BadInput(
            f"--layout {layout} shards over mesh axis '{axis}', and the mesh is {dict(mesh.shape)};"
            f" give for example --mesh data=-1,{axis}=2"
        )
    idle = [name for name, size in mesh.shape.items() if size > 1 and name not in {"data"} | needed]
    if idle:
        works = (
            "works along the 'data' axis only"
            if not needed
            else f"works along 'data' and '{min(needed)}'"
        )
        raise BadInput(
            f"--layout {layout} {works}, so the mesh axis '{idle[0]}' of size {mesh.shape[idle[0]]}"
            f" would repeat the same work; give --mesh data={mesh.size}, or another --layout"
        )
    for path, spec in leaves(recipe.parameters):
        placed = partition(spec, layout, mesh)
        if spec.sparse_rows and tuple(placed) and not owned(spec, placed):
            raise BadInput(
                f"--layout {layout} does not shard table {path} of recipe {recipe.name} by the rows"
                " in which it is updated; choose --layout zero1 or dp"
            )
    by_layer = "pipe" in needed or found.scan or (found.remat and not loops_over_layers(recipe))
    if not recipe.alike and by_layer:
        raise BadInput(
            f"--layout {layout} works layer by layer and the layers of recipe {recipe.name} are not"
            " alike; choose another --layout, or a recipe that runs its layers through ctx.blocks"
        )
    pipe = mesh.shape.get("pipe", 1)
    if recipe.layers % pipe:
        raise BadInput(
            f"--mesh pipe={pipe}: {recipe.layers} layer{'s' * (recipe.layers > 1)} of recipe"
            f" {recipe.name} cannot be divided over {pipe} stages; give a size that divides"
            f" {recipe.layers}"
        )
    if "model" in needed and not {"heads", "mlp"} & {
        axis for _, spec in leaves(recipe.parameters) for axis in spec.axes
    }:
        raise BadInput(
            f"--layout {layout} shards the logical axes {', '.join(MEGATRON)}, and no matrix of"
            f" recipe {recipe.name} has 'heads' or 'mlp'; choose another --layout"
        )
    _check_blocks(layout, mesh, recipe)


def _check_blocks(layout: str, mesh: Mesh, recipe: Recipe) -> None:
    """Trace the loss where a layout needs what only its blocks show."""
    if mesh.shape.get("model", 1) > 1:
        try:
            _trace_loss(recipe, mesh, blocks=_run_one_block)
        except BadInput as error:
            raise BadInput(
                f"--mesh model={mesh.shape['model']}, recipe {recipe.name}: {error}"
            ) from None
    if mesh.shape.get("pipe", 1) > 1 or find_layout(layout).scan:
        try:
            _trace_loss(recipe, blocks=scan_blocks)
        except TypeError as error:
            raise BadInput(
                f"--layout {layout}: a block of recipe {recipe.name} must return what it was given"
                f" in the same shapes and dtypes, and does not ({first_line(error)}); choose"
                " another --layout"
            ) from None


def partition(spec: ParamSpec, layout: str, mesh: Mesh) -> PartitionSpec:
    """Return how ``layout`` shards one parameter over ``mesh``."""
    return PartitionSpec(*shard(spec, layout, mesh)[0])


def shard(spec: ParamSpec, layout: str, mesh: Mesh) -> tuple[list[str | None], str]:
    """Return (the mesh axis of every dimension up to the last sharded one, why it is not sharded
    further).

    An array that stays whole always has a reason; one that is sharded has it where another mesh
    axis could not.
    """
    dims: list[str | None] = [None] * len(spec.shape)
    why = ""
    rules = find_layout(layout).rules
    for over, parts in mesh.shape.items():
        candidates = [axis for axis, to in rules.items() if to == over and axis in spec.axes]
        if parts == 1 or not candidates:
            continue
        dim = spec.axes.index(candidates[0])
        if spec.size < SMALL and over == "data":
            why = "small"
        elif spec.shape[dim] % parts:
            why = f"{candidates[0]} {spec.shape[dim]} does not divide by {parts}"
        else:
            dims[dim] = over
    if not why and not any(dims):
        shards = any(mesh.shape.get(over, 1) > 1 for over in rules.values())
        why = f"no axis that {layout} shards" if shards else f"{layout} shards nothing on this mesh"
    while dims and dims[-1] is None:
        dims.pop()
    return dims, why


def partitions(parameters: Mapping[str, Any], layout: str, mesh: Mesh) -> Any:
    """Return the tree of :func:`partition` over a parameter table."""
    return map_specs(
        lambda spec: PartitionSpec() if spec.on_host else partition(spec, layout, mesh), parameters
    )


def sharded_dim(spec: PartitionSpec, axis: str = "data") -> int | None:
    """The dimension that lies along the mesh axis ``axis``, or None."""
    return tuple(spec).index(axis) if axis in tuple(spec) else None


def owned(spec: ParamSpec, placed: PartitionSpec) -> bool:
    """Whether a table stays sharded by rows and is read through
    :func:`jspeed.parallel.sharded_table.fetch`."""
    return "row" in spec.axes and sharded_dim(placed) == spec.axes.index("row")


def lanes_only(specs: Any) -> Any:
    """Return the tree ``specs`` without ``model``, which XLA partitions."""
    return jax.tree.map(lambda spec: _only(spec, LANE_AXES), specs)


def only_model(spec: PartitionSpec) -> PartitionSpec:
    """Return ``spec`` along ``model`` alone."""
    return _only(spec, ("model",))


def _only(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*(axis if axis in axes else None for axis in spec))


def gathered_per_layer(recipe: Recipe, layout: str) -> Any:
    """Return a tree of booleans: whether each parameter is gathered by its layer."""
    by_layer = find_layout(layout).gather_per_layer and recipe.alike
    return map_specs(lambda spec: by_layer and spec.stacks_layers, recipe.parameters)


def gather(x: jax.Array, spec: PartitionSpec, later: bool = False) -> jax.Array:
    """Inside ``shard_map``: all-gather ``x`` along ``data``; unchanged if its layer gathers it
    (``later``)."""
    return x if later else _gather(x, spec, "data")


def gather_all(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Inside ``shard_map``: all-gather ``x`` along ``data`` and ``pipe``."""
    return _gather(_gather(x, spec, "data"), spec, "pipe")


def _gather(x: jax.Array, spec: PartitionSpec, axis: str) -> jax.Array:
    dim = sharded_dim(spec, axis)
    if dim is None:
        return x
    return _on_parts(lambda x: jax.lax.all_gather(x, axis, axis=dim, tiled=True), spec)(x)


def reduce_gradient(mesh: Mesh, x: jax.Array, spec: PartitionSpec, done: bool = False) -> jax.Array:
    """Inside ``shard_map``: the sum of gradients over the devices that share a parameter.

    Each device keeps its shard by ``spec``. ``done``: the transpose of the layer's all-gather has
    already reduced it over ``data``.
    """
    dim = sharded_dim(spec)
    if dim is not None and not done:
        x = _on_parts(partial(_scattered, dim=dim), spec)(x)
    others = tuple(
        axis
        for axis in LANE_AXES
        if mesh.shape.get(axis, 1) > 1 and sharded_dim(spec, axis) is None
    )
    return _on_parts(lambda x: jax.lax.psum(x, others), spec)(x) if others else x


def _scattered(x: jax.Array, dim: int) -> jax.Array:
    x = jax.lax.psum_scatter(x, "data", scatter_dimension=dim, tiled=True)
    # XLA scatters along the outermost axis in memory. Flat, the result is stored in the order of
    # its axes again: an optimizer that read one order and wrote another could not update in place,
    # and copied three arrays instead.
    return jax.lax.optimization_barrier(x.reshape(-1)).reshape(x.shape) if dim else x


def _on_parts(
    collective: Callable[[jax.Array], jax.Array], spec: PartitionSpec
) -> Callable[[jax.Array], jax.Array]:
    """Run ``collective`` on each device's shard along ``model``; XLA would gather the whole array
    first.

    Where ``model`` is XLA's, JAX also puts a sharding constraint into a reduction's sum, and XLA
    for CPUs, which turns bf16 sums into fp32, aborts on it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get("model", 1) == 1:
        return collective
    along_model = only_model(spec)
    return jax.shard_map(
        collective,
        in_specs=along_model,
        out_specs=along_model,
        axis_names={"model"},
        check_vma=False,
    )


def scan_blocks(
    block: Callable[[dict[str, jax.Array], Any], Any],
    table: Mapping[str, Any],
    layers: int,
    params: Mapping[str, jax.Array],
    x: Any,
) -> Any:
    """:func:`run_blocks` by ``jax.lax.scan``: the compiled program holds one layer, however many
    there are.

    ``block`` must return ``x`` in the shapes and dtypes that it was given.
    """
    stacked = {
        name: params[name] if k == 1 else params[name].reshape(-1, k, *params[name].shape[1:])
        for name, k in entries_of(table, layers).items()
    }
    return jax.lax.scan(lambda x, p: (block(p, x), None), x, stacked)[0]


def blocks(recipe: Recipe, layout: str, mesh: Mesh, parts: int) -> Any:
    """Return the :attr:`Context.blocks` of ``layout``; a pipeline takes the lanes in ``parts``
    micro-batches."""
    how = find_layout(layout)
    if not recipe.alike:
        return run_blocks

    def run(
        block: Any,
        table: Mapping[str, ParamSpec],
        layers: int,
        params: Mapping[str, jax.Array],
        x: Any,
    ) -> Any:
        specs = partitions(table, layout, mesh)

        def whole(name: str, part: jax.Array) -> jax.Array:
            # Counted from the end, a dimension is the same in the bank and in a layer's part of it.
            spec = PartitionSpec(*tuple(specs[name])[len(table[name].shape) - part.ndim :])
            if how.gather_per_layer and sharded_dim(spec) is not None:
                part = _gather(part, spec, "data")
            return share(part, spec)

        def one(p: Mapping[str, jax.Array], x: Any) -> Any:
            x = block({name: whole(name, part) for name, part in p.items()}, jax.tree.map(share, x))
            return jax.tree.map(share, x)

        if how.remat:
            one = jax.checkpoint(one)
        elif how.gather_per_layer:
            one = jax.checkpoint(one, policy=lambda primitive, *_, **__: primitive.name in KEPT)
        through = scan_blocks if how.scan else run_blocks
        if mesh.shape.get("pipe", 1) == 1:
            return through(one, table, layers, params, x)
        return pipeline(lambda x: through(one, table, layers, params, x), x, parts)

    def share(x: jax.Array, spec: PartitionSpec = WHOLE) -> jax.Array:
        """Constrain how XLA shards an array over ``model``; it would shard activations that must
        stay whole."""
        if mesh.shape.get("model", 1) == 1:
            return x
        return jax.lax.with_sharding_constraint(x, only_model(spec))

    return run
