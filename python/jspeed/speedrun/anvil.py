"""ANVIL: Muon with a fast and a slow momentum, six maps of the singular values, and NorMuon's
division."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jspeed.optim.muon import ANVIL_MAPS, on_whole_matrices, orthogonalise
from jspeed.speedrun.normuon import NorMuonState, scale_by_mean_square


class AnvilState(NamedTuple):
    """Number of updates so far (int32 scalar), both momenta (fp32, shaped like the parameters),
    mean squares."""

    step: jax.Array
    fast: Any
    slow: Any
    square: NorMuonState


class TwoMomentum(NamedTuple):
    """How two momenta make one: ``share`` of the fast one, whose beta is ``fast``, and the rest of
    the slow one's, all from step ``start`` on; before, the fast one has the scheduled beta and
    counts alone."""

    start: int
    fast: float
    slow: float
    share: float


def anvil(
    learning_rate: optax.Schedule,
    momentum: optax.Schedule,
    two_momentum: TwoMomentum,
    *,
    beta2: float,
    weight_decay: float,
    scale: Any,
    dtype: Any = jnp.bfloat16,
) -> optax.GradientTransformation:
    """Update banks ``[..., in, out]`` (modded-nanogpt, record 92).

    The blend M of both momenta becomes beta M + (1 - beta) G with beta = ``momentum(step)``. Then
    six maps make it nearly orthogonal and :func:`~jspeed.speedrun.normuon.scale_by_mean_square`
    equalises it. The rate of a matrix is ``learning_rate`` x ``scale`` (broadcast against the
    bank). Weights shrink by ``weight_decay`` x ``learning_rate`` x that rate where the slow
    momentum shrinks them or is zero.
    """
    equalise = scale_by_mean_square(beta2)

    def init(params: Any) -> AnvilState:
        def zeros() -> Any:
            return jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)

        return AnvilState(jnp.zeros([], jnp.int32), zeros(), zeros(), equalise.init(params))

    def update(grads: Any, state: AnvilState, params: Any = None) -> tuple[Any, AnvilState]:
        beta, rate = (
            jnp.asarray(schedule(state.step), jnp.float32) for schedule in (momentum, learning_rate)
        )
        blended = state.step >= two_momentum.start
        of_fast, share = (
            jnp.where(blended, two_momentum.fast, beta),
            jnp.where(blended, two_momentum.share, 1.0),
        )

        def moved(old: jax.Array, g: jax.Array, beta: Any) -> jax.Array:
            return old + (1 - beta) * (g - old)

        fast = jax.tree.map(partial(moved, beta=of_fast), state.fast, grads)
        slow = jax.tree.map(partial(moved, beta=two_momentum.slow), state.slow, grads)

        def direction(f: jax.Array, s: jax.Array, g: jax.Array) -> jax.Array:
            ahead = g + beta * (share * f + (1 - share) * s - g)
            return on_whole_matrices(
                partial(orthogonalise, polynomial=ANVIL_MAPS, dtype=dtype), ahead
            )

        directions, square = equalise.update(
            jax.tree.map(direction, fast, slow, grads), state.square
        )

        def change(x: jax.Array, s: jax.Array, p: jax.Array) -> jax.Array:
            return -rate * scale * (x + weight_decay * rate * jnp.where(s * p >= 0, p, 0))

        changes = jax.tree.map(change, directions, slow, params)
        return changes, AnvilState(state.step + 1, fast, slow, square)

    return optax.GradientTransformation(init, update)
