"""From the loader's batches to arrays on devices: the only file of this room that imports jax."""

import jax
from jax.sharding import NamedSharding

from jspeed.data import Batch


def to_global(batch: Batch, sharding: NamedSharding) -> jax.Array:
    """Return the tokens of all processes' lanes, rows sharded by ``sharding``: ``[lanes, lane_len + 1]`` as stored.

    Inputs and targets at once, uint16 or uint32; widen them inside jit. Offsets and mask stay on the host: documents
    follow from the tokens on the device, by :func:`jspeed.model.attention.find_documents`.
    """
    # With several processes JAX does not see that this copy is meant, and a loop's transfer guard would refuse it.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_process_local_data(sharding, batch.tokens)
