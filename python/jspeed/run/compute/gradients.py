"""Gradients of one device's lanes of a batch, over micro-batches."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from jspeed.base.beside import split
from jspeed.parallel.kinds import kind_of
from jspeed.recipe import Context, Recipe, map_specs
from jspeed.run.check_recipe import check_loss
from jspeed.run.compute import division
from jspeed.run.compute.device import Placement
from jspeed.run.compute.flat_dots import flattened
from jspeed.run.compute.host_tables import Rows, with_given

TRACING = threading.Lock()


def traced_once(placement: Placement, key: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``, by the equations that ``placement.traces`` has of it, if it has;
    on CPUs :func:`.flat_dots.flattened`.

    A function of the same ``key`` and shapes of ``args`` is traced once, which takes longer than
    its equations, also where threads ask at once. It may depend on no other array.
    """
    traces = placement.traces
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        return function(*args)
    arrays, tree = jax.tree.flatten(args)
    key = key, tree, tuple(map(jax.typeof, arrays))
    with TRACING:
        if key not in traces:
            equations, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
            if placement.device.platform == "cpu":
                equations = flattened(equations)
            # the function lives, and with it what its key names
            traces[key] = equations, jax.tree.structure(shapes), function
        equations, result, _ = traces[key]
    return jax.tree.unflatten(result, jaxpr_as_fun(equations)(*arrays))


def gradients(
    recipe: Recipe,
    ctx: Context,
    parts: int,
    at: tuple[jax.Array, jax.Array],
    weight: float,
    params: Any,
    tokens: jax.Array,
    given: Rows,
) -> tuple[Any, jax.Array, Rows]:
    """Return (gradient of ``weight`` x the summed loss, weighted mean loss of each lane, gradient
    of what is ``given``) of one device's lanes; ``at`` are the step and the number of the first
    lane.

    ``params`` are gathered and in their compute dtypes, and so is the result; micro-batches are
    summed in fp32. More ``parts`` than lanes cut each lane at document borders
    (:mod:`jspeed.run.compute.division`) and take one sub-lane at a time.
    """
    ctx = replace(ctx, step=at[0], first_lane=at[1])
    if parts > tokens.shape[0]:
        sub_lanes = parts // tokens.shape[0]
        tokens = tokens.astype(jnp.int32)
        return sub_lane_gradients(recipe, ctx, sub_lanes, weight, params, tokens, given)
    tokens, given = jax.tree.map(
        lambda rows: rows.reshape(parts, -1, *rows.shape[1:]),
        (tokens.astype(jnp.int32), given),
    )
    weights = jnp.full((tokens.shape[1], ctx.stage.lane_len), weight, jnp.float32)

    def loss(params: Any, micro: jax.Array, first_lane: jax.Array) -> tuple[jax.Array, jax.Array]:
        micro, beside = split(recipe.beside, micro)
        now = replace(ctx, first_lane=first_lane, beside=beside)
        inputs, targets = micro[:, :-1], micro[:, 1:]
        total, loss_BT = recipe.loss(params, inputs, targets, weigh(recipe, micro, weights), now)
        check_loss(recipe, total, loss_BT, inputs)
        return total, jnp.mean(weigh(recipe, micro, loss_BT), axis=1)

    if parts == 1:
        of_first = {path: rows[0] for path, rows in given.items()}
        grads, found = gradient(recipe, ctx, params, loss, of_first, tokens[0], ctx.first_lane)
        return grads, found[0], found[1]
    first_lanes = ctx.first_lane + tokens.shape[1] * jnp.arange(parts, dtype=jnp.int32)
    grads, stacked = summed_gradients(recipe, ctx, params, loss, given, tokens, first_lanes)
    lane_losses, of_given = jax.tree.map(lambda rows: rows.reshape(-1, *rows.shape[2:]), stacked)
    return grads, lane_losses, of_given


