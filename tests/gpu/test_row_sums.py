"""Sums of gradients of equal rows, and row Adam of them, on a real GPU, against the plain path."""

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.kernels import row_sums
from jspeed.model.custom_kernels import Kernel
from jspeed.optim.rows import row_adam
from jspeed.parallel.sharded_table import fetch
from jspeed.parallel.sparse_rows import Pending

from ..model import dense

TOKENS, ROWS, WIDTH = 40_000, 30_000, 768


def test_gradients_of_a_look_up():
    keys = jax.random.split(jax.random.key(0), 3)
    ids = jax.random.randint(keys[0], (1, TOKENS), 0, ROWS).at[0, 5:3000].set(7)
    grad = jax.random.normal(keys[1], (1, TOKENS, WIDTH), jnp.bfloat16)
    table = jax.random.normal(keys[2], (ROWS, WIDTH), jnp.bfloat16)
    found, expected = (
        jax.jit(
            lambda table, own=own: jax.vjp(lambda table: fetch(table, ids, None, own), table)[1](
                grad
            )[0]
        )(table)
        for own in (Kernel(row_sums.sum_rows), None)
    )
    assert dense.distance(found, expected) < 0.001
    np.testing.assert_allclose(
        *(np.asarray(each[7], np.float32) for each in (found, expected)), rtol=2**-7, atol=0.1
    )


def test_an_update_of_rows():
    keys = jax.random.split(jax.random.key(0), 3)
    names = jax.random.randint(keys[0], (TOKENS,), 0, 2 * ROWS).at[5:3000].set(7)
    grads = jax.random.normal(keys[1], (TOKENS, WIDTH), jnp.bfloat16)
    found = [Pending(names[part], grads[part]) for part in (slice(10_000), slice(10_000, None))]
    table = jax.random.normal(keys[2], (ROWS, WIDTH), jnp.bfloat16)
    adam = row_adam(lambda n: 0.1, lambda n: 0.9, eps=1e-10, weight_decay=lambda n: 0.5)
    (changed, state), (expected, other) = (
        jax.jit(adam.update, static_argnums=3)(found, table, adam.init(table), own)
        for own in (Kernel(row_sums.row_adam), None)
    )
    assert dense.distance(changed, expected) < 0.001
    assert dense.distance(state.square_V, other.square_V) < 1e-5
    others = ~np.isin(np.arange(ROWS), names)
    np.testing.assert_array_equal(changed[others], table[others])
