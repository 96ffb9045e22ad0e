"""NorMuon: Muon with a per-row second moment along the longer side of every matrix, and cautious
weight decay."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jspeed.optim.muon import POLAR_EXPRESS, frobenius, scale_by_muon
from jspeed.speedrun.cautious import add_cautious_decay


class NorMuonState(NamedTuple):
    """Running mean square along the longer side: fp32, shaped like the parameters with the other
    side 1."""

    square: Any


def scale_by_mean_square(beta: float) -> optax.GradientTransformation:
    """Divide each row or column of every matrix (``[..., in, out]``) by its running root mean
    square.

    One statistic per index of the longer side (per output for square matrices): S <- beta S + (1 -
    beta) mean(X^2), from 0 without bias correction. Each matrix keeps its Frobenius norm (Li et al.
    2025, NorMuon; modded-nanogpt from record 41 on).
    """

    def short(x: jax.Array) -> int:
        return -1 if x.shape[-2] > x.shape[-1] else -2

    def init(params: Any) -> NorMuonState:
        def zeros(p: jax.Array) -> jax.Array:
            return jnp.zeros(
                jax.eval_shape(lambda p: jnp.mean(p, axis=short(p), keepdims=True), p).shape,
                jnp.float32,
            )

        return NorMuonState(jax.tree.map(zeros, params))

    def update(updates: Any, state: NorMuonState, params: Any = None) -> tuple[Any, NorMuonState]:
        def running(square: jax.Array, x: jax.Array) -> jax.Array:
            now = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=short(x), keepdims=True)
            return beta * square + (1 - beta) * now

        def divided(square: jax.Array, x: jax.Array) -> jax.Array:
            x = x.astype(jnp.float32)
            y = x * jax.lax.rsqrt(jnp.maximum(square, 1e-10))
            return y * (frobenius(x) / jnp.maximum(frobenius(y), 1e-10))

        squares = jax.tree.map(running, state.square, updates)
        return jax.tree.map(divided, squares, updates), NorMuonState(squares)

    return optax.GradientTransformation(init, update)


def normuon(
    learning_rate: optax.Schedule,
    momentum: Callable[[jax.Array], Any],
    *,
    beta2: float,
    weight_decay: float,
    scale: Any,
    dtype: Any = jnp.bfloat16,
) -> optax.GradientTransformation:
    """Nesterov momentum, Polar Express, NorMuon's division and cautious decay, for banks ``[...,
    in, out]``.

    The rate of a matrix is ``learning_rate`` x ``scale`` (broadcast against the bank). Its weights
    shrink by ``weight_decay`` x ``learning_rate`` x that rate where the update shrinks them or is
    zero: the decay falls with the square of the schedule.
    """

    def decay(step: jax.Array) -> jax.Array:
        return weight_decay * jnp.square(learning_rate(step)) * scale

    return optax.chain(
        scale_by_muon(momentum, polynomial=POLAR_EXPRESS, scale=1.0, dtype=dtype),
        scale_by_mean_square(beta2),
        optax.stateless(lambda updates, _: jax.tree.map(lambda u: scale * u, updates)),
        optax.scale_by_learning_rate(learning_rate),
        add_cautious_decay(decay, where_zero=True),
    )
