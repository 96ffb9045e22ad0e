"""N-gram hash indices and signs against integer arithmetic and the reference recipe's values."""

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.model.ngrams import bigram_rows, ngram_rows, sign_rows, signs

TOKENS = [50256, 464, 2068, 7586, 21831, 18045]


def int32(value):
    return (value + 2**31) % 2**32 - 2**31


def test_tabulated_rows():
    found = bigram_rows(jnp.array([TOKENS], jnp.uint16), 377_280)
    np.testing.assert_array_equal(found, [[377279, 86771, 28822, 182963, 128375, 67769]])
    np.testing.assert_array_equal(
        sign_rows(jnp.array([TOKENS])), [[0, 1408, 2500, 5558, 2277, 4922]]
    )


def test_rows_by_python_integers():
    tokens = np.random.default_rng(0).integers(0, 50_257, size=(3, 200))
    last = 251_519
    found = bigram_rows(jnp.asarray(tokens, jnp.int32), last + 1)
    for row, rows in zip(tokens.tolist(), np.asarray(found), strict=True):
        # the quirk: the first token is overwritten before the products are formed
        before = [last, *row[1:]]
        expected = [
            int32(36313 * row[t]) ^ int32(27191 * before[t - 1]) for t in range(1, len(row))
        ]
        assert rows.tolist() == [last, *(value % last for value in expected)]
    assert found.min() >= 0 and found.max() == last


def test_signs_are_fair_and_those_of_the_pair():
    tokens = np.random.default_rng(0).integers(0, 50_257, size=(1, 400))
    run = jax.jit(signs, static_argnums=1)
    found = np.asarray(run(tokens, 768))
    assert found.shape == (1, 400, 768) and set(np.unique(found)) == {-1, 1}
    assert abs(found.mean()) < 0.01 and np.abs(found.mean((0, 1))).max() < 0.25
    assert jax.eval_shape(lambda: signs(tokens, 40)).shape == (1, 400, 40)
    again = np.asarray(run(np.tile(tokens[:, 7:9], 2), 768))
    np.testing.assert_array_equal(again[0, [1, 3]], found[0, [8, 8]])


def test_rows_of_ngrams_by_python_integers():
    tokens = np.random.default_rng(0).integers(0, 65, size=(2, 50))
    run = jax.jit(ngram_rows, static_argnums=(1, 2))
    for order in (1, 2, 5):
        for row, rows in zip(tokens.tolist(), np.asarray(run(tokens, order, 4096)), strict=True):
            for place, found in enumerate(rows.tolist()):
                value = order
                for back in reversed(range(order)):
                    value = (
                        (value ^ (row[place - back] + 1 if back <= place else 0))
                        * 2654435769
                        % 2**32
                    )
                    value ^= value >> 15
                assert found == value % 4096


def test_ngrams_spread_over_the_rows():
    every = np.stack(np.meshgrid(*[np.arange(65)] * 3, indexing="ij"), -1).reshape(-1, 3)
    rows = jax.jit(lambda every: ngram_rows(every, 3, 16_384))(every)
    counts = np.bincount(np.asarray(rows)[:, 2], minlength=16_384)
    mean = 65**3 / 16_384
    assert counts.sum() == 65**3 and counts.var() < 1.1 * mean  # as a fair draw
