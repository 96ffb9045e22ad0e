"""From the loader's batches to globally sharded arrays: the only file of this room that imports jax."""

import jax
from jax.sharding import NamedSharding

from jspeed.data import Batch


def to_global(batch: Batch, sharding: NamedSharding) -> jax.Array:
    """Return the batch's tokens as one global uint16 array ``[lanes, lane_len + 1]``, rows sharded by lane.

    Each process gives the lanes it owns. Tokens cross to the device as uint16; ``split`` widens them there.
    """
    return jax.make_array_from_process_local_data(sharding, batch.tokens)
