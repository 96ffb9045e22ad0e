"""Rotary position embedding (RoPE), YaRN for growing attention windows, and shifts by one token."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jspeed.model.attention import Documents, tags
from jspeed.model.custom_kernels import Kernel
from jspeed.model.kv_cache import active_cache
from jspeed.model.layers import position_ids, rms_norm


def frequencies(count: int, base: float = 1024.0) -> NDArray[np.float64]:
    """Return ``count`` angles per token, from 1 down to 1 / ``base`` in equal ratios."""
    return (1.0 / base) ** np.linspace(0.0, 1.0, count)


def yarn(
    angles: NDArray[np.float64],
    scale: float,
    windows: Sequence[int],
    fast: float = 32.0,
    slow: float = 1.0,
) -> tuple[NDArray[np.float64], float]:
    """Rescale rotary frequencies as the longest window grows from ``windows[0]`` to
    ``windows[-1]``: (angles, scale).

    At each step frequencies with fewer than ``slow`` rotations per old window are scaled by old /
    new; those with more than ``fast`` are kept, others interpolated; the softmax scale grows by the
    factor 1 + 0.2 log(new / old) (Peng et al. 2023, YaRN; modded-nanogpt, record 31).
    """
    for old, new in zip(windows, windows[1:], strict=False):
        turns = old * angles / (2 * math.pi)
        kept = np.clip((turns - slow) / (fast - slow), 0.0, 1.0)
        angles = angles * (old / new + kept * (1 - old / new))
        scale *= 1 + 0.2 * math.log(new / old)
    return angles, scale


def rotate(x_BTHK: jax.Array, angles: NDArray[np.float64], positions_TP: jax.Array) -> jax.Array:
    """Rotate the first ``2 len(angles)`` channels of each head by position x angle; same shape and
    dtype out.

    Channel c is rotated with channel c + ``len(angles)``. modded-nanogpt pairs neighbours from
    record 58 on: the same model with its columns in another order. ``positions_TP`` is ``[T, P]``,
    counted from the first of these tokens, with P positions for each: head h uses column h modulo
    P.
    """
    count, columns = len(angles), positions_TP.shape[1]
    positions_BTP = positions_TP[None]
    if cache := active_cache():
        positions_BTP += columns * cache.start_B[:, None, None]
    angle_BTPF = (
        positions_BTP.astype(jnp.float32)[..., None]
        * jnp.asarray(angles, jnp.float32)[None, None, None]
    )
    cos, sin = jnp.cos(angle_BTPF)[:, :, None], jnp.sin(angle_BTPF)[:, :, None]
    x = x_BTHK.reshape(*x_BTHK.shape[:2], -1, columns, x_BTHK.shape[3])
    first, second = (x[..., n * count : (n + 1) * count].astype(jnp.float32) for n in range(2))
    rotated = [first * cos + second * sin, second * cos - first * sin]
    parts = [*(part.astype(x.dtype) for part in rotated), x[..., 2 * count :]]
    return jnp.concatenate(parts, axis=-1).reshape(x_BTHK.shape)


def queries_and_keys(
    y_BTE: jax.Array,
    shape: Sequence[int],
    angles: NDArray[np.float64],
    positions_TP: jax.Array,
    kernel: Kernel | None = None,
    documents: Documents | None = None,
    look_back: bool = False,
    padded: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Split ``y_BTE`` into queries and keys of ``shape`` ``[B, T, H, K]``, normalise each head and
    :func:`rotate` it.

    With ``look_back`` keys then go through :func:`offset_keys`.

    With ``kernel`` ("queries and keys"), and no active KV cache, that is one kernel, and so is its
    gradient: equal up to rounding. The kernel also makes lanes NaN that have more ``documents``
    than slots: call :func:`jspeed.model.attention.attention` with ``overflow_checked``. It appends
    channels to each head up to ``padded``, as attention would where values are that wide:
    :func:`jspeed.model.attention.tags` (call it with ``doc_tagged``), then zeros. Inside
    ``jax.shard_map`` it needs ``check_vma=False``. It raises BadInput for what it does not support.
    """
    if not kernel or active_cache():
        q, k = jnp.split(y_BTE, 2, axis=-1)
        q_BTHK, k_BTHK = (rotate(rms_norm(x.reshape(shape)), angles, positions_TP) for x in (q, k))
        return q_BTHK, offset_keys(k_BTHK) if look_back else k_BTHK
    angle_TPF = (
        positions_TP.astype(jnp.float32)[..., None] * jnp.asarray(angles, jnp.float32)[None, None]
    )
    factor_B, tags_BTF = jnp.ones(shape[0]), None
    if documents is not None and documents.offsets is not None:
        factor_B = jnp.where(documents.offsets[:, -1] < shape[1], jnp.nan, 1).astype(jnp.float32)
        tags_BTF = tags(documents, len(angles)) if padded and padded > shape[3] else None
    tables = jnp.cos(angle_TPF), jnp.sin(angle_TPF)
    return kernel.run(y_BTE, *tables, factor_B, tags_BTF, shape[2], look_back, padded)


def shift_right(x_BT: jax.Array) -> jax.Array:
    """Shift ``[B, T, ...]`` by one position along T, zeros at the first: each token gets the value
    of the one before.

    Across document borders too: the first token of a document gets the last of the one before.
    """
    if cache := active_cache():
        position_BT = cache.positions_BT(x_BT.shape[1]) - 1
        before_BT = jax.vmap(lambda lane, position: lane[position])(
            cache.append(x_BT), jnp.maximum(position_BT, 0)
        )
        return jnp.where(jnp.expand_dims(position_BT < 0, range(2, x_BT.ndim)), 0, before_BT)
    return jnp.pad(x_BT[:, :-1], [(0, 0), (1, 0)] + [(0, 0)] * (x_BT.ndim - 2))


def smear(x_BTD: jax.Array, gate_BT: jax.Array) -> jax.Array:
    """Add to every token ``gate_BT`` times the token before it (modded-nanogpt, record 34)."""
    return x_BTD + gate_BT[..., None].astype(x_BTD.dtype) * shift_right(x_BTD)


def offset_keys(k_BTHK: jax.Array) -> jax.Array:
    """Take the second half of every key's channels from the token before, at the first token from
    itself.

    Those channels are not rotated. One layer can then act as an induction head (modded-nanogpt,
    record 49).
    """
    own, late = jnp.split(k_BTHK, 2, axis=-1)
    first_BT11 = position_ids(k_BTHK.shape[1])[..., None, None] == 0
    return jnp.concatenate([own, jnp.where(first_BT11, late, shift_right(late))], axis=-1)
