"""MLP matmuls fused with squared ReLU and its gradient; results in FP8, row-major and transposed.

Built on fused_matmul.py. Each has a reference in plain JAX with the same results up to the order of
sums. :func:`mlp` is the whole, with its gradient. An H200 has timed them
(lab/2026-11-27-first-gpu.md); JAX's interpreter of such kernels runs them on a CPU.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import Precision

from jspeed.kernels import fp8_cast
from jspeed.kernels.examples import normal
from jspeed.kernels.fused_matmul import LINE, ROWS, STRIP, WIDE, matmul
from jspeed.model import fp8
from jspeed.model.custom_kernels import Case, CustomKernel, Kernel, Sizes
from jspeed.model.fp8 import E4M3, E4M3_MAX, E5M2, E5M2_MAX, quantise
from jspeed.model.mlp import MARGIN


def accepts(n: int, d: int, f: int) -> bool:
    """Whether the kernels take FP8 ``[N, D]`` and ``[F, D]``; callers take plain JAX if not."""
    return n % ROWS == 0 and d % LINE == 0 and f % WIDE == 0


@jax.custom_vjp
def mlp(
    x_ND: jax.Array,
    up_DF: jax.Array,
    down_DF: jax.Array,
    largest_3: jax.Array,
    share: float,
    x_scale: jax.Array,
    up_scale: jax.Array,
    down_scale: jax.Array,
) -> jax.Array:
    """Return :func:`jspeed.model.mlp.fp8_mlp` of ``x_ND``, ``[N, D]`` in its dtype.

    Scales are those of ``x_ND`` and of both matrices. :mod:`jspeed.kernels.fp8_cast` rounds the
    gradient of the output.
    """
    return _fp8_forward(x_ND, up_DF, down_DF, largest_3, share, x_scale, up_scale, down_scale)[0]


class _Saved(NamedTuple):
    """What the FP8 kernels keep for the gradient: e4m3 operands, their scales, and empty arrays for
    dtypes."""

    x_ND: jax.Array
    up_FD: jax.Array
    down_DF: jax.Array
    h_NF: jax.Array
    h_FN: jax.Array
    h_amax_GN: jax.Array
    x_scale: jax.Array
    up_scale: jax.Array
    down_scale: jax.Array
    h_scale: jax.Array
    largest_3: jax.Array
    share: jax.Array | float
    up_0F: jax.Array
    down_0F: jax.Array


def _fp8_forward(x_ND, up_DF, down_DF, largest_3, share, x_scale, up_scale, down_scale):
    dtype = x_ND.dtype
    h_scale = fp8.as_scale(MARGIN * largest_3[0] / fp8.E4M3_MAX, dtype)
    scaled = (x_ND, x_scale), (up_DF.T, up_scale), (down_DF, down_scale)
    q_ND, q_FD, q_DF = (fp8.quantise(a, scale.astype(jnp.float32), fp8.E4M3) for a, scale in scaled)
    product, of_h = (
        x_scale.astype(jnp.float32) * up_scale.astype(jnp.float32),
        h_scale.astype(jnp.float32),
    )
    h_NF, h_FN, amax_GN = squared_relu_matmul_fp8(q_ND, q_FD, jnp.stack([product, of_h]))
    y_ND = fp8.dot(h_NF, q_DF, (1, 1), (h_scale, down_scale), dtype, Precision.DEFAULT)
    scales = x_scale, up_scale, down_scale, h_scale
    operands = q_ND, q_FD, q_DF, h_NF, h_FN, amax_GN
    return y_ND, _Saved(*operands, *scales, largest_3, share, up_DF[:0], down_DF[:0])


def _fp8_backward(saved: _Saved, g_ND):
    s, dtype = saved, saved.x_scale.dtype
    pre_scale, g_scale = (fp8.gradient_scale(largest, dtype) for largest in s.largest_3[1:])
    of_g, of_down, of_h, of_pre = (
        a.astype(jnp.float32) for a in (g_scale, s.down_scale, s.h_scale, pre_scale)
    )
    g_ND, g_DN, g_amax = fp8_cast.cast(g_ND, of_g, fp8.E5M2)
    scales_3 = jnp.stack([of_g * of_down, of_h, of_pre])
    dpre_NF, dpre_FN, amax_GN = squared_relu_gradient_fp8(g_ND, s.down_DF.T, s.h_NF, scales_3)
    dx_ND = fp8.dot(dpre_NF, s.up_FD, (1, 0), (pre_scale, s.up_scale), dtype, Precision.HIGHEST)
    dup_DF = fp8.dot(
        s.x_ND, dpre_FN, (0, 1), (s.x_scale, pre_scale), s.up_0F.dtype, Precision.HIGHEST
    )
    ddown_DF = fp8.dot(
        g_DN, s.h_FN, (1, 1), (g_scale, s.h_scale), s.down_0F.dtype, Precision.HIGHEST
    )
    # in two kernels instead of four
    of_h, of_dpre = jnp.max(jnp.stack([s.h_amax_GN, amax_GN]), axis=(1, 2))
    amax_3 = jnp.stack([of_h, of_dpre * of_pre, jnp.max(g_amax) * of_g])
    return (
        dx_ND,
        dup_DF,
        ddown_DF,
        (amax_3 * s.share).astype(s.largest_3.dtype),
        None,
        None,
        None,
        None,
    )


mlp.defvjp(_fp8_forward, _fp8_backward)


@partial(jax.jit, static_argnames="interpret")  # one trace for all layers
def squared_relu_matmul_fp8(
    x_ND: jax.Array, w_FD: jax.Array, scales_2: jax.Array, *, interpret: Any = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return ``h = relu(x w.T)^2`` over a scale, e4m3 ``[N, F]``; its transpose; the amax of each
    64, fp32.

    ``x_ND`` and ``w_FD`` are e4m3. ``scales_2`` are fp32: what the matmul is multiplied by, and
    what ``h`` is divided by before it is clipped to 448. The largest, ``[F / 64, N]``, are of ``h``
    before that, of 64 columns each. Raises Refused unless N is a multiple of 128, F of 256, and D
    of 128.
    """

    def epilogue(product, scalars):
        product_scale, scale = scalars
        positive = jnp.maximum(product * product_scale, 0.0)
        h = positive * positive
        scaled = jnp.minimum(h * (1 / scale), E4M3_MAX)
        return scaled, scaled, jnp.max(h, axis=1)

    outputs = [("NF", E4M3), ("FN", E4M3), ("GN", jnp.float32)]
    q_NF, q_FN, largest_GN = matmul(x_ND, w_FD, scales_2, outputs, epilogue, interpret=interpret)
    return q_NF, q_FN, largest_GN


