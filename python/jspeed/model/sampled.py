"""Cross-entropy over a sample of the vocabulary, for training: frequent tokens exactly, the others by importance.

Jean et al. 2015 (arXiv 1412.2007) and Bengio and Senecal 2008 for the idea; here the sample is stratified, without
replacement, and the estimate of the softmax's partition function has no bias.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.errors import BadInput
from jspeed.model.layers import lookup
from jspeed.model.losses import (
    Head,
    Softcap,
    dlogits,
    loss_of,
    over_chunks,
    partition_sum,
    read_again,
    scaled,
    shares,
    targets_last,
    total,
)


class Sample(NamedTuple):
    """Tokens to score: their ids, int32 ``[C]``, all different, and 1 / their inclusion probability, fp32 ``[C]``."""

    ids_C: jax.Array
    counts_C: jax.Array


def columns(vocabulary: int, exact: int, one_in: int) -> int:
    """Return how many tokens :func:`draw` takes. Raises :class:`BadInput` for less than 0 exact or 1 in less than 1."""
    if exact < 0 or one_in < 1:
        raise BadInput(f"a sample of {exact} exact tokens and 1 in {one_in} of the others; give at least 0 and 1 in 1")
    rest = max(0, vocabulary - exact)
    return vocabulary - rest + -(-rest // one_in)


@jax.custom_vjp
def count(total: jax.Array, counts_V: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array) -> jax.Array:
    """Return ``total``; the gradient with respect to fp32 ``counts_V`` is how often each id is in ``targets_BT`` where
    ``weights_BT`` is above 0.

    So a parameter whose gradient is added to it (:func:`optax.identity`) knows how often each token has been a target
    in all steps so far, on all devices. Its numbers are whole, hence exact up to 2^24, and no order of sums matters.
    """
    return total


count.defvjp(
    lambda total, counts_V, targets_BT, weights_BT: (total, (counts_V, targets_BT, weights_BT > 0)),
    # In int32, because GPUs add single fp32 numbers by compare-and-swap (jax issue 38806).
    lambda saved, g: (
        g,
        jnp.zeros(saved[0].shape, jnp.int32).at[saved[1]].add(saved[2].astype(jnp.int32)).astype(saved[0].dtype),
        None,
        None,
    ),
)


def by_frequency(counts_V: jax.Array) -> jax.Array:
    """Return all ids from frequent to rare, equal ones by id: int32 ``[V]``."""
    return jnp.argsort(-counts_V, stable=True).astype(jnp.int32)


def draw(step: jax.Array | int, vocabulary: int, exact: int, one_in: int, order_V: jax.Array | None = None) -> Sample:
    """Draw the tokens that step ``step`` scores: the first ``exact`` of ``order_V``, and 1 in ``one_in`` of the others.

    The others are cut, in their order, into strata of ``one_in`` (the last may be smaller), and one token of each is
    drawn, evenly: so every stretch of frequencies is in every sample. ``order_V`` (int32, each id once) holds ids from
    frequent to rare; None: by id. The sample depends on its arguments only, so it is the same on all devices.

    By id is a poor approximation for GPT-2's vocabulary, whose byte pairs were merged roughly by frequency. On 1.9 M
    tokens of web text, mostly encyclopedia articles, the first 8,192 ids are 81.1 % of the tokens; the 8,192 most
    frequent of 11.1 M other tokens are 86.0 %, and 5,290 of them 81.1 %; the most frequent of the first 0.5 M tokens,
    as many as ``fineweb-cpu`` trains on, 84.1 %. With 1 in 14 of the others, the partition sum of ``fineweb-cpu`` at
    the end of its training has a relative standard deviation of 4.0 % (at worst 70 %) with 8,192 by id, of 0.7 % (6 %)
    with as many by frequency and 1.2 % (10 %) with 5,290.
    """
    scored = columns(vocabulary, exact, one_in)
    exact = min(exact, vocabulary)
    first_S = np.arange(exact, vocabulary, one_in)
    size_S = np.minimum(vocabulary - first_S, one_in)
    key = jax.random.fold_in(jax.random.key(0), step)
    drawn_S = first_S + jax.random.randint(key, (scored - exact,), 0, size_S)
    ids_C = jnp.concatenate([jnp.arange(exact), drawn_S]).astype(jnp.int32)
    counts_C = np.concatenate([np.ones(exact), size_S]).astype(np.float32)
    return Sample(ids_C if order_V is None else order_V[ids_C], jnp.asarray(counts_C))


def sampled_cross_entropy(
    head: Head,
    head_VD: jax.Array,
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    sample: Sample,
    *,
    cap: Softcap | None,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (weighted sum, loss of every token) as :func:`jspeed.model.losses.cross_entropy` does, estimated.

    ``head(rows_ND, x)`` gives the raw logits of any rows of ``head_VD``. A token's softmax is over its targets, each
    through its own row and counted once, and over the sample's other tokens, counted as often as the sample says: the
    partition sum is that of the whole vocabulary on average over samples, whatever the targets. Its logarithm, the
    loss, and the gradient are ratios of such averages: a little biased, by the order of the sum's relative variance.

    Under differentiation as :func:`~jspeed.model.losses.cross_entropy`: gradients are formed in the forward pass, none
    of the size of tokens x columns is kept. The gradient of ``head_VD`` is dense, its rows added up in fp32.
    """
    targets_BTN, weights_BTN = targets_last(targets_BT, weights_BT)
    # One look-up, hence one sum of gradients.
    rows = lookup(head_VD, jnp.concatenate([sample.ids_C, targets_BTN.reshape(-1).astype(jnp.int32)]))
    columns_CD, targets_ND = jnp.split(rows, [len(sample.ids_C)])
    rows_BTND = targets_ND.reshape(*targets_BTN.shape, -1)
    return _cross_entropy(head, cap, chunk, columns_CD, rows_BTND, x_BTD, targets_BTN, weights_BTN, sample)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _cross_entropy(head, cap, chunk, columns_CD, rows_BTND, x_BTD, targets_BTN, weights_BTN, sample):
    return _forward(head, cap, chunk, columns_CD, rows_BTND, x_BTD, targets_BTN, weights_BTN, sample)[0]


