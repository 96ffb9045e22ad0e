"""Layers against NumPy written from their formulas."""

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.model.layers import (
    Fp32Accumulated,
    layer_norm,
    look_up_all,
    lookup,
    relu_squared,
    rms_norm,
    rotary,
    scaled,
    sparse_gate,
    uniform,
)


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
    np.testing.assert_allclose(jax.jit(rotary)(x), expected, atol=1e-5)


def test_rotary_scores_depend_on_distance_only():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 32)).astype(np.float32)
    turned_q, turned_k = (
        np.asarray(jax.jit(rotary)(np.broadcast_to(x, (1, 40, 1, 32))))[0, :, 0] for x in (q, k)
    )
    scores = turned_q @ turned_k.T
    np.testing.assert_allclose(scores[10:30, 5:25], scores[17:37, 12:32], atol=1e-5)
    np.testing.assert_allclose(turned_q[0], q[0, 0, 0], atol=1e-6)


def test_relu_squared_and_its_gradient():
    x = jnp.linspace(-2, 2, 9)
    np.testing.assert_array_equal(relu_squared(x), np.maximum(x, 0) ** 2)
    np.testing.assert_array_equal(jax.vmap(jax.grad(relu_squared))(x), 2 * np.maximum(x, 0))


def test_lookup_and_its_gradient():
    rng = np.random.default_rng(0)
    table, tokens = rng.normal(size=(7, 3)).astype(np.float32), rng.integers(0, 7, size=(2, 5))
    grad = rng.normal(size=(2, 5, 3)).astype(np.float32)
    found, pull = jax.vjp(lambda t: lookup(t, jnp.asarray(tokens)), jnp.asarray(table))
    np.testing.assert_array_equal(found, table[tokens])
    expected = np.zeros((7, 3))
    np.add.at(expected, tokens, grad)
    np.testing.assert_allclose(pull(jnp.asarray(grad))[0], expected, atol=1e-6)


def test_lookup_sums_the_gradient_of_a_bf16_table_in_fp32():
    table, tokens = jnp.zeros((3, 2), jnp.bfloat16), jnp.ones((4, 1000), jnp.int32)
    grad = jax.jit(jax.grad(lambda t: jnp.sum(lookup(t, tokens).astype(jnp.float32))))(table)
    assert grad.dtype == jnp.bfloat16
    # 4000 rounded to bf16; ones added in bf16 stop at 256.
    np.testing.assert_array_equal(grad.astype(jnp.float32), [[0, 0], [4000, 4000], [0, 0]])


def test_sums_of_tables_take_the_gradients_of_a_look_up():
    """Several tables at once, in fp32 though the tables are bf16, beside what the sums held; and
    the same rows."""
    rng = np.random.default_rng(0)
    tables, sums = rng.normal(size=(7, 2, 3)), rng.normal(size=(7, 2, 3))
    tokens, grads = rng.integers(0, 7, size=(2, 500)), rng.normal(size=(2, 2, 500, 3))
    tables, grads = (jnp.asarray(a, jnp.bfloat16) for a in (tables, grads))

    @jax.jit
    def both(sums, grads):
        found, pull = jax.vjp(lambda s: look_up_all(Fp32Accumulated(tables, s), tokens), sums)
        return found, look_up_all(tables, tokens), pull([*grads])[0]

    found, plain, gradient = both(sums.astype(np.float32), grads)
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_array_equal(one, other)
    for number, grad in enumerate(grads):
        np.add.at(sums, (tokens, number), np.asarray(grad, np.float64))
    np.testing.assert_allclose(gradient, sums, atol=1e-4)


def test_layer_norm_from_its_formula():
    rng = np.random.default_rng(0)
    x, gain, bias = 3 + rng.normal(size=(2, 5, 16)), rng.normal(size=16), rng.normal(size=16)
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    found = layer_norm(*(jnp.asarray(a, jnp.float32) for a in (x, gain, bias)))
    np.testing.assert_allclose(found, normal * gain[None, None] + bias[None, None], atol=1e-5)
    low = layer_norm(jnp.asarray(x, jnp.bfloat16), jnp.asarray(gain), jnp.asarray(bias))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), found, atol=0.06)


def test_sparse_gate_reads_the_first_channels():
    rng = np.random.default_rng(0)
    x, heads, one = rng.normal(size=(2, 3, 16)), rng.normal(size=(5, 4)), rng.normal(size=5)
    for weights in (heads, one):
        expected = 1 / (1 + np.exp(-(x[..., :5] @ weights)))
        np.testing.assert_allclose(
            sparse_gate(jnp.asarray(x), jnp.asarray(weights)), expected, atol=1e-6
        )


def test_uniform_draws_by_fan_in():
    drawn = uniform(0.5)(jax.random.key(0), (3, 64, 256), jnp.float32)
    assert abs(float(drawn.std()) * 8 / 0.5 - 1) < 0.01
    assert 0.99 < float(jnp.abs(drawn).max()) * 8 / 0.5 / 3**0.5 <= 1


def test_scaled_weights_give_gradients_of_a_scaled_output():
    rng = np.random.default_rng(0)
    x, w, g = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((40, 8), (8, 24), (40, 24))
    )

    def gradients(product):
        return lambda x, w, s: jax.vjp(product, x, w, s)[1](g)

    before = gradients(lambda x, w, s: s * (x @ w))
    after = gradients(lambda x, w, s: x @ scaled(w, s))
    given = x, w, np.float32(1.7)
    for one, two in zip(jax.jit(before)(*given), jax.jit(after)(*given), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)

    def passes(function):
        made = jax.make_jaxpr(function)(x, w, jnp.float32(1.7)).eqns
        return sum(
            eqn.outvars[0].aval.shape == g.shape and eqn.primitive.name != "dot_general"
            for eqn in made
        )

    assert passes(before) > passes(after) == 0
    half = jnp.full((3, 2), 1.5, jnp.bfloat16)
    assert scaled(half, None) is half and scaled(half, jnp.float32(2)).dtype == jnp.bfloat16
