"""Fused QK-norm and rotary embedding, forward and backward: Pallas (Triton backend).

XLA needs two passes over queries and keys, because a row's sum of squares comes before its use, and
three over their gradients. Here each program processes a block of tokens, head by head. It reads
each head's channels once, keeps them in registers and writes the result; the cos/sin tables are
read once for all heads. Only the matmul's output is saved for the backward pass, which recomputes
the sums.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jspeed.kernels.examples import normal, with_gradients
from jspeed.model.custom_kernels import Case, CustomKernel, Kernel, Refused, Sizes
from jspeed.model.positions import frequencies, queries_and_keys

# parts of a head that are rotated with one another; a head may have two more, that are not
TURNING = 2
TOKENS = 32  # of a program
WARPS = 4


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def norm_and_rotate(
    y_BTE: jax.Array,
    cos_TPF: jax.Array,
    sin_TPF: jax.Array,
    factor_B: jax.Array,
    tags_BTF: jax.Array | None,
    heads: int,
    look_back: bool = False,
    padded: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return queries and keys, bf16 ``[B, T, H, K]``, of ``y_BTE``, bf16 ``[B, T, 2 H K]``, first
    all of q, then k.

    Each head is divided by its root mean square as ``layers.rms_norm`` does, and rounded. Then
    channel c is rotated with channel c + F, F = K / 4 or K / 2. The angle is that of column h
    modulo P of ``cos_TPF`` and ``sin_TPF`` (fp32). All is multiplied by ``factor_B``: 1, or NaN.
    With ``look_back``, for F = K / 4, the second half of a key is that of the token before; at the
    first, its own. Each head gets more channels up to ``padded``, a multiple of F: the bf16
    ``tags_BTF`` if any, then zeros. Sums are fp32. Only ``y_BTE`` has a gradient, rounded once.

    :func:`jspeed.model.positions.queries_and_keys` does the same in plain JAX.

    Raises Refused for other dtypes, F or ``padded``, where F is no power of two, or H not a
    multiple of P.
    """
    return _forward(
        y_BTE, cos_TPF, sin_TPF, factor_B, tags_BTF, heads, look_back, padded, interpret
    )[0]


