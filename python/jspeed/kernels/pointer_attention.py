"""The pointer's attention, forward and backward, for packed lanes: Pallas (Triton backend).

FlashAttention-2 kernels like those of :mod:`jspeed.kernels.fused_attention`, whose values are
ones where a key's token is the query's target and else zeros: nothing is multiplied by them.
Running sums start with the key of no token. The forward pass keeps the log-sum-exp of every query
and both shares; the backward pass recomputes scores in two kernels, over blocks of queries (dq) and
of keys (dk). Scores never go to memory, and nothing is added atomically: the same input gives the
same bits. An H200 has run these kernels.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jspeed.base.jax_versions import register_gpus_with_pallas
from jspeed.kernels import block_pairs
from jspeed.kernels.examples import normal, starts, with_gradients
from jspeed.kernels.fused_attention import (
    LOG2_E,
    MASKED,
    Blocks,
    call,
    dot,
    key_blocks,
    like,
    load,
    own_block,
    query_blocks,
    ranges,
    store,
    tokens,
)
from jspeed.kernels.fused_attention import (
    sizes as block_sizes,
)
from jspeed.model import pointer
from jspeed.model.attention import find_documents
from jspeed.model.custom_kernels import (
    Call,
    Case,
    CustomKernel,
    Kernel,
    Price,
    Refused,
    Sizes,
    label,
)

# None spills on sm_90 (tests/aot/test_pointer_attention.py): at width 128, 80, 159 and 212
# registers a thread, so that an SM holds 3, 3 and 2 programs at once. Nothing was timed.
FORWARD, DQ, DK = Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)


def shares(
    q_BTK: jax.Array,
    k_BTK: jax.Array,
    none_BT: jax.Array,
    tokens_BT: jax.Array,
    targets_BT: jax.Array,
    ids_BT: jax.Array,
    window: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the shares of each query's attention on its target and on none: fp32 ``[B, T]`` both.

    A query sees the ``window`` tokens before its own that are of its document; ``ids_BT`` are the
    numbers of documents, ascending. ``none_BT``, fp32, is each query's score of no token. Queries
    and keys are bf16, scores and sums fp32. :func:`jspeed.model.pointer.copies` does the same in
    plain JAX. ``interpret=True`` runs JAX's interpreter of kernels, in any float type, for tests.
    Inside ``jax.shard_map`` this needs ``check_vma=False``.

    Raises Refused for other types, and for a width that is no power of two from 16 to 128.
    """
    if (width := q_BTK.shape[-1]) not in (16, 32, 64, 128):
        raise Refused(
            f"pointer kernel: width must be 16, 32, 64 or 128, found {width}; use OWN_KERNELS=off"
        )
    for name, x in (("q", q_BTK), ("k", k_BTK)):
        if x.dtype != jnp.bfloat16 and not interpret:
            raise Refused(
                f"pointer kernel: needs bfloat16, found {name} in {x.dtype}; use OWN_KERNELS=off"
            )
    if not interpret:
        register_gpus_with_pallas()
    search = partial(jnp.searchsorted, method="scan_unrolled")  # as in find_documents
    starts_BT, ends_BT = (
        jax.vmap(partial(search, side=side))(ids_BT, ids_BT) for side in ("left", "right")
    )
    first_BT, last_BT = ranges(starts_BT.astype(jnp.int32), ends_BT.astype(jnp.int32), window + 1)
    of_tokens = tokens_BT.astype(jnp.int32), targets_BT.astype(jnp.int32), first_BT, last_BT
    return _shares(q_BTK[:, :, None], k_BTK[:, :, None], none_BT, *of_tokens, window, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _shares(q, k, none_BT, tokens_BT, targets_BT, first_BT, last_BT, window, interpret):
    return _forward(q, k, none_BT, tokens_BT, targets_BT, first_BT, last_BT, window, interpret)[0]


def _forward(q, k, none_BT, tokens_BT, targets_BT, first_BT, last_BT, window, interpret):
    arrays = q, k, none_BT, tokens_BT, targets_BT, first_BT
    found = _run(
        "forward", _forward_kernel, FORWARD, arrays, (like(none_BT),) * 3, window, interpret
    )
    return tuple(found[:2]), (q, k, tokens_BT, targets_BT, first_BT, last_BT, *found)


def _backward(window, interpret, kept, gradients):
    q, k, tokens_BT, targets_BT, first_BT, last_BT, target_share_BT, none_share_BT, lse_BT = kept
    dtarget_BT, dnone_BT = gradients
    delta_BT = dtarget_BT * target_share_BT + dnone_BT * none_share_BT
    arrays = q, k, tokens_BT, targets_BT, dtarget_BT, delta_BT, lse_BT
    (dq,) = _run("dq", _dq_kernel, DQ, (*arrays, first_BT), (like(q),), window, interpret)
    (dk,) = _run("dk", _dk_kernel, DK, (*arrays, last_BT), (like(k),), window, interpret)
    return dq, dk, none_share_BT * (dnone_BT - delta_BT), None, None, None, None


_shares.defvjp(_forward, _backward)


def _run(name, kernel, blocks, arrays, results, window, interpret):
    width = arrays[0].shape[-1]
    named = label("pointer_attention", name, width=width, window=window, **block_sizes(blocks))
    return call(named, kernel, blocks, arrays, results, interpret)


def _forward_kernel(
    q_ref,
    k_ref,
    none_ref,
    token_ref,
    target_ref,
    first_ref,
    target_share_ref,
    none_share_ref,
    lse_ref,
    *,
    blocks,
):
    rows = own_block(blocks)
    q, none, target, first = (load(ref, rows) for ref in (q_ref, none_ref, target_ref, first_ref))
    none *= LOG2_E

    def visit(block, carry):
        top, total, on_target = carry
        keys = pl.ds(block * blocks.visited, blocks.visited)
        k, token = load(k_ref, keys), load(token_ref, keys)
        scores = jnp.where(
            _seen_keys(rows, keys, first), dot(q, k, rows_of_both=True) * LOG2_E, MASKED
        )
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - higher[:, None])
        shrunk = jnp.exp2(top - higher)
        copied = jnp.where(token[None, :] == target[:, None], weights, 0.0)
        return (
            higher,
            total * shrunk + jnp.sum(weights, axis=1),
            on_target * shrunk + jnp.sum(copied, axis=1),
        )

    start = none, jnp.ones(rows.size, jnp.float32), jnp.zeros(rows.size, jnp.float32)
    top, total, on_target = lax.fori_loop(*key_blocks(first_ref, rows, blocks), visit, start)
    store(target_share_ref, rows, on_target / total)
    store(none_share_ref, rows, jnp.exp2(none - top) / total)
    store(lse_ref, rows, top + jnp.log2(total))


