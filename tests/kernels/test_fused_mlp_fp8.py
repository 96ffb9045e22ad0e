"""Fused MLP matmuls with FP8 outputs in interpret mode, against their references and float64."""

import jax.numpy as jnp
import numpy as np
import pytest

# Private: the interpreter has no public name yet.
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from jspeed.kernels import fused_mlp
from jspeed.model.fp8 import E4M3, E5M2

from ..refusals import refused

N, F, D = 256, 512, 256
INTERPRETED = InterpretGPUParams()
# Half of the distance between neighbours: of normal numbers, relative, and of those below them.
ROUNDED = {E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17)}


def wide(*arrays):
    return tuple(np.asarray(array, np.float64) for array in arrays)


def drawn(seed, dtype, *shape):
    return jnp.asarray(
        np.clip(np.random.default_rng(seed).normal(size=shape) * 100, -448, 448), dtype
    )


@pytest.fixture
def forward():
    # The scale of the result is so small that the largest do not fit.
    return (
        drawn(0, E4M3, N, D),
        drawn(1, E4M3, F, D),
        jnp.array([0.01 / 160, 1000 / 448], jnp.float32),
    )


@pytest.fixture
def backward(forward):
    q_NF, *_ = fused_mlp.squared_relu_matmul_fp8_reference(*forward)
    scales = jnp.array([0.03 / 160, 1000 / 448, 0.05], jnp.float32)
    return drawn(2, E5M2, N, D), drawn(3, E4M3, F, D), q_NF, scales


KERNELS = [
    (
        "forward",
        fused_mlp.squared_relu_matmul_fp8,
        fused_mlp.squared_relu_matmul_fp8_reference,
        E4M3,
    ),
    (
        "backward",
        fused_mlp.squared_relu_gradient_fp8,
        fused_mlp.squared_relu_gradient_fp8_reference,
        E5M2,
    ),
]


@pytest.mark.parametrize(("operands", "kernel", "reference", "dtype"), KERNELS)
def test_a_kernel_matches_its_reference(request, operands, kernel, reference, dtype):
    arrays = request.getfixturevalue(operands)
    q_NF, q_FN, largest_GN = kernel(*arrays, interpret=INTERPRETED)
    expected_NF, expected_FN, expected_GN = reference(*arrays)
    assert q_NF.dtype == q_FN.dtype == expected_NF.dtype == expected_FN.dtype == dtype
    assert (q_NF.shape, q_FN.shape, largest_GN.shape) == ((N, F), (F, N), (F // 64, N))
    np.testing.assert_array_equal(q_FN.astype(jnp.float32), q_NF.astype(jnp.float32).T)
    # A sum in another order may be rounded to the neighbour.
    rtol, atol = (2 * bound for bound in ROUNDED[dtype])
    np.testing.assert_allclose(*wide(q_NF, expected_NF), rtol=rtol, atol=atol)
    np.testing.assert_allclose(*wide(largest_GN, expected_GN), rtol=1e-5 if dtype == E4M3 else rtol)
    assert np.mean(np.asarray(q_NF != expected_NF)) < 1e-3


@pytest.mark.slow
def test_the_squared_relu_is_near_float64(forward):
    x, w, (factor, scale) = wide(*forward)
    h = np.square(np.maximum(x @ w.T * factor, 0))
    q_NF, _, largest_GN = wide(*fused_mlp.squared_relu_matmul_fp8(*forward, interpret=INTERPRETED))
    rtol, atol = ROUNDED[E4M3]
    np.testing.assert_allclose(q_NF, np.minimum(h / scale, 448), rtol=rtol + 1e-5, atol=atol)
    np.testing.assert_allclose(largest_GN, h.reshape(N, -1, 64).max(axis=2).T, rtol=1e-5)
    assert q_NF.max() == 448 and h.max() > 448 * scale


@pytest.mark.slow
def test_the_gradient_is_near_float64(backward):
    g, w, h, (factor, h_scale, scale) = wide(*backward)
    exact = np.clip(g @ w.T * factor * 2 * np.sqrt(h * h_scale) / scale, -57_344, 57_344)
    q_NF, _, largest_GN = wide(
        *fused_mlp.squared_relu_gradient_fp8(*backward, interpret=INTERPRETED)
    )
    rtol, atol = ROUNDED[E5M2]
    np.testing.assert_allclose(q_NF, exact, rtol=rtol + 1e-5, atol=atol)
    np.testing.assert_array_equal(largest_GN, np.abs(q_NF).reshape(N, -1, 64).max(axis=2).T)
    assert np.abs(q_NF).max() == 57_344 and np.mean(np.abs(exact) == 57_344) < 0.1
    assert not q_NF[h == 0].any()


@pytest.mark.slow
def test_nan_stays_nan(forward, backward):
    """In its entry and its transpose. The largest on GPUs: tests/aot; on CPUs a maximum by XLA
    loses NaN itself."""
    x, w, scales = forward
    g, v, h, scales_3 = backward
    found = [
        fused_mlp.squared_relu_matmul_fp8(x.at[5].set(jnp.nan), w, scales, interpret=INTERPRETED)
    ]
    found.append(
        fused_mlp.squared_relu_gradient_fp8(
            g, v, h.at[5].set(jnp.nan), scales_3, interpret=INTERPRETED
        )
    )
    for q_NF, q_FN, _ in found:
        by_row, by_column = np.isnan(*wide(q_NF)), np.isnan(*wide(q_FN))
        assert by_row[5].all() and by_column[:, 5].all() and by_row.sum() == by_column.sum() == F


def test_the_root_of_a_rounded_square_is_within_a_thirtieth(forward):
    """Of ``2 relu(pre)``, the factor that a gradient gets; where e4m3 has normal numbers and
    nothing is clipped."""
    x, w, (factor, scale) = wide(*forward)
    pre = x @ w.T * factor
    h, *_ = wide(*fused_mlp.squared_relu_matmul_fp8_reference(*forward))
    kept = (pre > 0) & (h >= 2**-6) & (h < 448)
    assert np.max(np.abs(np.sqrt(h * scale)[kept] / pre[kept] - 1)) < 1 / 30
    assert np.mean(kept) > 0.2


@pytest.mark.parametrize(
    ("shape", "what"), [((100, 256, 128), "rows"), ((128, 300, 128), "columns")]
)
def test_sizes_that_do_not_fill_tiles_are_refused(shape, what):
    n, f, d = shape
    g, w, h = jnp.zeros((n, d), E5M2), jnp.zeros((f, d), E4M3), jnp.zeros((n, f), E4M3)
    refused(what, fused_mlp.squared_relu_gradient_fp8, g, w, h, jnp.ones(3), interpret=INTERPRETED)
