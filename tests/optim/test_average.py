"""The tail average against the definition, with and without updates that are not due."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jspeed.optim.average import tail_average
from jspeed.optim.slow import when_due


@pytest.mark.parametrize("every", [1, 2])
def test_the_last_due_update_ends_near_the_mean(every):
    rng = np.random.default_rng(0)
    start, grads = rng.normal(size=7), rng.normal(size=(6, 7))
    inner = optax.sgd(0.5) if every == 1 else when_due(optax.sgd(0.5))
    optimizer = tail_average(inner, updates=5, horizon=3.0, share=0.6)
    params = jnp.asarray(start, jnp.float32)
    state = optimizer.init(params)
    expected = mean = start
    for number, g in enumerate(grads):
        for within in range(every):
            due = within == every - 1
            change, state = optimizer.update(jnp.asarray(g, jnp.float32), state, params, due=due)
            params = params + change
        expected = expected - 0.5 * g
        mean = mean + (expected - mean) / 3
        if number == 4:
            expected = expected + 0.6 * (mean - expected)
        np.testing.assert_allclose(params, expected, atol=1e-5)
