"""What followed a context, as an input of the model, against loops."""

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.retrieval import Matches
from jspeed.retrieval import inputs as retrieved

LENGTHS = (2, 3, 6)


def matches(rng, shape=(2, 5), top=3):
    counts = -np.sort(-rng.integers(0, 20, (*shape, top)), axis=-1)
    counts[0, 0] = 0
    lengths = rng.choice([2, 3, 6], shape) * (counts[..., 0] > 0)
    more = counts.sum(-1) + rng.integers(0, 9, shape)
    return as_int32(rng.integers(0, 11, (*shape, top)), counts, lengths, more)


def as_int32(*parts):
    return Matches(*(np.array(part, np.int32) for part in parts))


def test_every_cell_has_a_number_of_its_own():
    found = {}
    for length in LENGTHS:
        for often in (1, 2, 3, 5, 9, 17, 33, 96):
            for top in range(1, often + 1):
                one = as_int32([[[7]]], [[[top]]], [[length]], [[often]])
                share = sum(top / often >= np.float32(border) for border in retrieved.SHARE)
                cell = int(retrieved.cells(one, LENGTHS)[0, 0])
                kind = length, sum(often >= border for border in retrieved.OFTEN), share
                assert found.setdefault(cell, kind) == kind
    assert len(set(found.values())) == len(found)
    assert min(found) >= 1 and max(found) < retrieved.number_of_cells(LENGTHS) == 127
    nothing = as_int32([[[0]]], [[[0]]], [[0]], [[0]])
    assert int(retrieved.cells(nothing, LENGTHS)[0, 0]) == 0


def test_the_mean_embedding_is_weighed_by_counts():
    rng = np.random.default_rng(0)
    table, found = rng.normal(size=(11, 8)).astype(np.float32), matches(rng)
    means = np.zeros((2, 5, 8))
    for b, t in np.ndindex(2, 5):
        if total := found.counts_BTK[b, t].sum():
            mean = (
                sum(
                    n * table[i]
                    for n, i in zip(found.counts_BTK[b, t], found.tokens_BTK[b, t], strict=True)
                )
                / total
            )
            means[b, t] = mean / np.sqrt(np.mean(mean**2))
    np.testing.assert_allclose(
        retrieved.mean_embedding(jnp.asarray(table), found), means, atol=1e-5
    )
    grad = jax.grad(lambda t: jnp.sum(retrieved.mean_embedding(t, found) ** 3))(jnp.asarray(table))
    assert not np.any(grad)


def test_terms_are_scaled_by_cell_and_need_an_index():
    rng = np.random.default_rng(1)
    table, found = jnp.asarray(rng.normal(size=(11, 8)), jnp.float32), matches(rng)
    scales = jnp.asarray(rng.normal(size=(retrieved.number_of_cells(LENGTHS), 2)), jnp.float32)
    cell_BT = np.asarray(retrieved.cells(found, LENGTHS))
    for number, (scale_BT, mean_BTD) in enumerate(retrieved.terms(scales, table, found, LENGTHS)):
        np.testing.assert_array_equal(scale_BT, np.asarray(scales)[cell_BT, number])
        np.testing.assert_array_equal(mean_BTD, retrieved.mean_embedding(table, found))
    assert (
        retrieved.terms(None, table, found, LENGTHS)
        == retrieved.terms(scales, table, None, LENGTHS)
        == []
    )