def squared_relu_matmul_fp8_reference(
    x_ND: jax.Array, w_FD: jax.Array, scales_2: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """:func:`squared_relu_matmul_fp8` in plain JAX."""
    h_NF = jnp.square(jnp.maximum(_product(x_ND, w_FD) * scales_2[0], 0.0))
    q_NF = quantise(h_NF, scales_2[1], E4M3)
    return q_NF, q_NF.T, _largest(h_NF)


@partial(jax.jit, static_argnames="interpret")
def squared_relu_gradient_fp8(
    g_ND: jax.Array,
    w_FD: jax.Array,
    h_NF: jax.Array,
    scales_3: jax.Array,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return ``(g w.T) 2 sqrt(h)`` over a scale, e5m2 ``[N, F]``; its transpose; the amax of each
    64, fp32.

    ``g_ND`` is e5m2, ``w_FD`` and ``h_NF`` are e4m3: ``h`` as :func:`squared_relu_matmul_fp8`
    returns it. ``scales_3`` are fp32: what the matmul is multiplied by, what ``h`` is, and what the
    result is divided by before it is clipped to 57,344. The largest are ``[F / 64, N]``, absolute
    values of what is returned, so in units of the last scale. Raises Refused unless N is a multiple
    of 128, F of 256, and D of 128.

    The factor is that of the rounded ``h``, which is kept anyway. ``h`` is off by 1/16 of itself at
    most and its root by 1/32, less than the 1/8 of e5m2. Where ``h`` over its scale is below 2^-6
    (it may be 448) it is off by 2^-10 at most: up to that it is 0, and so is the gradient. A
    clipped ``h`` has the gradient of what it was clipped to. Sums have the 14 bits or so of
    Hopper's FP8 products, not fp32's as gradients by cuBLASLt have.
    """

    def epilogue(product, scalars, h):
        scaled = _scaled_gradient(product, h, scalars)
        # The largest of rounded numbers is the largest rounded.
        largest = jnp.max(jnp.abs(scaled), axis=1)
        return scaled, scaled, largest.astype(E5M2).astype(jnp.float32)

    outputs = [("NF", E5M2), ("FN", E5M2), ("GN", jnp.float32)]
    q_NF, q_FN, largest_GN = matmul(
        g_ND, w_FD, scales_3, outputs, epilogue, epilogue_input_NF=h_NF, interpret=interpret
    )
    return q_NF, q_FN, largest_GN


def squared_relu_gradient_fp8_reference(
    g_ND: jax.Array, w_FD: jax.Array, h_NF: jax.Array, scales_3: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """:func:`squared_relu_gradient_fp8` in plain JAX."""
    q_NF = _scaled_gradient(_product(g_ND, w_FD), h_NF, scales_3).astype(E5M2)
    return q_NF, q_NF.T, _largest(jnp.abs(q_NF.astype(jnp.float32)))


def _scaled_gradient(product: jax.Array, h: jax.Array, scales: Any) -> jax.Array:
    factor = scales[0] * 2.0 * _root(scales[1]) * (1 / scales[2])
    scaled = product * factor * _root(h.astype(jnp.float32))
    return jnp.minimum(jnp.maximum(scaled, -E5M2_MAX), E5M2_MAX)


def _root(a: jax.Array) -> jax.Array:
    return a * lax.rsqrt(jnp.maximum(a, 1e-30))  # Mosaic has no sqrt


def _product(a_NK: jax.Array, b_FK: jax.Array) -> jax.Array:
    return lax.dot_general(a_NK, b_FK, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _largest(a_NF: jax.Array) -> jax.Array:
    return jnp.max(a_NF.reshape(a_NF.shape[0], -1, STRIP), axis=-1).T


def examples(sizes: Sizes) -> Mapping[str, Case]:
    """Both matmuls, and the cast before the second."""
    tokens, width, mlp_width, _ = sizes
    x, g, weights = normal((tokens, width), (tokens, width), (mlp_width, width))
    (h,) = normal((tokens, mlp_width), dtype=np.float32)
    h, scales = np.square(np.maximum(h, 0)), np.array([0.05, 0.01, 1e-3], np.float32)
    forward = [x.astype(E4M3), weights.astype(E4M3), scales[:2]]
    backward = [g.astype(E5M2), weights.astype(E4M3), h.astype(E4M3), scales]
    return {
        "squared ReLU in FP8": (
            squared_relu_matmul_fp8,
            squared_relu_matmul_fp8_reference,
            forward,
        ),
        "gradient of squared ReLU in FP8": (
            squared_relu_gradient_fp8,
            squared_relu_gradient_fp8_reference,
            backward,
        ),
        **fp8_cast.examples(sizes),
    }


CUSTOM = (CustomKernel("MLP", Kernel(mlp, accepts), examples),)
