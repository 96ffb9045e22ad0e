"""ANVIL, averages of weights and schedules of record 92 against NumPy and the numbers of its
source."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jspeed.optim.averages import Average, after_step, at_end, zeros
from jspeed.optim.muon import ANVIL_MAPS, orthogonalise
from jspeed.optim.schedules import jumps
from jspeed.speedrun.anvil import TwoMomentum, anvil
from jspeed.speedrun.cautious import cautious_adam

RAILS = TwoMomentum(start=2, fast=0.85, slow=0.98, share=0.4385)


def test_maps_of_single_values():
    """As tabulated for the reference recipe (appendix A)."""
    for start, end in {
        1e-4: 0.064250,
        1e-3: 0.584541,
        3e-3: 0.995067,
        0.01: 1.000267,
        0.1: 0.999600,
        0.5: 1.000150,
    }.items():
        x, largest = np.float64(start), 0.0
        for a, b, c in ANVIL_MAPS.maps:
            x = a * x + b * x**3 + c * x**5
            largest = max(largest, x)
        assert x == pytest.approx(end, abs=1e-6) and largest < 1.54


def test_a_matrix_becomes_orthogonal_and_zero_stays_zero():
    x = np.random.default_rng(0).normal(size=(2, 24, 8)).astype(np.float32)
    x[1] = 0
    y = np.asarray(
        orthogonalise(jnp.asarray(x), polynomial=ANVIL_MAPS, dtype=jnp.float32), np.float64
    )
    np.testing.assert_allclose(y[0].T @ y[0], np.eye(8), atol=0.011)
    assert not y[1].any()


def whitened(x):
    """The maps, and division by running mean squares of 0.1 of the first step's, in float64."""
    x = x / (1.05 * np.linalg.norm(x) + 1e-6)
    for a, b, c in ANVIL_MAPS.maps:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def test_anvil_against_its_rule():
    rng = np.random.default_rng(1)
    weights, grads = rng.normal(size=(4, 6)), rng.normal(size=(4, 4, 6))
    rule = anvil(
        lambda n: 0.1 / (n + 1),
        lambda n: 0.8,
        RAILS,
        beta2=0.9,
        weight_decay=2.25,
        scale=2.0,
        dtype=jnp.float32,
    )
    params = jnp.asarray(weights, jnp.float32)[None]
    state, update = rule.init(params), jax.jit(rule.update)
    fast = np.zeros((4, 6))
    slow = np.zeros((4, 6))
    mean = np.zeros(6)
    p = weights
    for n, g in enumerate(grads):
        changes, state = update(jnp.asarray(g, jnp.float32)[None], state, params)
        params = optax.apply_updates(params, changes)
        fast += (1 - (0.85 if n >= 2 else 0.8)) * (g - fast)
        slow += 0.02 * (g - slow)
        share = 0.4385 if n >= 2 else 1.0
        x = whitened(0.2 * g + 0.8 * (share * fast + (1 - share) * slow))
        mean = 0.9 * mean + 0.1 * np.mean(x**2, axis=0)  # one number for each of the longer side
        y = x / np.sqrt(np.maximum(mean, 1e-10))
        y *= np.linalg.norm(x) / np.linalg.norm(y)
        rate = 0.1 / (n + 1)
        p = p - 2 * rate * (y + 2.25 * rate * np.where(slow * p >= 0, p, 0))
        np.testing.assert_allclose(params[0], p, atol=2e-5)


def test_adam_whose_betas_change_is_adam_while_they_do_not():
    rng = np.random.default_rng(2)
    params, grads = (
        jnp.asarray(rng.normal(size=5), jnp.float32),
        jnp.asarray(rng.normal(size=(3, 5)), jnp.float32),
    )
    plain = cautious_adam(lambda n: 0.1, 0.75, 0.95, eps=1e-8, weight_decay=0.5)
    scheduled = cautious_adam(
        lambda n: 0.1,
        jumps({0: 0.75, 9: 0.5}),
        lambda n: 0.95,
        eps=1e-8,
        weight_decay=lambda n: 0.5,
    )
    states = plain.init(params), scheduled.init(params)
    for g in grads:
        (one, first), (other, second) = (
            t.update(g, s, params) for t, s in zip((plain, scheduled), states, strict=True)
        )
        states = first, second
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("among", [(0, 1, 2, 3), None, ()], ids=["all", "each", "unknown"])
def test_averages_start_move_and_take_the_weights_place(among):
    """In a program for all steps, one for each, and where its steps are not known."""
    rates = np.array([0, 1.0, 0, 0.25])
    averages = Average(rates, {"a": 0.5}), Average(rates, {"a": 1.0, "b": 0.0})
    steps = [{"a": jnp.full(2, value), "b": jnp.arange(3.0)} for value in (5.0, 2.0, 7.0, 4.0)]
    means = zeros(averages, steps[0])
    for step, params in enumerate(steps):
        means = jax.jit(
            lambda m, p, s, n=step: after_step(averages, m, p, s, (n,) if among is None else among)
        )(means, params, jnp.int32(step))
    np.testing.assert_allclose(means[0]["a"], 2.5)
    shipped = at_end(averages, means, steps[-1], ())
    np.testing.assert_allclose(shipped["a"], 2.5)  # half of 2.5 and 4, then all of 2.5
    np.testing.assert_array_equal(shipped["b"], steps[-1]["b"])
    # with its norm
    np.testing.assert_allclose(at_end(averages, means, steps[-1], ("a",))["a"], 4.0, rtol=1e-6)


def test_weights_that_stay_come_back():
    params = {"a": jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)}
    averages = (Average(np.array([1.0, 0.3, 0.3]), {"a": 0.65}),)
    means = zeros(averages, params)
    for step in range(3):
        means = after_step(averages, means, params, jnp.int32(step), range(3))
    np.testing.assert_allclose(at_end(averages, means, params, ("a",))["a"], params["a"], rtol=1e-6)