def gradient(
    recipe: Recipe,
    ctx: Context,
    params: Any,
    loss: Callable[..., Any],
    given: Rows,
    micro: jax.Array,
    *rest: Any,
) -> tuple[Any, tuple[Any, Rows]]:
    """Return (gradient, (the second result, gradient of what is ``given``)) of ``loss(params,
    micro, *rest)``.

    The gradient of a sparse table is a :class:`~jspeed.parallel.sparse_rows.Sink`; of summed
    tables, that of earlier steps and this one.
    """
    tokens = split(recipe.beside, micro)[0][:, 1:].size

    def of(leaves_: Any, given: Rows) -> Any:
        read = map_specs(lambda spec, *pair: kind_of(spec).read(*pair), table, params, leaves_)
        return loss(with_given(recipe, read, given), micro, *rest)

    table = recipe.parameters
    leaves_ = map_specs(lambda spec, p: kind_of(spec).leaf(p, tokens, ctx.owners), table, params)
    (grads, of_given), found = jax.grad(of, argnums=(0, 1), has_aux=True)(leaves_, given)
    return grads, (found, of_given)


def summed_gradients(
    recipe: Recipe,
    ctx: Context,
    params: Any,
    loss: Callable[..., Any],
    given: Rows,
    *arrays: jax.Array,
) -> tuple[Any, tuple[Any, Rows]]:
    """:func:`gradient` of one slice of ``given`` and ``arrays`` after the other, summed in fp32; of
    a sparse table, and of what is given, the rows of all."""

    table = recipe.parameters

    def accumulate(sums: Any, part: tuple[Any, ...]) -> tuple[Any, Any]:
        seeded = map_specs(lambda spec, *pair: kind_of(spec).seeded(*pair), table, params, sums)
        grads, found = gradient(recipe, ctx, seeded, loss, *part)
        lists = map_specs(lambda spec, grad: kind_of(spec).listed(grad), table, grads)
        sums = map_specs(lambda spec, *pair: kind_of(spec).added(*pair), table, sums, grads)
        return sums, (lists, found)

    first = map_specs(lambda spec, p: kind_of(spec).first(p), table, params)
    sums, (lists, found) = jax.lax.scan(accumulate, first, (given, *arrays))
    joined = map_specs(lambda spec, *of: kind_of(spec).joined(*of), table, params, sums, lists)
    return joined, found


def sub_lane_gradients(
    recipe: Recipe,
    ctx: Context,
    sub_lanes: int,
    weight: float,
    params: Any,
    tokens: jax.Array,
    given: Rows,
) -> tuple[Any, jax.Array, Rows]:
    """:func:`gradients` of lanes (int32) that are cut into ``sub_lanes`` each, one of them at a
    time; rows are ``given`` for each sub-lane."""
    lanes = tokens.shape[0]
    cut_lanes, counts = division.cut(recipe, ctx.stage, sub_lanes, tokens)

    def loss(params: Any, micro: jax.Array, counts_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights = weigh(recipe, micro, weight * counts_BT)
        now = replace(ctx, sub_lanes=sub_lanes)
        total, loss_BT = recipe.loss(params, micro[:, :-1], micro[:, 1:], weights, now)
        return total, jnp.sum(weigh(recipe, micro, loss_BT) * counts_BT) / ctx.stage.lane_len

    one_by_one = jax.tree.map(lambda x: x[:, None], (given, cut_lanes, counts))
    grads, (sub_lane_losses, of_given) = summed_gradients(recipe, ctx, params, loss, *one_by_one)
    of_given = jax.tree.map(lambda x: x[:, 0], of_given)
    return grads, jnp.sum(sub_lane_losses.reshape(lanes, sub_lanes), axis=1), of_given


def weigh(recipe: Recipe, tokens: jax.Array, x_BT: jax.Array) -> jax.Array:
    """Return ``x_BT`` times the weight of each target of ``tokens`` (int ``[B, T + 1]``)."""
    return x_BT if recipe.weigh is None else x_BT * recipe.weigh(tokens[:, :-1], tokens[:, 1:])
