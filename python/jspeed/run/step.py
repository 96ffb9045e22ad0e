"""What a training step and an evaluation compute: gather, gradients of a device's rows, reduce, update."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from jspeed.parallel.mesh import gather, partitions, reduce
from jspeed.recipe import Context, Recipe, init_parameters, map_specs

State = dict[str, Any]
ROWS = PartitionSpec("data")


def init_state(recipe: Recipe, seed: jax.Array) -> State:
    """Return the state before step 1: ``params`` and ``optimizer``."""
    params = init_parameters(recipe.parameters, jax.random.key(seed))
    return {"params": params, "optimizer": recipe.optimizer().init(params)}


def train_step(
    recipe: Recipe, ctx: Context, layout: str, parts: int, mesh: Mesh, state: State, tokens: jax.Array
) -> tuple[State, dict[str, jax.Array]]:
    """One update on one global batch, its gradient accumulated over ``parts`` micro-batches.

    The loss is the (weighted) mean over all tokens of the batch, formed row by row so that it does not depend on how
    rows are spread over devices and micro-batches. Each device gathers the parameters in their compute dtype, works on
    its own rows, and keeps its part of the summed gradient; the optimizer then runs where the parameters lie.
    """
    cuts = partitions(recipe.parameters, layout, mesh)
    mean = mean_weight(recipe, tokens)
    weight = 1 / recipe.tokens_per_step(ctx.stage) / mean

    def on_device(params: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        whole = jax.tree.map(gather, computing(recipe, params), cuts)
        grads, row_losses = gradients(recipe, ctx, parts, weight, whole, tokens)
        return jax.tree.map(reduce, grads, cuts), row_losses

    grads, row_losses = jax.shard_map(
        on_device, mesh=mesh, in_specs=(cuts, ROWS), out_specs=(cuts, ROWS), check_vma=False
    )(state["params"], tokens)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state["params"])
    updates, optimizer = recipe.optimizer().update(grads, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": optimizer}, {"loss": jnp.mean(row_losses) / mean}


def gradients(
    recipe: Recipe, ctx: Context, parts: int, weight: float, params: Any, tokens: jax.Array
) -> tuple[Any, jax.Array]:
    """Return (gradient of ``weight`` x the summed loss, mean loss of each row) of one device's rows, as they count.

    Micro-batches are summed in fp32; the result has the dtypes of ``params``.
    """
    tokens = tokens.astype(jnp.int32).reshape(parts, -1, tokens.shape[-1])
    weights = jnp.full((tokens.shape[1], ctx.stage.lane_len), weight, jnp.float32)

    def loss(params: Any, micro: jax.Array) -> tuple[jax.Array, jax.Array]:
        total, loss_BT = recipe.loss(params, micro[:, :-1], micro[:, 1:], weigh(recipe, micro, weights), ctx)
        return total, jnp.mean(weigh(recipe, micro, loss_BT), axis=1)

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
    """Return the mean loss of each row as it counts (fp32 ``[rows]``), ``1 / parts`` of a device's rows at a time."""
    cuts = partitions(recipe.parameters, layout, mesh)

    def on_device(params: Any, rows: jax.Array) -> jax.Array:
        whole = jax.tree.map(gather, computing(recipe, params), cuts)

        def losses(part: jax.Array) -> jax.Array:
            ones = jnp.ones((part.shape[0], part.shape[1] - 1), jnp.float32)
            loss_BT = recipe.loss(whole, part[:, :-1], part[:, 1:], ones, ctx)[1]
            return jnp.mean(weigh(recipe, part, loss_BT), axis=1)

        tokens = rows.astype(jnp.int32).reshape(parts, -1, rows.shape[-1])
        return jax.lax.map(losses, tokens).reshape(-1)

    return jax.shard_map(on_device, mesh=mesh, in_specs=(cuts, ROWS), out_specs=ROWS, check_vma=False)(params, rows)


def weigh(recipe: Recipe, tokens: jax.Array, x_BT: jax.Array) -> jax.Array:
    """Return ``x_BT`` times what each target of ``tokens`` (int ``[B, T + 1]``) counts."""
    return x_BT if recipe.weigh is None else x_BT * recipe.weigh(tokens[:, :-1], tokens[:, 1:])


def mean_weight(recipe: Recipe, tokens: Any) -> Any:
    """Return what the targets of ``tokens`` (int ``[B, T + 1]``) count on average: 1, or a scalar more than 0."""
    if recipe.weigh is None:
        return 1.0
    weights_BT = recipe.weigh(tokens[:, :-1], tokens[:, 1:])
    return jnp.maximum(jnp.mean(weights_BT), 1 / weights_BT.size)


def on_one_row(recipe: Recipe, layout: str, mesh: Mesh, function: Any) -> Any:
    """Return jitted ``function(whole params in their compute dtype, array)``; every device does the same work."""
    cuts, whole = partitions(recipe.parameters, layout, mesh), PartitionSpec()

    def on_device(params: Any, array: jax.Array) -> Any:
        return function(jax.tree.map(gather, computing(recipe, params), cuts), array)

    return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(cuts, whole), out_specs=whole, check_vma=False))


def computing(recipe: Recipe, params: Any) -> Any:
    """Return the parameters as the forward pass sees them: each in its ``compute`` dtype."""
    dtypes = map_specs(lambda spec: spec.compute or spec.dtype, recipe.parameters)
    return jax.tree.map(lambda p, dtype: p.astype(dtype), params, dtypes)
