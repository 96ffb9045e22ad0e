"""A training step (all-gather, gradients of each device's rows, reduce-scatter, update) and an evaluation."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec, use_abstract_mesh

from jspeed.errors import BadInput
from jspeed.model.layers import key_of
from jspeed.parallel import DEFAULT_LAYOUT
from jspeed.parallel.layout import (
    blocks,
    find_layout,
    gather,
    gather_all,
    gathered_per_layer,
    owned,
    partitions,
    reduce_gradient,
    rows_only,
)
from jspeed.parallel.mesh import ROW_AXES, rows_spec
from jspeed.parallel.sharded_table import fetch
from jspeed.recipe import Context, ParamSpec, Recipe, init_parameters, leaves, map_specs
from jspeed.run.compute import accumulators, split_lanes

State = dict[str, Any]


def init_state(recipe: Recipe, seed: jax.Array, layout: str = DEFAULT_LAYOUT, mesh: Mesh | None = None) -> State:
    """Return the state before step 1: ``params``, ``optimizer``, the number of steps done, and what one step carries
    to the next (:mod:`jspeed.run.compute.accumulators`), which alone depends on ``layout`` and ``mesh`` (None: one
    device)."""
    params = init_parameters(recipe.parameters, key_of(seed))
    optimizer, step = recipe.optimizer().init(params), jnp.zeros((), jnp.int32)
    return {"params": params, "optimizer": optimizer, "step": step, "carry": accumulators.zeros(recipe, layout, mesh)}


def train_step(
    recipe: Recipe, ctx: Context, layout: str, parts: int, mesh: Mesh, state: State, tokens: jax.Array
) -> tuple[State, dict[str, jax.Array]]:
    """One update on one global batch, its gradient accumulated over ``parts`` micro-batches.

    The loss is the (weighted) mean over all tokens of the batch, formed row by row so that it does not depend on how
    rows are spread over devices and micro-batches. Each device all-gathers the parameters in their compute dtype, works
    on its own rows, and keeps its shard of the summed gradient; the optimizer then runs on sharded parameters. With a
    pipeline the micro-batches are the pipeline's.
    """
    cuts, carry_specs = partitions(recipe.parameters, layout, mesh), accumulators.specs(recipe, layout, mesh)
    later = gathered_per_layer(recipe, layout)
    mean = mean_weight(recipe, tokens)
    weight = 1 / recipe.tokens_per_step(ctx.stage) / mean
    ctx = replace(ctx, blocks=blocks(recipe, layout, mesh, parts), fetch=fetcher(recipe, cuts))
    if find_layout(layout).remat:
        ctx = replace(ctx, layer=jax.checkpoint)
    parts = 1 if "pipe" in mesh.shape else parts

    def on_device(
        params: Any, kept: accumulators.Carry, step: jax.Array, tokens: jax.Array
    ) -> tuple[Any, accumulators.Carry, jax.Array]:
        now = replace(ctx, step=step, first_row=device_of_rows(mesh) * tokens.shape[0])
        whole = accumulators.load(recipe, now, kept, gather_parameters(recipe, gather, params, cuts, later))
        grads, row_losses = gradients(recipe, now, parts, weight, whole, tokens)
        grads, kept = accumulators.accumulate(recipe, now, kept, whole, grads)

        def summed(spec: ParamSpec, grad: jax.Array, cut: PartitionSpec, done: bool) -> jax.Array:
            return grad if owned(spec, cut) else reduce_gradient(mesh, grad, cut, done)

        return map_specs(summed, recipe.parameters, grads, cuts, later), kept, row_losses

    rows, param_specs = rows_spec(mesh), rows_only(cuts)
    grads, kept, row_losses = shard_map_over_rows(
        mesh, on_device, (param_specs, carry_specs, PartitionSpec(), rows), (param_specs, carry_specs, rows)
    )(state["params"], state["carry"], state["step"], tokens)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state["params"])
    optimizer = optax.with_extra_args_support(recipe.optimizer())
    due = ctx.phase == recipe.period - 1
    with use_abstract_mesh(mesh.abstract_mesh) if find_layout(layout).shards_matrices else nullcontext():
        updates, moments = optimizer.update(grads, state["optimizer"], state["params"], due=due)
    params = optax.apply_updates(state["params"], updates)
    done = {"params": params, "optimizer": moments, "step": state["step"] + 1, "carry": kept}
    return done, {"loss": jnp.mean(row_losses) / mean}


def gradients(
    recipe: Recipe, ctx: Context, parts: int, weight: float, params: Any, tokens: jax.Array
) -> tuple[Any, jax.Array]:
    """Return (gradient of ``weight`` x the summed loss, weighted mean loss of each row) of one device's rows.

    ``params`` are gathered and in their compute dtypes, and so is the result; micro-batches are summed in fp32. More
    ``parts`` than rows cut each row at document borders (:mod:`jspeed.run.compute.split_lanes`) and take one piece at a
    time.
    """
    if parts > tokens.shape[0]:
        return piecewise_gradients(recipe, ctx, parts // tokens.shape[0], weight, params, tokens.astype(jnp.int32))
    tokens = tokens.astype(jnp.int32).reshape(parts, -1, tokens.shape[-1])
    weights = jnp.full((tokens.shape[1], ctx.stage.lane_len), weight, jnp.float32)

    def loss(params: Any, micro: jax.Array, first_row: jax.Array) -> tuple[jax.Array, jax.Array]:
        now = replace(ctx, first_row=first_row)
        total, loss_BT = recipe.loss(params, micro[:, :-1], micro[:, 1:], weigh(recipe, micro, weights), now)
        return total, jnp.mean(weigh(recipe, micro, loss_BT), axis=1)

    def accumulate(sums: Any, part: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        grads, row_losses = jax.grad(loss, has_aux=True)(params, *part)
        return jax.tree.map(lambda s, g: s + g.astype(jnp.float32), sums, grads), row_losses

    if parts == 1:
        return jax.grad(loss, has_aux=True)(params, tokens[0], ctx.first_row)
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    first_rows = ctx.first_row + tokens.shape[1] * jnp.arange(parts, dtype=jnp.int32)
    sums, row_losses = jax.lax.scan(accumulate, zeros, (tokens, first_rows))
    return jax.tree.map(lambda s, p: s.astype(p.dtype), sums, params), row_losses.reshape(-1)


def piecewise_gradients(
    recipe: Recipe, ctx: Context, pieces: int, weight: float, params: Any, tokens: jax.Array
) -> tuple[Any, jax.Array]:
    """:func:`gradients` of rows (int32) that are cut into ``pieces`` each, one of them at a time."""
    rows = tokens.shape[0]
    cut_rows, counts = split_lanes.cut(recipe, ctx.stage, pieces, tokens)

    def loss(params: Any, micro: jax.Array, counts_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights = weigh(recipe, micro, weight * counts_BT)
        now = replace(ctx, pieces=pieces)
        total, loss_BT = recipe.loss(params, micro[:, :-1], micro[:, 1:], weights, now)
        return total, jnp.sum(weigh(recipe, micro, loss_BT) * counts_BT) / ctx.stage.lane_len

    def accumulate(sums: Any, piece: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        grads, part = jax.grad(loss, has_aux=True)(params, piece[0][None], piece[1][None])
        return jax.tree.map(lambda s, g: s + g.astype(jnp.float32), sums, grads), part

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    sums, parts = jax.lax.scan(accumulate, zeros, (cut_rows, counts))
    return jax.tree.map(lambda s, p: s.astype(p.dtype), sums, params), jnp.sum(parts.reshape(rows, pieces), axis=1)


def evaluate(
    recipe: Recipe, ctx: Context, layout: str, parts: int, mesh: Mesh, params: Any, rows: jax.Array
) -> jax.Array:
    """Return the weighted mean loss of each row (fp32 ``[rows]``), ``1 / parts`` of a device's rows at a time."""
    cuts, later = partitions(recipe.parameters, layout, mesh), gathered_per_layer(recipe, layout)
    ctx = replace(ctx, blocks=blocks(recipe, layout, mesh, mesh.shape.get("pipe", 1)), fetch=fetcher(recipe, cuts))

    def on_device(params: Any, rows: jax.Array) -> jax.Array:
        whole = gather_parameters(recipe, gather, params, cuts, later)

        def losses(part: jax.Array) -> jax.Array:
            ones = jnp.ones((part.shape[0], part.shape[1] - 1), jnp.float32)
            loss_BT = recipe.loss(whole, part[:, :-1], part[:, 1:], ones, ctx)[1]
            return jnp.mean(weigh(recipe, part, loss_BT), axis=1)

        tokens = rows.astype(jnp.int32).reshape(parts, -1, rows.shape[-1])
        return jax.lax.map(losses, tokens).reshape(-1)

    return shard_map_over_rows(mesh, on_device, (rows_only(cuts), rows_spec(mesh)), rows_spec(mesh))(params, rows)


