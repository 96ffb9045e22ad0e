"""N-gram look-up as an input: the mean embedding of the tokens that
followed, by how sure it is."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jspeed.model.layers import rms_norm
from jspeed.retrieval.rows import Matches

# Borders of how often a context occurred, and of the share of the token that followed most often:
# those of PR 367 of modded-nanogpt.
OFTEN = (2, 3, 5, 9, 17, 33)
SHARE = (0.3, 0.5, 0.7, 0.85, 0.95)


def number_of_cells(lengths: Sequence[int]) -> int:
    """How many cells :func:`cells` tells apart for contexts of these ``lengths``."""
    return 1 + len(lengths) * (len(OFTEN) + 1) * (len(SHARE) + 1)


def cells(matches: Matches, lengths: Sequence[int]) -> jax.Array:
    """Return the cell of every position, int32 ``[B, T]``: 0 where nothing was found; else by the
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
    """Return N terms for :func:`jspeed.speedrun.mudd.blend`: the :func:`mean_embedding`, each time
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


def _above(x: jax.Array, borders: Sequence[float]) -> jax.Array:
    """How many of ``borders`` each number reaches."""
    return jnp.searchsorted(jnp.array(borders, x.dtype), x, side="right", method="compare_all")
