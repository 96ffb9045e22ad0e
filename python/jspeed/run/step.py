"""What a training step and an evaluation compute: gather, gradients of a device's rows, reduce, update."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from jspeed.errors import BadInput
from jspeed.parallel.mesh import DEFAULT_LAYOUT, gather, owned, partitions, reduce
from jspeed.parallel.rows import fetch
from jspeed.recipe import Context, ParamSpec, Recipe, init_parameters, leaves
from jspeed.run import held

State = dict[str, Any]
ROWS = PartitionSpec("data")


def init_state(recipe: Recipe, seed: jax.Array, layout: str = DEFAULT_LAYOUT, mesh: Mesh | None = None) -> State:
    """Return the state before step 1: ``params``, ``optimizer``, the number of steps done, and what one step holds for
    the next (:mod:`jspeed.run.held`), which alone depends on ``layout`` and ``mesh`` (None: one device)."""
    params = init_parameters(recipe.parameters, jax.random.key(seed))
    optimizer, step = recipe.optimizer().init(params), jnp.zeros((), jnp.int32)
    return {"params": params, "optimizer": optimizer, "step": step, "held": held.nothing(recipe, layout, mesh)}


def train_step(
    recipe: Recipe, ctx: Context, layout: str, parts: int, mesh: Mesh, state: State, tokens: jax.Array
) -> tuple[State, dict[str, jax.Array]]:
    """One update on one global batch, its gradient accumulated over ``parts`` micro-batches.

    The loss is the mean over all tokens of the batch, formed row by row so that it does not depend on how rows
    are spread over devices and micro-batches. Each device gathers the parameters in their compute dtype, works on
    its own rows, and keeps its part of the summed gradient; the optimizer then runs where the parameters lie.
    """
    cuts, holds = partitions(recipe.parameters, layout, mesh), held.cuts(recipe, layout, mesh)
    weight = 1 / recipe.tokens_per_step(ctx.stage)

    def on_device(params: Any, kept: held.Held, step: jax.Array, tokens: jax.Array) -> tuple[Any, held.Held, jax.Array]:
        now = dataclasses.replace(ctx, step=step, fetch=fetcher(recipe, cuts))
        whole = held.recall(recipe, now, kept, assembled(recipe, params, cuts))
        grads, row_losses = gradients(recipe, now, parts, weight, whole, tokens)
        grads, kept = held.add(recipe, now, kept, whole, grads)
        return (
            each(recipe, lambda spec, g, cut: g if owned(spec, cut) else reduce(g, cut), grads, cuts),
            kept,
            row_losses,
        )

    grads, kept, row_losses = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(cuts, holds, PartitionSpec(), ROWS),
        out_specs=(cuts, holds, ROWS),
        check_vma=False,
    )(state["params"], state["held"], state["step"], tokens)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state["params"])
    optimizer = optax.with_extra_args_support(recipe.optimizer())
    due = ctx.phase == recipe.period - 1
    updates, moments = optimizer.update(grads, state["optimizer"], state["params"], due=due)
    params = optax.apply_updates(state["params"], updates)
    done = {"params": params, "optimizer": moments, "step": state["step"] + 1, "held": kept}
    return done, {"loss": jnp.mean(row_losses)}


def gradients(
    recipe: Recipe, ctx: Context, parts: int, weight: float, params: Any, tokens: jax.Array
) -> tuple[Any, jax.Array]:
    """Return (gradient of ``weight`` x the summed loss, mean loss of each row) of one device's rows.

    Micro-batches are summed in fp32; the result has the dtypes of ``params``.
    """
    tokens = tokens.astype(jnp.int32).reshape(parts, -1, tokens.shape[-1])
    weights = jnp.full((tokens.shape[1], ctx.stage.lane_len), weight, jnp.float32)

    def loss(params: Any, micro: jax.Array) -> tuple[jax.Array, jax.Array]:
        total, loss_BT = recipe.loss(params, micro[:, :-1], micro[:, 1:], weights, ctx)
        return total, jnp.mean(loss_BT, axis=1)

    def accumulate(sums: Any, micro: jax.Array) -> tuple[Any, jax.Array]:
        grads, row_losses = jax.grad(loss, has_aux=True)(params, micro)
        return jax.tree.map(lambda s, g: s + g.astype(jnp.float32), sums, grads), row_losses

    if parts == 1:
        return jax.grad(loss, has_aux=True)(params, tokens[0])
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    sums, row_losses = jax.lax.scan(accumulate, zeros, tokens)
    return jax.tree.map(lambda s, p: s.astype(p.dtype), sums, params), row_losses.reshape(-1)


def evaluate(
    recipe: Recipe, ctx: Context, layout: str, parts: int, mesh: Mesh, params: Any, rows: jax.Array
) -> jax.Array:
    """Return the mean loss of each row (fp32 ``[rows]``), ``1 / parts`` of a device's rows at a time."""
    cuts = partitions(recipe.parameters, layout, mesh)
    ctx = dataclasses.replace(ctx, fetch=fetcher(recipe, cuts))

    def on_device(params: Any, rows: jax.Array) -> jax.Array:
        whole = assembled(recipe, params, cuts)

        def losses(part: jax.Array) -> jax.Array:
            ones = jnp.ones((part.shape[0], part.shape[1] - 1), jnp.float32)
            return jnp.mean(recipe.loss(whole, part[:, :-1], part[:, 1:], ones, ctx)[1], axis=1)

        tokens = rows.astype(jnp.int32).reshape(parts, -1, rows.shape[-1])
        return jax.lax.map(losses, tokens).reshape(-1)

    return jax.shard_map(on_device, mesh=mesh, in_specs=(cuts, ROWS), out_specs=ROWS, check_vma=False)(params, rows)


def on_one_row(recipe: Recipe, ctx: Context, layout: str, mesh: Mesh, function: Any) -> Any:
    """Return jitted ``function(whole params in their compute dtype, array, ctx)``; all devices do the same work."""
    cuts, whole = partitions(recipe.parameters, layout, mesh), PartitionSpec()
    ctx = dataclasses.replace(ctx, fetch=fetcher(recipe, cuts))

    def on_device(params: Any, array: jax.Array) -> Any:
        return function(assembled(recipe, params, cuts), array, ctx)

    return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(cuts, whole), out_specs=whole, check_vma=False))


def assembled(recipe: Recipe, params: Any, cuts: Any) -> Any:
    """Inside ``shard_map``: the parameters as the forward pass sees them, whole but for tables fetched by row, each in
    its ``compute`` dtype."""

    def one(spec: ParamSpec, p: jax.Array, cut: PartitionSpec) -> jax.Array:
        p = p.astype(spec.compute or spec.dtype)
        return p if owned(spec, cut) else gather(p, cut)

    return each(recipe, one, params, cuts)


def each(recipe: Recipe, function: Any, *trees: Any) -> Any:
    """Map ``function(spec, ...)`` over the table of parameters and trees like it."""
    return jax.tree.map(function, recipe.parameters, *trees, is_leaf=lambda x: isinstance(x, ParamSpec))


def fetcher(recipe: Recipe, cuts: Any) -> Any:
    """Return how rows of tables are looked up: of their owners if they lie in parts, which all must or none."""
    tables = [spec for _, spec in leaves(recipe.parameters) if "row" in spec.axes]
    far = sum(jax.tree.leaves(each(recipe, owned, cuts)))
    if far not in (0, len(tables)):
        raise BadInput(
            f"recipe {recipe.name}: of {len(tables)} tables with an axis 'row' only {far} can be cut over the devices; "
            "give all a number of rows that the devices divide"
        )
    return partial(fetch, axis="data" if far else None)
