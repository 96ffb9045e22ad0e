"""Muon: momentum, then the nearest orthogonal matrix, for banks of matrices of one shape at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

# Keller Jordan's quintic: five iterations take singular values from 0.0032 to 1 into 0.68 to 1.21.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class MuonState(NamedTuple):
    """Number of updates so far (int32 scalar) and the momentum buffers (fp32, shaped like the parameters)."""

    step: jax.Array
    momentum: Any


def orthogonalise(x: jax.Array, *, steps: int = 5, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Push the singular values of every matrix in ``x`` (``[..., rows, cols]``) towards 1; ``dtype`` out.

    Newton-Schulz iteration on X / ||X||_F, always on the wide orientation so that the Gram matrix is the small
    one. A zero matrix stays zero.
    """
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = (x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)).astype(dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def scale_by_muon(
    momentum: Callable[[jax.Array], Any], *, steps: int = 5, dtype: Any = jnp.bfloat16
) -> optax.GradientTransformation:
    """Replace each gradient bank (``[..., in, out]``) by its orthogonalised Nesterov momentum.

    ``momentum`` maps the number of past updates to beta: M <- beta M + (1 - beta) G, and beta M + (1 - beta) G is
    orthogonalised in ``dtype``. The update is scaled by sqrt(max(1, out / in)) so that its effect on activations
    does not depend on the shape (modded-nanogpt, records 3-40).
    """

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros([], jnp.int32), jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params))

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        beta = jnp.asarray(momentum(state.step), jnp.float32)
        buffers = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.momentum, grads)

        def direction(m: jax.Array, g: jax.Array) -> jax.Array:
            rows, cols = g.shape[-2:]
            update = orthogonalise(beta * m + (1 - beta) * g, steps=steps, dtype=dtype)
            return update.astype(jnp.float32) * max(1.0, cols / rows) ** 0.5

        return jax.tree.map(direction, buffers, grads), MuonState(state.step + 1, buffers)

    return optax.GradientTransformation(init, update)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    momentum: Callable[[jax.Array], Any],
    *,
    steps: int = 5,
    dtype: Any = jnp.bfloat16,
) -> optax.GradientTransformation:
    """Muon with a learning-rate schedule and a momentum schedule; no weight decay."""
    return optax.chain(scale_by_muon(momentum, steps=steps, dtype=dtype), optax.scale_by_learning_rate(learning_rate))
