"""Optimizer wrappers: update every few steps, tie arrays and untie them later, and store measured
scalars."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jspeed.speedrun.cautious import cautious_adam


def when_due(
    inner: optax.GradientTransformation, every: int = 2
) -> optax.GradientTransformationExtraArgs:
    """Run ``inner`` only in calls of ``update(..., due=n)`` where ``every`` divides n; otherwise
    updates are zero and the state is unchanged.

    ``due`` is a Python int, so the compiled program of a step that is not due contains nothing of
    ``inner``. For parameters with this ``ParamSpec.every``, whose gradients are summed meanwhile:
    ``inner`` counts its own updates.
    """

    def update(
        grads: Any, state: Any, params: Any = None, *, due: int, **_: Any
    ) -> tuple[Any, Any]:
        if due % every == 0:
            return inner.update(grads, state, params)
        return jax.tree.map(jnp.zeros_like, grads), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def slow_adams(
    lines: Mapping[str, tuple[float, float, float, float]],
    rate: optax.Schedule,
    *,
    period: int,
    eps: float,
    decay: float,
) -> dict[str, optax.GradientTransformation]:
    """Return cautious Adam for each group of parameters that is due every ``period`` steps.

    ``lines`` gives a group's peak rate, its two betas and its weight decay in units of ``decay``;
    ``rate``, the multiple of the peak by step, is read at the last step of the ``period``.
    """

    def adam(
        peak: float, beta1: float, beta2: float, decays: float
    ) -> optax.GradientTransformation:
        def falling(update: jax.Array) -> jax.Array:
            return peak * rate(period * update + period - 1)

        return when_due(
            cautious_adam(falling, beta1, beta2, eps=eps, weight_decay=decays * decay), period
        )

    return {group: adam(*line) for group, line in lines.items()}


class TiedState(NamedTuple):
    """Number of due updates so far, int32 scalar, and the state of the inner transformation."""

    step: jax.Array
    inner: Any


def tied(
    updates: int, inner: optax.GradientTransformation, every: int = 2
) -> optax.GradientTransformationExtraArgs:
    """Tie arrays for the first ``updates`` updates that are due every ``every`` steps (each gets
    the sum of their gradients), then untie them.

    Arrays of one shape that start equal stay equal bit for bit while tied, moments included
    (modded-nanogpt, record 53).
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> TiedState:
        return TiedState(jnp.zeros([], jnp.int32), inner.init(params))

    def update(
        grads: Any, state: TiedState, params: Any = None, *, due: int, **_: Any
    ) -> tuple[Any, TiedState]:
        total = sum(jax.tree.leaves(grads))
        grads = jax.tree.map(lambda g: jnp.where(state.step < updates, total, g), grads)
        changes, new = inner.update(grads, state.inner, params, due=due)
        return changes, TiedState(state.step + (due % every == 0), new)

    return optax.GradientTransformationExtraArgs(init, update)


def delayed_scaling() -> optax.GradientTransformation:
    """Set every parameter to its gradient: an amax of this step for the next
    (:func:`jspeed.model.fp8.watch`)."""
    return optax.stateless(lambda grads, params: jax.tree.map(jnp.subtract, grads, params))
