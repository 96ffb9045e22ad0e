"""FP8 matmuls and casts against NumPy with ml_dtypes' casts and float64 sums."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

# Private: the interpreter has no public name yet.
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from jspeed.kernels import fp8_cast, fused_mlp
from jspeed.model.custom_kernels import Kernel
from jspeed.model.fp8 import (
    E4M3,
    E5M2,
    GRADIENT_MARGIN,
    Rounding,
    Scales,
    delayed_matmul,
    forward_matmul,
    matmul,
    quantise,
    scale_of,
    scales_of,
    watch,
)
from jspeed.model.layers import scaled
from jspeed.model.mlp import fp8_forward_mlp, fp8_mlp, mlp

SCALES = Scales(x=4 / 448, w=2 / 448, grad=0.75 / 448)


def rounded(a, scale, dtype) -> np.ndarray:
    """``a / scale`` as an 8-bit float, in float64; ml_dtypes rounds, the clip is ours."""
    limit = float(ml_dtypes.finfo(dtype).max)
    return (
        np.clip(np.asarray(a, np.float64) / scale, -limit, limit).astype(dtype).astype(np.float64)
    )


@partial(jax.jit, static_argnums=3)
def products(x, w, g, scales):
    """The product, and what its gradient ``g`` gives ``x`` and ``w``."""
    y, pull = jax.vjp(lambda x, w: matmul(x, w, scales), x, w)
    return y, *pull(g)


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    shapes = ((2, 5, 32), 1), ((48, 32), 0.5), ((2, 5, 48), 0.1)
    return [
        jnp.asarray((size * rng.normal(size=shape)).astype(np.float32)) for shape, size in shapes
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-7)])
def test_product_and_gradients(case, dtype, tolerance):
    x, w, g = case
    x, g = x.astype(dtype), g.astype(dtype)
    y, dx, dw = products(x, w, g, SCALES)
    # Divisors are numbers of the product's dtype.
    scales = Scales(*(float(np.asarray(scale, dtype)) for scale in SCALES))
    xq, wq = (
        rounded(x, scales.x, ml_dtypes.float8_e4m3fn),
        rounded(w, scales.w, ml_dtypes.float8_e4m3fn),
    )
    gq = rounded(g, scales.grad, ml_dtypes.float8_e5m2)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)
    expected = (
        np.einsum("btd,vd->btv", xq, wq) * scales.x * scales.w,
        np.einsum("btv,vd->btd", gq, wq) * scales.grad * scales.w,
        np.einsum("btv,btd->vd", gq, xq) * scales.grad * scales.x,
    )
    for found, value in zip((y, dx, dw), expected, strict=True):
        np.testing.assert_allclose(
            found.astype(jnp.float32), value, rtol=tolerance, atol=tolerance * np.abs(value).max()
        )
        # Neither larger nor smaller on average. Without FP8 hardware the widened operands are
        # rounded to the dtype.
        ratio = np.vdot(found.astype(jnp.float32), value) / np.vdot(value, value)
        assert ratio == pytest.approx(1, abs=1e-6 if dtype == jnp.float32 else 1.5e-3)
    # And near the product that was asked for.
    plain = np.einsum("btd,vd->btv", x.astype(jnp.float32), w)
    assert 1e-3 < np.abs(np.asarray(y, np.float32) - plain).max() / np.abs(plain).max() < 0.06


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_without_scales_it_is_the_plain_product(case, dtype):
    x, w, g = case
    x, g = x.astype(dtype), g.astype(dtype)
    y, dx, dw = products(x, w, g, None)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)
    x64, g64 = np.asarray(x, np.float64), np.asarray(g, np.float64)
    w64 = np.asarray(w.astype(dtype), np.float64)
    tolerance = 1e-5 if dtype == jnp.float32 else 2**-7
    np.testing.assert_allclose(
        np.asarray(y, np.float64), x64 @ w64.T, rtol=tolerance, atol=tolerance
    )
    np.testing.assert_allclose(
        np.asarray(dx, np.float64), g64 @ w64, rtol=tolerance, atol=tolerance
    )
    # The weight's gradient is fp32, not a bf16 number in an fp32 array.
    np.testing.assert_allclose(dw, np.einsum("btv,btd->vd", g64, x64), rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_saturates():
    far = jnp.asarray([1e6, -1e6, jnp.inf, 449.0, -460.0, 1.0])
    np.testing.assert_array_equal(
        quantise(far, 1.0, E4M3).astype(jnp.float32), [448, -448, 448, 448, -448, 1]
    )
    limit = float(jnp.finfo(E5M2).max)
    np.testing.assert_array_equal(
        quantise(far, 1.0, E5M2).astype(jnp.float32), [limit, -limit, limit, 448, -448, 1]
    )
    assert np.isnan(quantise(jnp.asarray([jnp.nan]), 1.0, E4M3).astype(jnp.float32)).all()
    x, w = jnp.full((3, 16), 1e9), jnp.full((8, 16), -1e9)
    assert all(np.isfinite(a).all() for a in products(x, w, jnp.full((3, 8), 1e9), SCALES))


def test_small_gradients_survive_what_e4m3_would_lose():
    tiny = jnp.asarray([2.0**-16, 2.0**-14])
    np.testing.assert_array_equal(quantise(tiny, 1.0, E5M2).astype(jnp.float32), tiny)
    np.testing.assert_array_equal(quantise(tiny, 1.0, E4M3).astype(jnp.float32), [0, 0])


@pytest.mark.parametrize("given", [None, 0.004])
def test_forward_product_in_fp8_has_the_plain_gradients(case, given):
    """Scales are measured but for one that is given, too small, so that ``x`` is clipped."""
    x, w, g = case
    scale = None if given is None else jnp.float32(given)
    y, pull = jax.vjp(jax.jit(lambda x, w: forward_matmul(x, w, scale)), x, w)
    plain = np.asarray(g) @ np.asarray(w), np.einsum("btv,btd->vd", g, x)
    x_scale, w_scale = given or np.abs(x).max() / 448, np.abs(w).max() / 448
    xq, wq = (rounded(a, s, ml_dtypes.float8_e4m3fn) * s for a, s in ((x, x_scale), (w, w_scale)))
    np.testing.assert_allclose(y, np.einsum("btd,vd->btv", xq, wq), atol=1e-4)
    if given:
        assert np.abs(xq).max() == pytest.approx(0.004 * 448) and np.abs(x).max() > 0.004 * 448
    for found, expected in zip(pull(g), plain, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@jax.jit
def measured_gradients(x, w, before, g):
    return jax.vjp(partial(delayed_matmul, share=0.5), x, w, before)[1](g)


def test_matmuls_of_a_layer_by_the_object_that_layers_share(case):
    """Its amax, of the row and column asked for, and its scale; without FP8 a plain product."""
    x, w, g = case
    np.testing.assert_array_equal(Rounding().matmul(x, w.T, "values", 1), x @ w.T)
    amax = jnp.float32([[1.0, 2.0, 3.0], [4.0, 5.0, 0.3]])
    of_values = jnp.float32([1.0, 0.02])
    shared = Rounding(amax, {"mlp": slice(2), "values": 2}, {"values": of_values}, 0.5, 4.0)

    def expected(x, w, amax):
        return delayed_matmul(x, w, amax[1, 2], 0.5, 4.0 / 448, of_values[1])

    def found(x, w, amax):
        return shared._replace(amax=amax).matmul(x, w.T, "values", 1)

    for run in (expected, found):
        y, pull = jax.vjp(run, jnp.asarray(x), jnp.asarray(w), amax)
        pulled = [y, *pull(jnp.asarray(g))]
        assert np.flatnonzero(pulled[3]).tolist() == [5]  # that of its own gradient alone
        if run is expected:
            wanted = pulled
    for one, other in zip(wanted, pulled, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("before", [0.0, 0.3, 0.001])
def test_gradients_in_fp8_by_what_the_step_before_measured(case, before):
    """Nothing measured yet; as much as now; a gradient past the margin, which is clipped."""
    x, w, g = case
    most = np.abs(g).max()
    dx, dw, found = measured_gradients(x, w, np.float32(before), g)
    scale = GRADIENT_MARGIN * before / 57_344 or 1.0
    clipped = scale * 57_344 < most
    assert clipped == (before == 0.001)
    gq = rounded(g, scale, ml_dtypes.float8_e5m2) * scale
    assert float(found) == pytest.approx(0.5 * np.abs(gq).max())
    xq, wq = (
        rounded(a, s, ml_dtypes.float8_e4m3fn) * s
        for a, s in ((x, np.abs(x).max() / 448), (w, np.abs(w).max() / 448))
    )
    np.testing.assert_allclose(dx, gq @ wq, atol=1e-4)
    np.testing.assert_allclose(dw, np.einsum("btv,btd->vd", gq, xq), atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_zeros_give_zeros_and_not_nan(dtype):
    y = jax.jit(forward_matmul)(np.ones((4, 8), dtype), np.zeros((16, 8), dtype))
    assert y.dtype == dtype and not np.any(np.asarray(y, np.float32))


def test_a_watched_maximum_is_what_the_parameter_becomes():
    """Two micro-batches of half the rows each: the mean of their maxima."""
    x = jnp.array([[1.0, -3.0], [2.0, 0.5]])
    largest = jnp.float32(248.0)

    def loss(x, largest):
        return sum(jnp.sum(watch(row, largest, 0.5) ** 2) for row in x)

    gradient, found = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, largest)
    np.testing.assert_array_equal(gradient, 2 * x)
    assert float(found) == 2.5


def test_mlp_in_fp8_remembers_its_largest_activation():
    rng = np.random.default_rng(0)
    x, up, down = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, 6, 16), (16, 64), (16, 64))
    )

    def total(x, up, down, largest):
        if largest is None:
            return jnp.sum(mlp(x, up, down) ** 2)
        y = in_fp8 if largest.ndim else partial(fp8_forward_mlp, share=0.5)
        return jnp.sum(y(x, up, down, largest) ** 2)

    h = np.maximum(np.asarray(x, np.float64) @ np.asarray(up), 0) ** 2
    plain = h @ np.asarray(down, np.float64).T
    run, gradients = jax.jit(mlp), jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))
    np.testing.assert_allclose(run(x, up, down), plain, atol=1e-3)
    found = np.asarray(jax.jit(fp8_forward_mlp)(x, up, down, np.float32(h.max()), 1.0))
    assert 1e-3 < np.abs(found - plain).max() / np.abs(plain).max() < 0.1
    *narrow, largest = gradients(x, up, down, np.float32(h.max()))
    *wide, _ = gradients(x, up, down, None)
    assert float(largest) == pytest.approx(0.5 * h.max(), rel=0.1)
    # The gradients are too large for a scale of 1: the first step measures them, clipped on the
    # way.
    before = np.float32([h.max(), 0, 0])
    for _ in range(2):
        *narrower, watched = gradients(x, up, down, before)
        before = np.concatenate([before[:1], 2 * np.asarray(watched[1:])])
    for one, two, wanted in zip(*jax.device_get((narrow, narrower, wide)), strict=True):
        for found in (one, two):
            norms = np.linalg.norm(found) * np.linalg.norm(wanted)
            assert np.vdot(found, wanted) / norms > 0.99
        assert np.abs(one - two).max() > 0
    assert float(watched[0]) == float(largest) and (watched[1:] > 0).all()


def in_fp8(x, up, down, largest_3, x_largest=None, kernel=None):
    scales = {"mlp": scales_of(jnp.stack([up, down]))[None]}
    rounding = Rounding(largest_3[None], {"mlp": slice(3)}, scales, 0.5, x_largest)
    return fp8_mlp(x, up, down, rounding, 0, kernel)


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels that round, by interpreters; ``calls`` has the shapes they were asked for."""
    calls = []

    def put(module, name, interpret):
        def run(*arrays):
            calls.append((name, arrays[0].shape))
            # The interpreter runs JAX itself, and hangs if more has been sent to its device
            # meanwhile.
            return jax.block_until_ready(
                kernel(*jax.block_until_ready(arrays), interpret=interpret)
            )

        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, run)

    put(fp8_cast, "cast", True)
    for name in ("squared_relu_matmul_fp8", "squared_relu_gradient_fp8"):
        put(fused_mlp, name, InterpretGPUParams())
    return calls


