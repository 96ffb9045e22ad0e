"""FlashAttention-2 kernels for packed lanes, for GPUs without a library that has them: Pallas
(Triton backend).

Scores never go to memory. A query sees one range of keys. So a block of queries visits the blocks
of keys from the first key that its first row sees to its own last row: work and traffic are linear
in the window and in the documents' lengths. The forward pass keeps the log-sum-exp of every row;
the backward pass recomputes scores in two kernels, over blocks of queries (dq) and of keys (dk and
dv), and adds zeros atomically: the same input gives the same bits.

JAX deprecated this backend of Pallas in 0.11; its successor, Mosaic GPU, supports the tensor cores
of GPUs before Hopper from 0.11. An H200 has run these kernels; for sm_80 to sm_120 they
are compiled, and run by JAX's interpreter.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jspeed.kernels import block_pairs
from jspeed.model.custom_kernels import Call, Price, label

LOG2_E = 1.4426950408889634  # base-2 exponents: the hardware has exp2
MASKED = -1e30  # the score of a key that is not seen; finite, because -inf - -inf is NaN


class Blocks(NamedTuple):
    """Tokens of a program's own block and of each block that it visits, its warps, and how far
    loads run ahead."""

    own: int
    visited: int
    warps: int
    stages: int


# By head width. None spills registers or takes more than the 99 kB of shared memory that sm_86,
# sm_89 and sm_120 have (tests/aot/test_attention.py; at width 64 the larger ones tried do, on
# sm_80). Nothing was timed.
FORWARD = {64: Blocks(64, 32, 4, 2), 128: Blocks(128, 64, 8, 2)}
DQ = {64: Blocks(64, 32, 4, 2), 128: Blocks(64, 64, 4, 2)}
DK_DV = {64: Blocks(64, 32, 4, 2), 128: Blocks(64, 64, 8, 2)}


def ranges(
    starts_BT: jax.Array, ends_BT: jax.Array, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Return (first key that each query sees, last query that sees each key): int32 ``[B, T]``,
    both ascending.

    ``starts_BT`` and ``ends_BT`` (exclusive), int32, are those of each token's document; ``window``
    counts the query.
    """
    first_BT, last_BT = starts_BT, ends_BT - 1
    if window is not None:
        t_1T = jnp.arange(starts_BT.shape[1], dtype=jnp.int32)[None]
        first_BT, last_BT = (
            jnp.maximum(first_BT, t_1T - (window - 1)),
            jnp.minimum(last_BT, t_1T + (window - 1)),
        )
    return first_BT, last_BT


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def attend(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    first_BT: jax.Array,
    last_BT: jax.Array,
    scale: float,
    packed: bool,
    window: int | None,
    interpret: bool = False,
) -> jax.Array:
    """Attend from each query t to keys ``first_BT`` to t: ``[B, T, H, K]`` in the dtype of
    ``q_BTHK``.

    ``first_BT`` and ``last_BT`` are those of :func:`ranges`. Whether they come from documents
    (``packed``) and which ``window`` names the kernels, so that a plan can count their work. Sums
    are fp32. K must be a key of ``FORWARD``.
    """
    return _forward(q_BTHK, k_BTHK, v_BTHK, first_BT, last_BT, scale, packed, window, interpret)[0]


def _forward(q, k, v, first_BT, last_BT, scale, packed, window, interpret):
    run = partial(_run, scale=scale, packed=packed, window=window, interpret=interpret)
    statistics = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    out, lse_BHT = run(
        "forward", _forward_kernel, FORWARD, (q, k, v, first_BT), (like(q), statistics)
    )
    return out, (q, k, v, first_BT, last_BT, out, lse_BHT)


def _backward(scale, packed, window, interpret, kept, dout):
    q, k, v, first_BT, last_BT, out, lse_BHT = kept
    run = partial(_run, scale=scale, packed=packed, window=window, interpret=interpret)
    # Row sums of out * dout (FlashAttention's delta).
    delta_BHT = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    arrays = q, k, v, dout, lse_BHT, delta_BHT
    (dq,) = run("dq", _dq_kernel, DQ, (*arrays, first_BT), (like(q),))
    dk, dv = run("dk_dv", _dk_dv_kernel, DK_DV, (*arrays, last_BT), (like(k), like(v)))
    return dq, dk, dv, None, None


