"""FP8 matmuls with one scale per operand, for Hopper's FP8 tensor cores.

Scales are constants (:func:`matmul`), current (measured before the cast) or delayed: taken from the
amax, the largest absolute value, of the step before. Parameters called ``largest`` hold such an
amax.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import Precision
from jax.typing import DTypeLike
from numpy.typing import NDArray

if TYPE_CHECKING:
    from jspeed.model.custom_kernels import Kernel

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
E4M3_MAX, E5M2_MAX = 448.0, 57_344.0
GRADIENT_MARGIN = 16.0
"""Headroom: the factor by which a gradient's amax may grow in a step before values are clipped: 4
of e5m2's 31 powers of two."""


class Scales(NamedTuple):
    """Divisors: an operand is stored as ``operand / scale`` and the result multiplied by both
    scales.

    ``x`` and ``w`` bring activations and weights into +-448 (e4m3), ``grad`` the gradient of the
    output into +-57,344 (e5m2). They are Python floats, part of the program: measuring them would
    cost a pass over the data. They are rounded to the compute dtype (bf16: within 0.4 %), for
    division and multiplication alike, so that the scales cancel exactly.
    """

    x: float
    w: float
    grad: float


def quantise(a: jax.Array, scale: float | jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return ``a / scale`` in an 8-bit ``dtype``; values outside its range are clipped, NaN stays
    NaN."""
    limit = float(jnp.finfo(dtype).max)
    # The cast itself turns an e4m3 overflow into NaN.
    return jnp.clip(a.astype(jnp.float32) * (1 / scale), -limit, limit).astype(dtype)


def matmul(x: jax.Array, w_VD: jax.Array, scales: Scales | None) -> jax.Array:
    """Return ``x @ w_VD.T``: ``[..., D]``, ``[V, D]`` -> ``[..., V]`` in ``x.dtype``.

    With ``scales`` the operands are e4m3 and the incoming gradient e5m2; without, all are in
    ``x.dtype``. As in modded-nanogpt the forward matmul accumulates fast (14 bits or so on Hopper)
    and the backward ones in fp32. Gradients have the dtype of their operand, rounded once. XLA
    compiles FP8 matmuls to cuBLASLt calls on GPUs from sm_89 on. Elsewhere operands are widened to
    ``x.dtype``, which is slow, and rounds them in bf16.
    """
    # XLA's rewriter takes exactly one dimension beside the contracted one.
    y_NV = _matmul(x.reshape(-1, x.shape[-1]), w_VD, scales)
    return y_NV.reshape(*x.shape[:-1], w_VD.shape[0])


def head(w_VD: jax.Array, x: jax.Array, *, scales: Scales | None) -> jax.Array:
    """:func:`matmul` with its operands as :func:`jspeed.model.losses.cross_entropy` hands them to a
    head."""
    return matmul(x, w_VD, scales)


def kept_in_e4m3(logits_BTV: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """Return logits for a loss and for its gradient, both rounded: in memory they are e4m3, divided
    by ``scale``, which must not be 1, and clipped.

    That is half of the bytes of bf16. XLA has the FP8 matmul before it write e4m3 where it finds a
    factor in the matmul's dtype, and the clipping.
    """
    dtype = logits_BTV.dtype
    factor, largest = (jnp.asarray(x, dtype) for x in (1 / scale, E4M3_MAX))
    kept_BTV = jnp.clip(logits_BTV * factor, -largest, largest).astype(E4M3)
    kept_BTV = jax.lax.optimization_barrier(kept_BTV)
    again_BTV = jax.lax.optimization_barrier(kept_BTV)
    of_loss, of_gradient = (
        x.astype(dtype) * jnp.asarray(scale, dtype) for x in (kept_BTV, again_BTV)
    )
    return of_loss, of_gradient


def forward_matmul(x: jax.Array, w_VD: jax.Array, x_scale: jax.Array | None = None) -> jax.Array:
    """Return ``x @ w_VD.T`` by an FP8 matmul (e4m3), whose gradients are matmuls in ``x``'s dtype.

    ``[..., D]``, ``[V, D]`` -> ``[..., V]``. Scales bring the largest entry to 448, e4m3's largest.
    ``x_scale``, a scalar, replaces that of ``x``; values that then do not fit are clipped.
    """
    scales = scale_of(x, x.dtype, x_scale), scale_of(w_VD, x.dtype)
    return _forward_matmul(x.reshape(-1, x.shape[-1]), w_VD, *scales).reshape(
        *x.shape[:-1], w_VD.shape[0]
    )


def scale_of(a: jax.Array, dtype: DTypeLike, scale: jax.Array | None = None) -> jax.Array:
    """Return ``scale``, or if it is None the one that brings the largest entry of ``a`` to e4m3's
    largest, 448.

    As :func:`as_scale` returns it.
    """
    return as_scale(
        jnp.max(jnp.abs(a)).astype(jnp.float32) / E4M3_MAX if scale is None else scale, dtype
    )


def scales_of(
    bank_NIO: jax.Array, times_N: jax.Array | None = None, read_NO: NDArray[np.bool_] | None = None
) -> jax.Array:
    """Return :func:`scale_of` of each matrix of a bank, ``[N]`` in its dtype.

    ``times_N``: of the matrices that :func:`.layers.scaled` makes of them, which are not needed for
    it: rounding keeps what is largest. ``read_NO`` leaves columns out. One after the other each
    would be two kernels of one number.
    """
    size_NIO = jnp.abs(bank_NIO)
    if read_NO is not None:
        size_NIO = jnp.where(read_NO[:, None], size_NIO, 0)
    amax_N = jnp.max(size_NIO, axis=(1, 2))
    if times_N is not None:
        amax_N = (amax_N.astype(jnp.float32) * jnp.abs(times_N)).astype(amax_N.dtype)
    return as_scale(amax_N.astype(jnp.float32) / E4M3_MAX, bank_NIO.dtype)


def as_scale(scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return ``scale`` in ``dtype``, the compute dtype, and above 0. Rounded, because the factor
    that undoes it is."""
    return jnp.maximum(scale, max(1e-12, float(jnp.finfo(dtype).tiny))).astype(dtype)


@jax.custom_vjp
def _forward_matmul(
    x_ND: jax.Array, w_VD: jax.Array, x_scale: jax.Array, w_scale: jax.Array
) -> jax.Array:
    return _forward_only(x_ND, w_VD, x_scale, w_scale)[0]


def _forward_only(x_ND: jax.Array, w_VD: jax.Array, x_scale: jax.Array, w_scale: jax.Array):
    return _rounded_dot(x_ND, w_VD, x_scale, w_scale)[0], (x_ND, w_VD)


def _rounded_dot(x_ND: jax.Array, w_VD: jax.Array, x_scale: jax.Array, w_scale: jax.Array):
    """Return ``x @ w_VD.T`` of the operands in e4m3, and both operands so."""
    q_ND, q_VD = (
        quantise(a, scale.astype(jnp.float32), E4M3)
        for a, scale in ((x_ND, x_scale), (w_VD, w_scale))
    )
    return dot(q_ND, q_VD, (1, 1), (x_scale, w_scale), x_ND.dtype, Precision.DEFAULT), q_ND, q_VD


def _backward_wide(saved: tuple[jax.Array, ...], g_NV: jax.Array):
    x_ND, w_VD = saved
    dx_ND = dot(g_NV, w_VD.astype(g_NV.dtype), (1, 0), None, x_ND.dtype, Precision.DEFAULT)
    dw_VD = dot(g_NV, x_ND, (0, 0), None, w_VD.dtype, Precision.DEFAULT)
    return dx_ND, dw_VD, None, None


_forward_matmul.defvjp(_forward_only, _backward_wide)


def delayed_matmul(
    x: jax.Array,
    w_VD: jax.Array,
    largest: jax.Array,
    share: float,
    x_scale: float | jax.Array | None = None,
    w_scale: jax.Array | None = None,
    *,
    kernel: "Kernel | None" = None,
) -> jax.Array:
    """:func:`forward_matmul` whose gradients are FP8 matmuls too: the incoming gradient in e5m2,
    times the operands that the forward pass rounded to e4m3.

    The gradient has a delayed scale: it is divided by GRADIENT_MARGIN x ``largest`` / 57,344.
    ``largest`` is a scalar parameter; its own gradient is ``share`` x the amax of this step's
    rounded gradient, as :func:`watch` has it. While it is 0, before the first step, the scale is 1.
    ``w_scale``: that of ``w_VD``, where :func:`scales_of` gave it.

    With ``kernel`` ("FP8 casts") the incoming gradient is rounded by one kernel, on Hopper in bf16
    where rows and V are multiples of 128: the same numbers, without a pass for the amax. ``x`` is
    left to XLA, which rounds it where it is computed, row-major and transposed: a kernel would need
    it in bf16 in memory first.
    """
    x_scale = x_scale if x_scale is None else jnp.asarray(x_scale, jnp.float32)
    scales = scale_of(x, x.dtype, x_scale), scale_of(w_VD, x.dtype) if w_scale is None else w_scale
    x_ND = x.reshape(-1, x.shape[-1])
    if kernel and not kernel.accepts(x_ND.shape[0], w_VD.shape[0]):
        kernel = None
    y_NV = _delayed_matmul(x_ND, w_VD, largest, share, *scales, kernel)
    return y_NV.reshape(*x.shape[:-1], w_VD.shape[0])


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _delayed_matmul(x_ND, w_VD, largest, share, x_scale, w_scale, kernel):
    return _delayed_forward(x_ND, w_VD, largest, share, x_scale, w_scale, kernel)[0]


def _delayed_forward(x_ND, w_VD, largest, share, x_scale, w_scale, kernel):
    y_NV, q_ND, q_VD = _rounded_dot(x_ND, w_VD, x_scale, w_scale)
    return y_NV, (q_ND, q_VD, largest, share, x_scale, w_scale, w_VD[:0])


def _delayed_backward(kernel, saved, g_NV):
    q_ND, q_VD, largest, share, x_scale, w_scale, w_0D = saved
    scale = gradient_scale(largest, x_scale.dtype)
    if kernel:
        q_NV, by_v, amax = kernel.run(g_NV, scale.astype(jnp.float32), E5M2)
        over = (1, 0)
    else:
        q_NV = by_v = quantise(g_NV, scale.astype(jnp.float32), E5M2)
        over = (0, 0)
    dx_ND = dot(q_NV, q_VD, (1, 0), (scale, w_scale), x_scale.dtype, Precision.HIGHEST)
    dw_VD = dot(by_v, q_ND, over, (scale, x_scale), w_0D.dtype, Precision.HIGHEST)
    # Amax of the rounded gradient: a margin of 16 absorbs the rounding, and the unrounded one is
    # never in memory.
    amax = (
        jnp.max(amax if kernel else jnp.abs(q_NV.astype(jnp.float32)))
        * scale.astype(jnp.float32)
        * share
    )
    return dx_ND, dw_VD, amax.astype(largest.dtype), None, None, None


_delayed_matmul.defvjp(_delayed_forward, _delayed_backward)


class Rounding(NamedTuple):
    """How matmuls of a forward pass are rounded to FP8, in one object for all its layers.

    By default they are not. A slot names matrices of one kind; their number is that of their row in
    ``amax``.
    """

    amax: jax.Array | None = None
    """fp32 ``[N, n]``: the parameter that holds each amax of the step before (:func:`watch`). None:
    FP8 is off."""
    slots: Mapping[str, int | slice] = {}
    """Columns of ``amax`` by slot."""
    w_scales: Mapping[str, jax.Array] = {}
    """:func:`scales_of` weights by slot, ``[N, ...]``."""
    share: float = 1.0
    """Of the batch that this pass has."""
    x_largest: float | None = None
    """A bound of all inputs' absolute values; None: their amax is taken."""
    kernel: "Kernel | None" = None
    """"FP8 casts", for :func:`delayed_matmul`."""

    def of(self, slot: str, number: int) -> tuple[jax.Array, jax.Array]:
        """Return the amax and the scales of some matrices; FP8 must be on."""
        assert self.amax is not None
        return self.amax[number, self.slots[slot]], self.w_scales[slot][number]

    def matmul(self, x: jax.Array, w_DV: jax.Array, slot: str, number: int) -> jax.Array:
        """Return ``x @ w_DV``, ``[..., V]``: by :func:`delayed_matmul` unless FP8 is off."""
        if self.amax is None:
            return x @ w_DV
        w_VD, (amax, w_scale) = w_DV.T, self.of(slot, number)
        x_scale = self.x_largest and self.x_largest / E4M3_MAX
        return delayed_matmul(x, w_VD, amax, self.share, x_scale, w_scale, kernel=self.kernel)


def gradient_scale(largest: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the delayed scale of a gradient in e5m2, from ``largest``, its amax (largest
    |gradient|) in the step before: a scalar of ``dtype``, 1 while ``largest`` is 0."""
    scale = jnp.where(largest > 0, GRADIENT_MARGIN * largest.astype(jnp.float32) / E5M2_MAX, 1.0)
    return as_scale(scale, dtype)


@jax.custom_vjp
def watch(x: jax.Array, largest: jax.Array, share: float) -> jax.Array:
    """Return ``x``; the gradient with respect to the scalar ``largest`` is ``share`` x amax(``x``).

    Implements delayed scaling: an optimizer that sets the parameter ``largest`` to its gradient
    (:func:`jspeed.speedrun.slow.measured`) keeps this step's amax for the next one; with shares
    that add up to 1, the mean over micro-batches and devices.
    """
    return x


watch.defvjp(
    lambda x, largest, share: (
        x,
        (jnp.max(jnp.abs(x)).astype(jnp.float32), largest[..., None][:0], share),
    ),
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
        q_ND, q_VD = (
            quantise(a, scale, E4M3) for a, scale in zip((x_ND, w_VD), factors, strict=True)
        )
    y_NV = dot(q_ND, q_VD, (1, 1), factors, x_ND.dtype, Precision.DEFAULT)
    # The operands are kept as they were multiplied; the originals are saved for their dtypes only.
    return y_NV, (q_ND, q_VD, x_ND[:0], w_VD[:0])


def _backward(scales: Scales | None, saved: tuple[jax.Array, ...], g_NV: jax.Array):
    q_ND, q_VD, x_0D, w_0D = saved
    if scales is None:
        q_NV = g_NV
        with_w = None
        with_x = None
        precision = Precision.DEFAULT
    else:
        x, w, grad = (_as_multiplied(scale, x_0D.dtype) for scale in scales)
        q_NV = quantise(g_NV, grad, E5M2)
        with_w = (grad, w)
        with_x = (grad, x)
        precision = Precision.HIGHEST
    dx_ND = dot(q_NV, q_VD, (1, 0), with_w, x_0D.dtype, precision)
    dw_VD = dot(q_NV, q_ND, (0, 0), with_x, w_0D.dtype, precision)
    return dx_ND, dw_VD


_matmul.defvjp(_forward, _backward)


def _as_multiplied(scale: float, dtype: DTypeLike) -> float:
    """Return ``scale`` rounded to ``dtype``, so that multiplying undoes the division exactly."""
    return float(np.asarray(scale, jnp.dtype(dtype)))


def dot(
    a: jax.Array,
    b: jax.Array,
    contract: tuple[int, int],
    factors: tuple[float | jax.Array, float | jax.Array] | None,
    dtype: DTypeLike,
    precision: Precision,
) -> jax.Array:
    """Multiply matrices ``a`` and ``b`` (2-d), contracting axis ``contract[0]`` of ``a`` with
    ``contract[1]`` of ``b``.

    Each is first multiplied by its factor; the result is of ``dtype``. For FP8 operands
    ``precision`` DEFAULT means fast accumulation, HIGHEST fp32.
    """
    over = (contract[:1], contract[1:]), ((), ())
    if factors:
        # At its operand, where XLA's rewriter makes it a scale of the cuBLASLt call: after the
        # matmul it would be one number rounded to the result's dtype, or y be read and written once
        # more.
        a, b = (
            x.astype(dtype) * jnp.asarray(factor, dtype)
            for x, factor in zip((a, b), factors, strict=True)
        )
    return jax.lax.dot_general(a, b, over, precision=precision, preferred_element_type=dtype)
