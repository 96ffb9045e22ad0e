"""Pipeline parallelism over layers and micro-batches: GPipe (Huang et al. 2018, arXiv
1811.06965)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def bubble(stages: int, parts: int) -> float:
    """The bubble, the share of a pipeline's time in which a stage is idle: ``(S - 1) / (M + S -
    1)``."""
    return (stages - 1) / (parts + stages - 1)


def pipeline(stage: Callable[[Any], Any], x: Any, parts: int) -> Any:
    """Inside ``shard_map``: apply the ``stage`` of every device along mesh axis ``pipe``, in order,
    to the lanes of all.

    ``x`` is a tree of arrays ``[lanes, ...]``. Each device passes its own lanes and gets them
    back, so outside the pipeline ``pipe`` acts as a data axis. The lanes of all are taken in
    ``parts`` micro-batches, which must divide them. A stage keeps its input of every tick for the
    gradient, which flows back the same way.
    """
    axis = "pipe"
    stages, index = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    lanes = jax.lax.all_gather(x, axis, axis=0, tiled=True)
    micro = jax.tree.map(lambda r: r.reshape(parts, -1, *r.shape[1:]), lanes)

    def tick(received: Any, number: jax.Array) -> tuple[Any, Any]:
        own = jax.tree.map(lambda m: m[jnp.minimum(number, parts - 1)], micro)
        done = stage(jax.tree.map(lambda o, r: jnp.where(index == 0, o, r), own, received))
        return jax.lax.ppermute(done, axis, [(n, n + 1) for n in range(stages - 1)]), done

    _, done = jax.lax.scan(
        tick, jax.tree.map(lambda m: jnp.zeros_like(m[0]), micro), jnp.arange(parts + stages - 1)
    )

    def back(done: jax.Array, like: jax.Array) -> jax.Array:
        last = jnp.where(index == stages - 1, done[stages - 1 :].reshape(like.shape), 0)
        return jax.lax.psum_scatter(last, axis, scatter_dimension=0, tiled=True)

    return jax.tree.map(back, done, lanes)
