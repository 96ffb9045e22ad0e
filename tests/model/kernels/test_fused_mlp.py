"""Fused MLP matmuls in bf16 in interpret mode, against their references and float64."""

import jax.numpy as jnp
import numpy as np
import pytest

# Private: the interpreter has no public name yet.
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from jspeed.errors import BadInput
from jspeed.model.fp8 import E4M3
from jspeed.model.kernels import fused_mlp

N, F, D = 256, 512, 256
INTERPRETED = InterpretGPUParams()


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    x, w = (
        jnp.asarray(np.clip(rng.normal(size=shape) * 100, -448, 448), E4M3)
        for shape in ((N, D), (F, D))
    )
    # The copy's scale is so small that the largest do not fit.
    return x, w, jnp.array([0.01 / 160, 1.0 / 448], jnp.float32)


def test_the_squared_relu_matmul_matches_its_reference(operands):
    h, copy, largest = fused_mlp.squared_relu_matmul(*operands, interpret=INTERPRETED)
    h2, copy2, largest2 = fused_mlp.squared_relu_matmul_reference(*operands)
    np.testing.assert_allclose(h.astype(jnp.float32), h2.astype(jnp.float32), rtol=2**-6, atol=1e-4)
    np.testing.assert_allclose(
        copy.astype(jnp.float32), copy2.astype(jnp.float32), rtol=2**-3, atol=2**-6
    )
    np.testing.assert_allclose(largest, largest2, rtol=2**-6)
    assert (copy.dtype, h.dtype) == (E4M3, jnp.bfloat16) and largest.shape == (F // 64, N)
    assert np.max(copy.astype(np.float32)) == 448


def test_the_squared_relu_matmul_is_near_float64(operands):
    x, w, scales = (np.asarray(a, np.float64) for a in operands)
    expected = np.square(np.maximum(x @ w.T * scales[0], 0))
    h, copy, largest = fused_mlp.squared_relu_matmul(*operands, interpret=INTERPRETED)
    np.testing.assert_allclose(np.asarray(h, np.float64), expected, rtol=2**-6, atol=1e-4)
    clipped = np.minimum(expected / scales[1], 448)
    np.testing.assert_allclose(np.asarray(copy, np.float64), clipped, rtol=2**-3, atol=2**-6)
    by_64 = expected.reshape(N, -1, 64).max(axis=2).T
    np.testing.assert_allclose(np.asarray(largest, np.float64), by_64, rtol=2**-6)


def test_the_gradient_matches_its_reference_and_near_float64():
    rng = np.random.default_rng(1)
    g, w = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((N, D), (D, F)))
    h = jnp.asarray(np.square(np.maximum(rng.normal(size=(N, F)), 0)), jnp.bfloat16)
    found = np.asarray(fused_mlp.squared_relu_gradient(g, w, h, interpret=INTERPRETED), np.float64)
    reference = np.asarray(fused_mlp.squared_relu_gradient_reference(g, w, h), np.float64)
    g64, w64, h64 = (np.asarray(a, np.float64) for a in (g, w, h))
    np.testing.assert_allclose(found, reference, rtol=2**-6, atol=1e-3)
    np.testing.assert_allclose(found, g64 @ w64 * 2 * np.sqrt(h64), rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "what"), [((100, 256, 128), "rows"), ((128, 300, 128), "columns")]
)
def test_sizes_that_do_not_fill_tiles_are_refused(shape, what):
    n, f, d = shape
    x, w = jnp.zeros((n, d), E4M3), jnp.zeros((f, d), E4M3)
    with pytest.raises(BadInput, match=what):
        fused_mlp.squared_relu_matmul(x, w, jnp.ones(2), interpret=INTERPRETED)
