"""From the loader's batches to arrays on devices: the only file of this room that imports jax."""

from typing import NamedTuple

import jax
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
    table of offsets and the mask only where the loader makes them. Document numbers follow from the tokens on the
    device: :func:`jspeed.model.attention.find_documents`.
    """

    def spread(local):
        # With several processes JAX does not see that this copy is meant, and a loop's transfer guard would refuse it.
        with jax.transfer_guard_host_to_device("allow"):
            return None if local is None else jax.make_array_from_process_local_data(sharding, local)

    return GlobalBatch(spread(batch.tokens), spread(batch.doc_offsets), spread(batch.loss_mask))
