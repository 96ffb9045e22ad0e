"""Fused matmul kernels on a real Hopper GPU, against their references."""

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.kernels import fp8_cast, fused_mlp
from jspeed.model.fp8 import E4M3, E5M2

N, F, D = 4096, 3072, 768


def drawn(number, *shape):
    return jax.random.normal(jax.random.key(number), shape, jnp.bfloat16)


def same(found, expected, rtol):
    found, expected = (np.asarray(a, np.float32) for a in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-3 * expected.max())


def test_the_fp8_kernels():
    """Their transposed results too; and wgmma of two FP8 types, which no interpreter ran."""
    forward = (
        drawn(0, N, D).astype(E4M3),
        drawn(1, F, D).astype(E4M3),
        jnp.array([0.05, 0.01], jnp.float32),
    )
    h = fused_mlp.squared_relu_matmul_fp8_reference(*forward)[0]
    backward = (
        drawn(2, N, D).astype(E5M2),
        drawn(3, F, D).astype(E4M3),
        h,
        jnp.array([0.05, 0.01, 1e-3], jnp.float32),
    )
    for name, arrays, rtol in (("matmul", forward, 0.13), ("gradient", backward, 0.26)):
        found = getattr(fused_mlp, f"squared_relu_{name}_fp8")(*arrays)
        expected = getattr(fused_mlp, f"squared_relu_{name}_fp8_reference")(*arrays)
        for ours, theirs in zip(found, expected, strict=True):
            same(ours, theirs, rtol)
        assert jnp.mean(found[0] != expected[0]) < 0.02


def test_the_fp8_copies():
    x, scale = drawn(0, N, D), jnp.float32(0.01)
    for found, expected in zip(
        fp8_cast.cast(x, scale, E5M2), fp8_cast.cast_reference(x, scale, E5M2), strict=True
    ):
        np.testing.assert_array_equal(
            np.asarray(found, np.float32), np.asarray(expected, np.float32)
        )
