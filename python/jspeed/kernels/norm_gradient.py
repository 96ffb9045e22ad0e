"""The gradient of RMSNorm added to that of the residual stream beside it, in one pass: Pallas
(Triton backend).

XLA reads the normalised array's gradient and its input once for a row's sum and, with the residual
stream's gradient, a second time. Here each program keeps whole rows in registers. No GPU has run
this kernel.
"""

from collections.abc import Mapping
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jspeed.kernels.examples import normal
from jspeed.model.custom_kernels import Case, CustomKernel, Kernel, Sizes
from jspeed.model.layers import inverse_rms, rms_norm

TOKENS = 4  # at once
ROUNDS = 4  # of a program: its sum is one number, and a sum of at most 4,096 is one kernel of XLA's
PART = 256  # channels that are loaded at once: Triton takes powers of two
WARPS = 4


def accepts(tokens: int, width: int) -> bool:
    """Whether the kernel takes ``[tokens, width]``; callers take plain JAX if not."""
    return tokens % (TOKENS * ROUNDS) == 0 and width % PART == 0


@partial(jax.jit, static_argnames="interpret")  # one trace for all layers
def norm_gradient(
    out_ND: jax.Array,
    normed_ND: jax.Array,
    x_ND: jax.Array,
    inverse_N: jax.Array,
    scale: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of ``x_ND`` and of ``scale``, an fp32 scalar, in ``scale`` x +
    f(rms_norm(x)).

    ``out_ND`` is the gradient of the sum, ``normed_ND`` that of f's argument; all are ``[N, D]`` of
    one dtype, in which the first result is; N and D as :func:`accepts` says. ``inverse_N``, fp32,
    are the rows' :func:`jspeed.model.layers.inverse_rms`, which the forward pass has. Sums are
    fp32.
    """
    tokens, width = x_ND.shape
    block = pl.BlockSpec((TOKENS * ROUNDS, width), lambda i: (i, 0))
    column = pl.BlockSpec((TOKENS * ROUNDS,), lambda i: (i,))
    one, mine = pl.BlockSpec((1,), lambda i: (0,)), pl.BlockSpec((1,), lambda i: (i,))
    programs = tokens // (TOKENS * ROUNDS)
    dx_ND, along = pl.pallas_call(
        _kernel,
        grid=(programs,),
        in_specs=[one, block, block, block, column],
        out_specs=[block, mine],
        out_shape=[
            jax.ShapeDtypeStruct(x_ND.shape, x_ND.dtype),
            jax.ShapeDtypeStruct((programs,), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="norm_gradient",
    )(scale.astype(jnp.float32)[None], out_ND, normed_ND, x_ND, inverse_N)
    return dx_ND, jnp.sum(along)


def _kernel(
    scale_ref: Any,
    out_ref: Any,
    normed_ref: Any,
    x_ref: Any,
    inverse_ref: Any,
    dx_ref: Any,
    along_ref: Any,
) -> None:
    width, scale = x_ref.shape[1], scale_ref[0]
    parts = [pl.ds(start, PART) for start in range(0, width, PART)]

    def some(number: Any, along: jax.Array) -> jax.Array:
        rows = pl.ds(number * TOKENS, TOKENS)
        out, normed, x = (
            [plgpu.load(ref.at[rows, part]).astype(jnp.float32) for part in parts]
            for ref in (out_ref, normed_ref, x_ref)
        )
        inverse = plgpu.load(inverse_ref.at[rows])[:, None]
        mean = _dot(normed, x)[:, None] / width * inverse * inverse
        for part, g, of_norm, own in zip(parts, out, normed, x, strict=True):
            dx = scale * g + inverse * (of_norm - own * mean)
            plgpu.store(dx_ref.at[rows, part], dx.astype(dx_ref.dtype))
        return along + _dot(out, x)

    along_ref[0] = jnp.sum(lax.fori_loop(0, ROUNDS, some, jnp.zeros(TOKENS, jnp.float32)))


def _dot(a: list[jax.Array], b: list[jax.Array]) -> jax.Array:
    return jnp.sum(reduce(jnp.add, (one * other for one, other in zip(a, b, strict=True))), axis=1)


def norm_gradient_reference(
    out_ND: jax.Array,
    normed_ND: jax.Array,
    x_ND: jax.Array,
    inverse_N: jax.Array,
    scale: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """:func:`norm_gradient` in plain JAX, in fp32."""
    out_ND, normed_ND, x_ND = (a.astype(jnp.float32) for a in (out_ND, normed_ND, x_ND))
    _, back = jax.vjp(lambda x, scale: (scale * x, rms_norm(x)), x_ND, scale)
    dx_ND, dscale = back((out_ND, normed_ND))
    return dx_ND, dscale


def examples(sizes: Sizes) -> Mapping[str, Case]:
    """Three arrays, what the last one's rows are divided by, and a scale."""
    arrays = normal(*[(sizes.tokens, sizes.width)] * 3)
    inverse_N = np.asarray(inverse_rms(jnp.asarray(arrays[2])))[:, 0]
    given = [*arrays, inverse_N, np.float32(1.25)]
    return {"gradient": (norm_gradient, norm_gradient_reference, given)}


CUSTOM = (CustomKernel("gradient of a norm", Kernel(norm_gradient, accepts), examples),)
