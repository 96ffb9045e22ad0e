"""Tokens made of documents of many lengths, as batches and as shards in the records' format."""

from pathlib import Path

import numpy as np


def documents(rng: np.random.Generator, bos: int, count: int, longest: int) -> np.ndarray:
    """``count`` tokens below ``bos`` in documents that start with ``bos``; the first starts in the
    middle."""
    parts: list[np.ndarray] = [rng.integers(0, bos, longest // 3)]
    while sum(map(len, parts)) < count:
        body = rng.integers(0, bos, int(rng.integers(1, longest)))
        parts.append(np.concatenate([[bos], body]))
    return np.concatenate(parts)[:count].astype(np.uint16)


def write_shards(folder: Path, split: str, shards: list[np.ndarray]) -> None:
    """Write ``folder/data/fineweb10B/fineweb_SPLIT_00000N.bin``."""
    place = folder / "data" / "fineweb10B"
    place.mkdir(parents=True, exist_ok=True)
    for number, tokens in enumerate(shards):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, len(tokens)
        (place / f"fineweb_{split}_{number:06}.bin").write_bytes(
            header.tobytes() + tokens.astype("<u2").tobytes()
        )
