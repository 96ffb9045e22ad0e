"""``python -m jspeed.data`` (data/__main__.py) describes a folder, and its ``--verify`` finds every
changed byte."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from jspeed.corpus.tokenise import Tokenising, prepare_text
from jspeed.data import ShardFormatError, open_shards
from jspeed.data.manifest import read_folder, read_manifest, verify

from ..refusals import refused
from .on_disk import shard_bytes


def command(*arguments):
    line = [sys.executable, "-m", "jspeed.data", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "texts").mkdir()
    for index in range(40):
        (tmp_path / "texts" / f"{index:02}.txt").write_text(f"Once upon a time {index}\n" * 20)
    return prepare_text(
        [tmp_path / "texts"], tmp_path / "out", Tokenising("bytes", shard_tokens=5000)
    )


def test_it_describes_and_verifies(folder):
    code, out, err = command(folder, "--verify")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (code, err) == (0, "")
    for split, total in manifest["splits"].items():
        assert f"{total['tokens']:,}" in out and f"{total['documents']}" in out
        assert open_shards(f"{folder}/*_{split}_*.bin").fingerprint in out
    assert "Once upon a time" in out and "tokenizer: bytes" in out and "verified: all " in out
    seen = []
    total = verify(folder, lambda done, total: seen.append((done, total)))
    assert (
        sum(done for done, _ in seen) == total == sum(file["bytes"] for file in manifest["files"])
    )


def test_a_changed_byte_a_lost_shard_and_a_short_one_are_found(folder):
    path = sorted(folder.glob("*_train_*.bin"))[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
    code, out, err = command(folder, "--verify")
    assert code == 2 and "train" in out
    assert err.startswith(f"error: shard {path} should have SHA-256 ") and err.count("\n") == 1
    path.write_bytes(whole[:-2])
    with pytest.raises(
        ShardFormatError, match=f"have {len(whole)} bytes but has {len(whole) - 2};"
    ):
        verify(folder)
    os.unlink(path)
    sorted(folder.glob("*_train_*.bin"))[0].write_bytes(b"")
    with pytest.raises(ShardFormatError, match=r"has 0 \(and 1 more shards are wrong\)"):
        verify(folder)


def test_without_a_manifest_documents_are_counted(tmp_path):
    tokens = np.array([50256, 40, 11, 50256, 40, 40, 50256, 11])
    (tmp_path / "fineweb_train_000001.bin").write_bytes(shard_bytes(tokens))
    code, out, err = command(tmp_path, "--verify")
    assert code == 2 and "no manifest.json with the hashes to verify against" in err
    assert "documents   3" in out and "not known without manifest.json" in out
    (tmp_path / "manifest.json").write_text("[]")
    refused(r"manifest.json: expected an object .* found \[\]", verify, tmp_path)
    for flags in ([], ["--verify"]):
        code, _, err = command(tmp_path, *flags)
        assert code == 2 and "manifest.json: expected an object" in err and err.count("\n") == 1
    assert command(tmp_path / "none")[0] == 2


def lose(folder, split):
    sorted(folder.glob(f"*_{split}_*.bin"))[-1].unlink()


def copy_as(name):
    def change(folder):
        path = sorted(folder.glob("*_train_*.bin"))[0]
        (folder / name.format(path.stem)).write_bytes(path.read_bytes())

    return change


def rename(folder):
    path = sorted(folder.glob("*_train_*.bin"))[0]
    path.rename(folder / "first.bin")


def shorten(folder):
    path = sorted(folder.glob("*_train_*.bin"))[-1]
    path.write_bytes(shard_bytes(np.arange(50)))


def dangle(folder):
    path = sorted(folder.glob("*_val_*.bin"))[0]
    path.unlink()
    path.symlink_to("/not/mounted")


CHANGES = {
    "train shard gone": (lambda folder: lose(folder, "train"), ("train",)),
    "val shard gone": (lambda folder: lose(folder, "val"), ("val",)),
    "a browser's copy": (copy_as("{} (1).bin"), ("train",)),
    "another's shard": (copy_as("more_train_000099.bin"), ("train",)),
    "hidden copy": (copy_as("._{}.bin"), ("train",)),
    "copy as val": (copy_as("copy_val.bin"), ("val",)),
    "renamed": (rename, ("train",)),
    "whole shard of another size": (shorten, ("train",)),
    "link to nothing": (dangle, ("val",)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_folder_is_what_its_manifest_says(folder, what):
    """Names and sizes, of the splits that are read, without --verify."""
    assert read_folder(folder) == read_manifest(folder)
    change, splits = CHANGES[what]
    change(folder)
    for asked in (("train",), ("val",), ("train", "val")):
        if set(asked) & set(splits):
            with pytest.raises(ShardFormatError, match=r"shard .*; .*, or make the folder again"):
                read_folder(folder, asked)
        else:
            read_folder(folder, asked)
    with pytest.raises(ShardFormatError, match="shard "):
        verify(folder)
    (folder / "manifest.json").unlink()
    assert read_folder(folder) is None


def test_other_files_in_a_folder_are_nobodys_business(folder):
    for name in ("notes.txt", "model.bin", "train.npy", "README"):
        (folder / name).write_text("mine")
    assert read_folder(folder)
