"""Exclusive self-attention (XSA), forward and backward: Pallas (Triton backend).

XLA needs two passes forward, because a head's dot products come before their use, and three
backward. Here a row is one head of one token: each program reads the channels of a block of rows
once, keeps them in registers and writes the result, or all gradients. Only the arguments are saved
for the backward pass. An H200 has run these kernels.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jspeed.kernels.examples import normal, with_gradients
from jspeed.model.attention import without_own_value
from jspeed.model.custom_kernels import Case, CustomKernel, Kernel, Refused, Sizes

CHANNELS = 4096  # of each array in a program
WARPS = 4
SMALLEST = 1e-8  # that the square of a value's length counts as


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def subtract_own_value(
    y_BTHK: jax.Array,
    v_BTHK: jax.Array,
    alpha_BTH: jax.Array,
    gate_BTH: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Return ``gate (y - tanh(alpha) (y.v / v.v) v)`` for each head: bf16 ``[B, T, H, K]``, as all
    arguments are.

    v.v counts as at least SMALLEST, and without ``gate_BTH`` gate is 1. All is fp32 inside; the
    result and each gradient are rounded once.

    :func:`jspeed.model.attention.without_own_value` does the same in plain JAX.

    Raises Refused for other dtypes, and unless K is a power of two up to CHANNELS.
    """
    return _forward(y_BTHK, v_BTHK, alpha_BTH, gate_BTH, interpret)[0]


def _forward(y_BTHK, v_BTHK, alpha_BTH, gate_BTH, interpret):
    arguments = y_BTHK, v_BTHK, alpha_BTH, gate_BTH
    width, arrays = y_BTHK.shape[-1], jax.tree.leaves(arguments)
    if width & (width - 1) or width > CHANNELS:
        raise Refused(
            f"XSA kernel: head width must be a power of two up to {CHANNELS}, found {width}; use"
            " OWN_KERNELS=off"
        )
    for x in arrays:
        if x.dtype != jnp.bfloat16:
            raise Refused(f"XSA kernel: needs bfloat16, found {x.dtype}; use OWN_KERNELS=off")
    (out_BTHK,) = _call("forward", _result, arrays, arrays[:1], interpret)
    return out_BTHK, arguments


def _backward(interpret, arguments, g_BTHK):
    arrays, tree = jax.tree.flatten(arguments)
    return jax.tree.unflatten(
        tree, _call("backward", _gradients, [g_BTHK, *arrays], arrays, interpret)
    )


subtract_own_value.defvjp(_forward, _backward)


def _call(
    name: str,
    compute: Callable[..., Sequence[jax.Array]],
    arrays: Sequence[jax.Array],
    like: Sequence[jax.Array],
    interpret: bool,
) -> Sequence[jax.Array]:
    """Return what ``compute`` makes of every block of rows, in fp32, as arrays ``like`` these."""
    width = arrays[0].shape[-1]
    rows, block = arrays[0].size // width, CHANNELS // width

    def in_rows(x):
        return x.reshape(rows, *x.shape[3:])

    def spec(x):
        return pl.BlockSpec((block, *x.shape[3:]), lambda i: (i, *(0 for _ in x.shape[3:])))

    found = pl.pallas_call(
        partial(_kernel, compute=compute, taken=len(arrays), rows=rows),
        grid=(pl.cdiv(rows, block),),
        in_specs=[spec(x) for x in arrays],
        out_specs=[spec(x) for x in like],
        out_shape=[jax.eval_shape(in_rows, x) for x in like],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name=f"own_value_{name}",
    )(*map(in_rows, arrays))
    return [x.reshape(wanted.shape) for x, wanted in zip(found, like, strict=True)]


def _kernel(*refs, compute, taken, rows):
    """Compute from ``[block, K]`` of each array of heads and ``[block]`` of each array of
    numbers."""
    block = refs[0].shape[0]
    row = pl.program_id(0) * block + jnp.arange(block)

    def inside(ref):
        return None if rows % block == 0 else jnp.expand_dims(row < rows, range(1, len(ref.shape)))

    def load(ref):
        mask = inside(ref)
        return plgpu.load(ref, mask=mask, other=None if mask is None else 0).astype(jnp.float32)

    for ref, x in zip(refs[taken:], compute(*map(load, refs[:taken])), strict=True):
        plgpu.store(ref, x.astype(ref.dtype), mask=inside(ref))


def _result(y, v, alpha, gate=None):
    share = _dot(y, v) / jnp.maximum(_dot(v, v), SMALLEST)
    out = y - (jnp.tanh(alpha) * share)[:, None] * v
    return (out if gate is None else gate[:, None] * out,)


def _gradients(g, y, v, alpha, gate=None):
    """Of y, v and alpha, and of the gate if there is one."""
    square, weight, along = _dot(v, v), jnp.tanh(alpha), _dot(g, v)
    divisor = jnp.maximum(square, SMALLEST)
    share = _dot(y, v) / divisor
    dgate = [] if gate is None else [_dot(g, y) - weight * share * along]
    if gate is not None:
        g, along = gate[:, None] * g, gate * along
    back = weight * along / divisor
    of_square = jnp.where(square > SMALLEST, 2 * share * back, 0.0)
    dv = of_square[:, None] * v - (weight * share)[:, None] * g - back[:, None] * y
    return g - back[:, None] * v, dv, (weight * weight - 1) * share * along, *dgate


def _dot(a, b):
    return jnp.sum(a * b, axis=1)


def examples(sizes: Sizes) -> Mapping[str, Case]:
    """Heads with a gate, and narrow ones without."""
    heads = 2, sizes.tokens // 2, sizes.heads, sizes.width // sizes.heads
    gradient, y, v, alpha, gate = normal(*[heads] * 3, *[heads[:3]] * 2)
    arrays = [gradient, y + v, v]  # outputs have a part of their own values
    run = with_gradients(without_own_value, KERNEL)
    narrow = [x[..., : heads[3] // 2] for x in arrays]
    return {"heads": (*run, [*arrays, alpha, gate]), "narrow heads": (*run, [*narrow, alpha])}


KERNEL = Kernel(subtract_own_value)
CUSTOM = (CustomKernel("XSA", KERNEL, examples),)
