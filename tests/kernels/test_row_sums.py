"""Sums of rows, and row Adam of them, in JAX's interpreter of kernels, against float64 NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspeed.kernels.row_sums import SUMS, row_adam, sum_rows

from ..refusals import refused


def example(counts, width):
    """Rows in any order, which of them are of which sum, and where each sum starts."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(sum(counts), width)).astype(ml_dtypes.bfloat16)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return rows, rng.permutation(len(rows)).astype(np.int32), starts


def exact(rows, order, starts):
    pieces = np.split(np.asarray(rows, np.float64)[order], starts[1:-1])
    return np.stack([piece.sum(axis=0) for piece in pieces])


COUNTS = [
    (1,) * SUMS,
    (3, 0, 0, 1, 150, 0, 2),  # less than a program has, and one sum of many
    (0,) * SUMS + (2, 1) * SUMS + (0,) * 5,
    (40,) * (SUMS + 1),
]


@pytest.mark.parametrize(
    ("counts", "width"),
    [
        pytest.param(counts, width, marks=[pytest.mark.slow] * (n % 3 != place))
        for n, counts in enumerate(COUNTS)
        for place, width in enumerate((128, 384, 48))
    ],
)
def test_sums_are_exact_but_for_one_rounding(counts, width):
    arrays = example(counts, width)
    found, wanted = sum_rows(*map(jnp.asarray, arrays), interpret=True), exact(*arrays)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2**-8, atol=1e-5)
    rounded = wanted.astype(np.float32).astype(ml_dtypes.bfloat16)
    assert (np.asarray(found) != rounded).mean() < 1e-3  # by fp32, which sums in another order
    assert not np.asarray(found)[np.array(counts) == 0].any()


def test_rows_of_no_sum_are_not_read():
    rows, order, starts = example((2, 1, 4), 128)
    found = sum_rows(
        jnp.asarray(rows).at[order[3] :].set(np.nan), order, starts[:2], interpret=True
    )
    assert np.isfinite(np.asarray(found, np.float32)).all()


@pytest.mark.parametrize("width", [pytest.param(768, marks=pytest.mark.slow), 48])
def test_row_adam_changes_the_rows_that_are_named(width):
    counts, part = (3, 0, 1, 90, 2, *(1,) * 30), 64
    arrays, rng = example(counts, width), np.random.default_rng(1)
    table = rng.normal(size=(part, width)).astype(ml_dtypes.bfloat16)
    numbers = np.append(rng.permutation(part)[: len(counts) - 2], [part, part + 7]).astype(np.int32)
    squares, factors = (
        rng.uniform(size=len(counts)).astype(np.float32),
        np.array([0.1, 0.3, 1e-10, 0.2], np.float32),
    )
    lists = [jnp.asarray(part) for part in (arrays[0][:40], arrays[0][40:50], arrays[0][50:])]
    given = map(jnp.asarray, (*arrays[1:], numbers, squares, factors, table))
    found, found_squares = row_adam(lists, *given, interpret=True)

    sums, wanted = exact(*arrays), table.astype(np.float64)
    new_squares = squares + 0.1 * np.mean(sums**2, axis=1)
    change = 0.3 / (np.sqrt(new_squares) + 1e-10)[:, None] * sums
    old = wanted[np.minimum(numbers, part - 1)]
    change += 0.2 * np.where(change * old > 0, old, 0)
    wanted[numbers[:-2]] = (old - change)[:-2]
    np.testing.assert_allclose(found_squares, new_squares, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2**-8, atol=1e-4)
    others = np.setdiff1d(np.arange(part), numbers)
    np.testing.assert_array_equal(np.asarray(found)[others], table[others])


@pytest.mark.parametrize(("dtype", "width"), [(jnp.float32, 128), (jnp.bfloat16, 40)])
def test_refuses(dtype, width):
    arrays = [jax.ShapeDtypeStruct((8, width), dtype)] + [jax.ShapeDtypeStruct((8,), jnp.int32)] * 2
    refused(f"found {jnp.dtype(dtype)} and {width}", jax.eval_shape, sum_rows, *arrays)
