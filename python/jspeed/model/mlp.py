"""The MLP of a block: squared ReLU between two matmuls, whose forward pass may be in FP8; or SwiGLU."""

import jax

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
) -> jax.Array:
    """Return ``relu(x up)^2 down.T``: ``[B, T, D]``; ``down_DF`` is stored as ``up_DF`` is.

    With ``largest`` both matmuls take e4m3 operands, and their gradients are in ``x``'s dtype. Scales are measured,
    but for the activation's, whose maximum is not known before it has been written: that is ``MARGIN`` x ``largest``,
    the scalar parameter in which :func:`jspeed.model.fp8.watch` keeps the maximum of the step before, of ``share`` of
    the batch (modded-nanogpt, records 84 and 89).
    """
    if largest is None:
        return relu_squared(x_BTD @ up_DF) @ down_DF.T
    h_BTF = fp8.watch(relu_squared(fp8.forward_matmul(x_BTD, up_DF.T)), largest, share)
    return fp8.forward_matmul(h_BTF, down_DF, MARGIN * largest / 448)


def swiglu(x_BTD: jax.Array, gate_DF: jax.Array, up_DF: jax.Array, down_FD: jax.Array) -> jax.Array:
    """Return ``(silu(x gate) * (x up)) down``: ``[B, T, D]`` (Shazeer 2020, arXiv 2002.05202).

    With :func:`swiglu_width` it has the parameters of an MLP of width 4 D. Drawn by ``layers.uniform(1.0)`` its output
    has 0.6 times the standard deviation of an input of independent normal numbers.
    """
    return (jax.nn.silu(x_BTD @ gate_DF) * (x_BTD @ up_DF)) @ down_FD


def swiglu_width(width: int, multiple: int = 8) -> int:
    """Return 8/3 of a model's ``width``, rounded up: three such matrices are as many parameters as two of 4 D."""
    return -(-8 * width // (3 * multiple)) * multiple
