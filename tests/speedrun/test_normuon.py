"""NorMuon, cautious decay, optimizer wrappers and schedules against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jspeed.optim.muon import POLAR_EXPRESS
from jspeed.optim.schedules import staged, through
from jspeed.speedrun.cautious import add_cautious_decay, cautious_adam
from jspeed.speedrun.normuon import normuon
from jspeed.speedrun.slow import delayed_scaling, slow_adams, tied, when_due

# The record's schedule: three batch sizes, a fall from step 508 to 1270, 15 steps more.
ETA = staged((1.0, 1.52, 1.73), (0, 423, 847), fall={508: 0.0, 1270: 1.0}, floor=0.15)


def polar_express(x):
    x = x / (1.02 * np.linalg.norm(x) + 1e-6)
    for a, b, c in POLAR_EXPRESS.maps:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


# As the record stores them, [out, in], and which of its axes is averaged over; jspeed stores [in,
# out].
SHAPES = {"fc": ((48, 16), 1), "square": ((16, 16), 1), "pair of heads": ((8, 24), 0)}


@pytest.mark.parametrize("name", SHAPES)
def test_normuon_equals_the_float64_model(name):
    shape, axis = SHAPES[name]
    rng = np.random.default_rng(0)
    count = 3
    beta2 = 0.9
    decay = 1.2
    rate = 0.3
    scale = np.array([2.0, 1.0, 4.0], np.float32)[:, None, None]
    weights = rng.normal(size=(count, *shape))
    buffer, square = np.zeros_like(weights), np.zeros(())
    eta = [1.0, 1.0, 0.7, 0.4, 0.4]
    momentum = [0.85, 0.9, 0.95, 0.95, 0.9]

    ours = normuon(
        lambda step: rate * jnp.asarray(eta)[step],
        lambda step: jnp.asarray(momentum)[step],
        beta2=beta2,
        weight_decay=decay,
        scale=scale,
        dtype=jnp.float32,
    )
    params = jnp.asarray(weights.transpose(0, 2, 1), jnp.float32)
    state = ours.init(params)
    update = jax.jit(ours.update)
    for step in range(5):
        g = rng.normal(size=weights.shape) * np.exp(rng.normal(size=weights.shape[:1] + (1,) * 2))
        mu = momentum[step]
        buffer = mu * buffer + (1 - mu) * g
        x = np.stack([polar_express(m) for m in mu * buffer + (1 - mu) * g])
        square = beta2 * square + (1 - beta2) * (x**2).mean(1 + axis, keepdims=True)
        y = x / np.sqrt(np.maximum(square, 1e-10))
        norms = [np.linalg.norm(m, axis=(1, 2), keepdims=True) for m in (x, y)]
        o = y * norms[0] / norms[1]
        rate_eff = rate * eta[step] * scale
        weights = (
            weights
            - weights * (o * weights >= 0) * decay * rate * eta[step] * rate_eff
            - o * rate_eff
        )

        change, state = update(jnp.asarray(g.transpose(0, 2, 1), jnp.float32), state, params)
        params = params + change
        np.testing.assert_allclose(params.mT, weights, atol=2e-4)


def test_unused_matrices_of_a_bank_stay_zero():
    ours = normuon(lambda _: 0.1, lambda _: 0.9, beta2=0.9, weight_decay=1.2, scale=1.0)
    bank = jnp.zeros((2, 4, 8)).at[0].set(1.0)
    change, _ = jax.jit(ours.update)(bank, ours.init(bank), bank)
    assert np.all(np.isfinite(change)) and np.any(np.asarray(change[0]))
    assert not np.any(np.asarray(change[1]))


def test_cautious_decay_of_weights_that_move_towards_zero():
    weights = jnp.array([2.0, 2.0, -2.0, -2.0, 2.0])
    change = jnp.array([-0.1, 0.1, 0.1, -0.1, 0.0])
    for where_zero, last in ((False, 0.0), (True, -0.02)):
        transform = add_cautious_decay(lambda step: 0.01 * (step + 1), where_zero=where_zero)
        found, state = transform.update(change, transform.init(weights), weights)
        np.testing.assert_allclose(found, [-0.12, 0.1, 0.12, -0.1, last], atol=1e-7)
        found, _ = transform.update(change, state, weights)
        np.testing.assert_allclose(found[0], -0.14, atol=1e-7)


def adam_model(weights, grads, rates, beta1, beta2, decay):
    """Adam as the record has it, float64: epsilon beside the uncorrected root, decay with the rate
    squared."""
    m = v = np.zeros_like(weights)
    for n, (g, rate) in enumerate(zip(grads, rates, strict=True), 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        u = rate * np.sqrt(1 - beta2**n) / (1 - beta1**n) * m / (np.sqrt(v) + 1e-10)
        weights = weights - u - rate**2 * decay * weights * (u * weights > 0)
        yield weights


def test_slow_adam_takes_two_gradients_and_the_second_rate():
    rng = np.random.default_rng(1)
    weights, grads = rng.normal(size=9), rng.normal(size=(8, 9))
    pairs = grads.reshape(4, 2, 9).sum(1)
    eta = staged((1.0, 1.52), (0, 5), fall={6: 0.0, 9: 1.0}, floor=0.15)
    slow = slow_adams({"table": (0.6, 0.75, 0.95, 5)}, eta, period=2, eps=1e-10, decay=0.005)[
        "table"
    ]
    rates = [0.6, 0.6, 0.6 * 1.52, 0.6 * (1.52 * 2 / 3 + 0.15 / 3)]
    expected = adam_model(weights, pairs, rates, 0.75, 0.95, 0.025)
    params = jnp.asarray(weights, jnp.float32)
    state = slow.init(params)
    for step in range(8):
        g = jnp.asarray(pairs[step // 2], jnp.float32)
        change, new = slow.update(g, state, params, due=1 + step % 2)
        if step % 2:
            params = params + change
            np.testing.assert_allclose(params, next(expected), atol=1e-5)
        else:
            assert new is state and not np.any(np.asarray(change))
        state = new


def test_tied_tables_are_one_until_they_part():
    """Against the record's protocol: one table with the sum of both gradients, then two with copies
    of its moments."""
    rng = np.random.default_rng(2)
    start, grads = rng.normal(size=6), rng.normal(size=(5, 2, 6))
    constants = 0.5, 0.95, 0.75
    single = cautious_adam(lambda n: jnp.asarray(0.1), 0.5, 0.95, eps=1e-10, weight_decay=0.75)
    together = tied(3, when_due(single))
    params = {"embed": jnp.asarray(start, jnp.float32), "head": jnp.asarray(start, jnp.float32)}
    state = together.init(params)
    both = np.concatenate([grads[:3].sum(1, keepdims=True).repeat(2, 1), grads[3:]])
    models = [adam_model(start, both[:, n], [0.1] * 5, *constants) for n in range(2)]
    for step, (g, *expected) in enumerate(zip(grads, *models, strict=True)):
        named = dict(zip(params, jnp.asarray(g, jnp.float32), strict=True))
        change, waiting = together.update(named, state, params, due=1)
        jax.tree.map(
            np.testing.assert_array_equal, (waiting, change["head"]), (state, jnp.zeros(6))
        )
        change, state = together.update(named, state, params, due=2)
        params = optax.apply_updates(params, change)
        for found, model in zip(params.values(), expected, strict=True):
            np.testing.assert_allclose(found, model, atol=1e-5)
        assert np.array_equal(params["embed"], params["head"]) == (step < 3)


def test_rates_of_the_record():
    """As tabulated for the reference recipe (appendix A)."""
    table = {
        0: 1.0,
        423: 1.52,
        508: 1.52,
        700: 1.1748,
        846: 0.9123,
        847: 1.0271,
        1000: 0.7098,
        1200: 0.2951,
    }
    for step, value in (table | {1269: 0.1521, 1270: 0.15, 1284: 0.15}).items():
        assert float(ETA(step)) == pytest.approx(value, abs=6e-5)


def test_momentum_of_the_record():
    """As tabulated for the reference recipe (appendix A)."""
    momentum = through({0: 0.85, 300: 0.95, 1235: 0.95, 1285: 0.85})
    table = {0: 0.85, 150: 0.90, 300: 0.95, 1235: 0.95, 1269: 0.882, 1270: 0.880, 1284: 0.852}
    for step, value in table.items():
        assert float(momentum(step)) == pytest.approx(value, abs=1e-6)


def test_a_measured_parameter_becomes_its_gradient():
    largest, found = jnp.float32(248.0), jnp.float32(2.5)
    transform = delayed_scaling()
    update, _ = transform.update(found, transform.init(largest), largest)
    assert float(largest + update) == 2.5
