"""Averages of weights over the end of a run, which take their place after the last step."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray


class Average(NamedTuple):
    """A running mean of some parameters: A <- A + ``rates[step]`` (p - A) after every step, in
    fp32.

    ``rates`` has one share for each step of the run: 1 where the average starts, 0 where it stays.
    ``blends`` says of each parameter how much of the mean takes its place at the end: p <- p +
    blend (A - p).
    """

    rates: NDArray[np.float64]
    blends: Mapping[str, float]

    def moves(self, steps: Sequence[int]) -> NDArray[np.bool_]:
        """Return in which of ``steps`` it moves."""
        return np.take(self.rates, np.asarray(steps, int), mode="clip") > 0


def rates_of(
    moves: NDArray[np.bool_], share: Any, last_steps: int, first: int | None = None
) -> NDArray[np.float64]:
    """Return the rates of an average that ``moves`` in some of the ``last_steps`` of all steps, by
    ``share``, which may differ, and at most 1. Step ``first`` starts it, or else the first in which
    it moves."""
    ticks = moves & (np.arange(len(moves)) >= len(moves) - last_steps)
    rates = np.where(ticks, np.minimum(share, 1.0), 0.0)
    rates[np.flatnonzero(ticks)[0] if first is None else first] = 1.0
    return rates


def zeros(
    averages: Sequence[Average], params: Mapping[str, jax.Array]
) -> list[dict[str, jax.Array]]:
    """Return where the means are kept, fp32."""
    return [
        {name: jnp.zeros_like(params[name], jnp.float32) for name in average.blends}
        for average in averages
    ]


def after_step(
    averages: Sequence[Average],
    means: Any,
    params: Mapping[str, jax.Array],
    step: jax.Array,
    among: Sequence[int],
) -> list[dict[str, jax.Array]]:
    """Return the means after step ``step``, which is one of ``among`` (empty: unknown): a mean that
    moves in none of them is left out of the program."""

    def one(average: Average, mean: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if len(among) and not average.moves(among).any():
            return mean
        # A rate of 0 leaves the mean as it is, and costs less than a branch: that copies it twice.
        rate = jnp.asarray(average.rates, jnp.float32)[step]
        return {name: a + rate * (params[name].astype(jnp.float32) - a) for name, a in mean.items()}

    return [one(*pair) for pair in zip(averages, means, strict=True)]


def at_end(
    averages: Sequence[Average],
    means: Any,
    params: Mapping[str, jax.Array],
    keep_norm: Sequence[str],
) -> dict[str, jax.Array]:
    """Return the parameters with the averages in their place, blended one after the other.

    Those in ``keep_norm`` are then rescaled, each as a whole, to the Frobenius norm from before: a
    mean of weights that move is shorter than they are (modded-nanogpt, record 92: decontraction).
    """
    new = dict(params)
    for average, mean in zip(averages, means, strict=True):
        for name, blend in average.blends.items():
            new[name] = (new[name] + blend * (mean[name] - new[name])).astype(params[name].dtype)
    for name in keep_norm:
        new[name] *= _norm(params[name]) / _norm(new[name])
    return new


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32))))
