"""Place the loader's batches on devices as globally sharded arrays; alone in this package it imports jax."""

from typing import Any

import jax
from jax.sharding import NamedSharding

from jspeed.data import Batch


def to_global(batch: Batch, sharding: NamedSharding, dtype: Any) -> jax.Array:
    """Return the tokens of all processes' lanes, rows sharded by ``sharding``: ``[lanes, lane_len + 1]``.

    Inputs and targets at once, as ``dtype``: uint16 or uint32, however they are stored; widen them inside jit. Offsets
    and mask stay on the host: documents follow from the tokens on the device, by
    :func:`jspeed.model.attention.find_documents`.
    """
    # With several processes JAX does not see that this copy is meant, and a loop's transfer guard would refuse it.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_process_local_data(sharding, batch.tokens.astype(dtype, copy=False))
