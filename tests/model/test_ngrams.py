"""N-gram hash indices against integer arithmetic."""

import jax
import numpy as np

from jspeed.model.ngrams import ngram_rows


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
