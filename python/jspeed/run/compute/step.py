"""A training step (all-gather, gradients of each device's lanes, reduce-scatter, update) and an
evaluation."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec, use_abstract_mesh

from jspeed.base.beside import split
from jspeed.errors import BadInput
from jspeed.model.layers import key_of
from jspeed.optim import averages
from jspeed.optim.rows import RowState
from jspeed.parallel import DEFAULT_LAYOUT, sparse_rows
from jspeed.parallel.kinds import kind_of
from jspeed.parallel.layout import (
    blocks,
    find_layout,
    gather,
    gather_all,
    gathered_per_layer,
    lanes_only,
    owned,
    partitions,
)
from jspeed.parallel.mesh import LANE_AXES, lanes_spec, put, replicated
from jspeed.recipe import (
    Context,
    ParamSpec,
    Recipe,
    init_parameters,
    leaves,
    map_specs,
    without_sparse,
)
from jspeed.run.compute import accumulators
from jspeed.run.compute.accumulators import AccumulatorState
from jspeed.run.compute.device import Placement
from jspeed.run.compute.division import replicas_fit
from jspeed.run.compute.gradients import gradients, traced_once
from jspeed.run.compute.host_tables import Rows, delivered, returned, with_given
from jspeed.run.compute.score import Measure, losses


class Metrics(TypedDict):
    """What a step says: the mean loss, and gradients of the rows that it was given."""

    loss: jax.Array
    rows: NotRequired[Rows]


class State(TypedDict):
    """What a step changes: trees of arrays, or of their shapes or shardings; ``step`` is the number
    of steps made.

    ``accumulators`` are what one step leaves for the next (:mod:`jspeed.run.compute.accumulators`),
    ``rows`` the state of the optimizers of sparse tables, ``means`` the averages of
    weights."""

    params: Any
    optimizer: Any
    step: Any
    accumulators: AccumulatorState
    rows: dict[str, RowState]
    means: Any


def init_state(
    recipe: Recipe, seed: jax.Array, layout: str = DEFAULT_LAYOUT, mesh: Mesh | None = None
) -> State:
    """Return the state before step 1; its ``accumulators`` alone depend on ``layout`` and ``mesh``
    (None: one device)."""
    params = init_parameters(recipe.parameters, key_of(seed))
    params = map_specs(lambda spec, p: None if spec.on_host else p, recipe.parameters, params)
    tables = accumulators.by_path(recipe, params)
    return {
        "params": params,
        "optimizer": recipe.optimizer().init(without_sparse(recipe, params)),
        "step": jnp.zeros((), jnp.int32),
        "accumulators": accumulators.zeros(recipe, layout, mesh),
        "rows": {
            path: each.init(tables[path])
            for path, each in recipe.row_optimizers().items()
            if path in recipe.sparse
        },
        "means": averages.zeros(recipe.averages, params),
    }


def with_parameters(recipe: Recipe, arrays: Any, state: State) -> State:
    """Return a first ``state`` with other parameters, ``arrays`` (NumPy), and the shardings that it
    has."""
    params = jax.tree.map(lambda array, old: put(array, old.sharding), arrays, state["params"])
    shardings = jax.tree.map(lambda array: array.sharding, state["optimizer"])
    init = jax.jit(recipe.optimizer().init, out_shardings=shardings)
    optimizer = init(without_sparse(recipe, params))
    return state | {"params": params, "optimizer": optimizer}


def train_step(
    recipe: Recipe,
    ctx: Context,
    placement: Placement,
    parts: int,
    phase: int,
    state: State,
    tokens: jax.Array,
    given: Rows | None = None,
) -> tuple[State, Metrics]:
    """One update on one global batch, its gradient accumulated over ``parts`` micro-batches;
    ``phase`` is the step's number modulo the recipe's period.

    The loss is the (weighted) mean over all tokens of the batch. It is formed lane by lane, so that
    it does not depend on how lanes are spread over devices and micro-batches. Each device
    all-gathers the parameters in their compute dtype, works on its own lanes, and keeps its shard
    of the summed gradient; the optimizer then runs on sharded parameters. With a pipeline the
    micro-batches are the pipeline's.

    ``tokens`` are ids ``[lanes, lane_len + 1]``, cut over the devices by lanes. ``given`` are the
    rows that they name in each table of ``recipe.on_host``; their gradients come back beside the
    loss, as ``rows``.
    """
    mesh, layout = placement.mesh, placement.layout
    mean = mean_weight(recipe, split(recipe.beside, tokens)[0])
    weight = 1 / recipe.tokens_per_step(ctx.stage) / mean
    on_device, in_specs, out_specs = on_devices(recipe, ctx, placement, parts, phase, weight)
    (grads, tables), kept, rows, lane_losses, of_given = shard_map_over_lanes(
        mesh, on_device, in_specs, out_specs
    )(state["params"], state["accumulators"], state["rows"], state["step"], tokens, given or {})
    old = without_sparse(recipe, state["params"])
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, old)
    optimizer = optax.with_extra_args_support(recipe.optimizer())
    # read by optimizers that skip steps, of recipes with `every`; others do not get it
    due = accumulators.number_due(recipe, ctx.stage, phase)
    # optim/muon.py reshards its banks between matrices, on the mesh that is set here
    by_matrix = find_layout(layout).shards_matrices
    with use_abstract_mesh(mesh.abstract_mesh) if by_matrix else nullcontext():
        updates, moments = optimizer.update(grads, state["optimizer"], old, due=due)
    params = optax.apply_updates(old, updates)
    params = accumulators.from_paths(recipe, accumulators.by_path(recipe, params) | tables)
    steps = accumulators.steps_of(recipe, ctx.stage, phase) if recipe.averages else ()
    means = averages.after_step(recipe.averages, state["means"], params, state["step"], steps)
    done = State(
        params=params,
        optimizer=moments,
        step=state["step"] + 1,
        accumulators=kept,
        rows=rows,
        means=means,
    )
    metrics: Metrics = {"loss": jnp.mean(lane_losses) / mean}
    if given:
        metrics["rows"] = of_given
    return done, metrics


def on_devices(
    recipe: Recipe, ctx: Context, placement: Placement, parts: int, phase: int, weight: Any
) -> tuple[Callable[..., Any], Any, Any]:
    """Return what each device does of a step, for ``shard_map``: the function, and the
    PartitionSpecs of its arguments and of its results.

    It gathers parameters and computes gradients of ``weight`` x the summed loss of its lanes. To
    these it adds what earlier steps left, reduces them, and updates tables row by row.

    ``cuts``, a tree like the parameters, are their PartitionSpecs; ``later`` says which of them are
    gathered layer by layer; ``place`` is where the lanes come from: the step, the first lane.
    """
    mesh, layout = placement.mesh, placement.layout
    cuts, later = partitions(recipe.parameters, layout, mesh), gathered_per_layer(recipe, layout)
    due = accumulators.number_due(recipe, ctx.stage, phase)
    ctx = replace(ctx, blocks=blocks(recipe, layout, mesh, parts), **fetcher(recipe, mesh, cuts))
    if find_layout(layout).remat:
        ctx = replace(ctx, layer=jax.checkpoint)
    parts = 1 if "pipe" in mesh.shape else parts
    key = id(recipe), mesh, layout, placement.device, ctx.stage, parts, ctx.head_chunk
    of_lanes = partial(gradients, recipe, ctx, parts)

    def on_device(
        params: Any, kept: Any, of_tables: Any, step: jax.Array, tokens: jax.Array, given: Rows
    ) -> Any:
        gathered = gather_parameters(recipe, gather, params, cuts, later)
        whole = accumulators.load(recipe, ctx.stage, phase, kept, gathered)
        place = step, device_of_lanes(mesh) * tokens.shape[0]
        given, slots = delivered(recipe, mesh, given)
        grads, lane_losses, of_given = traced_once(
            placement, key, of_lanes, place, weight, whole, tokens, given
        )
        grads, kept = accumulators.accumulate(recipe, ctx.stage, phase, kept, whole, grads)
        tables, of_tables = sparse_updates(recipe, ctx, mesh, cuts, due, whole, grads, of_tables)
        dense = [without_sparse(recipe, tree) for tree in (recipe.parameters, grads, cuts, later)]
        grads = map_specs(lambda spec, *its: kind_of(spec).reduced(mesh, *its), *dense)
        return (grads, tables), kept, of_tables, lane_losses, returned(mesh, of_given, slots)

    lanes, everywhere = lanes_spec(mesh), PartitionSpec()
    param_specs, sum_specs = lanes_only(cuts), accumulators.specs(recipe, layout, mesh)
    row_specs = sparse_specs(recipe, cuts)
    table_specs = {path: accumulators.by_path(recipe, cuts)[path] for path in row_specs}
    arguments = param_specs, sum_specs, row_specs, everywhere, lanes, lanes
    updated = without_sparse(recipe, param_specs), table_specs
    return on_device, arguments, (updated, sum_specs, row_specs, lanes, lanes)


def at_end(recipe: Recipe, state: State) -> State:
    """Return the state after the last step with averages of weights in their place."""
    params = averages.at_end(recipe.averages, state["means"], state["params"], recipe.keep_norm)
    return state | {"params": params}


def unchanged(state: State) -> State:
    """As :func:`at_end` without averages."""
    return state


def draw(drawn: Callable[[jax.Array], State], mesh: Mesh, seed: int) -> State:
    """Return the first state that ``drawn`` makes of a ``seed`` on the devices of ``mesh``."""
    return drawn(put(np.asarray(seed, np.uint32), replicated(mesh)))


def sparse_specs(recipe: Recipe, cuts: Any) -> dict[str, RowState]:
    """Return how the state of each table's own optimizer is sharded: as its rows are."""
    placed = accumulators.by_path(recipe, cuts)
    specs: Any = RowState  # of arrays, here of their PartitionSpecs
    return {
        path: specs(PartitionSpec(), PartitionSpec(*placed[path][:1])) for path in recipe.sparse
    }


