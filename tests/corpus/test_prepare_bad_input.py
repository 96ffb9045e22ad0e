"""``jspeed prepare text``: each bad input has its error message and leaves nothing behind."""

import gzip
import os
import re
from functools import partial

import pytest

from jspeed.corpus import named_data_sets, tokenise
from jspeed.errors import BadInput

from ..refusals import refused
from .prepared import byte_documents, jsonl, prepare_bytes, script

GOOD = b'{"text": "a"}\n{"text": "b"}\n'
# A file's name, its content, and what the message says behind or before the name.
BAD_FILES = {
    "unknown ending": ("a.csv", GOOD, r"NAME has an unknown ending; expected \.txt, "),
    "not JSON": ("a.jsonl", GOOD + b'{"text": \n', "line 3 of .*NAME is not JSON"),
    "nested too deep": ("a.jsonl", GOOD + b"[" * 200_000, "line 3 of .*NAME is not JSON"),
    "not an object": ("a.jsonl", b"[1]\n", "line 1 of .*NAME lacks the string field"),
    "no text": ("a.jsonl", GOOD + b'\n{"txt": ""}\n', "line 4 of .*NAME lacks the string field"),
    "text is a number": ("a.jsonl", b'{"text": 1}\n', "line 1 of .*NAME lacks the string field"),
    "half a surrogate pair": ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1 of .*NAME.* surrogate"),
    "not UTF-8 in JSON": ("a.jsonl", GOOD + b'{"text": "\xff"}\n', "NAME is not UTF-8 at byte 38"),
    "not UTF-8": ("a.txt", b"abc\xff", "NAME is not UTF-8 at byte 3"),
    "not UTF-8 later": ("a.txt", b"ab<|endoftext|>c\xffd", "NAME is not UTF-8 at byte 16"),
    "no documents": ("a.jsonl", b'\n{"text": ""}\n', "holds no documents"),
    "empty": ("a.txt", b"", "holds no documents"),
    "one document": ("a.txt", b"abc", "holds one document"),
    "compressed parquet": ("a.parquet.gz", gzip.compress(GOOD), "NAME has an unknown ending"),
    "json": ("a.json", GOOD, "NAME has an unknown ending"),
    "not parquet": ("a.parquet", GOOD, "NAME is corrupt or not parquet"),
    "copies": ("a.jsonl", GOOD[:14] * 5, "holds one document, or copies"),
    # What a compressed file lacks: tests/corpus/test_chunks.py.
    "not xz": ("a.jsonl.xz", GOOD, "NAME is corrupt or not xz"),
    "cut": ("A.TXT.GZ", gzip.compress(GOOD * 99)[:-9], "NAME is corrupt or not gzip"),
}


@pytest.mark.parametrize("name, content, message", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_file(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=message.replace("NAME", re.escape(name))) as raised:
        prepare_bytes(tmp_path / name, out=tmp_path / "new" / "out")
    assert "\n" not in str(raised.value)
    assert os.listdir(tmp_path) == [name]


def test_missing_input_and_empty_folder(tmp_path):
    for name in ("in", "with"):
        (tmp_path / name).mkdir()
    (tmp_path / "in" / "readme.rst").touch()
    jsonl(tmp_path / "with" / "a.jsonl", "ab")
    for name in ("pipe.txt", "with/pipe.txt"):
        os.mkfifo(tmp_path / name)
    for name, says in [
        ("no.jsonl", "no.jsonl does not exist"),
        ("in", r"input folder .*in holds no \.txt, "),
        ("x" * 300, "name too long|does not exist"),
        ("pipe.txt", "neither a file nor a folder"),
        ("with", r"with/pipe.txt cannot be read \(not a regular file\)"),
    ]:
        refused(says, prepare_bytes, tmp_path / name, out=tmp_path / "out")
    of_characters = partial(named_data_sets.prepare_shakespeare, characters=True)
    for made in (named_data_sets.prepare_names, of_characters):
        refused("pipe.txt cannot be read", made, tmp_path / "out", given=tmp_path / "pipe.txt")
    refused("no input was given", prepare_bytes, out=tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["in", "pipe.txt", "with"]


def test_bad_output(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", "ab")
    for out, says in [
        (source, "is a file"),
        (tmp_path, "not empty"),
        (source / "below" / "out", "cannot be created"),
        (tmp_path / ("x" * 300), "name too long"),
    ]:
        refused(says, prepare_bytes, source, out=out)
    (tmp_path / "in").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        refused("read-only", prepare_bytes, source, out=tmp_path / "in" / "out")
    assert not os.listdir(tmp_path / "in")
    # an empty folder is fine
    assert byte_documents(prepare_bytes(source, out=tmp_path / "in"), "train")


def test_bad_tokenizer(tmp_path):
    source, says = jsonl(tmp_path / "a.jsonl", "ab"), r"'gpt3' is unknown \(did you mean 'gpt2'\?\)"
    with pytest.raises(BadInput, match=rf"tokenizer {says}.* and any tokenizer.json"):
        tokenise.prepare_text([source], tmp_path / "out", tokenise.Tokenising("gpt3"))


@pytest.mark.parametrize(
    "arguments", [["text"], ["text", "a.txt", "--out", "o"], ["text", "--out", "o"], ["nonsense"]]
)
def test_bad_command_exits_with_2(tmp_path, arguments):
    code, out, err = script(*arguments)
    assert (code, out) == (2, "") and err and "Traceback" not in err
