"""From the loader's batches to arrays on devices: the only file of this room that imports jax."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jspeed.data import Batch


class GlobalBatch(NamedTuple):
    """A batch of all processes on the devices; rows are lanes, in order."""

    tokens: jax.Array
    """``[lanes, lane_len + 1]``, uint16 or uint32 as stored; widen it inside jit."""
    doc_offsets: jax.Array | None
    """int32 ``[lanes, max_docs + 1]`` as :attr:`Batch.doc_offsets`; None when the stage has no ``max_docs``."""
    loss_mask: jax.Array | None
    """bool ``[lanes, lane_len]`` as :attr:`Batch.loss_mask`; None when the loader was not asked for it."""


def to_global(batch: Batch, sharding: NamedSharding) -> GlobalBatch:
    """Return the global arrays of which each process gives the lanes it owns, rows sharded by ``sharding``.

    What crosses to the devices is one array of tokens as they are stored, inputs and targets at once, and the
    table of offsets and the mask only where the loader makes them. The rest follows from these on the device:
    :func:`documents`.
    """

    def spread(local):
        return None if local is None else jax.make_array_from_process_local_data(sharding, local)

    return GlobalBatch(spread(batch.tokens), spread(batch.doc_offsets), spread(batch.loss_mask))


def documents(inputs_BT: jax.Array, bos_id: int) -> tuple[jax.Array, jax.Array]:
    """Return (segment ids, positions) of packed lanes, both int32 ``[B, T]``; works inside jit.

    The id is the number of the document within its lane, from 0, and the position counts tokens from its start.
    A lane that begins within a document counts that one from the lane's start. This is what the rows of
    ``doc_offsets`` say, without sending them: the loader starts every piece of a document with ``bos_id``.
    """
    starts_BT = (inputs_BT == bos_id).at[:, 0].set(True)
    place_BT = jnp.broadcast_to(jnp.arange(inputs_BT.shape[1], dtype=jnp.int32), inputs_BT.shape)
    began_BT = jax.lax.cummax(jnp.where(starts_BT, place_BT, 0), axis=1)
    return jnp.cumsum(starts_BT, axis=1, dtype=jnp.int32) - 1, place_BT - began_BT
