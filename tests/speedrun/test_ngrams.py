"""Hashes of bigrams and signs against integer arithmetic and the reference recipe's values."""

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.speedrun.ngrams import bigram_rows, sign_rows, signs

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
