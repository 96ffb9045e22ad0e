"""JAX's attention kernels for TPUs (splash attention) on packed lanes: block sizes, masks, one
kernel per window.

Blocks of keys outside of the causal mask or the window are skipped, decided at compile time. Blocks
of other documents are computed and masked.
"""

import math
import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from jspeed.kernels import block_pairs
from jspeed.model.custom_kernels import Call, Price, label

BLOCKS = (512, 256, 128)  # tokens; the kernels take multiples of 128


def block_of(length: int) -> int:
    """Return the block size: the largest that pads a lane of ``length`` by an eighth or less, or
    else 128.

    49,152 and 1,024 tokens are whole blocks of 512; 14,464 are padded to 14,848; 640 are five
    blocks of 128.
    """
    return next((block for block in BLOCKS if -length % block <= length // 8), BLOCKS[-1])


def attend(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    ids_BT: jax.Array | None,
    scale: float,
    window: int | None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention ``[B, T, H, K]`` in the inputs' dtype, within documents where ``ids_BT``
    (int32) are given.

    Queries are scaled beforehand and rounded once more, to their type. A lane is padded with zeros
    to whole blocks; no token of the lane sees them, and their gradients are zero. Any head width
    compiles for TPUs; their matmul unit multiplies 128 channels or more at once, so narrower heads
    leave a part of it idle.
    """
    length, heads = q_BTHK.shape[1:3]
    block = block_of(length)
    padding = -length % block

    def given(x_BTHK: jax.Array) -> jax.Array:
        return jnp.moveaxis(jnp.pad(x_BTHK, ((0, 0), (0, padding), (0, 0), (0, 0))), 1, 2)

    scaled_BTHK = (q_BTHK.astype(jnp.float32) * scale).astype(q_BTHK.dtype)
    qkv = [given(x) for x in (scaled_BTHK, k_BTHK, v_BTHK)]
    documents = []
    if ids_BT is not None:
        ids_BT = jnp.pad(ids_BT, ((0, 0), (0, padding)))
        documents = [kernels.SegmentIds(ids_BT, ids_BT)]
    with jax.named_scope(label("splash_attention", "attend", window=window, own=block)):
        out_BHTK = jax.vmap(_kernel(length + padding, heads, window, block, interpret))(
            *qkv, *documents
        )
    return jnp.moveaxis(out_BHTK, 1, 2)[:, :length]


def price(call: Call) -> Price | None:
    """Documents end no block, and a block of two arrays is read again for each pair."""
    if not (match := re.search(r"splash_mha_(fwd|dq|dkv)", call.path)):
        return None
    kernel, matmuls = {"fwd": ("forward", 2), "dq": ("dq", 3), "dkv": ("dkv", 4)}[match[1]]
    *rows, length, width = next(array.dims for array in call.results if array.dtype == "bf16")
    channels, own = math.prod(rows) * width, call.numbers["own"]
    window, by_keys = call.numbers.get("window", length), kernel == "dkv"
    call = call._replace(kernel=kernel, numbers={"own": own, "visited": own})
    found = block_pairs.price(call, matmuls, channels, length, window, False, by_keys)
    pairs = block_pairs.count(by_keys, length, length, window, own, own)
    return found._replace(more_bytes=4 * channels * (pairs * own - length))


@cache
def _kernel(length: int, heads: int, window: int | None, block: int, interpret: bool) -> Any:
    """The kernels of all layers with one window: a function of q, k, v ``[H, T, K]`` and segment
    ids."""
    mask = _Window(length, window)
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dq=block,
        block_kv_dq=block,
        block_q_dkv=block,
        block_kv_dkv=block,
    )
    with jax.ensure_compile_time_eval():
        kernel = kernels.make_splash_mha_single_device(
            masks.MultiHeadMask([mask] * heads), block_sizes=sizes, interpret=interpret
        )
    mask.blocks.clear()  # the kernel keeps the mask
    return jax.tree.map(np.asarray, kernel)  # constants of any device's program


class _Window(masks.LocalMask):
    """The last ``window`` tokens, or all before. Its blocks are computed once for each distance to
    the diagonal.

    The library looks at every block several times: 49,152 tokens took 17 s of one core without
    this, 0.9 s with it.
    """

    def __init__(self, length: int, window: int | None) -> None:
        super().__init__((length, length), (None if window is None else window - 1, 0), offset=0)
        self.blocks: dict[tuple[int, ...], np.ndarray] = {}

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        queries, keys = index
        key = (queries.start - keys.start, queries.stop - queries.start, keys.stop - keys.start)
        if key not in self.blocks:
            self.blocks[key] = super().__getitem__(index)
        return self.blocks[key]
