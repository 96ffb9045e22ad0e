"""Schedules over stages: learning rates for batches of different size, and lines through points."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
import optax


def staged(peaks: Sequence[float], starts: Sequence[int], *, fall: Mapping[int, float], floor: float) -> optax.Schedule:
    """Constant at the peak of each stage, and on top of that one fall from peak to ``floor``.

    Stage n holds from step ``starts[n]`` on at ``peaks[n]``. The share of ``floor`` runs :func:`through` ``fall``,
    from 0 to 1, so a stage that begins meanwhile is a jump (modded-nanogpt, record 46: one straight line).
    """
    fallen = through(fall)

    def schedule(step: jnp.ndarray) -> jnp.ndarray:
        stage = jnp.searchsorted(jnp.asarray(starts), step, side="right") - 1
        share = fallen(step)
        return jnp.asarray(peaks, jnp.float32)[stage] * (1 - share) + floor * share

    return schedule


def through(points: Mapping[int, float] | Mapping[float, float]) -> optax.Schedule:
    """Straight lines through ``points`` (step: value, ascending); level before the first and after the last."""
    steps, values = np.array(list(points)), np.array(list(points.values()), np.float32)
    return lambda step: jnp.interp(jnp.asarray(step, jnp.float32), steps, values)
