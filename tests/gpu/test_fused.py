"""The fused matmuls on a real Hopper GPU, against their references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.model.fp8 import E4M3
from jspeed.model.kernels import fused_mlp

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU and JSPEED_TEST_GPU=1")
N, F, D = 4096, 3072, 768


def drawn(number, *shape):
    return jax.random.normal(jax.random.key(number), shape, jnp.bfloat16)


def same(found, expected, rtol):
    found, expected = (np.asarray(a, np.float32) for a in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-3 * expected.max())


def test_the_squared_relu_matmul():
    arrays = drawn(0, N, D).astype(E4M3), drawn(1, F, D).astype(E4M3), jnp.array([0.05, 0.01], jnp.float32)
    # One rounding to e4m3 may fall to either side where the sums differ in their last bits.
    for found, expected, rtol in zip(
        fused_mlp.squared_relu_matmul(*arrays),
        fused_mlp.squared_relu_matmul_reference(*arrays),
        (0.02, 0.13, 0.02),
        strict=True,
    ):
        same(found, expected, rtol)


def test_the_gradient():
    arrays = drawn(0, N, D), drawn(1, D, F), jnp.square(drawn(2, N, F))
    same(fused_mlp.squared_relu_gradient(*arrays), fused_mlp.squared_relu_gradient_reference(*arrays), 0.02)
