"""Causal attention over packed lanes, in blocks of queries so that no key that is masked for all of them is read."""

import jax
import jax.numpy as jnp

QUERY_BLOCK = 128


def document_ids(tokens_BT: jax.Array, bos_id: int) -> jax.Array:
    """Number the documents of each row: int32 ``[B, T]``, one more at every ``bos_id``."""
    return jnp.cumsum(tokens_BT == bos_id, axis=1, dtype=jnp.int32)


def attention(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    *,
    scale: float,
    documents: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Softmax attention of each query over the keys it may see: ``[B, T, H, K]``, dtype of ``v_BTHK``.

    A query at t sees key s when t - ``window`` < s <= t (``window`` counts the query itself; ``None`` is no
    limit) and, with ``documents`` (int32 ``[B, T]``, see :func:`document_ids`), both lie in one document.
    Scores and softmax are fp32. Memory grows with T x min(T, window + QUERY_BLOCK), not with T squared.
    """
    length = q_BTHK.shape[1]
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        first = 0 if window is None else max(0, start - window + 1)
        query, key = slice(start, stop), slice(first, stop)
        scores_BHTS = jnp.einsum(
            "bthk,bshk->bhts", q_BTHK[:, query], k_BTHK[:, key], preferred_element_type=jnp.float32
        )
        distance_TS = jnp.arange(start, stop)[:, None] - jnp.arange(first, stop)[None, :]
        seen = distance_TS >= 0
        if window is not None:
            seen &= distance_TS < window
        seen = seen[None, None]
        if documents is not None:
            same = documents[:, query, None] == documents[:, None, key]
            seen = seen & same[:, None]
        weights_BHTS = jax.nn.softmax(jnp.where(seen, scores_BHTS * scale, -jnp.inf), axis=-1)
        blocks.append(jnp.einsum("bhts,bshk->bthk", weights_BHTS.astype(v_BTHK.dtype), v_BTHK[:, key]))
    return jnp.concatenate(blocks, axis=1) if len(blocks) > 1 else blocks[0]