@pytest.mark.parametrize(
    ("rows", "before"),
    [
        ((2, 128), 0.003),
        ((2, 60), 0.0),
        pytest.param((2, 128), 0.0, marks=pytest.mark.slow),
        pytest.param((2, 60), 0.003, marks=pytest.mark.slow),
    ],
)
def test_products_by_custom_kernels_are_the_others_to_rounding(interpreted, before, rows):
    """Where sizes are whole blocks; where they are not it is the plain path."""
    rng = np.random.default_rng(0)
    x, w, g = (
        jnp.asarray(rng.normal(size=s), jnp.bfloat16)
        for s in ((*rows, 256), (128, 256), (*rows, 128))
    )

    def found(kernel):
        run = partial(delayed_matmul, share=0.5, kernel=kernel)
        y, pull = jax.vjp(run, x, w, jnp.float32(before))
        return [np.asarray(a, np.float64) for a in (y, *pull(g))]

    one, two = found(Kernel(fp8_cast.cast, fp8_cast.accepts)), found(None)
    assert interpreted == ([] if rows[1] == 60 else [("cast", (256, 128))])
    for a, b in zip(one, two, strict=True):
        # sums in another order
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=2**-8 * np.abs(b).max())
    np.testing.assert_array_equal(one[0], two[0])
    assert one[3] == two[3] > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("x_largest", [None, 6.0])
