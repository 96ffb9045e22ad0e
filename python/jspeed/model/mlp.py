"""The MLP of a block: squared ReLU between two matmuls, which may be in FP8; or SwiGLU."""

import jax
import jax.numpy as jnp
from jax.lax import Precision

from jspeed.model import fp8
from jspeed.model.layers import relu_squared

MARGIN = 1.8
"""Room that an activation has to grow in a step before it is clipped (modded-nanogpt, record 89)."""


def mlp(
    x_BTD: jax.Array,
    up_DF: jax.Array,
    down_DF: jax.Array,
    *,
    largest: jax.Array | None = None,
    share: float = 1.0,
    x_largest: float | None = None,
    own_kernels: bool = False,
) -> jax.Array:
    """Return ``relu(x up)^2 down.T``: ``[B, T, D]``; ``down_DF`` is stored as ``up_DF`` is.

    With ``largest`` both matmuls take e4m3 operands, and their gradients are in ``x``'s dtype. Scales are measured,
    but for the activation's, whose maximum is not known before it has been written: that is ``MARGIN`` x ``largest``,
    the scalar parameter in which :func:`jspeed.model.fp8.watch` keeps the maximum of the step before, of ``share`` of
    the batch (modded-nanogpt, records 84 and 89). ``x_largest``, if given, is what no entry of ``x`` exceeds; then that
    is not measured.

    With ``largest`` ``[3]`` gradients come of FP8 matmuls too (:func:`jspeed.model.fp8.measured_matmul`): the second
    and the third of it are of the gradients that enter the first matmul and the second.

    With ``own_kernels`` squared ReLU and its gradient are computed where the matmuls before them end, by
    :mod:`jspeed.model.kernels.fused_mlp`: the same to rounding, on Hopper in bf16 alone, where B x T is a multiple of
    128, D of 128 and F of 256.

    With ``own_kernels`` and ``largest`` ``[3]`` squared ReLU and its gradient are also rounded there, by rows and by
    columns, and never in memory in bf16; :mod:`jspeed.model.kernels.fp8_cast` rounds the gradient of the output. Where
    B x T and D are multiples of 128 and F of 256: the same to rounding, but that the gradient of squared ReLU is taken
    from its output in e4m3.
    """
    if largest is None:
        return relu_squared(x_BTD @ up_DF) @ down_DF.T
    x_scale = None if x_largest is None else jnp.float32(x_largest / 448)
    if largest.ndim:
        if own_kernels:
            from jspeed.model.kernels import fused_mlp  # slow to import, and most runs do without

            x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
            if fused_mlp.fits(x_ND.shape[0], *up_DF.shape):
                given = (x_ND, x_scale), (up_DF, None), (down_DF, None)
                divisors = [fp8.scale_of(a, x_ND.dtype, scale) for a, scale in given]
                return _in_fp8_kernels(x_ND, up_DF, down_DF, largest, share, *divisors).reshape(x_BTD.shape)
        of_h, of_up, of_down = largest
        pre_BTF = fp8.measured_matmul(x_BTD, up_DF.T, of_up, share, x_scale)
        h_BTF = fp8.watch(relu_squared(pre_BTF), of_h, share)
        return fp8.measured_matmul(h_BTF, down_DF, of_down, share, MARGIN * of_h / 448)
    h_scale = MARGIN * largest / 448
    if own_kernels:
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        scales = [fp8.scale_of(x_ND, x_ND.dtype, x_scale), *(fp8.scale_of(a, x_ND.dtype) for a in (up_DF, down_DF))]
        scales.append(fp8.scale_of(x_ND, x_ND.dtype, h_scale))
        return _in_own_kernels(x_ND, up_DF, down_DF, largest, share, *scales).reshape(x_BTD.shape)
    h_BTF = fp8.watch(relu_squared(fp8.forward_matmul(x_BTD, up_DF.T, x_scale)), largest, share)
    return fp8.forward_matmul(h_BTF, down_DF, h_scale)


@jax.custom_vjp
def _in_own_kernels(x_ND, up_DF, down_DF, largest, share, x_scale, up_scale, down_scale, h_scale):
    return _forward(x_ND, up_DF, down_DF, largest, share, x_scale, up_scale, down_scale, h_scale)[0]


def _forward(x_ND, up_DF, down_DF, largest, share, x_scale, up_scale, down_scale, h_scale):
    from jspeed.model.kernels import fused_mlp  # slow to import, and most runs do without

    scaled = ((x_ND, x_scale), (up_DF.T, up_scale), (down_DF, down_scale))
    q_ND, q_FD, q_DF = (fp8.quantise(a, scale.astype(jnp.float32), fp8.E4M3) for a, scale in scaled)
    product = x_scale.astype(jnp.float32) * up_scale.astype(jnp.float32)
    h_NF, q_NF, most_GN = fused_mlp.squared_relu_matmul(q_ND, q_FD, jnp.stack([product, h_scale.astype(jnp.float32)]))
    y_ND = fp8.dot(q_NF, q_DF, (1, 1), (h_scale, down_scale), x_ND.dtype, Precision.DEFAULT)
    return y_ND, (x_ND, up_DF, down_DF, h_NF, (jnp.max(most_GN) * share).astype(largest.dtype))


