"""Choose which documents form the validation split."""

import numpy as np
from numpy.typing import NDArray

from jspeed.errors import BadInput

VAL_FRACTION = 0.01
VAL_DOCUMENTS = 32
DEFAULT = f"{VAL_FRACTION:.0%}, at least {VAL_DOCUMENTS} but at most a tenth"
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the step between SplitMix64's streams


def by_content_hash(
    hashes: NDArray[np.uint64], fraction: float | None = None, seed: int = 0
) -> NDArray[np.bool_]:
    """Return which documents form the validation split, by the hashes of their contents:
    independent of their position.

    Equal documents stay together. The split has ``fraction`` of the distinct documents, at least
    one and never all. Without a fraction it has 1 %, but not fewer than 32 or a tenth of all,
    whichever is less: a handful of documents is a noisy measure. Another seed picks others; seed 0
    takes the smallest hashes. Raises BadInput when there are not two distinct documents.
    """
    ranks = splitmix64(hashes, seed) if seed else hashes
    distinct = np.unique(ranks)
    count = distinct.size
    if count < 2:
        held = "no documents" if count == 0 else "one document, or copies of one"
        raise BadInput(
            f"the input holds {held}; expected two or more, one for training and one for validation"
        )
    if fraction is None:
        wanted = max(round(VAL_FRACTION * count), min(VAL_DOCUMENTS, count // 10))
    else:
        wanted = round(fraction * count)
    return ranks <= distinct[min(max(wanted, 1), count - 1) - 1]


def by_permutation(count: int, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Return which of ``count`` documents are for validation, as Hugging Face's
    ``train_test_split`` draws test rows.

    That is how nanoGPT splits OpenWebText: fraction 0.0005, seed 2357, 4,007 of 8,013,769
    documents.
    """
    is_val = np.zeros(count, np.bool_)
    is_val[np.random.default_rng(seed).permutation(count)[: int(np.ceil(fraction * count))]] = True
    return is_val


def splitmix64(hashes: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Return SplitMix64's output for each hash, advanced by ``seed`` steps: one to one, so distinct
    stay distinct."""
    z = hashes + np.uint64(seed * GOLDEN % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
