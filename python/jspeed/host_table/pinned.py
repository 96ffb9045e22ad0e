"""Rows in memory that devices copy from and to by themselves.

A copy of NumPy's own memory goes through such memory, by one thread of the host.
"""

import ctypes
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from jspeed.parallel.mesh import put

PINNED = "pinned_host"  # JAX's name


class Buffer:
    """Rows for devices, bf16 ``[B, ids, D]``, in memory of the host that is written in place.

    ``parts`` are what each device of this process gets, with the lanes ``B`` that it is of, counted
    from the first one of this process. Nobody may write to them before the program that was given
    the last :meth:`put` has ended.
    """

    def __init__(self, shape: tuple[int, ...], sharding: NamedSharding) -> None:
        self._sharding = sharding
        zeros = np.zeros(shape, ml_dtypes.bfloat16)
        self._array = put(zeros, sharding.with_memory_kind(PINNED))
        shards = self._array.addressable_shards
        starts = [shard.index[0].start or 0 for shard in shards]
        self.parts = [
            (
                _memory_of(shard.data),
                slice(start - min(starts), start - min(starts) + len(shard.data)),
            )
            for start, shard in zip(starts, shards, strict=True)
        ]

    def put(self) -> jax.Array:
        """Begin to copy the rows to the devices."""
        return jax.device_put(self._array, self._sharding)


def to_host(array: jax.Array) -> jax.Array:
    """Begin to copy ``array`` into the host's memory as soon as it has been computed."""
    return jax.device_put(array, array.sharding.with_memory_kind(PINNED))


def fetched(array: jax.Array) -> list[NDArray[Any]]:
    """Return what :func:`to_host` has copied when it is there: parts along the first axis."""
    shards = {shard.index[0].start or 0: shard for shard in array.addressable_shards}
    return [np.asarray(shards[first].data) for first in sorted(shards)]


def _memory_of(array: jax.Array) -> NDArray[Any]:
    """Return the memory of an array of one device, which JAX itself never writes to."""
    array.block_until_ready()
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.ctypeslib.as_array(memory).view(array.dtype).reshape(array.shape)