def _dq_kernel(
    q_ref,
    k_ref,
    token_ref,
    target_ref,
    dtarget_ref,
    delta_ref,
    lse_ref,
    first_ref,
    dq_ref,
    *,
    blocks,
):
    rows = own_block(blocks)
    of_rows = q_ref, target_ref, dtarget_ref, delta_ref, lse_ref, first_ref
    q, target, dtarget, delta, lse, first = (load(ref, rows) for ref in of_rows)

    def visit(block, dq):
        keys = pl.ds(block * blocks.visited, blocks.visited)
        k, token = load(k_ref, keys), load(token_ref, keys)
        scores = dot(q, k, rows_of_both=True) * LOG2_E
        weights = jnp.where(_seen_keys(rows, keys, first), jnp.exp2(scores - lse[:, None]), 0.0)
        dweights = jnp.where(token[None, :] == target[:, None], dtarget[:, None], 0.0)
        dscores = weights * (dweights - delta[:, None])
        return dq + dot(dscores.astype(k.dtype), k)

    dq = lax.fori_loop(*key_blocks(first_ref, rows, blocks), visit, jnp.zeros(q.shape, jnp.float32))
    store(dq_ref, rows, dq)


def _dk_kernel(
    q_ref,
    k_ref,
    token_ref,
    target_ref,
    dtarget_ref,
    delta_ref,
    lse_ref,
    last_ref,
    dk_ref,
    *,
    blocks,
):
    keys = own_block(blocks)
    k, token, last = (load(ref, keys) for ref in (k_ref, token_ref, last_ref))

    def visit(block, dk):  # all scores transposed: a row is a key
        rows = pl.ds(block * blocks.visited, blocks.visited)
        of_rows = q_ref, target_ref, dtarget_ref, delta_ref, lse_ref
        q, target, dtarget, delta, lse = (load(ref, rows) for ref in of_rows)
        s, t = tokens(keys)[:, None], tokens(rows)[None, :]
        scores = dot(k, q, rows_of_both=True) * LOG2_E
        weights = jnp.where((s < t) & (t <= last[:, None]), jnp.exp2(scores - lse[None, :]), 0.0)
        dweights = jnp.where(token[:, None] == target[None, :], dtarget[None, :], 0.0)
        dscores = weights * (dweights - delta[None, :])
        return dk + dot(dscores.astype(q.dtype), q)

    dk = lax.fori_loop(
        *query_blocks(last_ref, keys, blocks), visit, jnp.zeros(k.shape, jnp.float32)
    )
    store(dk_ref, keys, dk)


def _seen_keys(rows, keys, first):
    s = tokens(keys)[None, :]
    return (first[:, None] <= s) & (s < tokens(rows)[:, None])


def examples(sizes: Sizes) -> Mapping[str, Case]:
    """Shares of targets and of none, within documents and a window of 150."""
    rows = 2, sizes.tokens // 2
    words = np.random.default_rng(0).integers(0, 20, (rows[0], rows[1] + 1), dtype=np.int32)
    documents = find_documents(jnp.asarray(starts(*rows)), 1)

    def copied(
        q: jax.Array, k: jax.Array, none: jax.Array, kernel: Kernel | None
    ) -> tuple[jax.Array, jax.Array]:
        of_tokens = jnp.asarray(words[:, :-1]), jnp.asarray(words[:, 1:]), documents
        return pointer.copies(q, k, none, *of_tokens, 150, kernel)

    gradients = tuple(normal(rows, rows, dtype=np.float32))
    q, k, none = normal((*rows, 128), (*rows, 128), (128,))
    q *= 0.1  # so that attention is on many keys
    return {"shares": (*with_gradients(copied, KERNEL), [gradients, q, k, none])}


def price(call: Call) -> Price:
    """Scores are recomputed in both backward kernels; keys do not count the query's own."""
    matmuls = {"forward": 1, "dq": 2, "dk": 2}[call.kernel]
    lanes, length, *_ = call.results[0].dims
    channels, window = lanes * call.numbers["width"], call.numbers["window"] + 1
    return block_pairs.price(call, matmuls, channels, length, window, True, call.kernel == "dk")


KERNEL = Kernel(shares)
CUSTOM = (CustomKernel("pointer", KERNEL, examples),)
