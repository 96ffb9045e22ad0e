"""Test helpers for prepared data: make inputs, run the script, read folders back without the
package."""

import gzip
import hashlib
import json
import lzma
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jspeed.corpus import tokenise

from ..call_script import call

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "prepare.py"
SHARED = ROOT.parent / "shared" / "data"
VOCABULARY = SHARED / "tiktoken_cache"
needs_gpt2 = pytest.mark.skipif(
    not VOCABULARY.is_dir(), reason=f"no GPT-2 vocabulary in {VOCABULARY}"
)


def read_shard(path):
    header = np.fromfile(path, dtype="<i4", count=256)
    tokens = np.fromfile(path, dtype="<u2", offset=1024)
    assert list(header[:3]) == [20240520, 1, len(tokens)] and not header[3:].any()
    return tokens


def read_split(folder, split):
    return np.concatenate([read_shard(path) for path in sorted(folder.glob(f"*_{split}_*.bin"))])


def documents_in(tokens, bos_id):
    starts = np.flatnonzero(tokens == bos_id)
    assert starts[0] == 0
    return [piece[1:] for piece in np.split(tokens, starts[1:])]


def byte_documents(folder, split):
    return [
        piece.astype(np.uint8).tobytes() for piece in documents_in(read_split(folder, split), 256)
    ]


def check_manifest(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {file["name"] for file in manifest["files"]} | {"manifest.json"} == set(
        os.listdir(folder)
    )
    for file in manifest["files"]:
        content = (folder / file["name"]).read_bytes()
        assert (file["bytes"], file["sha256"]) == (
            len(content),
            hashlib.sha256(content).hexdigest(),
        )
        tokens = read_shard(folder / file["name"])
        assert file["tokens"] == len(tokens)
        assert file["documents"] == np.count_nonzero(tokens == manifest["bos_id"])
    for split, total in manifest["splits"].items():
        its = [file for file in manifest["files"] if file["split"] == split]
        assert total["files"] == len(its)
        for what in ("bytes", "tokens", "documents"):
            assert total[what] == sum(file[what] for file in its)
    return manifest


def jsonl(path, texts):
    content = "".join(
        json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)
    ).encode()
    packed = {".xz": partial(lzma.compress, preset=0), ".gz": gzip.compress}.get(
        path.suffix.lower(), bytes
    )
    path.write_bytes(packed(content))
    return path


def prepare_bytes(*inputs, out, **options):
    return tokenise.prepare_text(inputs, out, tokenise.Tokenising("bytes", **options))


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def script(*arguments, **environment):
    """Exit code, stdout and stderr of prepare.py; with variables, in a process of its own."""
    if not environment:
        return call(Path(), "prepare.py", *arguments)
    command = [sys.executable, "-W", "error", str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    return done.returncode, done.stdout, done.stderr
