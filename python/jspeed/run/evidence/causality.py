"""Whether a loss depends on what comes later: validation lanes with other ends, evaluated again.

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
    4  # times the largest difference between two evaluations of the same lanes: 0 where bits agree
)


def draw_entropy() -> str:
    """Return 128 bits in hexadecimal digits that nobody can have known before."""
    return os.urandom(16).hex()


class Text(NamedTuple):
    """Validation ``lanes``, ids below ``vocabulary`` ``[R, T + 1]``, of documents that start with
    ``bos_id``; attention has room for ``most_docs`` of a lane, None: for all."""

    lanes: Ids
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
    """Compare the losses of the lanes of ``text``, which were ``before`` and, evaluated once more,
    ``again``, with those of lanes of other ends.

    ``losses(inputs)`` gives those of the same targets, ``[R, T]``, whatever the inputs are. Every
    pass draws for every lane from where on its inputs are others, and what they are: text from
    elsewhere, text that goes on after the same token elsewhere, ids at random, or one other id. A
    loss before that position must not change, nor any loss of a lane that is left alone while
    others are replaced. A recipe that looks ahead at a share f of the positions escapes n changed
    ends with a chance of (1 - f)^n. The same program on the same values gives the same bits; two
    evaluations of the same lanes say how far a device departs from that, which is the tolerance.

    Raises :class:`FloatingPointError` for a loss that is not a number, which would hide a leak.
    """
    rng = np.random.default_rng(int(entropy, 16))
    lanes = text.lanes
    tolerance = REPEATS * float(np.max(np.abs(finite(again) - finite(before))))
    passes = passes_over(len(lanes))
    longest = max(lengths_of(lanes, text.bos_id))
    leak = 0.0
    moved = np.inf
    positions = text_after(lanes)
    for number in range(passes + 1):
        if number == passes:
            changed = replaced_lanes(rng, lanes)
        else:
            changed = other_ends(rng, lanes, positions, text.vocabulary)
            broken = ~allowed(changed, text, longest)
            changed[broken] = same_documents(rng, text, lanes[broken], changed[broken])
        differs = changed[:, :-1] != lanes[:, :-1]
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
        "changed": passes * len(lanes),
        "entropy": entropy,
    }


def passes_over(lanes: int) -> int:
    """Return how often the ends of so many lanes are changed."""
    return int(np.clip(-(-CUTS // lanes), 2, 8))


def finite(losses: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return ``losses``; raises :class:`FloatingPointError` where one is not finite."""
    if not np.isfinite(losses).all():
        raise FloatingPointError("a loss of the lanes or of their changed inputs is not finite")
    return losses


def text_after(lanes: Ids) -> tuple[Ids, NDArray[np.intp], NDArray[np.intp]]:
    """Return the text of all lanes, where each id occurs in it, and where those positions begin for
    each id."""
    text = lanes[:, :-1].reshape(-1)
    order = np.argsort(text, kind="stable")
    starts = np.searchsorted(text[order], np.arange(int(text.max()) + 2))
    return text, order, starts


def other_ends(
    rng: np.random.Generator,
    lanes: Ids,
    positions: tuple[Ids, NDArray[np.intp], NDArray[np.intp]],
    ids: int,
) -> Ids:
    """Return ``lanes`` with other inputs from a position of each on."""
    text, order, starts = positions
    changed = lanes.copy()
    length = lanes.shape[1] - 1
    for lane in changed:
        cut = int(rng.integers(1, length)) if length > 1 else 0
        kind = rng.integers(4)
        rest = length - cut
        if kind == 0:
            begin = int(rng.integers(len(text)))
            lane[cut:length] = np.take(text, range(begin, begin + rest), mode="wrap")
        elif kind == 1:
            last = int(lane[max(cut - 1, 0)])
            begin = int(order[rng.integers(starts[last], starts[last + 1])]) + 1
            lane[cut:length] = np.take(text, range(begin, begin + rest), mode="wrap")
        elif kind == 2:
            lane[cut:length] = rng.integers(0, ids, rest)
        else:
            lane[cut] = text[rng.integers(len(text))]
    return changed


def replaced_lanes(rng: np.random.Generator, lanes: Ids) -> Ids:
    """Return ``lanes`` with half of them replaced by others of them."""
    changed = lanes.copy()
    chosen = rng.random(len(lanes)) < 0.5
    changed[chosen] = lanes[rng.integers(0, len(lanes), int(chosen.sum()))]
    return changed


def lengths_of(lanes: Ids, bos_id: int) -> list[int]:
    """Return the tokens of the longest document of each lane's inputs; a lane begins with one."""
    starts = lanes[:, :-1] == bos_id
    starts[:, 0] = True
    return [int(np.max(np.diff(np.flatnonzero(lane), append=lane.size))) for lane in starts]


def allowed(lanes: Ids, text: Text, longest: int) -> NDArray[np.bool_]:
    """Return for each lane whether attention has room for its documents, and none is longer than
    ``longest``."""
    documents = 1 + np.sum(lanes[:, 1:-1] == text.bos_id, axis=1)
    short = np.array(lengths_of(lanes, text.bos_id)) <= longest
    return short & (documents <= (text.most_docs or lanes.shape[1]))


def same_documents(rng: np.random.Generator, text: Text, lanes: Ids, changed: Ids) -> Ids:
    """Return ``changed`` lanes with documents where those of ``lanes`` begin and nowhere else."""
    others = rng.integers(0, max(text.vocabulary - 1, 1), changed.shape)
    others += others >= text.bos_id
    plain = np.where(changed == text.bos_id, others.astype(changed.dtype), changed)
    return np.where(lanes == text.bos_id, lanes, plain)
