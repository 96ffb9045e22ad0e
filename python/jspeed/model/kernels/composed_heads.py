"""Attention with composed heads (DCMHA), forward and backward: Pallas (Triton backend).

One program handles a block of queries and the blocks of keys that it sees: per head it computes
scores and softmax, accumulates the mixed probabilities of all heads, then computes each head's
output. Only the mixed probabilities are written to memory, in the dtype of the values: ``[B, T, N *
SIZE]`` for N blocks of keys. The backward pass reads them instead of recomputing scores, and stores
their gradient likewise. It has three kernels: dmixed and dgive from gradients and values, dq and
dtake from queries and keys, both over blocks of queries; dk and dv over blocks of keys. Nothing is
added atomically: the same input gives the same bits.

Each kernel reads queries, keys, values and gradients from memory once. From L2 it reads a block
once for each block that sees it (of 64 tokens, 3 in a window of 112). For each head dq reads those
keys and the gradient of the mixture twice, and dk_dv the mixture and its gradient once, rather than
hold them in registers.

The reference in plain JAX is :func:`jspeed.model.heads.composed`. Like those of
:mod:`jspeed.model.kernels.fused_attention` these kernels were run by JAX's interpreter and compiled
for sm_90; no GPU has run them.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jspeed.jax_versions import register_gpus_with_pallas
from jspeed.model.kernels.attention_backends import Refused
from jspeed.model.kernels.fused_attention import LOG2_E, MASKED, dot, like, tokens

SIZE = 64  # tokens of a block
MOST_BLOCKS = 3  # that a block of queries sees, with its own
# Warps of each kernel, and how far its loads run ahead. None spills on sm_90
# (tests/aot/test_composed_heads.py), nor with twice as many warps or with loads three ahead; with
# half as many, all but forward do. Nothing was timed.
LAUNCH = {"forward": (8, 2), "dmixed": (8, 2), "dq": (4, 2), "dk_dv": (4, 2)}


def compose(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    take_BTH: jax.Array,
    give_BTH: jax.Array,
    ids_BT: jax.Array,
    *,
    scale: float,
    window: int,
    interpret: bool = False,
) -> jax.Array:
    """Return ``give_h * (sum_h' take_h' softmax_h') v_h`` for each head h: ``[B, T, H, K]``.

    Queries, keys, values and ``give_BTH`` are bf16, and so is the result; scores, softmax and sums
    are fp32. ``take_BTH``, fp32, is already normalised. ``ids_BT``, int32 and not negative, number
    the documents of each lane; a query sees its document's last ``window`` tokens, itself among
    them. ``interpret=True`` runs JAX's interpreter of kernels, in any float type, for tests. Inside
    ``jax.shard_map`` this needs ``check_vma=False``.

    Raises Refused for other types, for a head width that is no power of two from 16 to 128, and for
    windows of more than 129 tokens, or less than 1.
    """
    width, most = q_BTHK.shape[-1], (MOST_BLOCKS - 1) * SIZE + 1
    if width not in (16, 32, 64, 128):
        raise Refused(f"composed-heads kernel: head width must be 16, 32, 64 or 128, found {width}")
    if not 1 <= window <= most:
        raise Refused(f"composed-heads kernel: window must be 1 to {most} tokens, found {window}")
    for name, x in (("q", q_BTHK), ("k", k_BTHK), ("v", v_BTHK), ("give", give_BTH)):
        if x.dtype != jnp.bfloat16 and not interpret:
            raise Refused(f"composed-heads kernel: needs bfloat16, found {name} in {x.dtype}")
    if not interpret:
        register_gpus_with_pallas()
    return _compose(q_BTHK, k_BTHK, v_BTHK, take_BTH, give_BTH, ids_BT, scale, window, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _compose(q, k, v, take_BTH, give_BTH, ids_BT, scale, window, interpret):
    return _forward(q, k, v, take_BTH, give_BTH, ids_BT, scale, window, interpret)[0]


def _forward(q, k, v, take_BTH, give_BTH, ids_BT, scale, window, interpret):
    arrays = q, k, v, take_BTH, give_BTH, ids_BT
    # of keys that a block of queries sees, its own among them
    blocks = 1 + pl.cdiv(min(window, q.shape[1]) - 1, SIZE)
    mixed_BTS = jax.ShapeDtypeStruct((*q.shape[:2], blocks * SIZE), v.dtype)
    kernel = partial(_forward_kernel, scale=scale, window=window)
    out, *kept = _call(
        "forward", kernel, q, arrays, (like(q), mixed_BTS, like(take_BTH)), blocks, interpret
    )
    return out, (*arrays, *kept)


def _backward(scale, window, interpret, kept, g):
    q, k, v, take_BTH, give_BTH, ids_BT, mixed_BTS, lse_BTH = kept
    blocks, seen = mixed_BTS.shape[-1] // SIZE, {"scale": scale, "window": window}

    def run(name, kernel, arrays, results):
        return _call(name, kernel, q, arrays, tuple(map(like, results)), blocks, interpret)

    dmixed_BTS, dgive_BTH = run(
        "dmixed", _dmixed_kernel, (v, g, give_BTH, mixed_BTS), (mixed_BTS, give_BTH)
    )
    of_scores = take_BTH, ids_BT, lse_BTH, dmixed_BTS
    dq, dtake_BTH = run("dq", partial(_dq_kernel, **seen), (q, k, *of_scores), (q, take_BTH))
    arrays = q, k, g, *of_scores, dtake_BTH, give_BTH, mixed_BTS
    dk, dv = run("dk_dv", partial(_dk_dv_kernel, **seen), arrays, (k, v))
    return dq, dk, dv, dtake_BTH, dgive_BTH, None


_compose.defvjp(_forward, _backward)


def _call(
    name: str,
    kernel: Callable[..., None],
    q_BTHK: jax.Array,
    arrays: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    blocks: int,
    interpret: bool,
) -> Sequence[jax.Array]:
    """Run ``kernel`` once for every block of tokens and lane; its references are to that lane of
    every array."""
    lanes, length, heads, width = q_BTHK.shape
    warps, stages = LAUNCH[name]

    def spec(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda i, b: (b, *(0 for _ in x.shape[1:])))

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(length, SIZE), lanes),
        in_specs=[spec(x) for x in arrays],
        out_specs=[spec(x) for x in results],
        out_shape=list(results),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        # plan/attention.py reads it.
        name=f"composed_heads_{name}_{heads}x{width}_blocks{SIZE}x{blocks * SIZE}",
    )(*arrays)


def _forward_kernel(
    q_ref, k_ref, v_ref, take_ref, give_ref, ids_ref, out_ref, mixed_ref, lse_ref, *, scale, window
):
    rows, visited = _seen_blocks(mixed_ref)
    first = _first(ids_ref, rows, visited, window)

    def mix(h, mixed):
        q = _load(q_ref, rows, h)
        scores = [
            dot(q, _load(k_ref, keys, h), rows_of_both=True) * (scale * LOG2_E) for keys in visited
        ]
        scores = [
            jnp.where(_seen(rows, keys, first), x, MASKED)
            for keys, x in zip(visited, scores, strict=True)
        ]
        top = reduce(jnp.maximum, [jnp.max(x, axis=1) for x in scores])
        weights = [jnp.exp2(x - top[:, None]) for x in scores]
        total = _sum(jnp.sum(x, axis=1) for x in weights)
        _store(lse_ref, rows, top + jnp.log2(total), h)
        share = _load(take_ref, rows, h) / total
        return tuple(m + share[:, None] * x for m, x in zip(mixed, weights, strict=True))

    mixed = lax.fori_loop(
        0, _heads(q_ref), mix, (jnp.zeros((SIZE, SIZE), jnp.float32),) * len(visited)
    )
    mixed = [m.astype(mixed_ref.dtype) for m in mixed]
    for n, m in enumerate(mixed):
        _store(mixed_ref, rows, m, _columns(n))

    def give(h, _):
        out = _sum(dot(m, _load(v_ref, keys, h)) for m, keys in zip(mixed, visited, strict=True))
        _store(out_ref, rows, out.astype(out_ref.dtype) * _load(give_ref, rows, h)[:, None], h)

    lax.fori_loop(0, _heads(q_ref), give, None)


def _dmixed_kernel(v_ref, g_ref, give_ref, mixed_ref, dmixed_ref, dgive_ref):
    rows, visited = _seen_blocks(mixed_ref)
    mixed = [_load(mixed_ref, rows, _columns(n)) for n in range(len(visited))]

    def add(h, dmixed):
        g = _load(g_ref, rows, h)
        products = [dot(g, _load(v_ref, keys, h), rows_of_both=True) for keys in visited]
        dgive = _sum(
            jnp.sum(m.astype(jnp.float32) * x, axis=1) for m, x in zip(mixed, products, strict=True)
        )
        _store(dgive_ref, rows, dgive, h)
        give = _load(give_ref, rows, h).astype(jnp.float32)
        return tuple(d + give[:, None] * x for d, x in zip(dmixed, products, strict=True))

    dmixed = lax.fori_loop(
        0, _heads(g_ref), add, (jnp.zeros((SIZE, SIZE), jnp.float32),) * len(visited)
    )
    for n, d in enumerate(dmixed):
        _store(dmixed_ref, rows, d, _columns(n))


def _dq_kernel(
    q_ref, k_ref, take_ref, ids_ref, lse_ref, dmixed_ref, dq_ref, dtake_ref, *, scale, window
):
    rows, visited = _seen_blocks(dmixed_ref)
    first = _first(ids_ref, rows, visited, window)

    def one_head(h, _):
        q, take, lse = _load(q_ref, rows, h), _load(take_ref, rows, h), _load(lse_ref, rows, h)

        def visit(n):
            keys = _away(rows, 1 + n - len(visited))
            k, dmixed = _load(k_ref, keys, h), _load(dmixed_ref, rows, _columns(n))
            weights = _weights(dot(q, k, rows_of_both=True), scale, lse[:, None])
            return k, dmixed, jnp.where(_seen(rows, keys, first), weights, 0.0)

        def add(n, dtake):
            _, dmixed, weights = visit(n)
            return dtake + jnp.sum(weights * dmixed, axis=1)

        def multiply(n, dq):
            k, dmixed, weights = visit(n)
            dscores = take[:, None] * weights * (dmixed - dtake[:, None])
            return dq + dot(dscores.astype(k.dtype), k)

        dtake = lax.fori_loop(0, len(visited), add, jnp.zeros(SIZE, jnp.float32))
        dq = lax.fori_loop(0, len(visited), multiply, jnp.zeros(q.shape, jnp.float32))
        _store(dtake_ref, rows, dtake, h)
        _store(dq_ref, rows, dq * scale, h)

    lax.fori_loop(0, _heads(q_ref), one_head, None)


def _dk_dv_kernel(
    q_ref, k_ref, g_ref, take_ref, ids_ref, lse_ref, dmixed_ref, dtake_ref, give_ref, mixed_ref,
    dk_ref, dv_ref, *, scale, window,
):  # fmt: skip
    keys, blocks = _own(), mixed_ref.shape[1] // SIZE
    last = _last(ids_ref, keys, [_away(keys, n) for n in range(blocks)], window)

    def later(n):
        """Queries n blocks later, and the columns of their mixture for these keys."""
        return _away(keys, n), _columns(blocks - 1 - n)

    def one_head(h, _):
        k = _load(k_ref, keys, h)

        def from_scores(n, dk):  # transposed: a row is a key
            rows, columns = later(n)
            q, dmixed = _load(q_ref, rows, h), _load(dmixed_ref, rows, columns).T
            take, lse, dtake = (_load(ref, rows, h)[None] for ref in (take_ref, lse_ref, dtake_ref))
            weights = _weights(dot(k, q, rows_of_both=True), scale, lse)
            weights = jnp.where(_seen_by(keys, rows, last), weights, 0.0)
            dscores = take * weights * (dmixed - dtake)
            return dk + dot(dscores.astype(q.dtype), q)

        def from_values(n, dv):
            rows, columns = later(n)
            g, mixed = _load(g_ref, rows, h), _load(mixed_ref, rows, columns).T
            give = _load(give_ref, rows, h)[None].astype(jnp.float32)
            return dv + dot((mixed * give).astype(g.dtype), g)

        zeros = jnp.zeros(k.shape, jnp.float32)
        _store(dk_ref, keys, lax.fori_loop(0, blocks, from_scores, zeros) * scale, h)
        _store(dv_ref, keys, lax.fori_loop(0, blocks, from_values, zeros), h)

    lax.fori_loop(0, _heads(k_ref), one_head, None)


def _own() -> Any:
    """Tokens of this program's block."""
    return pl.ds(pl.program_id(0) * SIZE, SIZE)


def _away(part: Any, blocks: Any) -> Any:
    """Tokens of the block that lies ``blocks`` after another; they may lie outside of the lane."""
    return pl.ds(part.start + blocks * SIZE, SIZE)


def _seen_blocks(mixed_ref: Any) -> tuple[Any, list[Any]]:
    """This program's queries, and the blocks of keys that they see, in order."""
    rows, blocks = _own(), mixed_ref.shape[1] // SIZE
    return rows, [_away(rows, 1 + n - blocks) for n in range(blocks)]


def _heads(ref: Any) -> int:
    return ref.shape[1]


def _columns(n: Any) -> Any:
    """Where the mixture for the n-th block of keys is."""
    return pl.ds(n * SIZE, SIZE)


def _first(ids_ref: Any, rows: Any, visited: Iterable[Any], window: int) -> jax.Array:
    """First key that each query sees: keys are adjacent and end with the query, so counting them is
    enough."""
    t, of_t = _numbered(ids_ref, rows)
    keys = (_numbered(ids_ref, part) for part in visited)
    seen = (_near(t[:, None], s[None], of_t[:, None], of_s[None], window) for s, of_s in keys)
    return t + 1 - _sum(jnp.sum(x.astype(jnp.int32), axis=1) for x in seen)


def _last(ids_ref: Any, keys: Any, visited: Iterable[Any], window: int) -> jax.Array:
    """Last query that sees each key."""
    s, of_s = _numbered(ids_ref, keys)
    queries = (_numbered(ids_ref, rows) for rows in visited)
    seen = (_near(t[None], s[:, None], of_t[None], of_s[:, None], window) for t, of_t in queries)
    return s - 1 + _sum(jnp.sum(x.astype(jnp.int32), axis=1) for x in seen)


def _numbered(ids_ref: Any, part: Any) -> tuple[jax.Array, jax.Array]:
    """Tokens and their document ids."""
    return tokens(part), _load(ids_ref, part, fill=-1)


def _near(t, s, document_of_t, document_of_s, window):
    return (s <= t) & (t - s < window) & (document_of_t == document_of_s)


def _seen(rows: Any, keys: Any, first: jax.Array) -> jax.Array:
    s = tokens(keys)[None]
    return (first[:, None] <= s) & (s <= tokens(rows)[:, None])


def _seen_by(keys: Any, rows: Any, last: jax.Array) -> jax.Array:
    t = tokens(rows)[None]
    return (tokens(keys)[:, None] <= t) & (t <= last[:, None])


def _weights(products, scale, lse):
    """Softmax of scores, by the log-sum-exp of each query."""
    return jnp.exp2(products * (scale * LOG2_E) - lse)


def _sum(parts: Iterable[jax.Array]) -> jax.Array:
    return reduce(operator.add, parts)


def _load(ref: Any, part: Any, *column: Any, fill: int = 0) -> jax.Array:
    """Tokens ``part`` of an array, ``fill`` outside of the lane; ``column`` is a head, or
    :func:`_columns`."""
    view, inside = _view(ref, part, column)
    return plgpu.load(view, mask=inside, other=fill)


def _store(ref: Any, part: Any, value: jax.Array, *column: Any) -> None:
    """Write tokens ``part`` of an array, but none outside of the lane."""
    view, inside = _view(ref, part, column)
    plgpu.store(view, value.astype(ref.dtype), mask=inside)


def _view(ref: Any, part: Any, column: tuple[Any, ...]) -> tuple[Any, jax.Array]:
    """Tokens ``part`` of an array, and which of them are in the lane, to select whole tokens."""
    t = tokens(part)
    view = ref.at[(part, *column)]
    inside = (0 <= t) & (t < ref.shape[0])
    return view, inside.reshape(-1, *(1 for _ in view.shape[1:]))
