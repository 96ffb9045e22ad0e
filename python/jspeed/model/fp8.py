"""Matrix products in 8-bit floats with one scale per operand, for Hopper's FP8 tensor cores."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jax.typing import DTypeLike

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


class Scales(NamedTuple):
    """Divisors: an operand is stored as ``operand / scale`` and the product multiplied by both scales.

    ``x`` and ``w`` bring activations and weights into +-448 (e4m3), ``grad`` the gradient of the output into
    +-57,344 (e5m2). They are Python floats, part of the program: measuring them would cost a pass over the data.
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
    modded-nanogpt the forward product accumulates fast (14 bits or so on Hopper) and the backward ones in full.
    Gradients come in the dtype of what they belong to, rounded once. XLA makes the FP8 products cuBLASLt calls
    on GPUs from sm_89 on, and computes the same numbers slowly elsewhere.
    """
    # XLA's rewriter takes exactly one dimension beside the contracted one.
    y_NV = _matmul(x.reshape(-1, x.shape[-1]), w_VD, scales)
    return y_NV.reshape(*x.shape[:-1], w_VD.shape[0])


def head(w_VD: jax.Array, x: jax.Array, *, scales: Scales | None) -> jax.Array:
    """:func:`matmul` with its operands as :func:`jspeed.model.losses.cross_entropy` hands them to a head."""
    return matmul(x, w_VD, scales)


def forward_matmul(x: jax.Array, w_VD: jax.Array, x_scale: jax.Array | None = None) -> jax.Array:
    """Return ``x @ w_VD.T`` with e4m3 operands, whose gradients are those of the product in ``x.dtype``.

    ``[..., D]``, ``[V, D]`` -> ``[..., V]``. Scales are measured, exactly what brings the largest entry to 448, but
    for ``x_scale`` where it is given: a scalar, by which ``x`` is divided; what then does not fit is clipped.
    """
    scales = [
        jnp.max(jnp.abs(a)).astype(jnp.float32) / 448 if scale is None else scale
        for a, scale in ((x, x_scale), (w_VD, None))
    ]
    # Rounded as the factor that undoes the division is.
    scales = [jnp.maximum(scale, 1e-12).astype(x.dtype) for scale in scales]
    return _forward_matmul(x.reshape(-1, x.shape[-1]), w_VD, *scales).reshape(*x.shape[:-1], w_VD.shape[0])


@jax.custom_vjp
def _forward_matmul(x_ND: jax.Array, w_VD: jax.Array, x_scale: jax.Array, w_scale: jax.Array) -> jax.Array:
    return _forward_only(x_ND, w_VD, x_scale, w_scale)[0]


def _forward_only(x_ND: jax.Array, w_VD: jax.Array, x_scale: jax.Array, w_scale: jax.Array):
    # Factors known only at run time go before the product: so XLA's rewriter takes them into the call.
    q_ND, q_VD = (
        quantise(a, scale.astype(jnp.float32), E4M3).astype(x_ND.dtype) * scale
        for a, scale in ((x_ND, x_scale), (w_VD, w_scale))
    )
    return _dot(q_ND, q_VD, (1, 1), 1.0, x_ND.dtype, Precision.DEFAULT), (x_ND, w_VD)


def _backward_wide(saved: tuple[jax.Array, ...], g_NV: jax.Array):
    x_ND, w_VD = saved
    dx_ND = _dot(g_NV, w_VD.astype(g_NV.dtype), (1, 0), 1.0, x_ND.dtype, Precision.DEFAULT)
    dw_VD = _dot(g_NV, x_ND, (0, 0), 1.0, w_VD.dtype, Precision.DEFAULT)
    return dx_ND, dw_VD, None, None


_forward_matmul.defvjp(_forward_only, _backward_wide)


@jax.custom_vjp
def watch(x: jax.Array, largest: jax.Array, share: float) -> jax.Array:
    """Return ``x``; the gradient with respect to the scalar ``largest`` is ``share`` x the largest |``x``|.

    So a parameter that is set to its gradient (:func:`jspeed.optim.slow.measured`) remembers, for the next step, what
    this one found; with shares that add up to 1, the mean over micro-batches and devices.
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
        q_ND, q_VD, scale = x_ND, w_VD.astype(x_ND.dtype), 1.0
    else:
        q_ND, q_VD, scale = quantise(x_ND, scales.x, E4M3), quantise(w_VD, scales.w, E4M3), scales.x * scales.w
    y_NV = _dot(q_ND, q_VD, (1, 1), scale, x_ND.dtype, Precision.DEFAULT)
    # The operands are kept as they were multiplied; the originals only lend their dtypes.
    return y_NV, (q_ND, q_VD, x_ND[:0], w_VD[:0])


def _backward(scales: Scales | None, saved: tuple[jax.Array, ...], g_NV: jax.Array):
    q_ND, q_VD, x_0D, w_0D = saved
    if scales is None:
        q_NV, x_scale, w_scale, precision = g_NV, 1.0, 1.0, Precision.DEFAULT
    else:
        q_NV, precision = quantise(g_NV, scales.grad, E5M2), Precision.HIGHEST
        x_scale, w_scale = scales.grad * scales.w, scales.grad * scales.x
    dx_ND = _dot(q_NV, q_VD, (1, 0), x_scale, x_0D.dtype, precision)
    dw_VD = _dot(q_NV, q_ND, (0, 0), w_scale, w_0D.dtype, precision)
    return dx_ND, dw_VD


_matmul.defvjp(_forward, _backward)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], scale: float, dtype: DTypeLike, precision: Precision):
    over = (contract[:1], contract[1:]), ((), ())
    y = jax.lax.dot_general(a, b, over, precision=precision, preferred_element_type=dtype)
    # In the dtype of the product, or XLA does not fold the factor into the call but reads and writes y once more.
    # That rounds the factor: by at most 1/512 in bf16, where rounding an operand to e4m3 may take 1/16.
    return y if scale == 1 else y * jnp.asarray(scale, dtype)
