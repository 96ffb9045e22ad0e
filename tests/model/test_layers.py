"""Layers against NumPy written from their formulas."""

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.model.layers import relu_squared, rms_norm, rotary


def test_rms_norm_gives_unit_rms_and_ignores_scale():
    x = np.random.default_rng(0).normal(size=(3, 5, 16)).astype(np.float32)
    y = np.asarray(rms_norm(jnp.asarray(x)))
    np.testing.assert_allclose(np.sqrt((y**2).mean(-1)), 1, rtol=1e-5)
    np.testing.assert_allclose(y, rms_norm(jnp.asarray(10 * x)), rtol=1e-4, atol=1e-5)


def test_rotary_is_a_rotation_of_channel_pairs():
    x = np.random.default_rng(0).normal(size=(2, 9, 3, 16)).astype(np.float32)
    frequency = np.concatenate([(1 / 1024) ** np.linspace(0, 1, 4), np.zeros(4)])
    turn = np.exp(-1j * np.arange(9)[:, None] * frequency)[None, :, None, :]
    z = (x[..., :8] + 1j * x[..., 8:]) * turn
    expected = np.concatenate([z.real, z.imag], -1)
    np.testing.assert_allclose(rotary(jnp.asarray(x)), expected, atol=1e-5)


def test_rotary_scores_depend_on_distance_only():
    key = jax.random.key(0)
    q, k = jax.random.normal(key, (2, 1, 1, 1, 32))
    turned_q = rotary(jnp.broadcast_to(q, (1, 40, 1, 32)))[0, :, 0]
    turned_k = rotary(jnp.broadcast_to(k, (1, 40, 1, 32)))[0, :, 0]
    scores = turned_q @ turned_k.T
    np.testing.assert_allclose(scores[10:30, 5:25], scores[17:37, 12:32], atol=1e-5)
    np.testing.assert_allclose(turned_q[0], q[0, 0, 0], atol=1e-6)


def test_relu_squared_and_its_gradient():
    x = jnp.linspace(-2, 2, 9)
    np.testing.assert_array_equal(relu_squared(x), np.maximum(x, 0) ** 2)
    np.testing.assert_array_equal(jax.vmap(jax.grad(relu_squared))(x), 2 * np.maximum(x, 0))
