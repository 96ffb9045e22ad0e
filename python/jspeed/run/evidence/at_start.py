"""Evidence taken before the clock starts: initial checksums, commit, GPUs, place among preregistered runs."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jspeed.record.schema import Git, PlaceInPlan

UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
ODD = (0x9E3779B1, 0x85EBCA77)  # one multiplier for each half of a checksum (xxHash's primes)


@dataclass(frozen=True)
class StartEvidence:
    """Checksums of the state drawn from the seed before and after the warm-up, and which preregistered run this is.

    ``git`` is of the start, when Python read the code: what is committed during a run has not run in it.
    """

    initial_checksum: str
    after_warm_up: str
    git: Git
    gpus: list[dict[str, Any]] | None
    plan: PlaceInPlan | None


def checksum(state: Any) -> str:
    """Return 16 hexadecimal digits over every bit of every array in ``state``, whatever its sharding.

    Two sums modulo 2^32 of all elements, each times an odd number that depends on its index, so that no change of a
    single element goes unseen. The devices compute them; with several processes each must call this.
    """
    halves = jax.device_get(_sums(jax.tree.leaves(state)))
    return "".join(f"{int(half):08x}" for half in halves)


@jax.jit
def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    return [sum((_sum(array, odd * (2 * n + 1)) for n, array in enumerate(arrays)), jnp.uint32(0)) for odd in ODD]


def _sum(array: jax.Array, multiplier: int) -> jax.Array:
    if array.dtype == bool:
        bits = array.astype(jnp.uint32)
    else:
        bits = jax.lax.bitcast_convert_type(array, UNSIGNED[array.dtype.itemsize]).astype(jnp.uint32)
    index = jnp.full(array.shape, 1, jnp.uint32)
    for axis, size in enumerate(array.shape):
        index = index * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    weight = (index * jnp.uint32(multiplier % 2**32)) | jnp.uint32(1)
    return jnp.sum(bits * weight, dtype=jnp.uint32)
