"""FP8 matmuls with one scale per operand, for Hopper's FP8 tensor cores."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import Precision
from jax.typing import DTypeLike

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
GRADIENT_MARGIN = 16.0
"""Room that a gradient has to grow in a step before it is clipped: 4 of the 31 powers of two that e5m2 has."""


class Scales(NamedTuple):
    """Divisors: an operand is stored as ``operand / scale`` and the result multiplied by both scales.

    ``x`` and ``w`` bring activations and weights into +-448 (e4m3), ``grad`` the gradient of the output into
    +-57,344 (e5m2). They are Python floats, part of the program: measuring them would cost a pass over the data.
    They are rounded to the compute dtype (bf16: within 0.4 %), for division and multiplication alike, so that the
    scales cancel exactly.
    """

    x: float
    w: float
    grad: float


def quantise(a: jax.Array, scale: float | jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return ``a / scale`` in an 8-bit ``dtype``; what does not fit becomes its largest value, NaN stays NaN."""
    limit = float(jnp.finfo(dtype).max)
    # The cast itself turns an e4m3 overflow into NaN.
    return jnp.clip(a.astype(jnp.float32) * (1 / scale), -limit, limit).astype(dtype)


def matmul(x: jax.Array, w_VD: jax.Array, scales: Scales | None) -> jax.Array:
    """Return ``x @ w_VD.T``: ``[..., D]``, ``[V, D]`` -> ``[..., V]`` in ``x.dtype``.

    With ``scales`` the operands are e4m3 and the incoming gradient e5m2; without, all are in ``x.dtype``. As in
    modded-nanogpt the forward matmul accumulates fast (14 bits or so on Hopper) and the backward ones in fp32.
    Gradients have the dtype of their operand, rounded once. XLA compiles FP8 matmuls to cuBLASLt calls on GPUs
    from sm_89 on. Elsewhere operands are widened to ``x.dtype``, which is slow, and rounds them in bf16.
    """
    # XLA's rewriter takes exactly one dimension beside the contracted one.
    y_NV = _matmul(x.reshape(-1, x.shape[-1]), w_VD, scales)
    return y_NV.reshape(*x.shape[:-1], w_VD.shape[0])


def head(w_VD: jax.Array, x: jax.Array, *, scales: Scales | None) -> jax.Array:
    """:func:`matmul` with its operands as :func:`jspeed.model.losses.cross_entropy` hands them to a head."""
    return matmul(x, w_VD, scales)


def forward_matmul(x: jax.Array, w_VD: jax.Array, x_scale: jax.Array | None = None) -> jax.Array:
    """Return ``x @ w_VD.T`` with e4m3 operands, whose gradients are those of the matmul in ``x.dtype``.

    ``[..., D]``, ``[V, D]`` -> ``[..., V]``. Scales are measured, exactly what brings the largest entry to 448, but
    for ``x_scale`` where it is given: a scalar, by which ``x`` is divided; what then does not fit is clipped.
    """
    scales = scale_of(x, x.dtype, x_scale), scale_of(w_VD, x.dtype)
    return _forward_matmul(x.reshape(-1, x.shape[-1]), w_VD, *scales).reshape(*x.shape[:-1], w_VD.shape[0])


def scale_of(a: jax.Array, dtype: DTypeLike, scale: jax.Array | None = None) -> jax.Array:
    """Return ``scale``, or what brings the largest entry of ``a`` to 448: a scalar of ``dtype``, the compute dtype.

    Rounded, because the factor that undoes the division is.
    """
    scale = jnp.max(jnp.abs(a)).astype(jnp.float32) / 448 if scale is None else scale
    return jnp.maximum(scale, 1e-12).astype(dtype)


@jax.custom_vjp
def _forward_matmul(x_ND: jax.Array, w_VD: jax.Array, x_scale: jax.Array, w_scale: jax.Array) -> jax.Array:
    return _forward_only(x_ND, w_VD, x_scale, w_scale)[0]


def _forward_only(x_ND: jax.Array, w_VD: jax.Array, x_scale: jax.Array, w_scale: jax.Array):
    return _rounded_dot(x_ND, w_VD, x_scale, w_scale)[0], (x_ND, w_VD)


def _rounded_dot(x_ND: jax.Array, w_VD: jax.Array, x_scale: jax.Array, w_scale: jax.Array):
    """``x @ w_VD.T`` of the operands in e4m3, and these."""
    q_ND, q_VD = (quantise(a, scale.astype(jnp.float32), E4M3) for a, scale in ((x_ND, x_scale), (w_VD, w_scale)))
    return dot(q_ND, q_VD, (1, 1), (x_scale, w_scale), x_ND.dtype, Precision.DEFAULT), q_ND, q_VD


