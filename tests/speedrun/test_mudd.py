"""MUDD coefficients, their slots and weighted sums against NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.speedrun.mudd import blend, coefficients, named, slots


def test_coefficients_by_the_formula():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 8))
    up = rng.normal(size=(8, 5))
    down = rng.normal(size=(5, 4))
    bias = rng.normal(size=4)
    hidden = x @ up
    erf = np.vectorize(math.erf)
    expected = 0.1 * ((0.5 * hidden * (1 + erf(hidden / np.sqrt(2)))) @ down + bias)
    arrays = {"g_up": up, "g_down": down, "g_bias": bias}
    params = {name: jnp.asarray(np.stack([0 * a, a]), jnp.float32) for name, a in arrays.items()}
    found = coefficients(jnp.asarray(x, jnp.float32), params, "g", 1, 0.1)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_blend_of_scalars_and_tokens():
    x, y = jax.random.normal(jax.random.key(0), (2, 2, 3, 4))
    c = jax.random.normal(jax.random.key(1), (2, 3))
    np.testing.assert_allclose(blend((0.5, x), (c, y)), 0.5 * x + c[..., None] * y, atol=1e-6)
    assert blend((c, x.astype(jnp.bfloat16)), (c, y)).dtype == jnp.bfloat16


def test_gradients_of_a_scalar_that_weighs_all_tokens():
    """Fp32Accumulated over channels first, then over tokens: to rounding the sum over all."""
    x, y, g = np.random.default_rng(0).normal(size=(3, 2, 3, 4))
    found = jax.grad(lambda c: jnp.sum(blend((c, jnp.asarray(x)), (1, jnp.asarray(y))) * g))
    for dtype in (jnp.float32, jnp.bfloat16):
        gradient = found(jnp.asarray(0.5, dtype))
        assert gradient.dtype == dtype and gradient.shape == ()
        np.testing.assert_allclose(
            gradient, np.sum(g * x), rtol=1e-5 if dtype != jnp.bfloat16 else 0.01
        )


def test_named_coefficients():
    c = jax.random.normal(jax.random.key(0), (2, 3, 6))
    found = named(c, {"a": 2, ("b", 1): 1, "c": 2})  # what is left over belongs to nobody
    assert list(found) == ["a", ("b", 1), "c"]
    np.testing.assert_array_equal(found["a"], c[..., :2])
    np.testing.assert_array_equal(found["b", 1], c[..., 2])
    np.testing.assert_array_equal(found["c"], c[..., 3:5])


def test_slots_by_layer_and_set():
    sizes, starts = slots(
        {"heads": ((0, 3), 2, 0.25), "in": ((0, 1, 2), 1, 0.5)}, (range(1), range(1, 4))
    )
    assert sizes == [{("heads", 0): 2, ("in", 0): 1}, {("heads", 3): 2, ("in", 1): 1, ("in", 2): 1}]
    np.testing.assert_array_equal(starts, [[0.25, 0.25, 0.5, 0], [0.25, 0.25, 0.5, 0.5]])
