"""A pointer: the next token may be copied from earlier in its document, by attention (Vinyals et
al. 2015).

One head attends to tokens before the present one; a share of its softmax belongs to a key of its
own, which stands for no token. :func:`mixed_loss` mixes what it finds with what the model writes
itself.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jspeed.model.attention import Documents, cached_mask
from jspeed.model.custom_kernels import Kernel
from jspeed.model.kv_cache import active_cache
from jspeed.model.layers import in_blocks, with_block_before

Read = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def copies(
    q_BTK: jax.Array,
    k_BTK: jax.Array,
    none_K: jax.Array,
    tokens_BT: jax.Array,
    targets_BT: jax.Array,
    documents: Documents,
    window: int,
    kernel: Kernel | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return how much of each token's attention is on its (first) target, and on none: fp32
    ``[B, T]`` both.

    A query sees the ``window`` tokens before its own that are of its document, and ``none_K``.
    Scores and softmax are fp32; blocks of ``window`` queries are done one after the other and again
    for the gradient, so that memory is that of one.

    With ``kernel`` ("pointer") scores never go to memory: equal up to rounding, on Hopper in bf16
    only. An active KV cache does without it.
    """
    if kernel and not active_cache():
        none_BT = jnp.einsum("btk,k->bt", q_BTK, none_K, preferred_element_type=jnp.float32)
        of_tokens = tokens_BT, targets_BT, documents.ids
        shares = kernel.run(q_BTK, k_BTK, none_BT, *of_tokens, window)
        return shares[0], shares[1]

    def read(p_BIJ: jax.Array, token_BJ: jax.Array, target_BI: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(token_BJ[:, None] == target_BI[..., None], p_BIJ, 0.0), axis=-1)

    return _attend(q_BTK, k_BTK, none_K, tokens_BT, targets_BT, documents, window, read)


def mixed_loss(
    loss_BT: jax.Array, copy_loss_BT: jax.Array, target_BT: jax.Array, none_BT: jax.Array
) -> jax.Array:
    """Return the loss of a target that is written or copied, from its loss and that of the id that
    stands for copying, and :func:`copies`.

    That id has a share s of the softmax, the other ids share the rest. Of s, what attends to
    nothing is written too: p = p_written (1 - s (1 - none)) + s copied (PR 379 of modded-nanogpt,
    after Merity et al. 2016).
    """
    share_BT, others_BT = jnp.exp(-copy_loss_BT), -jnp.expm1(-copy_loss_BT)
    written_BT = jnp.exp(-loss_BT) * (1 - share_BT * (1 - none_BT)) / others_BT
    return -jnp.log(written_BT + share_BT * target_BT)


def with_copying(
    targets_NBT: jax.Array, weights_NBT: jax.Array, copy_id: int
) -> tuple[jax.Array, jax.Array]:
    """Add a last target of no weight, the id that stands for copying, for :func:`mix`."""
    targets = jnp.full_like(targets_NBT[:1], copy_id)
    weights = jnp.zeros_like(weights_NBT[:1])
    return jnp.concatenate([targets_NBT, targets]), jnp.concatenate([weights_NBT, weights])


