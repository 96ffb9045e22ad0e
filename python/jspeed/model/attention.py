"""Causal attention over packed sequences: masks, a reference implementation, and backend dispatch.

A lane is one row of a batch; it holds several documents, one after the other.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jspeed.errors import BadInput, nearest
from jspeed.model.kv_cache import CacheStep, active_cache, write_lanes

if TYPE_CHECKING:
    from jspeed.model.custom_kernels import Kernel

QUERY_BLOCK = 128
UNROLLED_BLOCKS = 16
"""Lanes of more query blocks than this run as a loop instead of unrolled."""
TAG = 16.0
"""Each number of :func:`tags`. Scores of different documents are at least 2 TAG^2 x scale lower for
it, 66 in record 92's narrow heads, and scores of normalised heads of 64 channels differ by no more
than 128 x scale, 17."""
LEAST_APART = 30.0
"""By which scores of different documents must be lower: a weight of 1e-13."""


@partial(jax.tree_util.register_dataclass, data_fields=("ids", "offsets"), meta_fields=("longest",))
@dataclass(frozen=True)
class Documents:
    """Document index of every token. Made once by :func:`find_documents`, read by every layer."""

    ids: jax.Array
    """int32 ``[B, T]``: 0 for the first document of the lane, one more at every document start
    after it."""
    offsets: jax.Array | None = None
    """int32 ``[B, max_docs + 1]``: where each document starts, then T; None without ``max_docs``.
    """
    longest: int | None = None
    """Tokens that no document exceeds, where that is known."""


def find_documents(
    tokens_BT: jax.Array,
    bos_id: int,
    max_docs: int | None = None,
    max_doc_len: int | None = None,
    cut: int | None = None,
) -> Documents:
    """Number the documents of each lane, and with ``max_docs`` return where they start, as the
    loader's own table does.

    A document starts at every BOS token ``bos_id``. A lane need not begin with one: its first
    document starts at 0 either way, so that a lane of n documents always fills n slots. When a lane
    has more than ``max_docs`` documents, or one of more than ``max_doc_len`` tokens, its last
    offset is less than T. By this backends detect the overflow. The loader gives no such lanes in
    training (DocOverflowError).

    With ``cut`` every so many tokens of a document begin another one: attention does not cross
    these borders. Not with a KV cache.
    """
    begins_BT = tokens_BT == bos_id
    if cut is not None:
        t_1T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
        first_BT = jax.lax.cummax(jnp.where(begins_BT, t_1T, 0), axis=1)
        begins_BT |= (t_1T - first_BT) % cut == 0
        max_doc_len = min(cut, max_doc_len or cut)
    ids_BT = jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32)
    if cache := active_cache():
        return Documents(_continue_document_ids(cache, ids_BT))
    ids_BT -= ids_BT[:, :1]
    if max_docs is None:
        return Documents(ids_BT)
    if max_docs < 1:
        raise BadInput(
            f"max_docs={max_docs}, but a lane holds at least one document; give 1 or more"
        )
    # A binary search in the sorted ids, because scatters (nonzero, bincount) are a loop of
    # contended atomics on the GPU with jaxlib 0.10.2; unrolled, because a loop of log2(T) tiny
    # steps costs more to launch than to run.
    search = partial(
        jnp.searchsorted, v=jnp.arange(max_docs + 1, dtype=jnp.int32), method="scan_unrolled"
    )
    offsets_BO = jax.vmap(search)(ids_BT).astype(jnp.int32)
    if max_doc_len is None:
        return Documents(ids_BT, offsets_BO)
    fits_B1 = jnp.all(jnp.diff(offsets_BO) <= max_doc_len, axis=1, keepdims=True)
    last_B1 = jnp.where(fits_B1, offsets_BO[:, -1:], 0)
    return Documents(ids_BT, jnp.concatenate([offsets_BO[:, :-1], last_B1], axis=1), max_doc_len)


def tags(documents: Documents, channels: int) -> jax.Array:
    """Return channels that tell documents apart where queries and keys have them alike: bf16 ``[B,
    T, channels]``.

    They are the binary digits of a document's number as +-TAG, then zeros. The product of two tags
    is the same for all tokens of one document, which softmax does not see. For those of different
    documents it is at least 2 TAG^2 lower, so that they need no mask. Raises Refused where
    ``channels`` are not enough for ``max_docs``.
    """
    assert documents.offsets is not None
    slots = documents.offsets.shape[1] - 1
    digits = (slots - 1).bit_length()
    if digits > channels:
        from jspeed.model.custom_kernels import Refused

        raise Refused(
            f"{channels} channels tell {2**channels} documents apart, found {slots} slots"
        )
    digit_C = jnp.arange(channels, dtype=jnp.int32)[None, None]
    sign_BTC = 2 * (documents.ids[..., None] >> digit_C & 1) - 1
    return jnp.where(digit_C < digits, TAG * sign_BTC, 0).astype(jnp.bfloat16)


def attention(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    *,
    scale: float,
    documents: Documents | None = None,
    window: int | None = None,
    backend: str = "xla",
    overflow_checked: bool = False,
    doc_tagged: bool = False,
    gradient_window: int | None = None,
) -> jax.Array:
    """Softmax attention of each query over the keys it may see: ``[B, T, H, K]``, shape and dtype
    of ``v_BTHK``.

    A query at t sees key s when t - ``window`` < s <= t (``window`` counts the query itself;
    ``None`` is no limit) and, with ``documents``, both lie in one document. Scores and softmax are
    fp32. The arrays are those of one device: under a mesh, call it inside ``jax.shard_map`` over
    the data axis. Queries and keys may be narrower than values; kernels then get them with zeros at
    the end, which changes no score.

    ``xla`` runs anywhere, in any float type; memory grows with T x ``window``. The others are
    :func:`jspeed.model.custom_kernels.backends` and want bf16: ``splash`` a TPU, the rest a GPU
    (and all but ``triton`` take fp16). ``xla`` and ``splash`` read ``documents.ids``, the rest
    ``documents.offsets``: a lane of more than ``max_docs`` documents, or of one past
    ``max_doc_len``, gives NaN, never a silently wrong mask; of the latter ``cudnn`` does not write
    what is past it. ``overflow_checked``: the queries of such lanes are NaN already
    (:func:`jspeed.model.positions.queries_and_keys`), and the pass over all queries that makes them
    NaN is left out. ``doc_tagged``: queries and keys are normalised and have :func:`tags`;
    ``cudnn`` then needs no table of documents, and no block of its kernels is without work.

    With ``gradient_window`` a query and a key that is so many tokens before it, or more, get no
    gradient from each other; the softmax is that of all keys, in the backward pass too (PR 371 of
    modded-nanogpt). ``xla`` has it, and ``cudnn``, whose backward kernel then visits fewer blocks,
    where documents are known to be shorter than lanes. The others compute all gradients.

    Over a mesh axis that XLA partitions, heads are sharded. Raises BadInput for what a backend does
    not support, and for heads that do not divide.
    """
    _check_asked(backend, window)
    if cache := active_cache():
        return _cached(cache, q_BTHK, k_BTHK, v_BTHK, scale, documents, window)
    if window is not None and window >= q_BTHK.shape[1]:
        window = None
    if gradient_window is not None and gradient_window >= (window or q_BTHK.shape[1]):
        gradient_window = None
    ids_BT = None if documents is None else documents.ids
    if backend == "xla":
        short = q_BTHK.shape[1] <= UNROLLED_BLOCKS * QUERY_BLOCK
        path = _unrolled if short else _looped
        windows = {"window": window, "gradient_window": gradient_window}
        return _over_heads(partial(path, scale=scale, **windows), q_BTHK, k_BTHK, v_BTHK, ids_BT)
    both = window, gradient_window
    return _by_kernel(
        backend, q_BTHK, k_BTHK, v_BTHK, scale, documents, *both, overflow_checked, doc_tagged
    )


def _check_asked(backend: str, window: int | None) -> None:
    if backend != "xla":
        from jspeed.model.custom_kernels import backends

        known = ("xla", *backends())
        if backend not in known:
            raise BadInput(
                f"attention backend {backend!r} is not known; choose"
                f" {', '.join(known)}{nearest(backend, known)}"
            )
    if window is not None and window < 1:
        raise BadInput(
            f"attention window={window}, but it counts the query itself; give 1 or more, or None"
        )


def _by_kernel(
    backend: str,
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    scale: float,
    documents: Documents | None,
    window: int | None,
    gradient_window: int | None,
    overflow_checked: bool,
    doc_tagged: bool,
) -> jax.Array:
    """:func:`attention` by a kernel, which is told what it takes of documents and windows."""
    from jspeed.model.custom_kernels import backends

    if (narrower := v_BTHK.shape[-1] - q_BTHK.shape[-1]) > 0:
        q_BTHK, k_BTHK = (jnp.pad(x, [(0, 0)] * 3 + [(0, narrower)]) for x in (q_BTHK, k_BTHK))
    kernel = backends()[backend]
    if kernel.reads == "offsets_BO" and documents is not None and documents.offsets is None:
        raise BadInput(
            f"attention backend '{backend}' reads where documents start; give find_documents a"
            " max_docs, or choose backend 'xla'"
        )
    known: dict[str, int] = {}
    if documents is not None and documents.longest:
        known["longest"] = documents.longest
    if gradient_window is not None:
        known["gradient_window"] = gradient_window
    told = {name: number for name, number in known.items() if name in kernel.takes}
    if doc_tagged := doc_tagged and "doc_tagged" in kernel.takes:
        _require_apart(scale, v_BTHK.shape[-1] // 2)
        told.pop("longest", None)

    def attend(q_BTHK, k_BTHK, v_BTHK, of_documents):
        if kernel.reads == "offsets_BO" and of_documents is not None and not overflow_checked:
            q_BTHK = nan_where_overflown(q_BTHK, of_documents)
        given = {kernel.reads: None if doc_tagged else of_documents}
        return kernel.attend(q_BTHK, k_BTHK, v_BTHK, scale=scale, window=window, **given, **told)

    of_documents = documents and (documents.ids if kernel.reads == "ids_BT" else documents.offsets)
    return _over_heads(attend, q_BTHK, k_BTHK, v_BTHK, of_documents)


def nan_where_overflown(q_BTHK: jax.Array, offsets_BO: jax.Array) -> jax.Array:
    """Make the queries NaN in lanes with more documents than slots, and with them outputs,
    gradients and the loss.

    Queries, because this fuses into the normalisation or rotation that computes them; outputs would
    cost a pass.
    """
    overflown_B = offsets_BO[:, -1] < q_BTHK.shape[1]
    return q_BTHK * jnp.where(overflown_B, jnp.nan, 1).astype(q_BTHK.dtype)[:, None, None, None]


def _require_apart(scale: float, width: int) -> None:
    """Raise Refused where tags do not lower scores of normalised heads of ``width`` channels by
    LEAST_APART."""
    if (apart := (2 * TAG**2 - 2 * width) * scale) < LEAST_APART:
        from jspeed.model.custom_kernels import Refused

        raise Refused(
            f"tags lower the scores of other documents by {apart:.3g} at scale {scale:g};"
            f" {LEAST_APART:g} are needed"
        )


def _over_heads(path, q_BTHK, k_BTHK, v_BTHK, documents):
    """Run ``path(q, k, v, documents)`` with heads sharded over the mesh axes that XLA partitions.

    ``documents``, an array of the lanes or None, is the same for every head.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in mesh.auto_axes if mesh.shape[axis] > 1)
    if not axes or mesh.are_all_axes_auto:  # outside of shard_map XLA partitions freely
        return path(q_BTHK, k_BTHK, v_BTHK, documents)
    devices, heads = math.prod(mesh.shape[axis] for axis in axes), q_BTHK.shape[2]
    if heads % devices:
        raise BadInput(
            f"attention has {heads} heads, which {devices} devices cannot share; use a number that"
            " divides it"
        )
    cut = PartitionSpec(None, None, axes)
    specs = (cut, cut, cut, PartitionSpec())
    return jax.shard_map(
        path, in_specs=specs, out_specs=cut, axis_names=set(axes), check_vma=False
    )(q_BTHK, k_BTHK, v_BTHK, documents)


