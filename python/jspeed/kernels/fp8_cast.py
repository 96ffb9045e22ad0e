"""Cast a matrix to FP8, row-major and transposed, in one pass over memory: Pallas (Triton backend),
for Hopper.

cuBLASLt contracts FP8 matrices over the last axis of both only, so the weight gradient needs the
transposed copy. XLA writes both in one pass too, but computes the amax in another. This kernel
loads a block, rounds it, and stores the block, its transpose and its amax. It has a reference in
plain JAX with the same results. An H200 has run it.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from jspeed.kernels.examples import normal
from jspeed.model.custom_kernels import Case, CustomKernel, Kernel, Refused, Sizes

BLOCK = 128  # rows and columns of a program, and the bytes that it writes of a row of either copy
WARPS = 8

Copies = tuple[jax.Array, jax.Array, jax.Array]
"""The matrix ``[N, M]``, its transpose ``[M, N]``, and the amax of each block, fp32 ``[N / BLOCK, M
/ BLOCK]``."""


def accepts(*sizes: int) -> bool:
    """Whether all dimensions are whole blocks, so that the kernels take them; callers take plain
    JAX if not."""
    return all(size % BLOCK == 0 for size in sizes)


@partial(jax.jit, static_argnames=("dtype", "interpret"))  # one trace: equal calls are equal in HLO
def cast(x_NM: jax.Array, scale: jax.Array, dtype: DTypeLike, *, interpret: bool = False) -> Copies:
    """Return ``fp8.quantise(x, scale, dtype)``, its transpose, and the amax of each block as
    rounded.

    ``x_NM`` is bf16 or fp32, ``scale`` an fp32 scalar. Raises Refused unless N and M are multiples
    of BLOCK.
    """
    n, m = x_NM.shape
    if not accepts(n, m):
        raise Refused(
            f"FP8 cast: rows and columns must be multiples of {BLOCK}, found {n} x {m}; use"
            " plain JAX"
        )
    block, transposed = (
        pl.BlockSpec((BLOCK, BLOCK), index) for index in (lambda j, i: (i, j), lambda j, i: (j, i))
    )
    one = pl.BlockSpec((1, 1), lambda j, i: (i, j))
    results = ((n, m), dtype), ((m, n), dtype), ((n // BLOCK, m // BLOCK), jnp.float32)
    q_NM, q_MN, largest = pl.pallas_call(
        partial(_kernel, dtype),
        # blocks side by side run at once: whole rows are read together
        grid=(m // BLOCK, n // BLOCK),
        in_specs=[block, pl.BlockSpec((1,), lambda j, i: (0,))],
        out_specs=[block, transposed, one],
        out_shape=[jax.ShapeDtypeStruct(shape, kind) for shape, kind in results],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="fp8_cast",
    )(x_NM, jnp.asarray(1 / scale, jnp.float32)[None])
    return q_NM, q_MN, largest


def cast_reference(x_NM: jax.Array, scale: jax.Array, dtype: DTypeLike) -> Copies:
    """:func:`cast` in plain JAX."""
    q_NM = _rounded(x_NM.astype(jnp.float32) * (1 / scale), dtype)
    return q_NM, q_NM.T, _largest(q_NM.reshape(q_NM.shape[0] // BLOCK, BLOCK, -1, BLOCK), (1, 3))


def _kernel(
    dtype: DTypeLike, x_ref: Any, factor_ref: Any, rows_ref: Any, columns_ref: Any, largest_ref: Any
) -> None:
    q = _rounded(x_ref[...].astype(jnp.float32) * factor_ref[0], dtype)
    rows_ref[...] = q
    columns_ref[...] = q.T
    largest_ref[0, 0] = _largest(q)


def _rounded(a, dtype):
    limit = float(jnp.finfo(dtype).max)
    # Not jnp.clip: its GPU lowering loses NaN.
    return jnp.where(a > limit, limit, jnp.where(a < -limit, -limit, a)).astype(dtype)


def _largest(a, axes=(0, 1)):
    """The amax of ``a``, NaN if one is: as integers, floats that are not negative have the same
    order."""
    bits = lax.bitcast_convert_type(jnp.abs(a.astype(jnp.float32)), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(bits, axis=axes), jnp.float32)


def examples(sizes: Sizes) -> Mapping[str, Case]:
    """A gradient in e5m2."""
    kernel, plain = (partial(run, dtype=jnp.float8_e5m2) for run in (cast, cast_reference))
    return {"FP8 casts": (kernel, plain, [*normal((sizes.tokens, sizes.width)), np.float32(0.01)])}


CUSTOM = (CustomKernel("FP8 casts", Kernel(cast, accepts), examples),)
