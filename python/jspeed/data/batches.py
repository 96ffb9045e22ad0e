"""Place the loader's batches on devices as globally sharded arrays. The only module here that imports jax."""

import jax
from jax.sharding import NamedSharding
from numpy.typing import DTypeLike

from jspeed.data import Batch


def to_global(batch: Batch, sharding: NamedSharding, dtype: DTypeLike) -> jax.Array:
    """Return the tokens of all processes' lanes, rows sharded by ``sharding``: ``[lanes, lane_len + 1]``.

    Inputs and targets at once, as ``dtype``: uint16 or uint32, however they are stored; widen them inside jit. Offsets
    and mask stay on the host: documents follow from the tokens on the device, by
    :func:`jspeed.model.attention.find_documents`. ``sharding`` must give each process the rows that its
    ``process_index`` counts as its own.
    """
    # With several processes JAX does not see that this copy is meant, and a loop's transfer guard would refuse it.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_process_local_data(sharding, batch.tokens.astype(dtype, copy=False))
