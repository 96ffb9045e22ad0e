"""Attention against a dense float64 mask, forward and backward, for borders and windows anywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspeed.model import attention as module
from jspeed.model.attention import attention, document_ids


def dense(q, k, v, scale, documents, window):
    length = q.shape[1]
    t, s = np.arange(length)[:, None], np.arange(length)[None, :]
    seen = (s <= t) & (t - s < (window or length))
    seen = seen[None] & (documents[:, :, None] == documents[:, None, :])
    scores = np.einsum("bthk,bshk->bhts", q, k) * scale
    scores = np.where(seen[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshk->bthk", weights, v), weights


def dense_gradients(q, k, v, scale, documents, window, dout):
    _, w = dense(q, k, v, scale, documents, window)
    dv = np.einsum("bhts,bthk->bshk", w, dout)
    dw = np.einsum("bthk,bshk->bhts", dout, v)
    ds = w * (dw - (dw * w).sum(-1, keepdims=True)) * scale
    return np.einsum("bhts,bshk->bthk", ds, k), np.einsum("bhts,bthk->bshk", ds, q), dv


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_agrees_with_dense_mask(data):
    length = data.draw(st.integers(1, 24))
    block = data.draw(st.sampled_from([3, 8, 128]))
    window = data.draw(st.one_of(st.none(), st.integers(1, 30)))
    starts = data.draw(st.lists(st.booleans(), min_size=2 * length, max_size=2 * length))
    tokens = np.where(np.array(starts).reshape(2, length), 7, 1)
    rng = np.random.default_rng(length)
    q, k, v, dout = rng.normal(size=(4, 2, length, 2, 4))
    documents = np.cumsum(tokens == 7, axis=1)
    old, module.QUERY_BLOCK = module.QUERY_BLOCK, block
    try:
        ids = document_ids(jnp.asarray(tokens), 7)
        np.testing.assert_array_equal(ids, documents)
        out, back = jax.vjp(
            lambda *qkv: attention(*qkv, scale=0.3, documents=ids, window=window),
            *(jnp.asarray(x, jnp.float32) for x in (q, k, v)),
        )
        grads = back(jnp.asarray(dout, jnp.float32))
    finally:
        module.QUERY_BLOCK = old
    np.testing.assert_allclose(out, dense(q, k, v, 0.3, documents, window)[0], atol=2e-5)
    for found, expected in zip(grads, dense_gradients(q, k, v, 0.3, documents, window, dout), strict=True):
        np.testing.assert_allclose(found, expected, atol=5e-5)


@pytest.mark.parametrize("window", [None, 64])
def test_no_scores_larger_than_block_by_window(window):
    x = jax.ShapeDtypeStruct((1, 512, 1, 8), jnp.float32)
    text = jax.jit(lambda x: attention(x, x, x, scale=1.0, window=window)).lower(x).as_text()
    assert ("128x512xf32" in text) == (window is None)
    assert "512x512xf32" not in text
