"""Check that replicated arrays are equal on all devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jspeed.recipe import leaves


def drift(tree: Any) -> dict[str, float]:
    """Return, by path, how far copies of one shard differ at most, for the arrays of ``tree`` in
    which any do.

    Compared are the devices of this process, bit for bit; differing NaNs or signed zeros count as
    5e-324. Arrays are of at most 4 bytes per element. One scalar per array is copied to the host.
    """
    found = {}
    for name, array in leaves(tree):
        first: dict[Any, jax.Array] = {}
        furthest = 0.0
        for shard in array.addressable_shards:
            where = tuple((part.start, part.stop) for part in shard.index)
            if where not in first:
                first[where] = shard.data
                continue
            one, other = first[where], shard.data
            if shard.device.platform == "cpu" and np.array_equal(bytes_of(one), bytes_of(other)):
                continue  # nothing is compiled for it
            other = jax.device_put(other, one.device)
            with jax.set_mesh(Mesh([one.device], "copy")):  # the caller's may have other devices
                if not bool(_same(one, other)):
                    furthest = max(furthest, float(_distance(one, other)), 5e-324)
        if furthest:
            found[name] = furthest
    return found


def bytes_of(array: jax.Array) -> np.ndarray:
    """Return the bytes of an array in a CPU's memory: uint8."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@jax.jit
def _same(one: jax.Array, other: jax.Array) -> jax.Array:
    if jnp.issubdtype(one.dtype, jnp.floating):
        bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[one.dtype.itemsize]
        one, other = (jax.lax.bitcast_convert_type(a, bits) for a in (one, other))
    return jnp.array_equal(one, other)


@jax.jit
def _distance(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.nanmax(jnp.abs(one.astype(jnp.float32) - other.astype(jnp.float32)), initial=0.0)
