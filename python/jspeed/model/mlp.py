"""The MLP of a block: squared ReLU between two matmuls, in the compute dtype or FP8; or SwiGLU."""

import jax
import jax.numpy as jnp

from jspeed.model import fp8
from jspeed.model.custom_kernels import Kernel
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
    kernel: Kernel | None = None,
) -> jax.Array:
    """Return ``relu(x up)^2 down.T``: ``[B, T, D]`` in the dtype of ``x``; ``down_DF`` is stored as
    ``up_DF`` is.

    With ``largest``, an fp32 scalar, both matmuls take e4m3 operands, and their gradients are in
    ``x``'s dtype. Scales are measured (current scaling) except the activation's, which is delayed:
    ``MARGIN`` x ``largest`` / 448, where ``largest`` is the parameter in which
    :func:`jspeed.model.fp8.watch` keeps the amax of the step before, of ``share`` of the batch.
    So do records 84 and 89 of modded-nanogpt. ``x_largest``, if given, is a bound of |``x``| to
    use instead of measuring it.

    With ``largest`` ``[3]``, fp32, gradients are FP8 matmuls too
    (:func:`jspeed.model.fp8.measured_matmul`): its second and third entries are the amax of the
    gradients that enter the first matmul and the second. ``w_scales`` are then those of both
    matrices, where :func:`jspeed.model.fp8.scales_of` gave them.

    With ``kernel`` ("MLP") and ``largest`` ``[3]`` squared ReLU and its gradient are computed and
    rounded in the epilogue of the preceding matmul: they are written row-major and transposed, and
    never in memory in bf16. Other sizes than whole tiles, and a scalar ``largest``, take the plain
    path. Equal up to rounding, except that the gradient of squared ReLU uses its e4m3 output. On
    Hopper only.
    """
    if largest is None:
        return relu_squared(x_BTD @ up_DF) @ down_DF.T
    x_scale = None if x_largest is None else jnp.float32(x_largest / fp8.E4M3_MAX)
    dtype = x_BTD.dtype
    if largest.ndim:
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        if kernel and kernel.fits(x_ND.shape[0], *up_DF.shape):
            of_weights = (
                [fp8.scale_of(a, dtype) for a in (up_DF, down_DF)] if w_scales is None else w_scales
            )
            scales = [fp8.scale_of(x_ND, dtype, x_scale), *of_weights]
            y_ND = kernel.run(x_ND, up_DF, down_DF, largest, share, *scales)
            return y_ND.reshape(x_BTD.shape)
        of_h, of_up, of_down = largest
        up_scale, down_scale = (None, None) if w_scales is None else w_scales
        pre_BTF = fp8.measured_matmul(x_BTD, up_DF.T, of_up, share, x_scale, up_scale)
        h_BTF = fp8.watch(relu_squared(pre_BTF), of_h, share)
        return fp8.measured_matmul(
            h_BTF, down_DF, of_down, share, MARGIN * of_h / fp8.E4M3_MAX, down_scale
        )
    h_BTF = fp8.watch(relu_squared(fp8.forward_matmul(x_BTD, up_DF.T, x_scale)), largest, share)
    return fp8.forward_matmul(h_BTF, down_DF, MARGIN * largest / fp8.E4M3_MAX)


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
