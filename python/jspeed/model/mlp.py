"""The MLP of a block: squared ReLU between two matmuls, in the compute dtype or FP8; or SwiGLU."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import Precision

from jspeed.model import fp8
from jspeed.model.layers import relu_squared

MARGIN = 1.8
"""Headroom: the factor by which an activation's amax may grow in a step before values are clipped
(modded-nanogpt, record 89)."""


def mlp(
    x_BTD: jax.Array,
    up_DF: jax.Array,
    down_DF: jax.Array,
    *,
    largest: jax.Array | None = None,
    share: float = 1.0,
    x_largest: float | None = None,
    w_scales: jax.Array | None = None,
    own_kernels: bool = False,
) -> jax.Array:
    """Return ``relu(x up)^2 down.T``: ``[B, T, D]`` in the dtype of ``x``; ``down_DF`` is stored as
    ``up_DF`` is.

    With ``largest``, an fp32 scalar, both matmuls take e4m3 operands, and their gradients are in
    ``x``'s dtype. Scales are measured (current scaling) except the activation's, which is delayed:
    ``MARGIN`` x ``largest`` / 448, where ``largest`` is the parameter in which
    :func:`jspeed.model.fp8.watch` keeps the amax of the step before, of ``share`` of the batch
    (modded-nanogpt, records 84 and 89). ``x_largest``, if given, is a bound of |``x``| to use
    instead of measuring it.

    With ``largest`` ``[3]``, fp32, gradients are FP8 matmuls too
    (:func:`jspeed.model.fp8.measured_matmul`): its second and third entries are the amax of the
    gradients that enter the first matmul and the second. ``w_scales`` are then those of both
    matrices, where :func:`jspeed.model.fp8.scales_of` gave them.

    With ``own_kernels`` and ``largest`` ``[3]`` squared ReLU and its gradient are computed and
    rounded in the epilogue of the preceding matmul, by :mod:`jspeed.model.kernels.fused_mlp`: they
    are written row-major and transposed, and never in memory in bf16.
    :mod:`jspeed.model.kernels.fp8_cast` rounds the gradient of the output. Other sizes than whole
    tiles, and a scalar ``largest``, take the plain path. Equal up to rounding, except that the
    gradient of squared ReLU uses its e4m3 output. On Hopper only.
    """
    if largest is None:
        return relu_squared(x_BTD @ up_DF) @ down_DF.T
    x_scale = None if x_largest is None else jnp.float32(x_largest / fp8.E4M3_MAX)
    dtype = x_BTD.dtype
    if largest.ndim:
        if own_kernels:
            from jspeed.model.kernels import fused_mlp  # slow to import, and most runs do without

            x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
            if fused_mlp.fits(x_ND.shape[0], *up_DF.shape):
                of_weights = (
                    [fp8.scale_of(a, dtype) for a in (up_DF, down_DF)]
                    if w_scales is None
                    else w_scales
                )
                scales = [fp8.scale_of(x_ND, dtype, x_scale), *of_weights]
                return _in_fp8_kernels(x_ND, up_DF, down_DF, largest, share, *scales).reshape(
                    x_BTD.shape
                )
        of_h, of_up, of_down = largest
        up_scale, down_scale = (None, None) if w_scales is None else w_scales
        pre_BTF = fp8.measured_matmul(x_BTD, up_DF.T, of_up, share, x_scale, up_scale)
        h_BTF = fp8.watch(relu_squared(pre_BTF), of_h, share)
        return fp8.measured_matmul(
            h_BTF, down_DF, of_down, share, MARGIN * of_h / fp8.E4M3_MAX, down_scale
        )
    h_BTF = fp8.watch(relu_squared(fp8.forward_matmul(x_BTD, up_DF.T, x_scale)), largest, share)
    return fp8.forward_matmul(h_BTF, down_DF, MARGIN * largest / fp8.E4M3_MAX)


@jax.custom_vjp
def _in_fp8_kernels(x_ND, up_DF, down_DF, largest_3, share, x_scale, up_scale, down_scale):
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
    from jspeed.model.kernels import fused_mlp

    dtype = x_ND.dtype
    h_scale = fp8.as_scale(MARGIN * largest_3[0] / fp8.E4M3_MAX, dtype)
    scaled = (x_ND, x_scale), (up_DF.T, up_scale), (down_DF, down_scale)
    q_ND, q_FD, q_DF = (fp8.quantise(a, scale.astype(jnp.float32), fp8.E4M3) for a, scale in scaled)
    product, of_h = (
        x_scale.astype(jnp.float32) * up_scale.astype(jnp.float32),
        h_scale.astype(jnp.float32),
    )
    h_NF, h_FN, amax_GN = fused_mlp.squared_relu_matmul_fp8(q_ND, q_FD, jnp.stack([product, of_h]))
    y_ND = fp8.dot(h_NF, q_DF, (1, 1), (h_scale, down_scale), dtype, Precision.DEFAULT)
    scales = x_scale, up_scale, down_scale, h_scale
    operands = q_ND, q_FD, q_DF, h_NF, h_FN, amax_GN
    return y_ND, _Saved(*operands, *scales, largest_3, share, up_DF[:0], down_DF[:0])


def _fp8_backward(saved: _Saved, g_ND):
    from jspeed.model.kernels import fp8_cast, fused_mlp

    s, dtype = saved, saved.x_scale.dtype
    pre_scale, g_scale = (fp8.gradient_scale(largest, dtype) for largest in s.largest_3[1:])
    of_g, of_down, of_h, of_pre = (
        a.astype(jnp.float32) for a in (g_scale, s.down_scale, s.h_scale, pre_scale)
    )
    g_ND, g_DN, g_amax = fp8_cast.cast(g_ND, of_g, fp8.E5M2)
    scales_3 = jnp.stack([of_g * of_down, of_h, of_pre])
    dpre_NF, dpre_FN, amax_GN = fused_mlp.squared_relu_gradient_fp8(
        g_ND, s.down_DF.T, s.h_NF, scales_3
    )
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


_in_fp8_kernels.defvjp(_fp8_forward, _fp8_backward)


def swiglu(x_BTD: jax.Array, gate_DF: jax.Array, up_DF: jax.Array, down_FD: jax.Array) -> jax.Array:
    """Return ``(silu(x gate) * (x up)) down``: ``[B, T, D]`` (Shazeer 2020, arXiv 2002.05202).

    With :func:`swiglu_width` it has the parameters of an MLP of width 4 D. Drawn by
    ``layers.uniform(1.0)`` its output has 0.6 times the standard deviation of an input of
    independent normal numbers.
    """
    return (jax.nn.silu(x_BTD @ gate_DF) * (x_BTD @ up_DF)) @ down_FD


def swiglu_width(width: int, multiple: int = 8) -> int:
    """Return 8/3 of a model's ``width``, rounded up: three such matrices have the parameters of two
    of width 4 D."""
    return -(-8 * width // (3 * multiple)) * multiple
