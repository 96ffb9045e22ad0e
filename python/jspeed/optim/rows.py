"""Adam for tables of which few rows have a gradient: one second moment a row, and no momentum."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class RowState(NamedTuple):
    """Number of updates so far (int32 scalar) and the running mean square of each row (fp32 ``[V]``)."""

    step: jax.Array
    square_V: jax.Array


class RowTransformation(NamedTuple):
    """``init(table [V, D])`` and ``update(rows [R], gradients [R, D], table, state) -> (table, state)``.

    Rows are ascending and all different, those from V on mean nothing; gradients are fp32. Only named rows change.
    """

    init: Callable[[jax.Array], RowState]
    update: Callable[[jax.Array, jax.Array, jax.Array, RowState], tuple[jax.Array, RowState]]


def row_adam(
    learning_rate: optax.Schedule, beta2: optax.Schedule, *, eps: float, weight_decay: optax.Schedule
) -> RowTransformation:
    """Adam with beta1 = 0 and the mean of squares over a row in place of its squares (modded-nanogpt, record 92).

    Schedules map the number of past updates. The mean square of every row decays at every update. Decay is cautious,
    ``weight_decay`` x rate squared, as :func:`jspeed.optim.cautious.cautious_adam` has it.
    """

    def init(table_VD: jax.Array) -> RowState:
        return RowState(jnp.zeros([], jnp.int32), jnp.zeros(table_VD.shape[0], jnp.float32))

    def update(
        rows_R: jax.Array, grads_RD: jax.Array, table_VD: jax.Array, state: RowState
    ) -> tuple[jax.Array, RowState]:
        beta, rate = (jnp.asarray(schedule(state.step), jnp.float32) for schedule in (beta2, learning_rate))
        correction = jnp.sqrt(1 - beta ** (state.step + 1))
        named: dict[str, Any] = {"unique_indices": True, "indices_are_sorted": True}
        fresh_R = (1 - beta) * jnp.mean(jnp.square(grads_RD), axis=1)
        square_V = beta * state.square_V
        square_R = square_V.at[rows_R].get(mode="fill", fill_value=0, **named) + fresh_R
        square_V = square_V.at[rows_R].set(square_R, mode="drop", **named)
        old_RD = table_VD.at[rows_R].get(mode="fill", fill_value=0, **named).astype(jnp.float32)
        change_RD = (rate * correction / (jnp.sqrt(square_R) + eps))[:, None] * grads_RD
        fraction = weight_decay(state.step) * jnp.square(rate)
        # No select: XLA would share its zeros with those that sums of gradients start from, and write and read them.
        change_RD += fraction * old_RD * (change_RD * old_RD > 0)
        new_RD = (old_RD - change_RD).astype(table_VD.dtype)
        return table_VD.at[rows_R].set(new_RD, mode="drop", **named), RowState(state.step + 1, square_V)

    return RowTransformation(init, update)