def _forward(y_BTE, cos_TPF, sin_TPF, factor_B, tags_BTF, heads, look_back, padded, interpret):
    (_, columns, count), (rows, length, width) = cos_TPF.shape, y_BTE.shape
    parts, left = divmod(width, 2 * heads * count)
    if look_back and parts == TURNING or padded and padded % count:
        raise Refused(
            "QK-norm kernel: looks back with the half of a head that does not turn, and pads to a"
            f" multiple of {count} angles; found {width} channels of 2 x {heads} heads, padded to"
            f" {padded}; use OWN_KERNELS=off"
        )
    if left or parts not in (TURNING, 2 * TURNING) or count & (count - 1) or heads % columns:
        raise Refused(
            f"QK-norm kernel: needs head width = {TURNING} or {2 * TURNING} x angles, a"
            " power-of-two number of angles, and heads that position columns divide; found 2 x"
            f" {heads} heads in {width} channels, {count} angles, {columns} columns; use"
            " OWN_KERNELS=off"
        )
    if y_BTE.dtype != jnp.bfloat16:
        raise Refused(f"QK-norm kernel: needs bfloat16, found {y_BTE.dtype}; use OWN_KERNELS=off")
    wide = max(parts, (padded or 0) // count)
    outs = (jax.ShapeDtypeStruct((rows, length, heads * wide, count), y_BTE.dtype),) * 2
    arrays = (
        cos_TPF,
        sin_TPF,
        factor_B,
        _in_parts(y_BTE, count),
        *([] if tags_BTF is None else [tags_BTF]),
    )
    q, k = _call(_forward_kernel, arrays, outs, heads, look_back, interpret)
    shape = rows, length, heads, wide * count
    return (q.reshape(shape), k.reshape(shape)), (y_BTE, cos_TPF, sin_TPF, factor_B)


def _backward(heads, look_back, padded, interpret, kept, gradients):
    y_BTE, cos_TPF, sin_TPF, factor_B = kept
    y, dq, dk = (_in_parts(x, cos_TPF.shape[2]) for x in (y_BTE, *gradients))
    arrays = cos_TPF, sin_TPF, factor_B, y, dq, dk
    (dy,) = _call(
        _backward_kernel,
        arrays,
        (jax.ShapeDtypeStruct(y.shape, y.dtype),),
        heads,
        look_back,
        interpret,
    )
    return dy.reshape(y_BTE.shape), None, None, None, None


norm_and_rotate.defvjp(_forward, _backward)


def _in_parts(x_BT: jax.Array, count: int) -> jax.Array:
    """``[B, T, parts of all heads, F]``: the same bytes."""
    return x_BT.reshape(*x_BT.shape[:2], -1, count)


# one trace for all layers whose shapes are equal
@partial(jax.jit, static_argnames=("kernel", "results", "heads", "look_back", "interpret"))
def _call(
    kernel: Callable[..., None],
    arrays: Sequence[jax.Array],
    results: tuple[jax.ShapeDtypeStruct, ...],
    heads: int,
    look_back: bool,
    interpret: bool,
) -> Sequence[jax.Array]:
    """Run ``kernel`` once for every block of tokens and lane; it gets all of a lane of every
    array."""
    cos, sin, factor, *others = arrays
    tables = [x.reshape(x.shape[0], -1) for x in (cos, sin)]
    rows, length = others[0].shape[:2]

    def of_lane(x):
        return pl.BlockSpec((None, *x.shape[1:]), lambda i, b: (b, *(0 for _ in x.shape[1:])))

    def of_all(x):
        return pl.BlockSpec(x.shape, lambda i, b: tuple(0 for _ in x.shape))

    return pl.pallas_call(
        partial(kernel, heads=heads, look_back=look_back),
        grid=(pl.cdiv(length, TOKENS), rows),
        in_specs=[
            *map(of_all, tables),
            pl.BlockSpec((1,), lambda i, b: (b,)),
            *map(of_lane, others),
        ],
        out_specs=[of_lane(x) for x in results],
        out_shape=results,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name=f"qk_norm{kernel.__name__.removesuffix('_kernel')}",
    )(*tables, factor, *others)


def _forward_kernel(cos_ref, sin_ref, factor_ref, y_ref, *refs, heads, look_back):
    *tags_refs, q_ref, k_ref = refs
    parts, wide = y_ref.shape[1] // (2 * heads), q_ref.shape[1] // heads

    def of_head(rows, cos, sin, factor, head):
        for number, ref in enumerate((q_ref, k_ref)):
            x = _read(y_ref, rows, (number * heads + head) * parts, range(parts))
            scale = (_scale(x) * factor)[:, None]
            first, second, *rest = ((part * scale).astype(ref.dtype) for part in x)
            first, second = first.astype(jnp.float32), second.astype(jnp.float32)
            rotated = first * cos + second * sin, second * cos - first * sin
            more = [
                *(_load(ref.at[rows], _inside(ref, rows)) for ref in tags_refs),
                *[jnp.zeros_like(first)] * wide,
            ]
            for part, value in enumerate((*rotated, *rest, *more[: wide - parts])):
                late = look_back and number == 1 and part >= TURNING
                for at, mask in _key_targets(ref, rows) if late else [(rows, _inside(ref, rows))]:
                    plgpu.store(ref.at[at, head * wide + part], value.astype(ref.dtype), mask=mask)

    _for_heads(of_head, heads, y_ref.shape[2], cos_ref, sin_ref, factor_ref)


def _backward_kernel(
    cos_ref, sin_ref, factor_ref, y_ref, dq_ref, dk_ref, dy_ref, *, heads, look_back
):
    parts, wide = y_ref.shape[1] // (2 * heads), dq_ref.shape[1] // heads

    def of_head(rows, cos, sin, factor, head):
        for number, ref in enumerate((dq_ref, dk_ref)):
            of_y, of_ref = (number * heads + head) * parts, head * wide
            x, late = (
                _read(y_ref, rows, of_y, range(parts)),
                TURNING if look_back and number == 1 else parts,
            )
            g = _read(ref, rows, of_ref, range(late))
            if late < parts:
                moved = (
                    _read(ref, at, of_ref, range(late, parts), mask)
                    for at, mask in _key_targets(ref, rows)
                )
                g += [a + b for a, b in zip(*moved, strict=True)]
            first, second, *rest = g
            g = [first * cos - second * sin, first * sin + second * cos, *rest]
            scale = _scale(x)
            along = _sum(a * b for a, b in zip(g, x, strict=True)) * (
                scale * scale / (parts * cos.shape[1])
            )
            scale, along = (scale * factor)[:, None], along[:, None]
            for part, (a, b) in enumerate(zip(g, x, strict=True)):
                value = ((a - b * along) * scale).astype(dy_ref.dtype)
                plgpu.store(dy_ref.at[rows, of_y + part], value, mask=_inside(dy_ref, rows))

    _for_heads(of_head, heads, y_ref.shape[2], cos_ref, sin_ref, factor_ref)


def _for_heads(of_head, heads, count, cos_ref, sin_ref, factor_ref):
    """Call ``of_head(tokens, cos, sin, factor, head)`` for each head; those of a column share the
    tables."""
    rows, factor = pl.ds(pl.program_id(0) * TOKENS, TOKENS), factor_ref[0]
    columns = cos_ref.shape[1] // count
    for column in range(columns):
        cos, sin = (
            _load(ref.at[rows, pl.ds(column * count, count)], _inside(ref, rows))
            for ref in (cos_ref, sin_ref)
        )

        def step(n, carry, cos=cos, sin=sin, column=column):
            # JAX's interpreter loads by traced indices alone: n is one, and so is what is made of
            # it.
            of_head(rows, cos, sin, factor, n * columns + column)
            return carry

        lax.fori_loop(0, heads // columns, step, 0)


def _read(ref, rows, first, parts, mask=None):
    """``parts`` from the ``first`` on in fp32, each ``[TOKENS, F]``, zeros where ``mask`` (or the
    lane) leaves tokens out."""
    mask = _inside(ref, rows) if mask is None else mask
    return [_load(ref.at[rows, first + part], mask).astype(jnp.float32) for part in parts]


def _load(ref, mask):
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0)


def _scale(parts):
    """The factor of ``layers.rms_norm``."""
    mean = _sum(part * part for part in parts) / (len(parts) * parts[0].shape[1])
    return lax.rsqrt(mean + jnp.finfo(jnp.float32).eps)


def _sum(parts):
    return jnp.sum(reduce(jnp.add, parts), axis=1)


def _key_targets(ref, rows):
    """Where second halves of the keys of ``rows`` are stored: at the next token; the first token's
    also at itself."""
    after, t = pl.ds(rows.start + 1, rows.size), _tokens(rows)
    return (after, t + 1 < ref.shape[0]), (rows, t == 0)


def _inside(ref, rows):
    """Which of ``rows`` are in the lane; None where all are, always."""
    return None if ref.shape[0] % rows.size == 0 else _tokens(rows) < ref.shape[0]


def _tokens(rows):
    """Their numbers, ``[TOKENS, 1]``: a mask made of them selects whole tokens."""
    return (rows.start + jnp.arange(rows.size))[:, None]


def examples(sizes: Sizes) -> Mapping[str, Case]:
    """Heads whose keys look back, and narrow ones that are made as wide."""
    shape = 2, sizes.tokens // 2, sizes.heads, sizes.width // sizes.heads
    half, positions = shape[3] // 2, cast(jax.Array, np.arange(shape[1])[:, None])
    rotary = partial(queries_and_keys, angles=frequencies(shape[3] // 4), positions_TP=positions)

    def narrow(y: jax.Array, kernel: Kernel | None) -> tuple[jax.Array, ...]:
        q_and_k = rotary(y, (*shape[:3], half), padded=shape[3], kernel=kernel)
        return tuple(x[..., :half] for x in q_and_k)

    dq, dk, y = normal(shape, shape, (*shape[:2], 2 * sizes.width))
    wide = with_gradients(partial(rotary, shape=shape, look_back=True), KERNEL)
    gradients = tuple(x[..., :half] for x in (dq, dk))
    return {
        "heads": (*wide, [(dq, dk), y]),
        "narrow heads": (*with_gradients(narrow, KERNEL), [gradients, y[..., : sizes.width]]),
    }


KERNEL = Kernel(norm_and_rotate)
CUSTOM = (CustomKernel("queries and keys", KERNEL, examples),)
