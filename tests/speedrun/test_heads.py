"""Attention-head interactions (pairs, XSA, DCMHA) against loops in float64 NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jspeed.model.attention import find_documents, without_own_value
from jspeed.speedrun.heads import attention_in_pairs, composed, pair_documents, pair_positions

from ..model import dense
from ..model.test_attention import check_tags


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def f32(x):
    return np.asarray(x, np.float32)


def test_paired_heads_attend_as_two_heads_in_one_sequence():
    """Column c of the sequence is head c at even positions and head c + H/2 at odd ones, as the
    record's views are."""
    length, window = 11, 6
    q, k, v = (draw(2, length, 4, 8, seed=n) for n in range(3))
    tokens = np.random.default_rng(5).integers(0, 4, size=(2, length))
    expected = np.zeros((2, length, 4, 8))
    for column in range(2):
        joined = []
        for x in (q, k, v):
            sequence = np.zeros((2, 2 * length, 1, 8))
            sequence[:, 0::2, 0], sequence[:, 1::2, 0] = x[:, :, column], x[:, :, column + 2]
            joined.append(sequence)
        ids = np.cumsum(tokens == 0, axis=1).repeat(2, axis=1)
        t, s = np.arange(2 * length)[:, None], np.arange(2 * length)[None]
        seen = ((s <= t) & (t - s < window))[None] & (ids[:, :, None] == ids[:, None])
        y, _ = dense.forward(*joined, 0.3, seen)
        expected[:, :, column], expected[:, :, column + 2] = y[:, 0::2, 0], y[:, 1::2, 0]
    documents = find_documents(jnp.asarray(tokens), 0, length)
    how = {"scale": 0.3, "documents": documents, "window": window}
    y = jax.jit(partial(attention_in_pairs, **how))(f32(q), f32(k), f32(v))
    np.testing.assert_allclose(y, expected, atol=2e-6)
    np.testing.assert_array_equal(pair_positions(3), [[0, 1], [2, 3], [4, 5]])


def test_paired_offsets_are_those_of_the_paired_ids():
    tokens = jnp.array([[0, 5, 5, 0, 5, 0, 5, 5]])
    once, twice = find_documents(tokens, 0, 5), find_documents(jnp.repeat(tokens, 2, axis=1), 0, 16)
    np.testing.assert_array_equal(pair_documents(once).offsets, [[0, 6, 10, 16, 16, 16]])
    assert twice.offsets is not None and pair_documents(once).ids.shape == twice.ids.shape


def test_own_value_is_taken_out():
    y, v, alpha = draw(2, 5, 3, 8), draw(2, 5, 3, 8, seed=1), draw(2, 5, 3, seed=2)
    v[0, 0, 0] = 0
    along = (y * v).sum(-1) / np.maximum((v * v).sum(-1), 1e-8)
    expected = y - (np.tanh(alpha) * along)[..., None] * v
    np.testing.assert_allclose(without_own_value(f32(y), f32(v), f32(alpha)), expected, atol=1e-6)
    gated = without_own_value(f32(y), f32(v), f32(alpha), f32(gate := draw(2, 5, 3, seed=3)))
    np.testing.assert_allclose(gated, expected * gate[..., None], atol=1e-6)
    gradient = jax.grad(lambda v: jnp.sum(without_own_value(f32(y), v, f32(alpha))))(f32(v))
    assert np.all(np.isfinite(gradient))


@pytest.mark.slow
def test_composed_attention_by_loops():
    """Each head's local softmax, mixed over heads by weights of the query, times the value of each
    head."""
    length, window, scale = 300, 112, 0.2
    q, k, v = (draw(1, length, 3, 4, seed=n) for n in range(3))
    take, give = draw(1, length, 3, seed=3), draw(1, length, 3, seed=4)
    tokens = np.random.default_rng(5).integers(0, 90, size=(1, length))
    documents = find_documents(jnp.asarray(tokens), 0)
    ids = np.cumsum(tokens[0] == 0)

    expected = np.zeros_like(q)
    for t in range(length):
        keys = [s for s in range(t + 1) if t - s < window and ids[s] == ids[t]]
        weights = take[0, t] / np.sqrt(np.mean(take[0, t] ** 2) + 1e-6)
        mixed = np.zeros(len(keys))
        for head in range(3):
            p = np.exp(scale * k[0, keys, head] @ q[0, t, head])
            mixed += weights[head] * p / p.sum()
        for head in range(3):
            expected[0, t, head] = give[0, t, head] * mixed @ v[0, keys, head]

    def ours(q, k, v, take, give):
        return composed(q, k, v, take, give, scale=scale, documents=documents, window=window)

    arguments = [f32(x) for x in (q, k, v, take, give)]
    np.testing.assert_allclose(ours(*arguments), expected, atol=1e-5)
    q, k, *others = arguments
    check_grads(partial(ours, q, k), others, order=1, modes=["rev"], rtol=1e-2)
    check_grads(lambda q, k: ours(q, k, *others), (q, k), order=1, modes=["rev"], rtol=1e-2)


def test_composed_attention_of_a_short_row():
    arguments = [f32(draw(2, 10, 3, 4, seed=n)) for n in range(3)] + [
        f32(draw(2, 10, 3, seed=n)) for n in (3, 4)
    ]
    documents = find_documents(jnp.ones((2, 10), jnp.int32), 0)
    padded = [np.pad(a, [(0, 0), (0, 290)] + [(0, 0)] * (a.ndim - 2)) for a in arguments]
    long = find_documents(jnp.ones((2, 300), jnp.int32), 0)
    for window in (112, 3):
        call = partial(composed, scale=0.3, window=window)
        found = jax.jit(partial(call, documents=documents))(*arguments)
        expected = jax.jit(partial(call, documents=long))(*padded)[:, :10]
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("documents_of", [0.05, pytest.param(0.6, marks=pytest.mark.slow)])
def test_tags_of_documents_stand_for_a_mask_of_pairs(documents_of):
    check_tags(attention_in_pairs, documents_of)
