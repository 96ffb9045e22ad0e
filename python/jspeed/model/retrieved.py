"""What followed a context earlier, as an input: the mean embedding of the tokens that did, by how
sure it is.

Earlier in the run, as :mod:`jspeed.retrieval` tells it, or :func:`earlier` in the document.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jspeed.model.kv_cache import active_cache
from jspeed.model.layers import rms_norm
from jspeed.retrieval import Matches

# Borders of how often a context occurred, and of the share of the token that followed most often:
# those of PR 367 of modded-nanogpt.
OFTEN = (2, 3, 5, 9, 17, 33)
SHARE = (0.3, 0.5, 0.7, 0.85, 0.95)


def number_of_cells(lengths: Sequence[int]) -> int:
    """How many cells :func:`cells` tells apart for contexts of these ``lengths``."""
    return 1 + len(lengths) * (len(OFTEN) + 1) * (len(SHARE) + 1)


def cells(matches: Matches, lengths: Sequence[int]) -> jax.Array:
    """Return the cell of every position, int32 ``[B, T]``: 0 where nothing was found, else by the
    length of the context, how often it occurred, and how large a share of that the first token has.
    """
    length_BT = _above(matches.lengths_BT, lengths)
    share_BT = matches.counts_BTK[..., 0] / jnp.maximum(matches.occurrences_BT, 1)
    cell_BT = (length_BT - 1) * (len(OFTEN) + 1) + _above(matches.occurrences_BT, OFTEN)
    cell_BT = cell_BT * (len(SHARE) + 1) + _above(share_BT, SHARE)
    return jnp.where(length_BT == 0, 0, 1 + cell_BT)


def terms(
    scales_CN: jax.Array | None,
    table_VD: jax.Array,
    matches: Matches | None,
    lengths: Sequence[int],
) -> list[tuple[jax.Array, jax.Array]]:
    """Return N terms for :func:`jspeed.model.mudd.blend`: the :func:`mean_embedding`, each time
    scaled by what the position's cell says; none without an index."""
    if scales_CN is None or matches is None:
        return []
    mean_BTD = mean_embedding(table_VD, matches)
    numbers_C = jnp.arange(len(scales_CN), dtype=jnp.int32)
    # A sum over cells, whose gradient is one too: that of an indexed read adds scalars one by one.
    of_cell_BTC = cells(matches, lengths)[..., None] == numbers_C[None, None]
    return [
        (jnp.sum(jnp.where(of_cell_BTC, scales_C, 0.0), axis=-1), mean_BTD)
        for scales_C in scales_CN.T
    ]


def mean_embedding(table_VD: jax.Array, matches: Matches) -> jax.Array:
    """Return the mean of the rows of ``table_VD`` that followed, each as often as it did, ``[B, T,
    D]`` of rms 1; 0 where nothing was found. No gradient reaches the table."""
    total_BT = jnp.maximum(jnp.sum(matches.counts_BTK, axis=-1), 1)
    share_BTK = (matches.counts_BTK / total_BT[..., None]).astype(table_VD.dtype)
    rows_BTKD = jax.lax.stop_gradient(table_VD)[matches.tokens_BTK]
    return rms_norm(jnp.einsum("btkd,btk->btd", rows_BTKD, share_BTK))


def earlier(tokens_BT: jax.Array, bos_id: int, lengths: Sequence[int]) -> Matches:
    """Return what followed the context up to each position when it last occurred in the same
    document: one token.

    The longest context of ``lengths`` (tokens, ascending) that occurred counts; ``occurrences_BT``
    says how often. Contexts are compared by hashes of 32 bits: of three lanes of 49,152 tokens one
    has a false match, for each length.
    """
    cache = active_cache()
    if cache is None:
        return _earlier(tokens_BT, bos_id, lengths)
    # Among all tokens that are cached: what is behind a position changes nothing there.
    found, position_BT = (
        _earlier(cache.cache.tokens_BS, bos_id, lengths),
        cache.positions_BT(tokens_BT.shape[1]),
    )
    return Matches(*(jax.vmap(lambda row, at: row[at])(x_BS, position_BT) for x_BS in found))


def _earlier(tokens_BT: jax.Array, bos_id: int, lengths: Sequence[int]) -> Matches:
    lanes, length = tokens_BT.shape
    tokens_BT, t_1T = tokens_BT.astype(jnp.int32), jnp.arange(length, dtype=jnp.int32)[None]
    first_BT = jax.lax.cummax(jnp.where(tokens_BT == bos_id, t_1T, 0), axis=1)
    hash_BT, hashes, none = (
        (first_BT.astype(jnp.uint32) + 1) * jnp.uint32(2246822519),
        [],
        jnp.uint32(2**32 - 1),
    )
    for back in range(lengths[-1]):
        before_BT = jnp.pad(tokens_BT, [(0, 0), (back, 0)])[:, :length].astype(jnp.uint32)
        hash_BT = (hash_BT ^ before_BT) * jnp.uint32(2654435769)
        hash_BT ^= hash_BT >> 15
        if back + 1 in lengths:
            hashes.append(jnp.where(t_1T - first_BT >= back, hash_BT, none))
    # Of all lengths at once: equal hashes become neighbours, in the order of their positions.
    n_1N = jnp.arange(len(lengths) * length, dtype=jnp.int32)[None]
    places_BN = jnp.broadcast_to(n_1N, (lanes, n_1N.size))
    hash_BN, place_BN = jax.lax.sort((jnp.concatenate(hashes, axis=1), places_BN), num_keys=1)
    begins_BN = jnp.concatenate(
        [jnp.ones((lanes, 1), bool), hash_BN[:, 1:] != hash_BN[:, :-1]], axis=1
    )
    before_BN = n_1N - jax.lax.cummax(jnp.where(begins_BN, n_1N, 0), axis=1)
    last_BN = jnp.where(begins_BN | (hash_BN == none), -1, jnp.roll(place_BN, 1, axis=1) % length)
    _, last_BN, before_BN = jax.lax.sort((place_BN, last_BN, before_BN), num_keys=1)
    last_BT, often_BT, length_BT = (jnp.zeros_like(tokens_BT) for _ in range(3))
    each = (jnp.split(x_BN, len(lengths), axis=1) for x_BN in (last_BN, before_BN))
    for context, last, often in zip(lengths, *each, strict=True):
        last_BT, often_BT, length_BT = (
            jnp.where(last >= 0, new, old)
            for new, old in ((last, last_BT), (often, often_BT), (context, length_BT))
        )
    next_BT = jnp.take_along_axis(tokens_BT, jnp.minimum(last_BT + 1, length - 1), axis=1) * (
        length_BT > 0
    )
    return Matches(next_BT[..., None], often_BT[..., None], length_BT, often_BT)


def _above(x: jax.Array, borders: Sequence[float]) -> jax.Array:
    """How many of ``borders`` each number reaches."""
    return jnp.searchsorted(jnp.array(borders, x.dtype), x, side="right", method="compare_all")
