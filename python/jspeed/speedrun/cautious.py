"""Cautious weight decay, applied only where the update already shrinks the weight; Adam with it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class CautiousState(NamedTuple):
    """Number of updates so far, int32 scalar."""

    step: jax.Array


def add_cautious_decay(
    decay: optax.Schedule, *, where_zero: bool = False
) -> optax.GradientTransformation:
    """Shrink weights by the fraction ``decay(past updates)`` where the update moves them towards
    zero.

    Comes last in a chain: it needs the update as it is added to the weight. ``decay`` may return an
    array, broadcast against each parameter. With ``where_zero`` weights whose update is exactly
    zero shrink too, as in modded-nanogpt's Muon, but not in its Adam (Chen et al. 2025; records 43
    and 50).
    """

    def init(params: Any) -> CautiousState:
        return CautiousState(jnp.zeros([], jnp.int32))

    def update(updates: Any, state: CautiousState, params: Any = None) -> tuple[Any, CautiousState]:
        fraction = decay(state.step)

        def decayed(u: jax.Array, p: jax.Array) -> jax.Array:
            shrinks = u * p <= 0 if where_zero else u * p < 0
            return u - fraction * jnp.where(shrinks, p, 0)

        return jax.tree.map(decayed, updates, params), CautiousState(state.step + 1)

    return optax.GradientTransformation(init, update)


def cautious_adam(
    learning_rate: optax.Schedule,
    beta1: optax.ScalarOrSchedule,
    beta2: optax.ScalarOrSchedule,
    *,
    eps: float,
    weight_decay: optax.ScalarOrSchedule,
) -> optax.GradientTransformation:
    """Adam with cautious decoupled weight decay of ``weight_decay`` x rate squared.

    modded-nanogpt's from record 50 on, except that ``eps`` is added after bias correction, as in
    optax. What is a schedule depends on the number of past updates.
    """
    fixed = not callable(beta1) and not callable(beta2)
    decay = weight_decay if callable(weight_decay) else lambda step: weight_decay
    return optax.chain(
        optax.scale_by_adam(beta1, beta2, eps) if fixed else _scale_by_adam(beta1, beta2, eps),
        optax.scale_by_learning_rate(learning_rate),
        add_cautious_decay(lambda step: decay(step) * jnp.square(learning_rate(step))),
    )


def _scale_by_adam(beta1: Any, beta2: Any, eps: float) -> optax.GradientTransformation:
    """``optax.scale_by_adam`` with betas by the number of past updates; bias is corrected by those
    of this one."""

    def init(params: Any) -> optax.ScaleByAdamState:
        return optax.scale_by_adam().init(params)

    def update(
        grads: Any, state: optax.ScaleByAdamState, params: Any = None
    ) -> tuple[Any, optax.ScaleByAdamState]:
        b1, b2 = (jnp.asarray(beta(state.count), jnp.float32) for beta in (beta1, beta2))
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.nu, grads)
        n = state.count + 1
        updates = jax.tree.map(
            lambda m, v: m / (1 - b1**n) / (jnp.sqrt(v / (1 - b2**n)) + eps), mu, nu
        )
        return updates, optax.ScaleByAdamState(n, mu, nu)

    return optax.GradientTransformation(init, update)
