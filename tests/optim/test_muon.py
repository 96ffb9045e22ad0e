"""Muon against optax's own, a float64 model, and published singular values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jspeed.optim.muon import muon, orthogonalise

# Image of single singular values under five iterations in exact arithmetic, from the polynomial alone
# (3.4445 s - 4.7750 s^3 + 2.0315 s^5 applied five times), as tabulated for the reference recipe.
SINGULAR_VALUES = {1e-4: 0.0485, 1e-3: 0.4705, 0.003: 1.1104, 0.01: 0.6989, 0.1: 0.7121, 0.6: 0.7229}


def test_singular_value_map():
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.normal(size=(8, 8)))
    v, _ = np.linalg.qr(rng.normal(size=(12, 12)))
    values = np.array([*SINGULAR_VALUES, 0.3, 0.03])
    norm = np.linalg.norm(values)
    x = u @ np.diag(values) @ v[:8]
    with jax.enable_x64(True):
        y = orthogonalise(jnp.asarray(x / norm * 1.0), dtype=jnp.float64)
        found = np.diag(u.T @ np.asarray(y) @ v[:8].T)
    a, b, c = 3.4445, -4.7750, 2.0315
    s = values / norm
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    np.testing.assert_allclose(found, s, atol=1e-6)
    for start, end in SINGULAR_VALUES.items():
        for _ in range(5):
            start = a * start + b * start**3 + c * start**5
        assert start == pytest.approx(end, abs=6e-5)


@pytest.mark.parametrize("shape", [(6, 64, 256), (3, 2, 256, 64), (64, 64)])
def test_orthogonalised_singular_values_lie_in_a_band(shape):
    x = jax.random.normal(jax.random.key(0), shape)
    values = np.linalg.svd(np.asarray(orthogonalise(x, dtype=jnp.float32)), compute_uv=False)
    assert values.max() < 1.3 and np.quantile(values, 0.1) > 0.5


def test_bank_equals_matrix_by_matrix_and_zero_stays_zero():
    bank = jax.random.normal(jax.random.key(0), (5, 16, 8)).at[2].set(0)
    whole = orthogonalise(bank, dtype=jnp.float32)
    for matrix, result in zip(bank, whole, strict=True):
        np.testing.assert_allclose(orthogonalise(matrix, dtype=jnp.float32), result, atol=1e-5)
    assert not np.any(np.asarray(whole[2]))


def test_equals_optax_muon_without_momentum():
    # With momentum the two differ on purpose: optax corrects its Nesterov average for the zero start.
    params = {"wide": jnp.zeros((16, 24)), "tall": jnp.zeros((24, 16))}
    theirs = optax.contrib.muon(0.02, beta=0.0, eps=1e-7)
    ours = muon(0.02, lambda step: 0.0, dtype=jnp.float32)
    grads = {name: jax.random.normal(jax.random.key(n), p.shape) for n, (name, p) in enumerate(params.items())}
    found, _ = ours.update(grads, ours.init(params), params)
    expected, _ = theirs.update(grads, theirs.init(params), params)
    for name in params:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)


def test_equals_float64_model_with_momentum_schedule():
    rng = np.random.default_rng(0)
    momentum = optax.linear_schedule(0.85, 0.95, 3)
    ours = muon(0.1, momentum, dtype=jnp.float32)
    params = jnp.zeros((2, 6, 10))
    state, buffer = ours.init(params), np.zeros((2, 6, 10))
    for step in range(5):
        g = rng.normal(size=(2, 6, 10))
        beta = min(0.85 + 0.1 * step / 3, 0.95)
        buffer = beta * buffer + (1 - beta) * g
        x = beta * buffer + (1 - beta) * g
        x /= np.linalg.norm(x, axis=(1, 2), keepdims=True)
        for _ in range(5):
            gram = x @ x.transpose(0, 2, 1)
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        update, state = ours.update(jnp.asarray(g, jnp.float32), state, params)
        np.testing.assert_allclose(update, -0.1 * (10 / 6) ** 0.5 * x, atol=1e-4)