def _continue_document_ids(cache: CacheStep, ids_BT: jax.Array) -> jax.Array:
    """Continue numbering documents after the last token of each lane in ``cache``, and append the
    numbers to it."""
    before_B = jnp.take_along_axis(
        cache.cache.documents_BS, jnp.maximum(cache.start_B - 1, 0)[:, None], axis=1
    )[:, 0]
    ids_BT += jnp.where(cache.start_B > 0, before_B, 0)[:, None]
    cache.cache = cache.cache._replace(
        documents_BS=write_lanes(cache.cache.documents_BS, ids_BT, cache.start_B)
    )
    return ids_BT


def _cached(cache: CacheStep, q_BTHK, k_BTHK, v_BTHK, scale, documents, window):
    """Attend from the next tokens of each lane to themselves and to the lane's cached tokens."""
    k_BSHK, v_BSHK = cache.append(k_BTHK), cache.append(v_BTHK)
    seen_BTS = cached_mask(cache, q_BTHK.shape[1], k_BSHK.shape[1], documents, window)
    return _weighted(q_BTHK, k_BSHK, v_BSHK, seen_BTS[:, None], scale)


def cached_mask(
    cache: CacheStep, length: int, size: int, documents: Documents | None, window: int | None
) -> jax.Array:
    """Return which of ``size`` cached keys each of the next ``length`` queries sees: bool ``[B, T,
    S]``."""
    t_BT1 = cache.positions_BT(length)[..., None]
    s_11S = jnp.arange(size, dtype=jnp.int32)[None, None]
    seen_BTS = s_11S <= t_BT1
    if window is not None:
        seen_BTS &= t_BT1 - s_11S < window
    if documents is not None:
        ids_BS = jnp.repeat(cache.cache.documents_BS, length // cache.tokens, axis=1)[:, :size]
        seen_BTS &= documents.ids[:, :, None] == ids_BS[:, None, :]
    return seen_BTS


def _block(
    q_BTHK, k_BSHK, v_BSHK, t_T, s_S, query_ids_BT, key_ids_BS, scale, window, gradient_window
):
    """Attend from queries at positions ``t_T`` to keys at positions ``s_S``."""
    distance_TS = t_T[:, None] - s_S[None, :]
    seen = distance_TS >= 0
    if window is not None:
        seen &= distance_TS < window
    seen = seen[None, None]
    if query_ids_BT is not None:
        seen = seen & (query_ids_BT[:, None, :, None] == key_ids_BS[:, None, None, :])
    near = None if gradient_window is None else distance_TS < gradient_window
    return _weighted(q_BTHK, k_BSHK, v_BSHK, seen, scale, near)


def _weighted(q_BTHK, k_BSHK, v_BSHK, seen, scale, near=None):
    """Softmax over the keys where ``seen`` (bool, broadcast to ``[B, H, T, S]``), then the weighted
    sum of values. With ``near`` only these scores and values have gradients."""
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK, preferred_element_type=jnp.float32)
    if near is not None:
        scores_BHTS = jnp.where(near, scores_BHTS, jax.lax.stop_gradient(scores_BHTS))
    weights_BHTS = jax.nn.softmax(jnp.where(seen, scores_BHTS * scale, -jnp.inf), axis=-1).astype(
        v_BSHK.dtype
    )
    if near is None:
        return jnp.einsum("bhts,bshk->bthk", weights_BHTS, v_BSHK)
    parts = [(near, v_BSHK), (~near, jax.lax.stop_gradient(v_BSHK))]
    return sum(
        jnp.einsum("bhts,bshk->bthk", jnp.where(where, weights_BHTS, 0), v) for where, v in parts
    )


