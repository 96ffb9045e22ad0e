"""The gradients that meet before a norm, in interpret mode, against JAX's own and in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.kernels import norm_gradient as module
from jspeed.model.custom_kernels import Kernel
from jspeed.model.layers import inverse_rms, rms_norm
from jspeed.speedrun.mudd import add_normed

from ..model import dense

TOKENS, WIDTH = 32, 768


def test_against_float64():
    """bf16 gradients, rounded once; rows of zeros, and large ones."""
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(3, TOKENS, WIDTH))
    arrays[:, 3] *= 100
    arrays[2, 5] = 0
    out, normed, x = jnp.asarray(arrays, jnp.bfloat16)
    inverse_N = inverse_rms(x)[:, 0]
    dx, dscale = module.norm_gradient(out, normed, x, inverse_N, jnp.float32(1.25), interpret=True)
    out, normed, x = (np.asarray(a, np.float64) for a in (out, normed, x))
    inverse = 1 / np.sqrt(np.mean(x**2, 1, keepdims=True) + np.finfo(np.float32).eps)
    expected = 1.25 * out + inverse * (
        normed - x * inverse**2 * np.mean(normed * x, 1, keepdims=True)
    )
    assert dx.dtype == jnp.bfloat16 and dense.distance(dx, expected) < 0.002
    np.testing.assert_allclose(dscale, np.sum(out * x), rtol=1e-5)


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS - 1])
def test_a_sum_beside_a_norm_has_the_gradients_of_the_plain_path(tokens):
    """Terms that use arrays around them, and the first channels; where tokens are no whole blocks,
    by plain JAX."""
    kernel = Kernel(partial(module.norm_gradient, interpret=True), module.accepts)
    rng = np.random.default_rng(0)
    x, w, c, g = (
        jnp.asarray(rng.normal(size=(1, *shape)), jnp.float32)
        for shape in ((tokens, WIDTH), (1, WIDTH), (tokens,), (tokens, WIDTH))
    )

    def call(x, w, c, scale, own):
        def terms(a, first):
            return [(1, a * w), (c, jnp.sin(a * scale)), (jnp.sum(first**3, axis=-1), x)]

        found = add_normed(terms, x, scale, own, channels=6)
        return jnp.sum(found * g), found

    def plain(x, w, c, scale):
        a = rms_norm(x)
        cubes = jnp.sum(a[..., :6] ** 3, axis=-1)
        added = a * w + c[..., None] * jnp.sin(a * scale) + cubes[..., None] * x
        return jnp.sum((scale * x + added) * g)

    given, outputs = (x, w, c, np.float32(1.5)), []
    expected = jax.jit(jax.grad(plain, (0, 1, 2, 3)))(*given)
    for own in (None, kernel):
        run = jax.jit(jax.grad(partial(call, own=own), (0, 1, 2, 3), has_aux=True))
        gradients, out = run(*given)
        outputs.append(out)
        for one, other in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(*outputs)