def _backward_wide(saved: tuple[jax.Array, ...], g_NV: jax.Array):
    x_ND, w_VD = saved
    dx_ND = dot(g_NV, w_VD.astype(g_NV.dtype), (1, 0), None, x_ND.dtype, Precision.DEFAULT)
    dw_VD = dot(g_NV, x_ND, (0, 0), None, w_VD.dtype, Precision.DEFAULT)
    return dx_ND, dw_VD, None, None


_forward_matmul.defvjp(_forward_only, _backward_wide)


def measured_matmul(
    x: jax.Array,
    w_VD: jax.Array,
    largest: jax.Array,
    share: float,
    x_scale: float | jax.Array | None = None,
    *,
    own_kernels: bool = False,
) -> jax.Array:
    """:func:`forward_matmul` whose gradients are FP8 matmuls too: the incoming gradient in e5m2 times what is kept of
    the forward pass, both operands in e4m3.

    Before it is rounded the gradient is divided by GRADIENT_MARGIN x ``largest`` / 57,344. ``largest`` is a scalar
    parameter, whose own gradient is ``share`` x the largest |gradient| of this step after rounding, as :func:`watch`
    has it; while it is 0, nothing has been measured and nothing is divided.

    With ``own_kernels`` the incoming gradient is rounded by :mod:`jspeed.model.kernels.fp8_cast`, on Hopper in bf16
    where rows and V are multiples of 128: the same, but its largest entry needs no pass of its own. ``x`` is left to
    XLA, which rounds it, by rows and by columns, where it is made: for a kernel it would be written in bf16 first.
    """
    x_scale = x_scale if x_scale is None else jnp.asarray(x_scale, jnp.float32)
    scales = scale_of(x, x.dtype, x_scale), scale_of(w_VD, x.dtype)
    x_ND, run = x.reshape(-1, x.shape[-1]), _measured_matmul
    if own_kernels:
        from jspeed.model.kernels import fp8_cast  # slow to import, and most runs do without

        run = _measured_in_own_kernels if fp8_cast.fits(x_ND.shape[0], w_VD.shape[0]) else run
    y_NV = run(x_ND, w_VD, largest, share, *scales)
    return y_NV.reshape(*x.shape[:-1], w_VD.shape[0])


@jax.custom_vjp
def _measured_matmul(x_ND, w_VD, largest, share, x_scale, w_scale):
    return _measured_forward(x_ND, w_VD, largest, share, x_scale, w_scale)[0]


def _measured_forward(x_ND, w_VD, largest, share, x_scale, w_scale):
    y_NV, q_ND, q_VD = _rounded_dot(x_ND, w_VD, x_scale, w_scale)
    return y_NV, (q_ND, q_VD, largest, share, x_scale, w_scale, w_VD[:0])


def _measured_backward(saved, g_NV):
    q_ND, q_VD, largest, share, x_scale, w_scale, w_0D = saved
    scale = gradient_scale(largest, x_scale.dtype)
    q_NV = quantise(g_NV, scale.astype(jnp.float32), E5M2)
    dx_ND = dot(q_NV, q_VD, (1, 0), (scale, w_scale), x_scale.dtype, Precision.HIGHEST)
    dw_VD = dot(q_NV, q_ND, (0, 0), (scale, x_scale), w_0D.dtype, Precision.HIGHEST)
    # Of the rounded gradient, which a margin of 16 can bear: so the gradient itself need not go through memory.
    most = jnp.max(jnp.abs(q_NV.astype(jnp.float32))) * scale.astype(jnp.float32) * share
    return dx_ND, dw_VD, most.astype(largest.dtype), None, None, None


_measured_matmul.defvjp(_measured_forward, _measured_backward)


@jax.custom_vjp
def _measured_in_own_kernels(x_ND, w_VD, largest, share, x_scale, w_scale):
    return _measured_forward(x_ND, w_VD, largest, share, x_scale, w_scale)[0]


