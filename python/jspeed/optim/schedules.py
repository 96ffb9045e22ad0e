"""Learning-rate schedules: a peak for each training stage with one decay over all, and piecewise
linear ones."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import sub
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from jspeed.errors import BadInput


def shortened(
    share: float, steps: tuple[int, ...], schedules: tuple[Any, ...], period: int
) -> tuple[Any, tuple[Any, ...]]:
    """Return the steps of each stage, and ``schedules`` for them, in a run ``share`` as long; at 1
    both as they are.

    Stages begin with multiples of ``period``. A step of a schedule (a number, several, or the keys
    of a mapping) keeps its place between the borders of its stage. Raises BadInput where a stage
    would have no steps.
    """
    if share == 1:
        return steps, schedules
    starts = (0, *accumulate(steps))
    new = [period * round(share * start / period) for start in starts]
    if min(shorter := tuple(map(sub, new[1:], new))) < 1:
        raise BadInput(
            f"a run {share:g} as long leaves {shorter} steps to its stages; each needs {period}:"
            " give more"
        )

    def moved(schedule: Any) -> Any:
        if isinstance(schedule, Mapping):
            return {moved(step): value for step, value in schedule.items()}
        if isinstance(schedule, tuple):
            return tuple(map(moved, schedule))
        return round(float(np.interp(schedule, starts, new)))

    return shorter, moved(schedules)


def staged(
    peaks: Sequence[float], starts: Sequence[int], *, fall: Mapping[int, float], floor: float
) -> optax.Schedule:
    """Return rate = peak x (1 - s) + ``floor`` x s.

    ``peak`` is constant in each stage (``peaks[n]`` from step ``starts[n]`` on); s rises from 0 to
    1 along ``fall``, as :func:`through` interpolates it. A stage that starts during the decay is a
    jump (modded-nanogpt, record 46: one straight line).
    """
    fallen = through(fall)

    def schedule(step: jnp.ndarray) -> jnp.ndarray:
        jumps = zip(starts[1:], peaks, peaks[1:], strict=False)
        peak = peaks[0] + sum((after - before) * (step >= start) for start, before, after in jumps)
        share = fallen(step)
        return peak * (1 - share) + floor * share

    return schedule


def jumps(points: Mapping[int, float]) -> optax.Schedule:
    """The value of the last step in ``points`` (step: value, in order) that is not after this one,
    or the first."""
    first, *_ = values = list(points.values())

    def schedule(step: jnp.ndarray) -> jnp.ndarray:
        later = zip(list(points)[1:], values, values[1:], strict=False)
        return jnp.float32(first) + sum(
            (after - before) * (jnp.asarray(step) >= start) for start, before, after in later
        )

    return schedule


def through(points: Mapping[int, float] | Mapping[float, float]) -> optax.Schedule:
    """Piecewise linear interpolation of ``points`` (step: value), constant before the first and
    after the last.

    Steps must ascend, which is not checked. A sum of clipped lines: element-wise, so that it fuses
    into the kernel that uses it, which ``jnp.interp`` does not.
    """
    (_, first), *_ = ends = list(points.items())

    def schedule(step: jnp.ndarray) -> jnp.ndarray:
        step = jnp.asarray(step, jnp.float32)
        lines = zip(ends, ends[1:], strict=False)
        return jnp.float32(first) + sum(
            (v - u) * jnp.clip((step - s) / (t - s), 0, 1) for (s, u), (t, v) in lines
        )

    return schedule
