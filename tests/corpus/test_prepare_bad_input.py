"""``jspeed prepare text``: each bad input has its error message and leaves nothing behind."""

import gzip
import lzma
import os
from functools import partial

import pytest

from jspeed.corpus import named_data_sets, tokenise
from jspeed.errors import BadInput

from .prepared import byte_documents, jsonl, prepare_bytes, script

GOOD = b'{"text": "a"}\n{"text": "b"}\n'
BAD_FILES = {
    "unknown ending": ("a.csv", GOOD, r"a\.csv has an unknown ending; expected \.txt, "),
    "not JSON": ("a.jsonl", GOOD + b'{"text": \n', r"line 3 of .*a\.jsonl is not JSON"),
    "nested too deep": ("a.jsonl", GOOD + b"[" * 200_000, r"line 3 of .* is not JSON"),
    "not an object": ("a.jsonl", b"[1]\n", r"line 1 of .*a\.jsonl lacks the string field"),
    "no text": (
        "a.jsonl",
        GOOD + b'\n{"txt": ""}\n',
        r"line 4 of .*a\.jsonl lacks the string field",
    ),
    "text is a number": (
        "a.jsonl",
        b'{"text": 1}\n',
        r"line 1 of .*a\.jsonl lacks the string field",
    ),
    "half a surrogate pair": ("a.jsonl", b'{"text": "\\ud800"}\n', r"line 1 of .* surrogate"),
    "not UTF-8 in JSON": (
        "a.jsonl",
        GOOD + b'{"text": "\xff"}\n',
        r"a\.jsonl is not UTF-8 at byte 38",
    ),
    "not UTF-8": ("a.txt", b"abc\xff", r"a\.txt is not UTF-8 at byte 3"),
    "not UTF-8 later": (
        "a.txt",
        b"ab<|endoftext|>c\xffd<|endoftext|>",
        r"a\.txt is not UTF-8 at byte 16",
    ),
    "not xz": ("a.jsonl.xz", GOOD, r"a\.jsonl\.xz is corrupt or not xz"),
    "cut short": (
        "a.jsonl.xz",
        lzma.compress(GOOD * 99)[:-9],
        r"a\.jsonl\.xz is corrupt or not xz",
    ),
    "no documents": ("a.jsonl", b'\n{"text": ""}\n', r"holds no documents"),
    "empty": ("a.txt", b"", r"holds no documents"),
    "one document": ("a.txt", b"abc", r"holds one document"),
    "not gzip": ("a.jsonl.gz", GOOD, r"a\.jsonl\.gz is corrupt or not gzip"),
    "gzip in capitals, cut": (
        "A.TXT.GZ",
        gzip.compress(GOOD * 99)[:-9],
        r"A\.TXT\.GZ is corrupt or not gzip",
    ),
    "compressed parquet": (
        "a.parquet.gz",
        gzip.compress(GOOD),
        r"a\.parquet\.gz has an unknown ending",
    ),
    "json": ("a.json", GOOD, r"a\.json has an unknown ending"),
    "not parquet": ("a.parquet", GOOD, r"a\.parquet is corrupt or not parquet"),
    "copies": ("a.jsonl", GOOD[:14] * 5, r"holds one document, or copies"),
}


@pytest.mark.parametrize("name, content, message", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_file(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=message) as raised:
        prepare_bytes(tmp_path / name, out=tmp_path / "new" / "out")
    assert "\n" not in str(raised.value)
    assert os.listdir(tmp_path) == [name]


def test_corrupt_xz(tmp_path):
    content = bytearray(lzma.compress(os.urandom(5000).hex().encode()))
    content[len(content) // 2] ^= 255
    (tmp_path / "a.txt.xz").write_bytes(content)
    with pytest.raises(BadInput, match="corrupt"):
        prepare_bytes(tmp_path / "a.txt.xz", out=tmp_path / "out")


def test_missing_input_and_empty_folder(tmp_path):
    with pytest.raises(BadInput, match="no.jsonl does not exist"):
        prepare_bytes(tmp_path / "no.jsonl", out=tmp_path / "out")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "readme.rst").touch()
    with pytest.raises(BadInput, match=r"input folder .*in holds no \.txt, "):
        prepare_bytes(tmp_path / "in", out=tmp_path / "out")
    with pytest.raises(BadInput, match="name too long|does not exist"):
        prepare_bytes(tmp_path / ("x" * 300), out=tmp_path / "out")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(BadInput, match="neither a file nor a folder"):
        prepare_bytes(tmp_path / "pipe.txt", out=tmp_path / "out")
    (tmp_path / "with").mkdir()
    jsonl(tmp_path / "with" / "a.jsonl", "ab")
    os.mkfifo(tmp_path / "with" / "pipe.txt")
    with pytest.raises(BadInput, match=r"with/pipe.txt cannot be read \(not a regular file\)"):
        prepare_bytes(tmp_path / "with", out=tmp_path / "out")
    for made in (
        named_data_sets.prepare_names,
        partial(named_data_sets.prepare_shakespeare, characters=True),
    ):
        with pytest.raises(BadInput, match=r"pipe.txt cannot be read \(not a regular file\)"):
            made(tmp_path / "out", given=tmp_path / "pipe.txt")
    with pytest.raises(BadInput, match="no input was given"):
        prepare_bytes(out=tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["in", "pipe.txt", "with"]


def test_bad_output(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", "ab")
    with pytest.raises(BadInput, match="is a file"):
        prepare_bytes(source, out=source)
    with pytest.raises(BadInput, match="not empty"):
        prepare_bytes(source, out=tmp_path)
    with pytest.raises(BadInput, match="cannot be created"):
        prepare_bytes(source, out=source / "below" / "out")
    with pytest.raises(BadInput, match="name too long"):
        prepare_bytes(source, out=tmp_path / ("x" * 300))
    (tmp_path / "in").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(BadInput, match="read-only"):
            prepare_bytes(source, out=tmp_path / "in" / "out")
    assert not os.listdir(tmp_path / "in")
    # an empty folder is fine
    assert byte_documents(prepare_bytes(source, out=tmp_path / "in"), "train")


def test_bad_tokenizer(tmp_path):
    with pytest.raises(
        BadInput,
        match=r"tokenizer 'gpt3' is unknown \(did you mean 'gpt2'\?\).* and any tokenizer.json",
    ):
        tokenise.prepare_text(
            [jsonl(tmp_path / "a.jsonl", "ab")], tmp_path / "out", tokenise.Tokenising("gpt3")
        )


@pytest.mark.parametrize(
    "arguments", [["text"], ["text", "a.txt", "--out", "o"], ["text", "--out", "o"], ["nonsense"]]
)
def test_bad_command_exits_with_2(tmp_path, arguments):
    code, out, err = script(*arguments)
    assert (code, out) == (2, "") and err and "Traceback" not in err