def _forward(head, cap, chunk, columns_CD, rows_BTND, x_BTD, targets_BTN, weights_BTN, sample):
    largest, share_BTN = shares(weights_BTN)

    def own(row_D, x_D):
        return head(row_D[None], x_D[None, None])[0, 0, 0]

    own_BTN = jax.vmap(jax.vmap(jax.vmap(own, (0, None))))

    def of_chunk(dcolumns_CD, rows_BtND, x_BtD, targets_BtN, share_BtN):
        logits_BtC, pull = jax.vjp(head, columns_CD, x_BtD)
        target_BtN, pull_own = jax.vjp(own_BTN, rows_BtND, x_BtD)
        counts_BtC, once_BtN = _counts(sample, targets_BtN)
        shift_Bt, sum_Bt = partition_sum(cap, (logits_BtC, counts_BtC), (target_BtN, once_BtN))
        scale_Bt = jnp.sum(share_BtN, axis=-1) / sum_Bt
        new_CD, dx_BtD = pull(dlogits(read_again(logits_BtC), None, scale_Bt, shift_Bt, cap, counts_BtC))
        drows_BtND, own_dx_BtD = pull_own(dlogits(target_BtN, share_BtN, scale_Bt, shift_Bt, cap, once_BtN))
        loss_BtN = loss_of(target_BtN, shift_Bt, sum_Bt, cap)
        return dcolumns_CD + new_CD.astype(jnp.float32), (loss_BtN, drows_BtND, dx_BtD + own_dx_BtD)

    arrays = rows_BTND, x_BTD, targets_BTN, share_BTN
    zeros_CD = jnp.zeros(columns_CD.shape, jnp.float32)
    dcolumns_CD, (loss_BTN, drows_BTND, dx_BTD) = over_chunks(of_chunk, zeros_CD, arrays, chunk)
    grads = dcolumns_CD.astype(columns_CD.dtype), drows_BTND, dx_BTD
    return (total(loss_BTN, weights_BTN), loss_BTN[..., 0]), (grads, largest)


def _backward(head, cap, chunk, saved, cotangents):
    return *scaled(saved, cotangents), None, None, None


_cross_entropy.defvjp(_forward, _backward)


def _counts(sample: Sample, targets_BTN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return how often each column counts for each token, 0 where it is a target; and each target, 0 if it repeats."""
    counts_BTC = jnp.broadcast_to(sample.counts_C, (*targets_BTN.shape[:2], len(sample.counts_C)))
    once_BTN = []
    for n in range(targets_BTN.shape[-1]):
        target_BT1 = targets_BTN[..., n, None]
        counts_BTC = jnp.where(target_BT1 == sample.ids_C[None, None], 0.0, counts_BTC)
        once_BTN.append(jnp.all(target_BT1 != targets_BTN[..., :n], axis=-1))
    return counts_BTC, jnp.stack(once_BTN, axis=-1).astype(jnp.float32)
