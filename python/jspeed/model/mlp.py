"""The MLP of a block: squared ReLU between two matmuls, in the compute dtype or FP8; or SwiGLU."""

from functools import partial

import jax
import jax.numpy as jnp

from jspeed.model import fp8
from jspeed.model.custom_kernels import Kernel
from jspeed.model.layers import relu_squared

MARGIN = 1.8
"""Headroom: the factor by which an activation's amax may grow in a step before values are clipped
(modded-nanogpt, record 89)."""


def mlp(x_BTD: jax.Array, up_DF: jax.Array, down_DF: jax.Array) -> jax.Array:
    """Return ``relu(x up)^2 down.T``: ``[B, T, D]`` in the dtype of ``x``; ``down_DF`` is stored as
    ``up_DF`` is."""
    return relu_squared(x_BTD @ up_DF) @ down_DF.T


def fp8_forward_mlp(
    x_BTD: jax.Array, up_DF: jax.Array, down_DF: jax.Array, largest: jax.Array, share: float
) -> jax.Array:
    """:func:`mlp` whose matmuls take e4m3 operands; their gradients are in ``x``'s dtype.

    Scales are measured (current scaling) except the activation's, which is delayed: ``MARGIN`` x
    ``largest`` / 448. There ``largest``, fp32, is the parameter in which
    :func:`jspeed.model.fp8.watch` keeps the amax of the step before, of ``share`` of the batch
    (modded-nanogpt, record 84).
    """
    h_BTF = fp8.watch(relu_squared(fp8.forward_matmul(x_BTD, up_DF.T)), largest, share)
    return fp8.forward_matmul(h_BTF, down_DF, MARGIN * largest / fp8.E4M3_MAX)


def fp8_mlp(
    x_BTD: jax.Array,
    up_DF: jax.Array,
    down_DF: jax.Array,
    rounding: fp8.Rounding,
    number: int,
    kernel: Kernel | None = None,
) -> jax.Array:
    """:func:`fp8_forward_mlp` whose gradients are FP8 matmuls too
    (:func:`jspeed.model.fp8.delayed_matmul`), as records 84 and 89 have it.

    Of the slot "mlp" of ``rounding`` an amax has three entries: of the activation, and of the
    gradients that enter the first matmul and the second. Its scales are those of both matrices.

    With ``kernel`` ("MLP") squared ReLU and its gradient are computed and rounded in the epilogue
    of the preceding matmul: they are written row-major and transposed, and never in memory in bf16.
    Other sizes than whole tiles take plain JAX. Equal up to rounding, except that the gradient of
    squared ReLU uses its e4m3 output. On Hopper only.
    """
    largest, w_scales = rounding.of("mlp", number)
    bound = rounding.x_largest
    x_scale = None if bound is None else jnp.float32(bound / fp8.E4M3_MAX)
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    if kernel and kernel.accepts(x_ND.shape[0], *up_DF.shape):
        scales = fp8.scale_of(x_ND, x_ND.dtype, x_scale), *w_scales
        y_ND = kernel.run(x_ND, up_DF, down_DF, largest, rounding.share, *scales)
        return y_ND.reshape(x_BTD.shape)
    of_h, of_up, of_down = largest
    up_scale, down_scale = w_scales
    multiply = partial(fp8.delayed_matmul, share=rounding.share)
    pre_BTF = multiply(x_BTD, up_DF.T, of_up, x_scale=x_scale, w_scale=up_scale)
    h_BTF = fp8.watch(relu_squared(pre_BTF), of_h, rounding.share)
    h_scale = MARGIN * of_h / fp8.E4M3_MAX
    return multiply(h_BTF, down_DF, of_down, x_scale=h_scale, w_scale=down_scale)


def swiglu(x_BTD: jax.Array, gate_DF: jax.Array, up_DF: jax.Array, down_FD: jax.Array) -> jax.Array:
    """Return ``(silu(x gate) * (x up)) down``: ``[B, T, D]`` (Shazeer 2020, arXiv 2002.05202).

    With :func:`swiglu_width` it has the parameters of an MLP of width 4 D. Drawn by
    ``layers.uniform(1.0)`` its output has 0.6 times the standard deviation of an input of
    independent normal numbers.
    """
    return _gated(x_BTD @ gate_DF, x_BTD @ up_DF) @ down_FD


@jax.checkpoint
def _gated(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    """Kept for the gradient are the two alone: of three more arrays of their size each costs a CPU
    more to write and read than to compute again."""
    return jax.nn.silu(gate_BTF) * up_BTF


def swiglu_width(width: int, multiple: int = 8) -> int:
    """Return 8/3 of a model's ``width``, rounded up: three such matrices have the parameters of two
    of width 4 D."""
    return -(-8 * width // (3 * multiple)) * multiple