def test_mlp_in_fp8_by_a_custom_kernel_is_the_other_to_rounding(interpreted, x_largest):
    rng = np.random.default_rng(0)
    shapes = ((2, 128, 128), (128, 256), (128, 256), (2, 128, 128))
    x, up, down, g = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    largest = jnp.float32([2000.0, 500.0, 4.0])

    def found(kernel, largest=largest):
        def run(x, up, down, largest):
            if largest is None:
                return mlp(x, up, down)
            return in_fp8(x, up, down, largest, x_largest, kernel)

        y, pull = jax.vjp(run, x, up, down, largest)
        return [np.asarray(a, np.float64) for a in (y, *pull(g))]

    kernel = Kernel(fused_mlp.mlp, fused_mlp.accepts)
    one, two, plain = found(kernel), found(None), found(None, None)
    assert interpreted == [
        (name, (256, 128))
        for name in ("squared_relu_matmul_fp8", "cast", "squared_relu_gradient_fp8")
    ]
    for a, b, exact in zip(one[:4], two[:4], plain[:4], strict=True):
        # as FP8 rounds
        assert a.shape == b.shape and np.linalg.norm(a - b) < 0.08 * np.linalg.norm(b)
        # What FP8 costs anyway is hardly made more.
        assert (
            np.linalg.norm(a - exact)
            < 1.1 * np.linalg.norm(b - exact)
            < 0.2 * np.linalg.norm(exact)
        )
    assert one[4][0] == pytest.approx(two[4][0], rel=2**-6)  # the other is rounded to bf16, twice
    assert one[4][2] == two[4][2]
    assert one[4][1] == pytest.approx(two[4][1], rel=0.26) and (one[4] > 0.5).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_scales_of_a_bank_are_those_of_its_matrices(dtype):
    """Also of matrices times their scales, whose order rounding keeps; and without columns that are
    left out."""
    rng = np.random.default_rng(0)
    bank, times = (
        jnp.asarray(rng.normal(size=(5, 8, 16)), dtype),
        jnp.asarray(rng.normal(size=5), jnp.float32),
    )
    read = rng.uniform(size=(5, 16)) < 0.5
    of_bank, of_matrix = jax.jit(scales_of), jax.jit(partial(scale_of, dtype=dtype))
    for factors in (None, times):
        found, part = of_bank(bank, factors), of_bank(bank, factors, read)
        for n, matrix in enumerate(bank):
            matrix = matrix if factors is None else scaled(matrix, factors[n])
            assert float(found[n]) == pytest.approx(float(of_matrix(matrix)), rel=2e-7)
            kept = np.where(read[n], matrix, 0)
            assert float(part[n]) == pytest.approx(float(of_matrix(kept)), rel=2e-7)
    assert found.dtype == dtype