def mix(
    loss_BTN: jax.Array, *copied: jax.Array
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, list[jax.Array]]]]:
    """The :attr:`jspeed.model.losses.Head.mix` of targets :func:`with_copying`: the loss of the
    first is :func:`mixed_loss`, which has a gradient with respect to what is ``copied``."""
    mixed_BT, pull = jax.vjp(mixed_loss, loss_BTN[..., 0], loss_BTN[..., -1], *copied)

    def pull_mix(share_BTN: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        first_BT, last_BT, *dcopied = pull(share_BTN[..., 0])
        return share_BTN.at[..., 0].set(first_BT).at[..., -1].add(last_BT), dcopied

    return loss_BTN.at[..., 0].set(mixed_BT), pull_mix


def log_probabilities(
    logits_BTV: jax.Array,
    copy_id: int,
    q_BTK: jax.Array,
    k_BTK: jax.Array,
    none_K: jax.Array,
    tokens_BT: jax.Array,
    documents: Documents,
    window: int,
) -> jax.Array:
    """Return the logarithm of every id's probability, written or copied: fp32 ``[B, T, V]``, at
    least -87.

    ``copy_id`` has that one. As :func:`mixed_loss` of :func:`copies`, for all
    targets at once.
    """
    vocabulary = logits_BTV.shape[-1]

    def read(p_BIJ: jax.Array, token_BJ: jax.Array, target_BI: jax.Array) -> jax.Array:
        add = jax.vmap(
            lambda p_IJ, token_J: jnp.zeros((len(p_IJ), vocabulary)).at[:, token_J].add(p_IJ)
        )
        return add(p_BIJ, token_BJ)

    copied_BTV, none_BT = _attend(
        q_BTK, k_BTK, none_K, tokens_BT, tokens_BT, documents, window, read
    )
    p_BTV = jax.nn.softmax(logits_BTV.astype(jnp.float32), axis=-1)
    share_BT = p_BTV[..., copy_id]
    p_BTV = p_BTV.at[..., copy_id].set(0)
    written_BT = (1 - share_BT * (1 - none_BT)) / jnp.sum(p_BTV, axis=-1)
    p_BTV = p_BTV * written_BT[..., None] + share_BT[..., None] * copied_BTV
    return jnp.log(jnp.maximum(p_BTV, jnp.finfo(jnp.float32).tiny))


def _attend(
    q_BTK: jax.Array,
    k_BTK: jax.Array,
    none_K: jax.Array,
    tokens_BT: jax.Array,
    targets_BT: jax.Array,
    documents: Documents,
    window: int,
    read: Read,
) -> tuple[jax.Array, jax.Array]:
    """Return ``read(probabilities, tokens of the keys, targets of the queries)``, and the share of
    none. ``read`` is linear in the probabilities of a query."""
    if cache := active_cache():
        k_BSK = cache.append(k_BTK)
        length, size = q_BTK.shape[1], k_BSK.shape[1]
        earlier = jnp.arange(size)[None, None] < cache.positions_BT(length)[..., None]
        seen_BTS = earlier & cached_mask(cache, length, size, documents, window + 1)
        return _of_block(read, none_K, q_BTK, targets_BT, k_BSK, cache.cache.tokens_BS, seen_BTS)
    lanes, length = tokens_BT.shape
    size = min(window, length)
    cut = partial(in_blocks, size=size)
    with_before = with_block_before if length > size else lambda x_BNI, fill=0: x_BNI
    ids_BNI = cut(documents.ids, fill=-2)
    ids_BNJ = with_before(ids_BNI, fill=-1)
    keys_J, queries_I = jnp.arange(ids_BNJ.shape[2]), jnp.arange(size) + ids_BNJ.shape[2] - size
    back_1IJ = (queries_I[:, None] - keys_J[None])[None]

    @jax.checkpoint
    def of_block(block):
        q_BIK, targets_BI, ids_BI, k_BJK, tokens_BJ, ids_BJ = block
        seen_BIJ = (back_1IJ > 0) & (back_1IJ <= window) & (ids_BI[..., None] == ids_BJ[:, None])
        return _of_block(read, none_K, q_BIK, targets_BI, k_BJK, tokens_BJ, seen_BIJ)

    keys = with_before(cut(k_BTK)), with_before(cut(tokens_BT)), ids_BNJ
    arrays = cut(q_BTK), cut(targets_BT), ids_BNI, *keys
    found = jax.lax.map(
        of_block, jax.tree.map(partial(jnp.moveaxis, source=1, destination=0), arrays)
    )
    join = partial(jnp.moveaxis, source=0, destination=1)
    return jax.tree.map(lambda x: join(x).reshape(lanes, -1, *x.shape[3:])[:, :length], found)


def _of_block(
    read: Read, none_K, q_BIK, targets_BI, k_BJK, tokens_BJ, seen_BIJ
) -> tuple[jax.Array, jax.Array]:
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores_BIJ = jnp.where(seen_BIJ, dot("bik,bjk->bij", q_BIK, k_BJK), -jnp.inf)
    none_BI = dot("bik,k->bi", q_BIK, none_K)
    # Sums of exponentials, divided at the end: the probabilities of all keys need no array of their
    # own.
    shift_BI = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores_BIJ, axis=-1), none_BI))
    e_BIJ, e_none_BI = jnp.exp(scores_BIJ - shift_BI[..., None]), jnp.exp(none_BI - shift_BI)
    total_BI = jnp.sum(e_BIJ, axis=-1) + e_none_BI
    found = read(e_BIJ, tokens_BJ, targets_BI)
    return found / jnp.expand_dims(total_BI, range(2, found.ndim)), e_none_BI / total_BI