attend.defvjp(_forward, _backward)


def _run(name, kernel, blocks_of, arrays, results, *, scale, packed, window, interpret):
    blocks = blocks_of[arrays[0].shape[-1]]
    named = label("fused_attention", name, packed=int(packed), window=window, **sizes(blocks))
    return call(named, partial(kernel, scale=scale), blocks, arrays, results, interpret)


def sizes(blocks: Blocks) -> dict[str, int]:
    """What a kernel's label says of its blocks."""
    return {"own": blocks.own, "visited": blocks.visited}


def price(call: Call) -> Price:
    """Scores are recomputed in both backward kernels. Results are ``[B, T, H, K]``."""
    matmuls = {"forward": 2, "dq": 3, "dk_dv": 4}[call.kernel]
    lanes, length, *rest = call.results[0].dims
    window = call.numbers.get("window", length)
    how = window, bool(call.numbers["packed"]), call.kernel == "dk_dv"
    return block_pairs.price(call, matmuls, lanes * math.prod(rest), length, *how)


def call(
    name: str,
    kernel: Callable[..., None],
    blocks: Blocks,
    arrays: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    interpret: bool,
) -> Sequence[jax.Array]:
    """Run ``kernel`` once for every block of tokens, head and lane; it gets that head's part of
    every array.

    Arrays are ``[B, T, H, K]``, which the first one is, ``[B, H, T]`` or ``[B, T]``.
    """
    lanes, length, heads, width = arrays[0].shape

    def spec(x: Any) -> pl.BlockSpec:
        if len(x.shape) == 4:  # [B, T, H, K]
            return pl.BlockSpec((None, length, None, width), lambda i, h, b: (b, 0, h, 0))
        if len(x.shape) == 3:  # [B, H, T]
            return pl.BlockSpec((None, None, length), lambda i, h, b: (b, h, 0))
        return pl.BlockSpec((None, length), lambda i, h, b: (b, 0))  # [B, T]

    return pl.pallas_call(
        partial(kernel, blocks=blocks),
        grid=(pl.cdiv(length, blocks.own), heads, lanes),
        in_specs=[spec(x) for x in arrays],
        out_specs=[spec(x) for x in results],
        out_shape=list(results),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name=name,
    )(*arrays)


def _forward_kernel(q_ref, k_ref, v_ref, first_ref, out_ref, lse_ref, *, blocks, scale):
    rows = own_block(blocks)
    q, first = load(q_ref, rows), load(first_ref, rows)

    def visit(block, carry):
        out, top, total = carry
        keys = pl.ds(block * blocks.visited, blocks.visited)
        k, v = load(k_ref, keys), load(v_ref, keys)
        scores = jnp.where(
            _seen_keys(rows, keys, first), dot(q, k, rows_of_both=True) * (scale * LOG2_E), MASKED
        )
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - higher[:, None])
        shrunk = jnp.exp2(top - higher)
        out = out * shrunk[:, None] + dot(weights.astype(v.dtype), v)
        return out, higher, total * shrunk + jnp.sum(weights, axis=1)

    zeros = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(rows.size, -jnp.inf),
        jnp.zeros(rows.size, jnp.float32),
    )
    out, top, total = lax.fori_loop(*key_blocks(first_ref, rows, blocks), visit, zeros)
    store(out_ref, rows, out / total[:, None])
    store(lse_ref, rows, top + jnp.log2(total))


