"""Adam for tables of which few rows have a gradient: one second moment a row, and no momentum."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jspeed.model.custom_kernels import Kernel
from jspeed.parallel.sparse_rows import Pending, distinct, grouped, joined

# of rows as ``distinct`` gives them
NAMED: dict[str, Any] = {"unique_indices": True, "indices_are_sorted": True}


class RowState(NamedTuple):
    """Number of updates so far (int32 scalar) and the running mean square of each row (fp32
    ``[V]``)."""

    step: jax.Array
    square_V: jax.Array


class RowTransformation(NamedTuple):
    """``init(table [V, D])`` and ``update(found, table, state, kernel) -> (table, state)``.

    ``found`` are lists of rows, some several times, and their gradients; rows from V on mean
    nothing. Only named rows change. ``custom_kernels`` is what a recipe's field OWN_KERNELS says.
    ``rates(n)`` are those of the first n updates, fp32 ``[n]``, by the names that
    :meth:`jspeed.host_table.RowTable.update` has for them.
    """

    init: Callable[[jax.Array], RowState]
    update: Callable[
        [Sequence[Pending], jax.Array, RowState, Kernel | None], tuple[jax.Array, RowState]
    ]
    custom_kernels: str = "off"
    rates: Callable[[int], dict[str, jax.Array]] = lambda updates: {}


def row_adam(
    learning_rate: optax.Schedule,
    beta2: optax.Schedule,
    *,
    eps: float,
    weight_decay: optax.Schedule,
    custom_kernels: str = "off",
) -> RowTransformation:
    """Adam with beta1 = 0 and the mean of squares over a row in place of its squares
    (modded-nanogpt, record 92).

    Schedules map the number of past updates. The mean square of every row decays at every update.
    Decay is cautious, ``weight_decay`` x rate squared, as
    :func:`jspeed.speedrun.cautious.cautious_adam` has it. Gradients of a row are summed in fp32.
    With a kernel ("update of rows") sums and changes are one.
    """

    def init(table_VD: jax.Array) -> RowState:
        return RowState(jnp.zeros([], jnp.int32), jnp.zeros(table_VD.shape[0], jnp.float32))

    def update(
        found: Sequence[Pending], table_VD: jax.Array, state: RowState, kernel: Kernel | None = None
    ) -> tuple[jax.Array, RowState]:
        beta, rate = (
            jnp.asarray(schedule(state.step), jnp.float32) for schedule in (beta2, learning_rate)
        )
        factors = (
            1 - beta,
            rate * jnp.sqrt(1 - beta ** (state.step + 1)),
            eps,
            weight_decay(state.step) * rate**2,
        )
        change = partial(_changed_by_kernel, kernel) if kernel else _changed
        table_VD, square_V = change(found, table_VD, beta * state.square_V, factors)
        return table_VD, RowState(state.step + 1, square_V)

    def rates(updates: int) -> dict[str, jax.Array]:
        schedules = {
            "learning_rate": learning_rate,
            "beta2": beta2,
            "eps": lambda step: eps,
            "weight_decay": weight_decay,
        }

        def each(schedule: optax.Schedule) -> jax.Array:
            return jax.vmap(lambda step: jnp.asarray(schedule(step), jnp.float32))(
                jnp.arange(updates)
            )

        return {name: each(schedule) for name, schedule in schedules.items()}

    return RowTransformation(init, update, custom_kernels, rates)


def _changed(
    found: Sequence[Pending], table_VD: jax.Array, square_V: jax.Array, factors: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    """Return the table and the mean squares after the named rows' change."""
    fresh, rate, eps, fraction = factors
    rows_R, grads_RD = distinct(joined(found), table_VD.shape[0])
    square_R = square_V.at[rows_R].get(mode="fill", fill_value=0, **NAMED)
    square_R += fresh * jnp.mean(jnp.square(grads_RD), axis=1)
    old_RD = table_VD.at[rows_R].get(mode="fill", fill_value=0, **NAMED).astype(jnp.float32)
    change_RD = (rate / (jnp.sqrt(square_R) + eps))[:, None] * grads_RD
    # No select: XLA would share its zeros with those that sums of gradients start from, and write
    # and read them.
    change_RD += fraction * old_RD * (change_RD * old_RD > 0)
    new_RD = (old_RD - change_RD).astype(table_VD.dtype)
    table_VD = table_VD.at[rows_R].set(new_RD, mode="drop", **NAMED)
    return table_VD, square_V.at[rows_R].set(square_R, mode="drop", **NAMED)


def _changed_by_kernel(
    kernel: Kernel,
    found: Sequence[Pending],
    table_VD: jax.Array,
    square_V: jax.Array,
    factors: tuple[Any, ...],
) -> tuple[jax.Array, jax.Array]:
    """:func:`_changed`, equal up to rounding; only what is named is read, once."""
    groups = grouped(joined(found).rows_R, table_VD.shape[0])
    square_R = square_V.at[groups.rows_R].get(mode="fill", fill_value=0, **NAMED)
    of_rows = (
        [each.grads_RD for each in found],
        groups.order_R,
        groups.starts_R1,
        groups.rows_R,
        square_R,
    )
    table_VD, square_R = kernel.run(*of_rows, jnp.stack(factors).astype(jnp.float32), table_VD)
    return table_VD, square_V.at[groups.rows_R].set(square_R, mode="drop", **NAMED)
