"""Tables of GPT-2's tokens: the longest proper prefix that is itself a token, and the class of
those of like text."""

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TABLE = Path(__file__).with_name("gpt2_prefixes.npz")  # uint16 [50,256]
CLASSES = TABLE.with_name("gpt2_classes.npz")  # uint16 [50,256]
NONE = 65_535


@cache
def gpt2_prefixes(ordinary: int, size: int) -> NDArray[np.int32]:
    """Return the longest proper prefix of GPT-2's first ``ordinary`` tokens: int32 ``[size]``, -1
    for none.

    Ids from ``ordinary`` on (special tokens, padding) have no prefix. The table is stored beside
    this file, so no vocabulary is downloaded; a test regenerates it.
    """
    with np.load(TABLE) as file:
        table = np.where(file["prefixes"] == NONE, -1, file["prefixes"].astype(np.int32))
    found = table[:ordinary]
    while (beyond := found >= ordinary).any():
        # the next shorter prefix is the longest one of the longest
        found = np.where(beyond, table[found], found)
    return np.pad(found, (0, size - ordinary), constant_values=-1)


@cache
def gpt2_classes(ordinary: int, size: int) -> NDArray[np.int32]:
    """Return for GPT-2's first ``ordinary`` tokens the first one of like text: int32 ``[size]``;
    others are themselves.

    Texts are alike that are equal after NFKC and in lower case, without accents (PR 375). Several
    blanks are one, and none at either end. Tokens that are not whole characters, or nothing but
    accents, stay themselves. The table is stored beside this file; a test regenerates it.
    """
    with np.load(CLASSES) as file:
        table = file["classes"].astype(np.int32)
    return np.concatenate([table[:ordinary], np.arange(ordinary, size, dtype=np.int32)])
