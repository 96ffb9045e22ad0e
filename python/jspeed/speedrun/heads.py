"""Interactions between attention heads: paired heads, composed heads (DCMHA)."""

from typing import Any

import jax
import jax.numpy as jnp

from jspeed.model.attention import Documents, attention, cached_mask
from jspeed.model.kv_cache import active_cache
from jspeed.model.layers import in_blocks, with_block_before


def pair_heads(x_BTHK: jax.Array) -> jax.Array:
    """Interleave heads h and h + H/2 along the sequence: ``[B, T, H, K]`` to ``[B, 2T, H/2, K]``.

    A query then attends to the keys of both heads; at its own position the first head sees only its
    own key, the second both (modded-nanogpt, record 58). Reshape the result back to separate them.
    """
    rows, length, heads, width = x_BTHK.shape
    return x_BTHK.reshape(rows, 2 * length, heads // 2, width)


def attention_in_pairs(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, *, documents: Documents, **rest: Any
) -> jax.Array:
    """:func:`jspeed.model.attention.attention` of paired heads: ``[B, T, H, K]``; a window of w
    reaches back w / 2 tokens."""
    paired = map(pair_heads, (q_BTHK, k_BTHK, v_BTHK))
    return attention(*paired, documents=pair_documents(documents), **rest).reshape(v_BTHK.shape)


def pair_positions(length: int) -> jax.Array:
    """Positions by which the heads of a pair rotate: fp32 ``[T, 2]``, 2t for even heads and 2t + 1
    for odd ones."""
    return 2.0 * jnp.arange(length)[:, None] + jnp.arange(2)[None, :]


def pair_documents(documents: Documents) -> Documents:
    """Documents of the interleaved sequence of :func:`pair_heads`, of twice as many tokens."""
    offsets_BO, longest = documents.offsets, documents.longest
    return Documents(
        jnp.repeat(documents.ids, 2, axis=1),
        None if offsets_BO is None else 2 * offsets_BO,
        None if longest is None else 2 * longest,
    )


def composed(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    take_BTH: jax.Array,
    give_BTH: jax.Array,
    *,
    scale: float,
    documents: Documents,
    window: int,
) -> jax.Array:
    """Attend once more within ``window`` tokens, with probabilities that each token mixes over
    heads.

    Every head's softmax over the last ``window`` tokens of the document is weighted by
    ``take_BTH``, scaled to a root mean square of 1 over heads. The sum over heads weighs every
    head's values, and head h gets ``give_h`` times the result: ``[B, T, H, K]``, to be added to the
    output of attention (Xiao et al. 2024, DCMHA; record 85).
    """
    rows, length, heads, width = q_BTHK.shape
    take_BTH = take_BTH.astype(jnp.float32)
    take_BTH *= jax.lax.rsqrt(jnp.mean(jnp.square(take_BTH), axis=-1, keepdims=True) + 1e-6)
    give_BTH1 = give_BTH[..., None].astype(v_BTHK.dtype)
    if cache := active_cache():
        k_BSHK, v_BSHK = cache.append(k_BTHK), cache.append(v_BTHK)
        seen_BTS = cached_mask(cache, length, k_BSHK.shape[1], documents, window)
        # one block
        q, k, v, take, seen = (x[:, None] for x in (q_BTHK, k_BSHK, v_BSHK, take_BTH, seen_BTS))
        return _mixed(q, k, v, take, seen, scale)[:, 0] * give_BTH1
    # of a block of queries, which sees itself and the block before
    size = min(max(128, window), length)
    ids_BNS = in_blocks(documents.ids, size, fill=-2)
    query, key = jnp.arange(size)[:, None] + size, jnp.arange(2 * size)[None]
    seen = (key <= query) & (query - key < window)
    seen = seen[None, None] & (
        ids_BNS[..., None] == with_block_before(ids_BNS, fill=-1)[..., None, :]
    )
    q_BNSHK, k_BNSHK, v_BNSHK, take_BNSH = (
        in_blocks(x, size) for x in (q_BTHK, k_BTHK, v_BTHK, take_BTH)
    )
    y = _mixed(
        q_BNSHK, with_block_before(k_BNSHK), with_block_before(v_BNSHK), take_BNSH, seen, scale
    )
    return y.reshape(rows, -1, heads, width)[:, :length] * give_BTH1


def _mixed(q_BNIHK, k_BNJHK, v_BNJHK, take_BNIH, seen_BNIJ, scale: float) -> jax.Array:
    """Softmax of every head over what ``seen_BNIJ`` allows, summed with ``take_BNIH``, of the
    values of each head."""
    scores = _scores(q_BNIHK, k_BNJHK)
    p = jax.nn.softmax(jnp.where(seen_BNIJ[:, :, None], scale * scores, -jnp.inf), axis=-1)
    mixed = jnp.sum(p * jnp.moveaxis(take_BNIH, 3, 2)[..., None], axis=2).astype(v_BNJHK.dtype)
    return jnp.einsum("bnij,bnjhk->bnihk", mixed, v_BNJHK)


@jax.custom_vjp
def _scores(q_BNIHK: jax.Array, k_BNJHK: jax.Array) -> jax.Array:
    """Dot products of queries and keys, fp32 ``[B, N, H, I, J]``.

    The matmuls of their gradient are in the dtype of the operands, as in attention kernels: JAX's
    own would be in fp32, and twice the bytes.
    """
    return jnp.einsum("bnihk,bnjhk->bnhij", q_BNIHK, k_BNJHK, preferred_element_type=jnp.float32)


def _scores_backward(saved: tuple[jax.Array, jax.Array], g_BNHIJ: jax.Array):
    q_BNIHK, k_BNJHK = saved
    g_BNHIJ = g_BNHIJ.astype(q_BNIHK.dtype)
    return jnp.einsum("bnhij,bnjhk->bnihk", g_BNHIJ, k_BNJHK), jnp.einsum(
        "bnhij,bnihk->bnjhk", g_BNHIJ, q_BNIHK
    )


_scores.defvjp(lambda q, k: (_scores(q, k), (q, k)), _scores_backward)
