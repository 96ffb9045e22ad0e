"""Which tokens a stream has read, and how many of the validation tokens occur among them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jspeed._dataloader import HEADER_BYTES, Shards
from jspeed.base.cores import cores

BLOCK = 64  # tokens that must agree: longer than a phrase, shorter than a document
CHUNK = 1 << 22  # tokens hashed at once: 34 MB for each of a handful of arrays
ROOT = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
TABLE_BITS = 24


class TokenRange(NamedTuple):
    """The tokens of a shard from ``first`` up to ``end``."""

    path: Path
    first: int
    end: int


def trained_on(shards: Shards, position: dict[str, Any]) -> list[TokenRange]:
    """Return the tokens that a stream at ``position`` can have read.

    A stream in order has read every shard up to the present one and that one up to its offset.
    After a whole epoch, or in a shuffled order, any token may have been read.
    """
    sizes = [(path.stat().st_size - HEADER_BYTES) // shards.dtype.itemsize for path in shards.paths]
    whole = [TokenRange(path, 0, size) for path, size in zip(shards.paths, sizes, strict=True)]
    if position["epoch"] or position["shuffle"] != "none":
        return whole
    before, present = whole[: position["shard"]], whole[position["shard"]]
    end = min(position["offset"] + 1, present.end)  # the last input's target
    return [*before, present._replace(end=end)] if position["step"] else []


def overlap(
    ranges: Sequence[TokenRange], dtype: np.dtype, validation: NDArray[np.unsignedinteger]
) -> float:
    """Return the share of blocks of 64 ``validation`` tokens (ids ``[N]``) that occur in the
    training tokens.

    ``ranges`` are what was trained on, stored as ``dtype``. Equality is that of 64-bit polynomial
    hashes. A false match has a chance of one in 10^5 or less for a whole training set. About 70 ns
    a token on one core. Raises OSError when a shard cannot be read.
    """
    block = min(BLOCK, len(validation))
    count = len(validation) // block
    root, inverse = np.uint64(ROOT), np.uint64(pow(ROOT, -1, 2**64))
    longest = max((piece.end - piece.first for piece in ranges), default=0)
    powers, inverses = (_powers(base, min(CHUNK, longest) + block) for base in (root, inverse))
    blocks = validation[: count * block].reshape(count, block).astype(np.uint64) + np.uint64(1)
    keys = (blocks * powers[:block]).sum(axis=1, dtype=np.uint64)
    known = np.unique(keys)
    table = np.zeros(1 << TABLE_BITS, bool)
    table[_slot(known)] = True

    def seen(piece: TokenRange) -> NDArray[np.uint64]:
        path, first, end = piece
        tokens = np.fromfile(
            path, dtype, count=end - first, offset=HEADER_BYTES + first * dtype.itemsize
        )
        if len(tokens) < block:
            return np.empty(0, np.uint64)
        sums = (tokens.astype(np.uint64) + np.uint64(1)) * powers[: len(tokens)]
        np.cumsum(sums, out=sums)
        hashes = sums[block - 1 :].copy()
        hashes[1:] -= sums[:-block]
        hashes *= inverses[: len(hashes)]
        return np.intersect1d(hashes[table[_slot(hashes)]], known)

    pieces = [
        TokenRange(path, start, min(start + CHUNK + block - 1, end))
        for path, first, end in ranges
        for start in range(first, end, CHUNK)
    ]
    with ThreadPoolExecutor(min(16, cores())) as pool:
        found = np.concatenate([np.empty(0, np.uint64), *pool.map(seen, pieces)])
    return float(np.isin(keys, found).mean())


def _slot(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    return (keys >> np.uint64(64 - TABLE_BITS)).astype(np.int64)


def _powers(base: np.uint64, count: int) -> NDArray[np.uint64]:
    """Return ``base ** n`` modulo 2^64 for ``n`` below ``count``."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)