def sparse_updates(
    recipe: Recipe,
    ctx: Context,
    mesh: Mesh,
    cuts: Any,
    due: int,
    whole: Any,
    grads: Any,
    rows: dict[str, RowState],
) -> tuple[dict[str, jax.Array], dict[str, RowState]]:
    """Inside ``shard_map``: return sparse tables and the state of their optimizers, changed
    where due."""
    placed, every = accumulators.by_path(recipe, cuts), dict(leaves(recipe.parameters))
    tables = {path: accumulators.by_path(recipe, whole)[path] for path in recipe.sparse}
    for path, optimizer in recipe.row_optimizers().items():
        if path not in tables or due % every[path].every:
            continue
        lists = accumulators.by_path(recipe, grads)[path]
        kernel = ctx.kernel(optimizer.custom_kernels, "update of rows")
        arrays = lists, tables[path], rows[path], kernel
        tables[path], rows[path] = kind_of(every[path]).updated(
            mesh, placed[path], optimizer.update, *arrays
        )
    return tables, rows


def eval_step(
    recipe: Recipe,
    ctx: Context,
    placement: Placement,
    parts: int,
    params: Any,
    lanes: jax.Array,
    targets: jax.Array,
    tokenizer_mask: jax.Array | None = None,
    given: Rows | None = None,
    *,
    measure: Measure = losses,
) -> jax.Array:
    """Return the weighted loss of every target, or what else ``measure`` finds: fp32 ``[lanes,
    T]``, ``1 / parts`` of a device's lanes at a time.

    Only the inputs of ``lanes`` reach the recipe; ``targets`` (ids ``[lanes, T]``) never do.
    ``tokenizer_mask`` is that of the context, ``given`` as of :func:`train_step`. On a CPU a device
    holds small tables whole: their rows are many messages."""
    mesh, layout = placement.mesh, placement.layout
    cuts, later = partitions(recipe.parameters, layout, mesh), gathered_per_layer(recipe, layout)
    if placement.device.platform == "cpu" and replicas_fit(recipe, mesh.size):
        cuts = map_specs(
            lambda spec, cut: PartitionSpec() if owned(spec, cut) else cut, recipe.parameters, cuts
        )
    ctx = replace(
        ctx,
        blocks=blocks(recipe, layout, mesh, mesh.shape.get("pipe", 1)),
        **fetcher(recipe, mesh, cuts),
    )

    def on_device(
        params: Any,
        lanes: jax.Array,
        targets: jax.Array,
        tokenizer_mask: jax.Array | None,
        given: Rows,
    ) -> jax.Array:
        whole = gather_parameters(recipe, gather, params, cuts, later)
        now = replace(ctx, tokenizer_mask=tokenizer_mask)
        given, _ = delivered(recipe, mesh, given)

        def scored(part: tuple[jax.Array, jax.Array, Rows]) -> jax.Array:
            lane, targets_BT, given_of_part = part
            lane, beside = split(recipe.beside, lane)
            inputs_BT, here = lane[:, :-1], with_given(recipe, whole, given_of_part)
            found_BT = measure(recipe, here, inputs_BT, targets_BT, replace(now, beside=beside))
            if recipe.weigh is None:
                return found_BT
            return found_BT * recipe.weigh(inputs_BT, targets_BT)

        ids = lanes.astype(jnp.int32), targets.astype(jnp.int32)
        cut = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), (*ids, given))
        return jax.lax.map(scored, cut).reshape(targets.shape)

    by_lane = lanes_spec(mesh)
    specs = lanes_only(cuts), by_lane, by_lane, PartitionSpec(), by_lane
    step = shard_map_over_lanes(mesh, on_device, specs, by_lane)
    return step(params, lanes, targets, tokenizer_mask, given or {})


