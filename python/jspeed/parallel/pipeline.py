"""Pipeline parallelism over layers and micro-batches: GPipe (Huang et al. 2018, arXiv 1811.06965)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def bubble(stages: int, parts: int) -> float:
    """The bubble, the share of a pipeline's time in which a stage is idle: ``(S - 1) / (M + S - 1)``."""
    return (stages - 1) / (parts + stages - 1)


def pipeline(stage: Callable[[jax.Array], jax.Array], x: jax.Array, parts: int, axis: str = "pipe") -> jax.Array:
    """Inside ``shard_map``: apply the ``stage`` of every device along ``axis``, in order, to the rows of all of them.

    ``x`` ``[rows, ...]`` are a device's own rows, and so is the result: before and after the pipeline ``axis`` is one
    more axis of data, so that nothing else is computed twice. The rows of all are taken in ``parts`` micro-batches.
    A stage keeps its input of every tick for the gradient, which flows back the same way.
    """
    stages, index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    rows = jax.lax.all_gather(x, axis, axis=0, tiled=True)
    micro = rows.reshape(parts, -1, *rows.shape[1:])

    def tick(received: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        done = stage(jnp.where(index == 0, micro[jnp.minimum(number, parts - 1)], received))
        return jax.lax.ppermute(done, axis, [(n, n + 1) for n in range(stages - 1)]), done

    _, done = jax.lax.scan(tick, jnp.zeros_like(micro[0]), jnp.arange(parts + stages - 1))
    rows = done[stages - 1 :].reshape(rows.shape)
    return jax.lax.psum_scatter(jnp.where(index == stages - 1, rows, 0), axis, scatter_dimension=0, tiled=True)
