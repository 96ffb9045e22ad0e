"""FP8 cast kernels (row-major and transposed) in interpret mode, against plain JAX and float64."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspeed.errors import BadInput
from jspeed.kernels import fp8_cast
from jspeed.model.fp8 import E4M3, E5M2, quantise

N, M = 256, 384
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}


def drawn(seed, size=1.0):
    return jnp.asarray(size * np.random.default_rng(seed).normal(size=(N, M)), jnp.bfloat16)


def exact(a):
    return np.asarray(a).astype(np.float64)


def rounded(a, dtype):
    """As ml_dtypes rounds float64; what does not fit is clipped."""
    limit = float(ml_dtypes.finfo(NUMPY[dtype]).max)
    return np.clip(a, -limit, limit).astype(NUMPY[dtype]).astype(np.float64)


def divided(a, scale):
    """In fp32, by the reciprocal, as kernels do: rounding twice may turn a near tie into one."""
    return (np.asarray(a, np.float32) * (np.float32(1) / np.float32(scale))).astype(np.float64)


def by_block(a):
    return np.abs(a).reshape(N // 128, 128, M // 128, 128).max(axis=(1, 3))


def agree(found, reference):
    """Bit for bit, in either order, and the largest of each block."""
    for one, two in zip(found, reference, strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(exact(one), exact(two))
    np.testing.assert_array_equal(exact(found[1]), exact(found[0]).T)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [1.0, 0.00731, 4.0])
def test_a_cast_matches_its_reference_and_float64(dtype, scale):
    """At the second scale a good part of it is clipped to e4m3's 448."""
    x = drawn(0, 3.0)
    found = fp8_cast.cast(x, jnp.float32(scale), dtype, interpret=True)
    agree(found, fp8_cast.cast_reference(x, jnp.float32(scale), dtype))
    np.testing.assert_array_equal(exact(found[0]), exact(quantise(x, jnp.float32(scale), dtype)))
    expected = rounded(divided(exact(x), scale), dtype)
    np.testing.assert_array_equal(exact(found[0]), expected)
    np.testing.assert_array_equal(exact(found[2]), by_block(expected))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_overflows_is_clipped_and_nan_stays_nan(dtype):
    limit = float(ml_dtypes.finfo(NUMPY[dtype]).max)
    x = jnp.zeros((N, M), jnp.bfloat16)
    x = x.at[5, :5].set(jnp.asarray([1e30, -1e30, jnp.inf, -jnp.inf, jnp.nan], jnp.bfloat16))
    found = fp8_cast.cast(x, jnp.float32(1.0), dtype, interpret=True)
    agree(found, fp8_cast.cast_reference(x, jnp.float32(1.0), dtype))
    np.testing.assert_array_equal(exact(found[0])[5, :6], [limit, -limit, limit, -limit, np.nan, 0])
    np.testing.assert_array_equal(exact(found[2]), [[np.nan, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize("shape", [(100, 128), (128, 192)])
def test_sizes_that_do_not_fill_blocks_are_refused(shape):
    assert not fp8_cast.accepts(*shape) and fp8_cast.accepts(128, 256)
    with pytest.raises(BadInput, match=f"multiples of 128, found {shape[0]} x {shape[1]}"):
        fp8_cast.cast(jnp.zeros(shape, jnp.bfloat16), jnp.float32(1.0), E4M3, interpret=True)