def _dq_kernel(
    q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, first_ref, dq_ref, *, blocks, scale
):
    rows = own_block(blocks)
    q, dout, lse, delta, first = (
        load(ref, rows) for ref in (q_ref, dout_ref, lse_ref, delta_ref, first_ref)
    )

    def visit(block, dq):
        keys = pl.ds(block * blocks.visited, blocks.visited)
        k, v = load(k_ref, keys), load(v_ref, keys)
        scores = dot(q, k, rows_of_both=True) * (scale * LOG2_E)
        weights = jnp.where(_seen_keys(rows, keys, first), jnp.exp2(scores - lse[:, None]), 0.0)
        dscores = weights * (dot(dout, v, rows_of_both=True) - delta[:, None])
        return dq + dot(dscores.astype(k.dtype), k)

    dq = lax.fori_loop(*key_blocks(first_ref, rows, blocks), visit, jnp.zeros(q.shape, jnp.float32))
    store(dq_ref, rows, dq * scale)


def _dk_dv_kernel(
    q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, last_ref, dk_ref, dv_ref, *, blocks, scale
):
    keys = own_block(blocks)
    k, v, last = (load(ref, keys) for ref in (k_ref, v_ref, last_ref))

    def visit(block, carry):  # all scores transposed: a row is a key
        dk, dv = carry
        rows = pl.ds(block * blocks.visited, blocks.visited)
        q, dout, lse, delta = (load(ref, rows) for ref in (q_ref, dout_ref, lse_ref, delta_ref))
        s, t = tokens(keys)[:, None], tokens(rows)[None, :]
        scores = dot(k, q, rows_of_both=True) * (scale * LOG2_E)
        weights = jnp.where((s <= t) & (t <= last[:, None]), jnp.exp2(scores - lse[None, :]), 0.0)
        dscores = weights * (dot(v, dout, rows_of_both=True) - delta[None, :])
        return dk + dot(dscores.astype(q.dtype), q), dv + dot(weights.astype(dout.dtype), dout)

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = lax.fori_loop(*query_blocks(last_ref, keys, blocks), visit, (zeros, zeros))
    store(dk_ref, keys, dk * scale)
    store(dv_ref, keys, dv)


def own_block(blocks):
    """The tokens of this program."""
    return pl.ds(pl.program_id(0) * blocks.own, blocks.own)


def tokens(part):
    return part.start + jnp.arange(part.size)


def _end(part, ref):
    """The end of ``part``, at most that of the lane."""
    return jnp.minimum(part.start + part.size, ref.shape[0])


def key_blocks(first_ref, rows, blocks):
    """(first, last + 1) block of keys that ``rows`` see."""
    end = lax.div(_end(rows, first_ref) + blocks.visited - 1, blocks.visited)
    return lax.div(_scalar(first_ref, rows.start), blocks.visited), end


def query_blocks(last_ref, keys, blocks):
    """(first, last + 1) block of queries that see ``keys``."""
    return keys.start // blocks.visited, _scalar(
        last_ref, _end(keys, last_ref) - 1
    ) // blocks.visited + 1


def _seen_keys(rows, keys, first):
    s = tokens(keys)[None, :]
    return (first[:, None] <= s) & (s <= tokens(rows)[:, None])


def dot(a, b, rows_of_both=False):
    """``a @ b``, or ``a @ b.T``, in fp32."""
    return lax.dot_general(
        a, b, (((1,), (1 if rows_of_both else 0,)), ((), ())), preferred_element_type=jnp.float32
    )


def _scalar(ref, at):
    return plgpu.load(ref.at[at])


def load(ref, part):
    """Tokens ``part`` of an array, zeros past the end of the lane."""
    mask = _inside(ref, part)
    return plgpu.load(ref.at[part], mask=mask, other=None if mask is None else 0)


def store(ref, part, value):
    """Write tokens ``part`` of an array, but none past the end of the lane."""
    plgpu.store(ref.at[part], value.astype(ref.dtype), mask=_inside(ref, part))


def _inside(ref, part):
    """Which of ``part`` are in the lane, to select whole tokens; None where all are, always."""
    if ref.shape[0] % part.size == 0:
        return None
    return (tokens(part) < ref.shape[0]).reshape(-1, *(1 for _ in ref.shape[1:]))


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
