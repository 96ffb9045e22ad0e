"""The longest proper prefix of every token that is itself a token of the vocabulary."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TABLE = Path(__file__).with_name("gpt2_prefixes.npz")  # uint16 [50,256]
NONE = 65_535


def longest_prefixes(vocabulary: Sequence[bytes]) -> NDArray[np.int32]:
    """Return the id of the longest proper prefix of each token that is itself a token, -1 where there is none."""
    ids = {token: id for id, token in enumerate(vocabulary) if token}
    return np.array(
        [
            next((ids[token[:end]] for end in range(len(token) - 1, 0, -1) if token[:end] in ids), -1)
            for token in vocabulary
        ],
        np.int32,
    )


@cache
def gpt2_prefixes(ordinary: int, size: int) -> NDArray[np.int32]:
    """Return :func:`longest_prefixes` of GPT-2's first ``ordinary`` byte pairs: int32 ``[size]``, -1 for other ids.

    An id from ``ordinary`` on is a special token, padding, or what a smaller vocabulary uses it for: no byte pair. The
    table of all 50,256 is a file beside this one, so that no vocabulary is fetched; a test makes it again.
    """
    with np.load(TABLE) as file:
        table = np.where(file["prefixes"] == NONE, -1, file["prefixes"].astype(np.int32))
    found = table[:ordinary]
    while (beyond := found >= ordinary).any():
        found = np.where(beyond, table[found], found)  # the next shorter prefix is the longest one of the longest
    return np.pad(found, (0, size - ordinary), constant_values=-1)
