"""Files that stand for others, and web pages saved in their place, are never read as content."""

import codecs
import json
import os

import numpy as np
import pytest

from jspeed.base.files import open_regular, read_input, what_instead
from jspeed.corpus.chunks import documents, segments
from jspeed.corpus.sources import text_files, text_stamps
from jspeed.corpus.tokenizers import file_tokenizer
from jspeed.data import open_shards
from jspeed.data.manifest import read_manifest
from jspeed.inference.model_config import read_config
from jspeed.run import export
from jspeed.run.find_recipe import find

from .multi_process import said

LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
POINTERS = {
    "Git LFS": LFS,
    "before Git LFS": LFS.replace("git-lfs", "hawser"),
    "git-annex, unlocked": "/annex/objects/SHA256E-s7--0.txt\n",
    "git-annex, on FAT": "../../.git/annex/objects/x/y/SHA256E-s7--0/SHA256E-s7--0",
    "Xet": "# xet version 0\nfilesize = 7\nhash = '0'\n",
    "Google Drive": '{"url": "https://docs.google.com/open?id=1"}',
}


def text_of(path):
    return [text for segment in segments(path) for text in documents(segment)]


READERS = {
    "text.txt": text_of,
    "text.jsonl": text_of,
    "text.txt.zst": text_of,
    "text.parquet": text_of,
    "a_train.bin": lambda path: open_shards([path]),
    "model.safetensors": export.load,
    "tokenizer.json": file_tokenizer,
    "manifest.json": lambda path: read_manifest(path.parent),
    "config.json": lambda path: read_config(path.parent),
    "recipe.py": lambda path: find(str(path)),
}


@pytest.mark.parametrize("kind", POINTERS)
def test_a_pointer_is_named_with_what_fetches_it(tmp_path, kind):
    for name, read in READERS.items():
        path = tmp_path / name
        path.write_text(POINTERS[kind])
        message = said(lambda path=path, read=read: read(path))
        assert "not the file itself" in message and str(path) in message, (name, message)


def test_a_link_to_what_is_not_here_is_named(tmp_path):
    """As git-annex has locked files, and Hugging Face's cache a blob that was removed."""
    annexed = "../.git/annex/objects/F0/x/SHA256E-s7--0/SHA256E-s7--0"
    for target, word in ((annexed, "git annex get"), ("../../blobs/1f2e", "not here")):
        for name, read in READERS.items():
            path = tmp_path / name
            path.unlink(missing_ok=True)
            path.symlink_to(target)
            if name not in ("a_train.bin", "recipe.py", "config.json"):
                assert word in said(lambda path=path, read=read: read(path)), name
            assert word in str(what_instead(path))
        assert word in said(lambda: text_files([tmp_path / "text.txt"]))
        assert word in said(lambda: text_stamps([("a", tmp_path / "text.txt")]))


PAGES = [
    ("<!DOCTYPE html>\n<html><body>404</body>", "web page"),
    ("\ufeff  <HTML lang='en'>", "web page"),
    ("<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "web page"),
    ("Invalid username or password.", "the text 'Invalid username or password.'"),
    ("Entry not found\n", "the text 'Entry not found'"),
    ("\0" * 5000, "zeros only"),
]


@pytest.mark.parametrize(("page", "told"), PAGES)
def test_what_a_server_or_a_drive_gave_instead_is_told(tmp_path, page, told):
    for name in ("a_train.bin", "model.safetensors", "tokenizer.json", "text.parquet"):
        path = tmp_path / name
        path.write_text((page + "\n") * 50 if "\0" not in page else page)
        assert told in said(lambda path=path, name=name: READERS[name](path)), name
    if "\0" in page:
        path = tmp_path / "text.txt"
        path.write_text(page)
        assert told in said(lambda: text_of(path))


def test_texts_about_placeholders_are_texts(tmp_path):
    for text in ("version https://git-lfs is what a pointer begins with", LFS + "more\n" * 1000):
        (tmp_path / "a.txt").write_text(text)
        assert text_of(tmp_path / "a.txt") == [text.encode()]
    (tmp_path / "short").write_bytes(b"")
    with open_regular(tmp_path / "short") as file:
        assert file.read() == b"" == read_input(tmp_path / "short", "")


def test_a_byte_order_mark_is_no_content(tmp_path):
    """As Windows' editors write; in recipes, manifests, configs, tokenizers and texts."""
    recipe = find("stdlib").path.read_bytes()
    (tmp_path / "mine.py").write_bytes(codecs.BOM_UTF8 + recipe.replace(b"\n", b"\r\n"))
    (tmp_path / "same.py").write_bytes(recipe)
    marked, plain = (find(str(tmp_path / name)) for name in ("mine.py", "same.py"))
    assert marked.source == plain.source and marked.hash == plain.hash
    given = {"format_version": 1, "tokenizer": "bytes", "vocab_size": 257, "bos_id": 256}
    shard = {"name": "a_train.bin", "split": "train", "bytes": 1026, "sha256": "0" * 64}
    given |= {"source": {}, "files": [shard | {"tokens": 1, "documents": 1}]}
    config = {"recipe": "stdlib", "recipe_hash": "0", "fields": {}, "overrides": {}}
    texts = {"manifest.json": given, "config.json": config | {"tokenizer": None}}
    for name, content in texts.items():
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + json.dumps(content).encode())
    assert read_manifest(tmp_path)["vocab_size"] == 257
    assert read_config(tmp_path)["recipe"] == "stdlib"
    vocabulary = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    for mark in (b"", codecs.BOM_UTF8):
        (tmp_path / "tokenizer.json").write_bytes(mark + json.dumps({"model": vocabulary}).encode())
        made = file_tokenizer(tmp_path / "tokenizer.json")
        np.testing.assert_array_equal(made.encode(b"b"), [1])
        assert made.name.endswith("@" + made.name[-16:]) and made.content[:1] == b"{"
    os.remove(tmp_path / "tokenizer.json")
