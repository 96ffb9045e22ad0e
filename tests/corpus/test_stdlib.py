"""``jspeed prepare stdlib``: every source file in order, as bytes, prepared once."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import pytest

from jspeed.corpus import sources, tokenise

from ..refusals import refused
from .prepared import byte_documents, check_manifest, content_of, jsonl, prepare_bytes, script


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
    return tokenise.prepare_stdlib(tmp_path_factory.mktemp("stdlib") / "out")


def test_stdlib_holds_every_chosen_source_in_order(stdlib):
    manifest = check_manifest(stdlib)
    assert [manifest[key] for key in ("tokenizer", "vocab_size", "bos_id")] == ["bytes", 257, 256]
    assert sorted(os.listdir(stdlib)) == [
        "manifest.json",
        "stdlib_train_000001.bin",
        "stdlib_val_000000.bin",
    ]
    root = Path(os.__file__).parent
    names = {"train": [], "val": []}
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        parts = set(name.split("/"))
        if not parts & (sources.EXCLUDED_FOLDERS | sources.EXCLUDED_FILES) and path.stat().st_size:
            if not any(part.startswith(("config-", "_sysconfigdata")) for part in parts):
                hashed = int(hashlib.sha256(name.encode()).hexdigest()[:16], 16)
                names["val" if hashed % 32 == 0 else "train"].append(name)
    for split, expected in names.items():
        assert byte_documents(stdlib, split) == [(root / name).read_bytes() for name in expected]
    assert manifest["splits"]["val"]["tokens"] >= 200_000
    assert manifest["splits"]["train"]["tokens"] >= 5_000_000


def test_stdlib_manifest_names_no_place(stdlib):
    text = (stdlib / "manifest.json").read_text()
    assert str(Path(os.__file__).parent) not in text and str(stdlib) not in text
    assert json.loads(text)["source"]["python"].split()[-1] == ".".join(
        map(str, sys.version_info[:3])
    )


def test_stdlib_is_prepared_once_and_quick_to_find(stdlib, tmp_path, monkeypatch):
    monkeypatch.setenv("JSPEED_CACHE", str(tmp_path))
    folder = tokenise.prepare_stdlib()
    assert folder == tokenise.stdlib_folder() and folder.parent == tmp_path / "data"
    assert content_of(folder) == content_of(stdlib)
    monkeypatch.setattr(
        tokenise.sources, "stdlib_documents", lambda *_: pytest.fail("prepared again")
    )
    assert tokenise.prepare_stdlib() == folder
    assert (
        min(timed(tokenise.prepare_stdlib) for _ in range(3)) < 2
    )  # on a busy machine; preparing takes many times as long


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def test_another_python_gets_another_folder(monkeypatch):
    before = tokenise.stdlib_folder()
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    assert tokenise.stdlib_folder() != before


def test_stdlib_command(tmp_path):
    code, out, err = script(
        "stdlib", "--out", tmp_path / "x", JSPEED_CACHE=str(tmp_path / "unused")
    )
    assert (code, err) == (0, "") and "tokens a second" in out
    before = content_of(tmp_path / "x")
    code, out, err = script("stdlib", "--out", tmp_path / "x")
    assert (code, err) == (0, "") and "already there" in out
    assert content_of(tmp_path / "x") == before and os.listdir(tmp_path) == ["x"]


def test_stdlib_refuses_a_folder_of_something_else(stdlib, tmp_path):
    out = tmp_path / "x"
    prepare_bytes(jsonl(tmp_path / "a.jsonl", "ab"), out=out)
    refused("not empty", tokenise.prepare_stdlib, out)