def weigh(recipe: Recipe, tokens: jax.Array, x_BT: jax.Array) -> jax.Array:
    """Return ``x_BT`` times the weight of each target of ``tokens`` (int ``[B, T + 1]``)."""
    return x_BT if recipe.weigh is None else x_BT * recipe.weigh(tokens[:, :-1], tokens[:, 1:])


def mean_weight(recipe: Recipe, tokens: Any) -> Any:
    """Return the mean weight of the targets of ``tokens`` (int ``[B, T + 1]``): 1, or a scalar more than 0."""
    if recipe.weigh is None:
        return 1.0
    weights_BT = recipe.weigh(tokens[:, :-1], tokens[:, 1:])
    return jnp.maximum(jnp.mean(weights_BT), 1 / weights_BT.size)


def replicated_on_all_devices(recipe: Recipe, ctx: Context, layout: str, mesh: Mesh, function: Any) -> Any:
    """Return jitted ``function(gathered params in their compute dtype, array, ctx)``; all devices do the same work."""
    cuts, whole = partitions(recipe.parameters, layout, mesh), PartitionSpec()
    ctx = replace(ctx, fetch=fetcher(recipe, cuts))

    def on_device(params: Any, array: jax.Array) -> Any:
        return function(gather_parameters(recipe, gather_all, params, cuts), array, ctx)

    return jax.jit(shard_map_over_rows(mesh, on_device, (rows_only(cuts), whole), whole))