def mean_weight(recipe: Recipe, tokens: Any) -> Any:
    """Return the mean weight of the targets of ``tokens`` (int ``[B, T + 1]``): 1, or a scalar more
    than 0."""
    if recipe.weigh is None:
        return 1.0
    weights_BT = recipe.weigh(tokens[:, :-1], tokens[:, 1:])
    return jnp.maximum(jnp.mean(weights_BT), 1 / weights_BT.size)


def replicated_on_all_devices(
    recipe: Recipe, ctx: Context, placement: Placement, function: Any
) -> Any:
    """Return jitted ``function(gathered params in their compute dtype, arrays, ctx)``, whose third
    argument is the ``tokenizer_mask`` of ctx; all devices do the same work."""
    mesh, whole = placement.mesh, PartitionSpec()
    cuts = partitions(recipe.parameters, placement.layout, mesh)
    ctx = replace(ctx, **fetcher(recipe, mesh, cuts))

    def on_device(params: Any, arrays: Any, tokenizer_mask: jax.Array | None) -> Any:
        gathered = gather_parameters(recipe, gather_all, params, cuts)
        return function(gathered, arrays, replace(ctx, tokenizer_mask=tokenizer_mask))

    return jax.jit(shard_map_over_lanes(mesh, on_device, (lanes_only(cuts), whole, whole), whole))


