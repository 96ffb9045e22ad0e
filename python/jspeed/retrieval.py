"""What a recipe asks of the index of earlier steps, what it is told, and how that reaches the
devices. Imports no jax.

A row of a batch is its tokens and, with retrieval, behind them what is known of each input: one
array, whose rows are divided over devices and micro-batches as ever.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from jspeed.fields import Count, integer, misfits


@dataclass(frozen=True)
class Retrieval:
    """What a forward pass is told of earlier steps: which tokens followed the context up to each
    position, in the documents that this run has trained on so far.

    The longest context of ``lengths`` (tokens, ascending) that occurred counts, by its ``recent``
    last occurrences; of the tokens that followed, the ``top`` most frequent are told.
    """

    lengths: tuple[Annotated[int, integer(1, 255)], ...] = (6, 10, 20)
    recent: Annotated[int, integer(1, 255)] = 96
    top: Count = 4

    @property
    def words(self) -> int:
        """How many numbers a position is told: :class:`Matches`, one after the other."""
        return 2 * self.top + 2

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the fields."""
        for where, expected, found in misfits(self, Retrieval, "retrieval"):
            yield f"{where} is {found}; expected {expected}"
        if not self.lengths or list(self.lengths) != sorted(set(self.lengths)):
            yield (
                f"retrieval looks for contexts of {self.lengths} tokens; give at least one length,"
                " ascending"
            )
        if self.top > self.recent:
            yield (
                f"retrieval tells {self.top} tokens of {self.recent} occurrences; give at most as"
                " many"
            )


class Matches(NamedTuple):
    """What followed the contexts of rows ``[B, T]`` earlier: integers that a :class:`Retrieval`
    asks for.

    ``tokens_BTK`` followed ``counts_BTK`` times, the most frequent first (0: there are fewer), of
    ``occurrences_BT`` of a context of ``lengths_BT`` tokens (0: none of these lengths occurred).
    """

    tokens_BTK: Any
    counts_BTK: Any
    lengths_BT: Any
    occurrences_BT: Any


def packed(tokens: NDArray[Any], matches: Matches, dtype: DTypeLike) -> NDArray[Any]:
    """Return rows ``[B, T + 1 + T x Retrieval.words]`` of ``tokens`` (ids ``[B, T + 1]``) and the
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


def unpacked(asked: Retrieval | None, rows: Any) -> tuple[Any, Matches | None]:
    """Return the tokens ``[B, T + 1]`` of ``rows`` (NumPy's or JAX's), and what is behind them:
    None without retrieval."""
    if asked is None:
        return rows, None
    top, length = asked.top, (rows.shape[1] - 1) // (1 + asked.words)
    words_BTW = rows[:, length + 1 :].reshape(rows.shape[0], length, asked.words)
    return rows[:, : length + 1], Matches(
        words_BTW[..., :top], words_BTW[..., top : 2 * top], words_BTW[..., -2], words_BTW[..., -1]
    )
