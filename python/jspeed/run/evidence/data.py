"""The tokens of a run as evidence: their hashes for run.json, and how many validation tokens were
trained on."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jspeed.cores import cores
from jspeed.data import Shards
from jspeed.data.find_shards import HEADER_BYTES
from jspeed.data.retriever import looked_up
from jspeed.errors import BadInput
from jspeed.files import sha256_of
from jspeed.record.schema import Data, Holdout
from jspeed.run import evaluate
from jspeed.run.setup import Setup

BLOCK = 64  # tokens that must agree: longer than a phrase, shorter than a document
CHUNK = 1 << 22  # tokens hashed at once: 34 MB for each of a handful of arrays
ROOT = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
TABLE_BITS = 24


class TokenRange(NamedTuple):
    """The tokens of a shard from ``first`` up to ``end``."""

    path: Path
    first: int
    end: int


def data_evidence(setup: Setup, hashed: bool) -> Data:
    """Return run.json's ``data``; hashes are null unless ``hashed``.

    Hashes of shards that can no longer be read are null, so that the record is still written.
    """
    read, position = setup.data, setup.data.loader.state_dict()
    ranges: list[TokenRange] = []
    hashes: list[str | None] = []
    val_sha256 = None
    with suppress(OSError, BadInput):
        ranges = trained_on(read.shards, position)
        hashes = [None] * len(ranges)
        if hashed:
            with ThreadPoolExecutor(min(16, cores())) as pool:
                hashes = list(pool.map(lambda part: sha256_of(part.path), ranges))
            val_sha256 = sha256_of_rows(read.rows, setup)
    found: Data = {
        "name": setup.recipe.data.name,
        "fingerprint": read.shards.fingerprint,
        "val_fingerprint": read.val_shards.fingerprint,
        "train_tokens": read.shards.num_tokens,
        "val_tokens": setup.validation.tokens,
        "tokenizer": read.manifest.get("tokenizer"),
        "val_sha256": val_sha256,
        "train_shards": [
            {"name": part.path.name, "sha256": digest, "first": part.first, "end": part.end}
            for part, digest in zip(ranges, hashes, strict=True)
        ],
        "position": {
            name: position[name]
            for name in ("step", "epoch", "shard", "offset", "shuffle", "config_hash")
        },
    }
    source = read.manifest.get("source") or {}
    if source.get("kind") == "stdlib":
        found["python"] = source["python"]
    return found


def ids_of(rows: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Return the ids that the loss of evaluation ``rows`` is a mean over and the one after them:
    ``[N + 1]``."""
    return np.append(rows[:, :-1].reshape(-1), rows[-1, -1])


def sha256_of_rows(rows: NDArray[np.unsignedinteger], setup: Setup) -> str:
    """Return the SHA-256 of the ids of evaluation ``rows``, little-endian in the recipe's dtype."""
    return hashlib.sha256(
        ids_of(rows).astype(setup.recipe.data.dtype.newbyteorder("<")).tobytes()
    ).hexdigest()


def evaluate_holdout(setup: Setup, holdout: evaluate.HoldoutRows, params: Any) -> Holdout:
    """Evaluate the track's second range of the validation tokens by the program of the first; every
    process must."""
    first, rows = holdout
    known = looked_up(setup.data.loader, rows)
    validation = evaluate.to_devices(
        known, setup.program.eval_rows, setup.recipe, setup.placement.mesh
    )
    validation.impossible = setup.validation.impossible
    loss = evaluate.validation_loss(setup.program.evaluate, params, validation)
    sha256 = sha256_of_rows(rows, setup)
    return {"first": first, "tokens": validation.tokens, "sha256": sha256, "val_loss": loss}


def overlap_of_run(setup: Setup) -> float:
    """Return the share of the validation tokens that occur in the tokens trained on
    (:func:`overlap`)."""
    ranges = trained_on(setup.data.shards, setup.data.loader.state_dict())
    return overlap(ranges, setup.data.shards.dtype, ids_of(setup.data.rows))


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
    hashes, so that a false match has a chance of one in 10^5 or less for a whole training set.
    About 70 ns a token on one core. Raises OSError when a shard cannot be read.
    """
    block = min(BLOCK, len(validation))
    count = len(validation) // block
    root, inverse = np.uint64(ROOT), np.uint64(pow(ROOT, -1, 2**64))
    powers, inverses = (_powers(base, CHUNK + block) for base in (root, inverse))
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