def _backward_in_own_kernels(saved, g_NV):
    from jspeed.model.kernels import fp8_cast

    q_ND, q_VD, largest, share, x_scale, w_scale, w_0D = saved
    scale = gradient_scale(largest, x_scale.dtype)
    q_NV, q_VN, most = fp8_cast.cast(g_NV, scale.astype(jnp.float32), E5M2)
    dx_ND = dot(q_NV, q_VD, (1, 0), (scale, w_scale), x_scale.dtype, Precision.HIGHEST)
    dw_VD = dot(q_VN, q_ND, (1, 0), (scale, x_scale), w_0D.dtype, Precision.HIGHEST)
    most = jnp.max(most) * scale.astype(jnp.float32) * share
    return dx_ND, dw_VD, most.astype(largest.dtype), None, None, None


_measured_in_own_kernels.defvjp(_measured_forward, _backward_in_own_kernels)


def gradient_scale(largest: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return what a gradient is divided by before it is rounded to e5m2, when in the step before ``largest`` was its
    largest: a scalar of ``dtype``, 1 while ``largest`` is 0."""
    limit = float(jnp.finfo(E5M2).max)
    scale = jnp.where(largest > 0, GRADIENT_MARGIN * largest.astype(jnp.float32) / limit, 1.0)
    return scale_of(scale, dtype, scale)


@jax.custom_vjp
def watch(x: jax.Array, largest: jax.Array, share: float) -> jax.Array:
    """Return ``x``; the gradient with respect to the scalar ``largest`` is ``share`` x the largest |``x``|.

    So a parameter that is set to its gradient (:func:`jspeed.optim.slow.measured`) keeps this step's maximum for
    the next one; with shares that add up to 1, the mean over micro-batches and devices.
    """
    return x


watch.defvjp(
    lambda x, largest, share: (x, (jnp.max(jnp.abs(x)).astype(jnp.float32), largest[..., None][:0], share)),
    lambda saved, g: (g, (saved[0] * saved[2]).astype(saved[1].dtype), None),
)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x_ND: jax.Array, w_VD: jax.Array, scales: Scales | None) -> jax.Array:
    return _forward(x_ND, w_VD, scales)[0]


def _forward(x_ND: jax.Array, w_VD: jax.Array, scales: Scales | None):
    if scales is None:
        q_ND, q_VD, factors = x_ND, w_VD.astype(x_ND.dtype), None
    else:
        factors = _as_multiplied(scales.x, x_ND.dtype), _as_multiplied(scales.w, x_ND.dtype)
        q_ND, q_VD = (quantise(a, scale, E4M3) for a, scale in zip((x_ND, w_VD), factors, strict=True))
    y_NV = dot(q_ND, q_VD, (1, 1), factors, x_ND.dtype, Precision.DEFAULT)
    # The operands are kept as they were multiplied; the originals only lend their dtypes.
    return y_NV, (q_ND, q_VD, x_ND[:0], w_VD[:0])


def _backward(scales: Scales | None, saved: tuple[jax.Array, ...], g_NV: jax.Array):
    q_ND, q_VD, x_0D, w_0D = saved
    if scales is None:
        q_NV, with_w, with_x, precision = g_NV, None, None, Precision.DEFAULT
    else:
        x, w, grad = (_as_multiplied(scale, x_0D.dtype) for scale in scales)
        q_NV, with_w, with_x, precision = quantise(g_NV, grad, E5M2), (grad, w), (grad, x), Precision.HIGHEST
    dx_ND = dot(q_NV, q_VD, (1, 0), with_w, x_0D.dtype, precision)
    dw_VD = dot(q_NV, q_ND, (0, 0), with_x, w_0D.dtype, precision)
    return dx_ND, dw_VD


_matmul.defvjp(_forward, _backward)


def _as_multiplied(scale: float, dtype: DTypeLike) -> float:
    """Return ``scale`` as the nearest number that ``dtype`` has, so that multiplying undoes the division exactly."""
    return float(np.asarray(scale, jnp.dtype(dtype)))


def dot(
    a: jax.Array,
    b: jax.Array,
    contract: tuple[int, int],
    factors: tuple[float | jax.Array, float | jax.Array] | None,
    dtype: DTypeLike,
    precision: Precision,
) -> jax.Array:
    """Multiply matrices over axes ``contract``, one of each, times ``factors``, one for each: in ``dtype``."""
    over = (contract[:1], contract[1:]), ((), ())
    if factors:
        # At its operand, where XLA's rewriter makes it a scale of the cuBLASLt call: after the matmul it would be one
        # number rounded to the result's dtype, or y be read and written once more.
        a, b = (x.astype(dtype) * jnp.asarray(factor, dtype) for x, factor in zip((a, b), factors, strict=True))
    return jax.lax.dot_general(a, b, over, precision=precision, preferred_element_type=dtype)
