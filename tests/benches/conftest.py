"""``benches`` as ``scripts/bench.py`` imports it, and a folder of shards."""

from pathlib import Path

import pytest

from ..data.on_disk import shard_bytes
from .call_bench import SCRIPTS


@pytest.fixture(autouse=True)
def benches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests import ``benches``."""
    monkeypatch.syspath_prepend(SCRIPTS)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for split in "train", "val":
        (folder / f"toy_{split}_000000.bin").write_bytes(
            shard_bytes([256, *b"round and round " * 200])
        )
    return folder
