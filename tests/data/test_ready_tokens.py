"""``jspeed prepare tokens``: ids of nanoGPT and build-nanogpt, and files that are none."""

import json
import os
import shutil

import numpy as np
import pytest

from jspeed.corpus import tokenizers
from jspeed.corpus.shards import ready_tokens
from jspeed.corpus.shards.ready_tokens import convert_tokens
from jspeed.corpus.tokenizers import named_facts
from jspeed.data.manifest import verify

from ..corpus.prepared import read_split, script
from ..multi_process import said
from ..refusals import refused
from .on_disk import shard_bytes

# nanoGPT's: a mark after each document
TRAIN = np.array([1, 2, 256, 3, 4, 5, 256, 256, 6, 7, 8, 9, 256], "<u2")
VAL = np.array([256, 1, 2, 256, 3], "<u2")  # build-nanogpt's: before


def prepare_tokens(folder, out, tokenizer="bytes", *progress):
    return convert_tokens(folder, out, *named_facts(tokenizer), *progress)


def write(folder, train, val):
    folder.mkdir()
    for name, content in (train, val):
        np.save(folder / name, content) if name.endswith(".npy") else content.tofile(folder / name)
    return folder


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
@pytest.mark.parametrize(
    "names", [("train.bin", "val.bin"), ("edu_train_000001.npy", "edu_val_000000.npy")]
)
@pytest.mark.parametrize("dtype", ["<u2", "<i8"])
def test_the_same_tokens(tmp_path, monkeypatch, names, dtype, chunk):
    monkeypatch.setattr(ready_tokens, "CHUNK", chunk)
    dtype = dtype if names[0].endswith(".npy") else "<u2"
    folder = write(
        tmp_path / "in", *zip(names, (TRAIN.astype(dtype), VAL.astype(dtype)), strict=True)
    )
    (folder / "readme.bin").write_bytes(b"x")  # of no split
    told = []
    out = prepare_tokens(
        folder, tmp_path / "out", "bytes", lambda count, total: told.append((count, total))
    )
    for split, tokens in (("train", TRAIN), ("val", VAL)):
        np.testing.assert_array_equal(read_split(out, split), tokens)
    manifest = json.loads((out / "manifest.json").read_text())
    assert verify(out) and [file["documents"] for file in manifest["files"]] == [4, 2]
    assert list(manifest["source"]["files"]) == list(names) and manifest["tokenizer"] == "bytes"
    total = np.dtype(dtype).itemsize * (TRAIN.size + VAL.size)
    assert sum(count for count, _ in told) == total and {total for _, total in told} == {total}
    stamp = (out / "manifest.json").stat().st_mtime_ns
    assert prepare_tokens(folder, out) == out
    assert (out / "manifest.json").stat().st_mtime_ns == stamp
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


BAD = {
    "no folder": (lambda f: shutil.rmtree(f), "input folder {} cannot be read (No such file"),
    "no tokens": (lambda f: [path.unlink() for path in f.iterdir()], "{} holds no tokens"),
    "one split": (lambda f: (f / "val.bin").unlink(), "the val split of "),
    "too large": (lambda f: np.array([1, 2, 257], "<u2").tofile(f / "val.bin"), "token id 257 at "),
    "negative": (lambda f: np.save(f / "x_val_1.npy", np.array([1, -2])), "token id -2 at "),
    "odd": (lambda f: (f / "val.bin").write_bytes(b"abc"), "val.bin holds no ids of tokens"),
    "empty": (lambda f: (f / "val.bin").write_bytes(b""), "val.bin holds no ids of tokens"),
    "no array": (lambda f: (f / "val_1.npy").write_bytes(b"abc"), "val_1.npy holds no ids"),
    "pickle": (lambda f: np.save(f / "val_1.npy", np.array([{}])), "val_1.npy holds no ids"),
    "several arrays": (
        lambda f: np.savez(f / "x.npz", x=VAL) or (f / "x.npz").rename(f / "val_1.npy"),
        "no ids of",
    ),
    "table": (lambda f: np.save(f / "val_1.npy", np.ones((2, 3), int)), "(2, 3) of int64"),
    "numbers": (lambda f: np.save(f / "val_1.npy", np.ones(3)), "holds an array (3,) of float64"),
    "a shard": (lambda f: (f / "val.bin").write_bytes(shard_bytes()), "val.bin is a shard already"),
    "a pipe": (lambda f: os.mkfifo(f / "val_1.bin"), "val_1.bin cannot be read"),
    "characters": (lambda f: (f / "meta.pkl").touch(), "ids in {} are of characters"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_what_holds_no_tokens_of_the_tokenizer(tmp_path, change, message):
    folder = write(tmp_path / "in", ("train.bin", TRAIN), ("val.bin", VAL))
    change(folder)
    sentence = said(lambda: prepare_tokens(folder, tmp_path / "out"))
    assert message.format(folder) in sentence and "\n" not in sentence
    assert not (tmp_path / "out").exists()


def test_gpt2_s_ids_need_no_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers, "named_tokenizer", None)
    out = prepare_tokens(
        write(tmp_path / "in", ("train.bin", TRAIN), ("val.bin", VAL)), tmp_path / "out", "gpt2"
    )
    assert json.loads((out / "manifest.json").read_text())["bos_id"] == 50256


def test_the_command(tmp_path):
    folder = write(tmp_path / "in", ("train.bin", TRAIN), ("val.bin", VAL))
    code, stdout, err = script("tokens", folder, "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert (code, err) == (0, "") and "train             13 tokens           4 documents" in stdout
    refused("not empty", prepare_tokens, folder, tmp_path / "in")