def device_of_lanes(mesh: Mesh) -> jax.Array:
    """Inside :func:`shard_map_over_lanes`: which of the shards of a batch's lanes this device has,
    from 0."""
    if mesh.size == 1:
        return jnp.zeros((), jnp.int32)
    return jax.lax.axis_index(tuple(axis for axis in LANE_AXES if axis in mesh.shape))


def shard_map_over_lanes(mesh: Mesh, function: Any, in_specs: Any, out_specs: Any) -> Any:
    """``shard_map`` over the axes that shard lanes; over the other axes XLA partitions the work.

    Without jit, on the one device that it then needs, ``function`` as it is: its Python code runs
    on arrays.
    """
    if without_jit() and mesh.size == 1:
        return function
    axes = {axis for axis in LANE_AXES if axis in mesh.shape}
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=axes,
        check_vma=False,
    )


def without_jit() -> bool:
    """Whether JAX_DISABLE_JIT or ``jax.disable_jit`` says that nothing is to be compiled."""
    return jax.config.jax_disable_jit  # type: ignore[attr-defined]


def to_compute_dtype(recipe: Recipe, params: Any) -> Any:
    """Return the parameters as the forward pass sees them: each in its ``compute`` dtype."""
    return map_specs(lambda spec, p: kind_of(spec).computed(p), recipe.parameters, params)


def gather_parameters(
    recipe: Recipe, gather: Callable[..., jax.Array], params: Any, *trees: Any
) -> Any:
    """Inside ``shard_map``: the gathered parameters, except tables whose rows are fetched from
    their owners.

    ``trees`` are the other arguments of ``gather``, first the PartitionSpecs.
    """

    def one(spec: ParamSpec, p: Any, cut: PartitionSpec, *rest: Any) -> Any:
        return kind_of(spec).gathered(p, cut, gather, *rest)

    return map_specs(one, recipe.parameters, to_compute_dtype(recipe, params), *trees)


def fetcher(recipe: Recipe, mesh: Mesh, cuts: Any) -> dict[str, Any]:
    """Return ``fetch`` and ``owners`` of a context: from the rows' owners if tables are sharded,
    which must be all of them or none."""
    specs = leaves(recipe.parameters)
    tables = [spec for _, spec in specs if "row" in spec.axes and not spec.on_host]
    sharded = sum(jax.tree.leaves(map_specs(owned, recipe.parameters, cuts)))
    if sharded not in (0, len(tables)):
        raise BadInput(
            f"recipe {recipe.name}: of {len(tables)} tables with an axis 'row' only {sharded} can"
            " be sharded over the devices; give all a number of rows that the devices divide"
        )
    owners = mesh.shape["data"] if sharded else 1
    return {"fetch": partial(sparse_rows.read, axis="data" if sharded else None), "owners": owners}
