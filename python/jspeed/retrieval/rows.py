"""The n-gram look-ups of a batch, and how they lie behind the tokens of its rows.

Imports no jax."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Matches(NamedTuple):
    """N-gram look-ups of rows ``[B, T]``: what followed their contexts earlier, integers.

    ``tokens_BTK`` followed ``counts_BTK`` times, the most frequent first (0: there are fewer), of
    ``occurrences_BT`` of a context of ``lengths_BT`` tokens (0: none of these lengths occurred).
    """

    tokens_BTK: Any
    counts_BTK: Any
    lengths_BT: Any
    occurrences_BT: Any


def packed(tokens: NDArray[Any], matches: Matches, dtype: DTypeLike) -> NDArray[Any]:
    """Return rows ``[B, T + 1 + T x words]`` of ``tokens`` (ids ``[B, T + 1]``) and the
    ``matches`` of all but the last."""
    rows, length = matches.lengths_BT.shape
    parts = (
        matches.tokens_BTK,
        matches.counts_BTK,
        matches.lengths_BT[..., None],
        matches.occurrences_BT[..., None],
    )
    words_BTW = np.concatenate(parts, axis=-1, dtype=dtype, casting="unsafe")
    return np.concatenate([tokens.astype(dtype, copy=False), words_BTW.reshape(rows, -1)], axis=1)