def _unrolled(q_BTHK, k_BTHK, v_BTHK, ids_BT, *, scale, window, gradient_window):
    """Unrolled over blocks of queries, each with the keys in its range: fastest, but a large
    program."""
    length = q_BTHK.shape[1]
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        first = 0 if window is None else max(0, start - window + 1)
        query, key = slice(start, stop), slice(first, stop)
        ids = (None, None) if ids_BT is None else (ids_BT[:, query], ids_BT[:, key])
        positions = jnp.arange(start, stop), jnp.arange(first, stop)
        qkv = q_BTHK[:, query], k_BTHK[:, key], v_BTHK[:, key]
        blocks.append(_block(*qkv, *positions, *ids, scale, window, gradient_window))
    return jnp.concatenate(blocks, axis=1) if len(blocks) > 1 else blocks[0]


def _looped(q_BTHK, k_BTHK, v_BTHK, ids_BT, *, scale, window, gradient_window):
    """Two loops over blocks of queries: the program does not grow with T.

    The lane is cut into spans no shorter than the window, so that a query sees its own span and the
    one before. The outer loop carries spans, the inner one slices keys out of two of them: sliced
    out of the whole lane instead, their gradients would be added to an array of length T once for
    every block. Blocks are recomputed in the backward pass.
    """
    length = q_BTHK.shape[1]
    if ids_BT is None:
        ids_BT = jnp.zeros(q_BTHK.shape[:2], jnp.int32)
    span = -(-(window or length) // QUERY_BLOCK) * QUERY_BLOCK
    spans = -(-length // span)
    before, keys = (span, span + QUERY_BLOCK) if spans > 1 else (0, span)

    def with_previous(x_NBS):
        if not before:
            return x_NBS
        return jnp.concatenate(
            [jnp.concatenate([jnp.zeros_like(x_NBS[:1]), x_NBS[:-1]]), x_NBS], axis=2
        )

    def one_span(of_span):
        begin, q_BRHK, query_ids_BR, *of_keys = of_span

        @partial(jax.checkpoint, prevent_cse=False)  # the loop keeps it from being merged
        def one_block(of_block):
            start, q_BTHK, query_ids_BT = of_block
            first = start if before else 0
            k, v, key_ids = (jax.lax.dynamic_slice_in_dim(x, first, keys, axis=1) for x in of_keys)
            t_T = begin + start + jnp.arange(QUERY_BLOCK)
            s_S = begin - before + first + jnp.arange(keys)
            # positions before the lane are masked like future ones
            s_S = jnp.where(s_S < 0, length + span, s_S)
            return _block(
                q_BTHK, k, v, t_T, s_S, query_ids_BT, key_ids, scale, window, gradient_window
            )

        starts = jnp.arange(0, span, QUERY_BLOCK)
        return _join(
            jax.lax.map(
                one_block, (starts, _cut(q_BRHK, QUERY_BLOCK), _cut(query_ids_BR, QUERY_BLOCK))
            )
        )

    q, k, v, ids = (_cut(x, span) for x in (q_BTHK, k_BTHK, v_BTHK, ids_BT))
    begins = jnp.arange(0, spans * span, span)
    out = jax.lax.map(
        one_span, (begins, q, ids, with_previous(k), with_previous(v), with_previous(ids))
    )
    return _join(out)[:, :length]


def _cut(x_BT: jax.Array, size: int) -> jax.Array:
    """Cut axis 1 into pieces of ``size``, the last padded with zeros: ``[B, T, ...]`` to ``[N, B,
    size, ...]``.

    Queries of the padding see their own padded key, so that no line of scores is empty and no
    gradient NaN.
    """
    lanes, length, *rest = x_BT.shape
    pieces = -(-length // size)
    x_BT = jnp.pad(x_BT, [(0, 0), (0, pieces * size - length)] + [(0, 0)] * len(rest))
    return jnp.moveaxis(x_BT.reshape(lanes, pieces, size, *rest), 1, 0)


def _join(x_NBS: jax.Array) -> jax.Array:
    """Undo :func:`_cut`, padding kept: ``[N, B, size, ...]`` to ``[B, N * size, ...]``."""
    pieces, lanes, size, *rest = x_NBS.shape
    return jnp.moveaxis(x_NBS, 0, 1).reshape(lanes, pieces * size, *rest)


def without_own_value(
    y_BTHK: jax.Array,
    v_BTHK: jax.Array,
    alpha_BTH: jax.Array,
    gate_BTH: jax.Array | None = None,
    kernel: "Kernel | None" = None,
) -> jax.Array:
    """Subtract tanh(``alpha``) times the projection of each head's output onto its token's own
    value (XSA, record 82).

    ``[B, T, H, K]``, times ``gate_BTH`` if it is given, in the dtype of the arguments, which are of
    one dtype.

    With ``kernel`` ("XSA") that is one kernel, and so is its gradient: equal up to rounding. Inside
    ``jax.shard_map`` it needs ``check_vma=False``. It raises BadInput for what it does not support.
    """
    if kernel:
        return kernel.run(y_BTHK, v_BTHK, alpha_BTH, gate_BTH)
    along = jnp.sum(y_BTHK * v_BTHK, -1, keepdims=True) / jnp.maximum(
        jnp.sum(v_BTHK**2, -1, keepdims=True), 1e-8
    )
    out_BTHK = y_BTHK - jnp.tanh(alpha_BTH)[..., None] * along * v_BTHK
    return out_BTHK if gate_BTH is None else out_BTHK * gate_BTH[..., None]
