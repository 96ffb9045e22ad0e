"""Sampled softmax for training: frequent tokens are scored exactly, the others by importance
sampling.

After Jean et al. 2015 (arXiv 1412.2007) and Bengio and Senecal 2008; here the sample is stratified,
without replacement, and the estimate of the softmax's partition function has no bias.
"""

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.errors import BadInput
from jspeed.model.layers import key_of, lookup
from jspeed.model.losses import (
    LogitsOf,
    Softcap,
    dlogits,
    keep_low_precision,
    loss_of,
    over_chunks,
    partition_sum,
    rescale_gradients,
    shares,
    targets_last,
    total,
)


class Sample(NamedTuple):
    """Token ids to score. A lane is split into G groups of consecutive tokens, and each scores its
    own ids.

    ``ids_GC``: int32 ids, all different within a group; ``counts_C``: fp32, 1 / their inclusion
    probability. ``all_E``: ids that all groups score besides, counted once.
    """

    ids_GC: jax.Array
    counts_C: jax.Array
    all_E: jax.Array


def columns(vocabulary: int, exact: int, one_in: int) -> int:
    """Return how many ids :func:`draw` returns. Raises :class:`BadInput` unless ``exact`` >= 0 and
    ``one_in`` >= 1."""
    if exact < 0 or one_in < 1:
        raise BadInput(
            f"a sample of {exact} exact ids and 1 in {one_in} of the others; expected exact >= 0,"
            " one_in >= 1"
        )
    rest = max(0, vocabulary - exact)
    return vocabulary - rest + -(-rest // one_in)


@jax.custom_vjp
def count(
    total: jax.Array, counts_V: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array
) -> jax.Array:
    """Return ``total``; the gradient with respect to fp32 ``counts_V`` is how often each id is in
    ``targets_BT`` where ``weights_BT`` is above 0.

    A parameter whose gradient is added to it (:func:`optax.identity`) then counts how often each
    token has been a target so far, on all devices. Counts are integers, exact in fp32 up to 2^24,
    so the order of summation does not matter.
    """
    return total


count.defvjp(
    lambda total, counts_V, targets_BT, weights_BT: (total, (counts_V, targets_BT, weights_BT > 0)),
    # In int32, because GPUs add single fp32 numbers by compare-and-swap (jax issue 38806).
    lambda saved, g: (
        g,
        jnp.zeros(saved[0].shape, jnp.int32)
        .at[saved[1]]
        .add(saved[2].astype(jnp.int32))
        .astype(saved[0].dtype),
        None,
        None,
    ),
)


def by_frequency(counts_V: jax.Array) -> jax.Array:
    """Return all ids from frequent to rare, equal ones by id: int32 ``[V]``."""
    return jnp.argsort(-counts_V, stable=True).astype(jnp.int32)


def draw(
    step: jax.Array | int,
    vocabulary: int,
    exact: int,
    one_in: int,
    order_V: jax.Array | None = None,
    groups: int = 1,
) -> Sample:
    """Draw the ids that step ``step`` scores: the first ``exact`` of ``order_V``, and 1 in
    ``one_in`` of the others.

    The others are split, in their order, into strata of ``one_in`` (the last may be smaller), and
    one id of each is drawn uniformly: every range of frequencies is in every sample. ``order_V``
    (int32, each id once) holds ids from frequent to rare; None: by id. The sample depends on its
    arguments only, so it is the same on all devices. With one group all ids are in ``ids_GC``; with
    several, ``all_E`` holds the exact ones.

    Each of several ``groups`` has its own sample, the next id of every stratum: with ``one_in``
    groups each id of the vocabulary is scored by one of them. Every row of the head then gets a
    gradient in every step, from some of its tokens, instead of an occasional one from all. Its
    variance over steps is much lower, which matters to Adam.

    By id is a poor approximation for GPT-2's vocabulary, whose byte pairs were merged roughly by
    frequency. On 1.9 M tokens of web text, mostly encyclopedia articles, the first 8,192 ids are
    81.1 % of the tokens; the 8,192 most frequent of 11.1 M other tokens are 86.0 %, and 5,290 of
    them 81.1 %; the most frequent of the first 0.5 M tokens, as many as ``fineweb-cpu`` trains on,
    84.1 %. With 1 in 14 of the others, a sample's partition sum has a relative standard deviation,
    for ``fineweb-cpu`` at the end of its training. It is 4.0 % (at worst 70 %) with 8,192 by id;
    0.7 % (6 %) with as many by frequency, 1.2 % (10 %) with 5,290.
    """
    scored = columns(vocabulary, exact, one_in)
    exact = min(exact, vocabulary)
    first_S = np.arange(exact, vocabulary, one_in)
    size_S = np.minimum(vocabulary - first_S, one_in)
    key = jax.random.fold_in(key_of(0), step)
    offsets_S = jax.random.randint(key, (scored - exact,), 0, size_S)
    drawn_GS = first_S[None] + (offsets_S[None] + np.arange(groups)[:, None]) % size_S[None]
    # A single group needs one matmul for all it scores.
    shared = exact if groups > 1 else 0
    shared_GE = jnp.broadcast_to(jnp.arange(shared, exact), (groups, exact - shared))
    ids_GC = jnp.concatenate([shared_GE, drawn_GS], axis=1).astype(jnp.int32)
    counts_C = np.concatenate([np.ones(exact - shared), size_S]).astype(np.float32)
    order_V = jnp.arange(vocabulary, dtype=jnp.int32) if order_V is None else order_V
    return Sample(order_V[ids_GC], jnp.asarray(counts_C), order_V[:shared])


def sampled_cross_entropy(
    head: LogitsOf,
    head_VD: jax.Array,
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    sample: Sample,
    *,
    cap: Softcap | None,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (weighted sum, loss of every token) as :func:`jspeed.model.losses.cross_entropy` does,
    estimated.

    ``head(rows_ND, x)`` gives the raw logits of any rows of ``head_VD``. A token's softmax is over
    its targets, each through its own row and counted once. It is also over the sample's other
    tokens, counted as often as the sample says: the partition sum is that of the whole vocabulary
    on average over samples, whatever the targets. Its logarithm, the loss, and the gradient are
    ratios of such averages: a little biased, by the order of the sum's relative variance.

    Under differentiation as :func:`~jspeed.model.losses.cross_entropy`: gradients are formed in the
    forward pass, none of the size of tokens x columns is kept. The gradient of ``head_VD`` is
    dense, its rows added up in fp32. Raises :class:`BadInput` where the sample's groups do not
    divide T.
    """
    (lanes, length), groups = x_BTD.shape[:2], len(sample.ids_GC)
    if length % groups:
        raise BadInput(
            f"lanes of {length} tokens cannot be cut into {groups} groups; give a number that"
            " divides"
        )
    targets_BTN, weights_BTN = targets_last(targets_BT, weights_BT)
    # One look-up, hence one sum of gradients.
    own = sample.ids_GC.size
    ids = [sample.ids_GC.reshape(-1), sample.all_E, targets_BTN.reshape(-1).astype(jnp.int32)]
    rows = lookup(head_VD, jnp.concatenate(ids))
    own_GCD = rows[:own].reshape(*sample.ids_GC.shape, -1)
    all_ED, targets_ND = jnp.split(rows[own:], [len(sample.all_E)])

    def cut(a_BT: jax.Array) -> jax.Array:
        """``[B, T, ...]`` to ``[R, t, ...]``: a row is a lane's group, those of all lanes' first
        groups first."""
        a_BGt = a_BT.reshape(lanes, groups, length // groups, *a_BT.shape[2:])
        return jnp.moveaxis(a_BGt, 1, 0).reshape(lanes * groups, *a_BGt.shape[2:])

    scored = [own_GCD, all_ED] if len(all_ED) else [own_GCD]
    arrays = (targets_ND.reshape(*targets_BTN.shape, -1), x_BTD, targets_BTN, weights_BTN)
    total, loss_Rt = _cross_entropy(head, cap, chunk, scored, *map(cut, arrays), sample)
    return total, jnp.moveaxis(loss_Rt.reshape(groups, lanes, -1), 0, 1).reshape(lanes, length)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _cross_entropy(head, cap, chunk, columns, rows_RTND, x_RTD, targets_RTN, weights_RTN, sample):
    return _forward(head, cap, chunk, columns, rows_RTND, x_RTD, targets_RTN, weights_RTN, sample)[
        0
    ]


def _forward(head, cap, chunk, columns, rows_RTND, x_RTD, targets_RTN, weights_RTN, sample):
    largest, share_RTN = shares(weights_RTN)
    groups = len(sample.ids_GC)

    def by_group(own_GCD, x_RtD):
        if groups == 1:
            return head(own_GCD[0], x_RtD)
        logits_GBtC = jax.vmap(head)(own_GCD, x_RtD.reshape(groups, -1, *x_RtD.shape[1:]))
        return logits_GBtC.reshape(*x_RtD.shape[:2], -1)

    def own(row_D, x_D):
        return head(row_D[None], x_D[None, None])[0, 0, 0]

    own_RTN = jax.vmap(jax.vmap(jax.vmap(own, (0, None))))
    heads = (by_group, head)[: len(columns)]

    def of_chunk(dcolumns, rows_RtND, x_RtD, targets_RtN, share_RtN):
        scored = [jax.vjp(multiply, w, x_RtD) for multiply, w in zip(heads, columns, strict=True)]
        target_RtN, pull_own = jax.vjp(own_RTN, rows_RtND, x_RtD)
        *counts, once_RtN = _counts(sample, targets_RtN)
        parts = [
            (logits_RtC, counts_RtC)
            for (logits_RtC, _), counts_RtC in zip(scored, counts, strict=True)
        ]
        shift_Rt, sum_Rt = partition_sum(cap, *parts, (target_RtN, once_RtN))
        scale_Rt = jnp.sum(share_RtN, axis=-1) / sum_Rt
        drows_RtND, dx_RtD = pull_own(
            dlogits(target_RtN, share_RtN, scale_Rt, shift_Rt, cap, once_RtN)
        )
        new = []
        for (logits_RtC, counts_RtC), (_, pull) in zip(parts, scored, strict=True):
            dw, more_RtD = pull(
                dlogits(keep_low_precision(logits_RtC), None, scale_Rt, shift_Rt, cap, counts_RtC)
            )
            new.append(dw.astype(jnp.float32))
            dx_RtD += more_RtD
        return jax.tree.map(jnp.add, dcolumns, new), (
            loss_of(target_RtN, shift_Rt, sum_Rt, cap),
            drows_RtND,
            dx_RtD,
        )

    arrays = rows_RTND, x_RTD, targets_RTN, share_RTN
    zeros = [jnp.zeros(w.shape, jnp.float32) for w in columns]
    dcolumns, (loss_RTN, drows_RTND, dx_RTD) = over_chunks(of_chunk, zeros, arrays, chunk)
    dcolumns = [dw.astype(w.dtype) for dw, w in zip(dcolumns, columns, strict=True)]
    return (total(loss_RTN, weights_RTN), loss_RTN[..., 0]), (
        (dcolumns, drows_RTND, dx_RTD),
        largest,
    )


def _backward(head, cap, chunk, saved, cotangents):
    return *rescale_gradients(saved, cotangents), None, None, None


_cross_entropy.defvjp(_forward, _backward)


def _counts(sample: Sample, targets_RTN: jax.Array) -> list[jax.Array]:
    """Return how often each column counts for each token, 0 where it is a target: a group's own,
    and if there are any those that all score; and last each target, 0 if it repeats."""
    each_N = [targets_RTN[..., n, None] for n in range(targets_RTN.shape[-1])]

    def remaining_counts(ids_RC: jax.Array, counts_C: jax.Array) -> jax.Array:
        is_target_RTC = reduce(
            jnp.logical_or, [target_RT1 == ids_RC[:, None] for target_RT1 in each_N]
        )
        return jnp.where(is_target_RTC, 0.0, counts_C[None, None])

    parts = [
        (jnp.repeat(sample.ids_GC, len(targets_RTN) // len(sample.ids_GC), axis=0), sample.counts_C)
    ]
    if len(sample.all_E):
        parts.append((sample.all_E[None], jnp.ones(len(sample.all_E))))
    once_RTN = [
        jnp.all(target_RT1 != targets_RTN[..., :n], axis=-1) for n, target_RT1 in enumerate(each_N)
    ]
    return [
        *(remaining_counts(*part) for part in parts),
        jnp.stack(once_RTN, axis=-1).astype(jnp.float32),
    ]