def _backward(saved, g_ND):
    from jspeed.model.kernels import fused_mlp

    x_ND, up_DF, down_DF, h_NF, most = saved
    dpre_NF = fused_mlp.squared_relu_gradient(g_ND, down_DF, h_NF)
    operands = ((dpre_NF, up_DF, (1, 1)), (x_ND, dpre_NF, (0, 0)), (g_ND, h_NF, (0, 0)))
    grads = (fp8.dot(a, b, over, None, x_ND.dtype, Precision.DEFAULT) for a, b, over in operands)
    return *grads, most, None, None, None, None, None


_in_own_kernels.defvjp(_forward, _backward)


@jax.custom_vjp
def _in_fp8_kernels(x_ND, up_DF, down_DF, largest_3, share, x_scale, up_scale, down_scale):
    return _fp8_forward(x_ND, up_DF, down_DF, largest_3, share, x_scale, up_scale, down_scale)[0]


def _fp8_forward(x_ND, up_DF, down_DF, largest_3, share, x_scale, up_scale, down_scale):
    from jspeed.model.kernels import fused_mlp

    dtype = x_ND.dtype
    h_scale = fp8.scale_of(x_ND, dtype, MARGIN * largest_3[0] / 448)
    scaled = (x_ND, x_scale), (up_DF.T, up_scale), (down_DF, down_scale)
    qx_ND, up_FD, down_8 = (fp8.quantise(a, scale.astype(jnp.float32), fp8.E4M3) for a, scale in scaled)
    product, wide = x_scale.astype(jnp.float32) * up_scale.astype(jnp.float32), h_scale.astype(jnp.float32)
    h_NF, h_FN, most_GN = fused_mlp.squared_relu_matmul_fp8(qx_ND, up_FD, jnp.stack([product, wide]))
    y_ND = fp8.dot(h_NF, down_8, (1, 1), (h_scale, down_scale), dtype, Precision.DEFAULT)
    kept = qx_ND, up_FD, down_8, h_NF, h_FN, jnp.max(most_GN)
    return y_ND, (kept, (x_scale, up_scale, down_scale, h_scale), largest_3, share, up_DF[:0], down_DF[:0])


def _fp8_backward(saved, g_ND):
    from jspeed.model.kernels import fp8_cast, fused_mlp

    kept, (x_scale, up_scale, down_scale, h_scale), largest_3, share, up_0F, down_0F = saved
    qx_ND, up_FD, down_DF, h_NF, h_FN, most_h = kept
    dtype = x_scale.dtype
    pre_scale, g_scale = (fp8.gradient_scale(largest, dtype) for largest in largest_3[1:])
    of_g, of_down, of_h, of_pre = (a.astype(jnp.float32) for a in (g_scale, down_scale, h_scale, pre_scale))
    g_ND, g_DN, most_g = fp8_cast.cast(g_ND, of_g, fp8.E5M2)
    scales_3 = jnp.stack([of_g * of_down, of_h, of_pre])
    dpre_NF, dpre_FN, most_GN = fused_mlp.squared_relu_gradient_fp8(g_ND, down_DF.T, h_NF, scales_3)
    dx_ND = fp8.dot(dpre_NF, up_FD, (1, 0), (pre_scale, up_scale), dtype, Precision.HIGHEST)
    dup_DF = fp8.dot(qx_ND, dpre_FN, (0, 1), (x_scale, pre_scale), up_0F.dtype, Precision.HIGHEST)
    ddown_DF = fp8.dot(g_DN, h_FN, (1, 1), (g_scale, h_scale), down_0F.dtype, Precision.HIGHEST)
    found = most_h, jnp.max(most_GN) * of_pre, jnp.max(most_g) * of_g
    return dx_ND, dup_DF, ddown_DF, (jnp.stack(found) * share).astype(largest_3.dtype), None, None, None, None


_in_fp8_kernels.defvjp(_fp8_forward, _fp8_backward)


def swiglu(x_BTD: jax.Array, gate_DF: jax.Array, up_DF: jax.Array, down_FD: jax.Array) -> jax.Array:
    """Return ``(silu(x gate) * (x up)) down``: ``[B, T, D]`` (Shazeer 2020, arXiv 2002.05202).

    With :func:`swiglu_width` it has the parameters of an MLP of width 4 D. Drawn by ``layers.uniform(1.0)`` its output
    has 0.6 times the standard deviation of an input of independent normal numbers.
    """
    return (jax.nn.silu(x_BTD @ gate_DF) * (x_BTD @ up_DF)) @ down_FD


def swiglu_width(width: int, multiple: int = 8) -> int:
    """Return 8/3 of a model's ``width``, rounded up: three such matrices are as many parameters as two of 4 D."""
    return -(-8 * width // (3 * multiple)) * multiple
