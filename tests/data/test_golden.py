"""Hash of the first 1000 batches of a three-stage schedule (modded-nanogpt's shapes), equal in Rust
and everywhere.

The shards come from integers alone: token ``i`` of shard ``k`` is drawn from ``mix(2^32 k + i)``,
SplitMix64's finaliser. It is the document start 50256 when the draw is a multiple of 690, FineWeb's
mean length, and otherwise the draw shifted right by 16, modulo 50256.
``rust/dataloader/core/tests/golden.rs`` makes the same bytes. The lanes have their full length; the
four shards have 3M tokens each and are gone through about thirty times.
"""

import hashlib

import numpy as np
import pytest

from jspeed.data import Stage, TokenLoader

from .on_disk import shards_of
from .oracle import stream

DIGEST = "cd5041a3e2c2ff483025eca6267e2f76d79805695b0fd262e95c47e4b2304c39"
BOS = 50_256
STAGES = [
    Stage(333, 16_384, 896, 128),
    Stage(333, 32_768, 2048, 256),
    Stage(334, 49_152, 2048, 512),
]


def synthetic(shard: int, tokens: int = 3_000_000) -> np.ndarray:
    z = np.uint64(shard << 32) + np.arange(tokens, dtype=np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return np.where(z % np.uint64(690) == 0, BOS, (z >> np.uint64(16)) % np.uint64(BOS)).astype(
        "<u2"
    )


@pytest.fixture(scope="module")
def tokens():
    return [synthetic(shard) for shard in range(4)]


def digest(batches) -> str:
    sha = hashlib.sha256()
    for batch in batches:
        sha.update(batch)
    return sha.hexdigest()


@pytest.mark.slow
def test_the_model_has_the_known_hash(tokens):
    """The reference: modded-nanogpt's rules in NumPy give this number, and it goes from here into
    both tests."""
    assert (
        digest(rows for _, rows, _, _ in stream(tokens, STAGES, 8, "bos", BOS, epochs=99)) == DIGEST
    )


@pytest.mark.parametrize("processes", [1, 8])
def test_the_loader_has_the_known_hash(tokens, processes):
    shards = shards_of(*tokens)
    how = {"align": "bos", "schedule": STAGES, "epochs": None, "process_count": processes}
    parts = [TokenLoader(shards, process_index=index, **how) for index in range(processes)]
    assert digest(batch.tokens for step in zip(*parts, strict=True) for batch in step) == DIGEST