def device_of_rows(mesh: Mesh) -> jax.Array:
    """Inside :func:`shard_map_over_rows`: which of the shards of a batch's rows this device has, from 0."""
    if mesh.size == 1:
        return jnp.zeros((), jnp.int32)
    return jax.lax.axis_index(tuple(axis for axis in ROW_AXES if axis in mesh.shape))


def shard_map_over_rows(mesh: Mesh, function: Any, in_specs: Any, out_specs: Any) -> Any:
    """``shard_map`` over the axes that shard rows; over the other axes XLA partitions the work.

    Without jit, on the one device that it then needs, ``function`` as it is: its Python code runs on arrays.
    """
    if without_jit() and mesh.size == 1:
        return function
    axes = {axis for axis in ROW_AXES if axis in mesh.shape}
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def without_jit() -> bool:
    """Whether JAX_DISABLE_JIT or ``jax.disable_jit`` says that nothing is to be compiled."""
    return jax.config.jax_disable_jit  # type: ignore[attr-defined]


def to_compute_dtype(recipe: Recipe, params: Any) -> Any:
    """Return the parameters as the forward pass sees them: each in its ``compute`` dtype."""
    return map_specs(lambda spec, p: p.astype(spec.compute or spec.dtype), recipe.parameters, params)


def gather_parameters(recipe: Recipe, gather: Callable[..., jax.Array], params: Any, *trees: Any) -> Any:
    """Inside ``shard_map``: the gathered parameters, except tables whose rows are fetched from their owners.

    ``trees`` are the other arguments of ``gather``, first the PartitionSpecs.
    """

    def one(spec: ParamSpec, p: jax.Array, cut: PartitionSpec, *rest: Any) -> jax.Array:
        return p if owned(spec, cut) else gather(p, cut, *rest)

    return map_specs(one, recipe.parameters, to_compute_dtype(recipe, params), *trees)


def fetcher(recipe: Recipe, cuts: Any) -> Any:
    """Return the lookup of table rows: from their owners if tables are sharded, which must be all of them or none."""
    tables = [spec for _, spec in leaves(recipe.parameters) if "row" in spec.axes]
    sharded = sum(jax.tree.leaves(map_specs(owned, recipe.parameters, cuts)))
    if sharded not in (0, len(tables)):
        raise BadInput(
            f"recipe {recipe.name}: of {len(tables)} tables with an axis 'row' only {sharded} can be sharded over the "
            "devices; give all a number of rows that the devices divide"
        )
    return partial(fetch, axis="data" if sharded else None)
