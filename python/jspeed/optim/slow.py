"""Parameters updated less often than others, tables updated as if they were one, and numbers that are measured."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


def when_due(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Run ``inner`` only in calls of ``update(..., due=True)``; in others nothing moves, its state included.

    ``due`` is a Python bool, so a program of steps that are not due holds nothing of ``inner``. For parameters with
    ``ParamSpec.every`` above 1, whose gradients the step sums up meanwhile: ``inner`` counts its own updates.
    """

    def update(grads: Any, state: Any, params: Any = None, *, due: bool, **_: Any) -> tuple[Any, Any]:
        if due:
            return inner.update(grads, state, params)
        return jax.tree.map(jnp.zeros_like, grads), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


class TiedState(NamedTuple):
    """Number of updates so far, int32 scalar."""

    step: jax.Array


def tied(updates: int) -> optax.GradientTransformation:
    """Give all arrays the sum of their gradients for the first ``updates`` updates, and to each its own after them.

    Arrays of one shape that start equal and get the same optimizer stay equal bit for bit meanwhile: they are one
    array, moments and all, that becomes several (modded-nanogpt, record 53).
    """

    def init(params: Any) -> TiedState:
        return TiedState(jnp.zeros([], jnp.int32))

    def update(grads: Any, state: TiedState, params: Any = None) -> tuple[Any, TiedState]:
        total = sum(jax.tree.leaves(grads))
        tied = state.step < updates
        return jax.tree.map(lambda g: jnp.where(tied, total, g), grads), TiedState(state.step + 1)

    return optax.GradientTransformation(init, update)


def measured() -> optax.GradientTransformation:
    """Set every parameter to its gradient: a measurement of this step for the next (:func:`jspeed.model.fp8.watch`)."""
    return optax.stateless(lambda grads, params: jax.tree.map(jnp.subtract, grads, params))
