"""Whether a loss depends on what comes later: validation rows with other ends, evaluated again.

The executable, the batch and its shapes are those of every evaluation, so that no recipe can tell
one from the other. What is changed is drawn from the operating system's entropy after the run.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.unsignedinteger[Any]]
Losses = Callable[[Ids], NDArray[np.float32]]

CUTS = 1024  # ends that are changed at least, where 8 evaluations suffice for as many
REPEATS = (
    4  # times the largest difference between two evaluations of the same rows: 0 where bits agree
)


def draw_entropy() -> str:
    """Return 128 bits in hexadecimal digits that nobody can have known before."""
    return os.urandom(16).hex()


class Text(NamedTuple):
    """Validation ``rows``, ids below ``vocabulary`` ``[R, T + 1]``, of documents that start with
    ``bos_id``; attention has room for ``most_docs`` of a row, None: for all."""

    rows: Ids
    vocabulary: int
    bos_id: int
    most_docs: int | None


def causality(
    text: Text,
    before: NDArray[np.float32],
    again: NDArray[np.float32],
    losses: Losses,
    entropy: str,
) -> dict[str, Any]:
    """Compare the losses of the rows of ``text``, which were ``before`` and, evaluated once more,
    ``again``, with those of rows of other ends.

    ``losses(inputs)`` gives those of the same targets, ``[R, T]``, whatever the inputs are. Every
    pass draws for every row from where on its inputs are others, and what they are: text from
    elsewhere, text that goes on after the same token elsewhere, ids at random, or one other id. A
    loss before that position must not change, nor any loss of a row that is left alone while
    others are replaced. A recipe that looks ahead at a share f of the positions escapes n changed
    ends with a chance of (1 - f)^n. The same program on the same values gives the same bits; two
    evaluations of the same rows say how far a device departs from that, which is the tolerance.

    Raises :class:`FloatingPointError` for a loss that is not a number, which would hide a leak.
    """
    rng = np.random.default_rng(int(entropy, 16))
    rows = text.rows
    tolerance = REPEATS * float(np.max(np.abs(finite(again) - finite(before))))
    passes = passes_over(len(rows))
    longest = max(lengths_of(rows, text.bos_id))
    leak = 0.0
    moved = np.inf
    positions = text_after(rows)
    for number in range(passes + 1):
        if number == passes:
            changed = replaced_rows(rng, rows)
        else:
            changed = other_ends(rng, rows, positions, text.vocabulary)
            broken = ~allowed(changed, text, longest)
            changed[broken] = same_documents(rng, text, rows[broken], changed[broken])
        differs = changed[:, :-1] != rows[:, :-1]
        difference = np.abs(finite(losses(changed)) - before)
        later = np.logical_or.accumulate(differs, axis=1)
        leak = max(leak, float(np.max(np.where(later, 0.0, difference))))
        counted = later & (before != 0)  # targets without weight have a loss of 0, whatever comes
        if counted.any():
            moved = min(moved, float(np.max(difference[counted])))
    return {
        "passed": leak <= tolerance and 0 < moved < np.inf,
        "leak": leak,
        "moved": moved if np.isfinite(moved) else 0.0,
        "tolerance": tolerance,
        "changed": passes * len(rows),
        "entropy": entropy,
    }


def passes_over(rows: int) -> int:
    """Return how often the ends of so many rows are changed."""
    return int(np.clip(-(-CUTS // rows), 2, 8))


def finite(losses: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return ``losses``; raises :class:`FloatingPointError` where one is not finite."""
    if not np.isfinite(losses).all():
        raise FloatingPointError("a loss of the rows or of their changed inputs is not finite")
    return losses


def text_after(rows: Ids) -> tuple[Ids, NDArray[np.intp], NDArray[np.intp]]:
    """Return the text of all rows, where each id occurs in it, and where those positions begin for
    each id."""
    text = rows[:, :-1].reshape(-1)
    order = np.argsort(text, kind="stable")
    starts = np.searchsorted(text[order], np.arange(int(text.max()) + 2))
    return text, order, starts


def other_ends(
    rng: np.random.Generator,
    rows: Ids,
    positions: tuple[Ids, NDArray[np.intp], NDArray[np.intp]],
    ids: int,
) -> Ids:
    """Return ``rows`` with other inputs from a position of each on."""
    text, order, starts = positions
    changed = rows.copy()
    length = rows.shape[1] - 1
    for row in changed:
        cut = int(rng.integers(1, length)) if length > 1 else 0
        kind = rng.integers(4)
        rest = length - cut
        if kind == 0:
            begin = int(rng.integers(len(text)))
            row[cut:length] = np.take(text, range(begin, begin + rest), mode="wrap")
        elif kind == 1:
            last = int(row[max(cut - 1, 0)])
            begin = int(order[rng.integers(starts[last], starts[last + 1])]) + 1
            row[cut:length] = np.take(text, range(begin, begin + rest), mode="wrap")
        elif kind == 2:
            row[cut:length] = rng.integers(0, ids, rest)
        else:
            row[cut] = text[rng.integers(len(text))]
    return changed


def replaced_rows(rng: np.random.Generator, rows: Ids) -> Ids:
    """Return ``rows`` with half of them replaced by others of them."""
    changed = rows.copy()
    chosen = rng.random(len(rows)) < 0.5
    changed[chosen] = rows[rng.integers(0, len(rows), int(chosen.sum()))]
    return changed


def lengths_of(rows: Ids, bos_id: int) -> list[int]:
    """Return the tokens of the longest document of each row's inputs; a row begins with one."""
    starts = rows[:, :-1] == bos_id
    starts[:, 0] = True
    return [int(np.max(np.diff(np.flatnonzero(row), append=row.size))) for row in starts]


def allowed(rows: Ids, text: Text, longest: int) -> NDArray[np.bool_]:
    """Return for each row whether attention has room for its documents, and none is longer than
    ``longest``."""
    documents = 1 + np.sum(rows[:, 1:-1] == text.bos_id, axis=1)
    short = np.array(lengths_of(rows, text.bos_id)) <= longest
    return short & (documents <= (text.most_docs or rows.shape[1]))


def same_documents(rng: np.random.Generator, text: Text, rows: Ids, changed: Ids) -> Ids:
    """Return ``changed`` rows with documents where those of ``rows`` begin and nowhere else."""
    others = rng.integers(0, max(text.vocabulary - 1, 1), changed.shape)
    others += others >= text.bos_id
    plain = np.where(changed == text.bos_id, others.astype(changed.dtype), changed)
    return np.where(rows == text.bos_id, rows, plain)
