"""Tiny shards on disk for the tests of this folder, written byte by byte from the format's
description."""

import atexit
import tempfile
from pathlib import Path

import numpy as np

from jspeed.data import Shards, open_shards

FOLDER = tempfile.TemporaryDirectory(prefix="jspeed-tests-")
atexit.register(FOLDER.cleanup)


def shard_bytes(tokens=(1, 2, 3), magic=20240520, version=1, count=None, dtype="<u2") -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + np.asarray(tokens, dtype).tobytes()


def wide_bytes(tokens) -> bytes:
    return shard_bytes(tokens, 20240801, 7, dtype="<u4")


def shards_of(*shards, make=shard_bytes) -> Shards:
    """Write and open one shard for each sequence of token ids."""
    folder = Path(tempfile.mkdtemp(dir=FOLDER.name))
    paths = [folder / f"t_{i:03}.bin" for i in range(len(shards))]
    for path, tokens in zip(paths, shards, strict=True):
        path.write_bytes(make(tokens))
    return open_shards(paths)
