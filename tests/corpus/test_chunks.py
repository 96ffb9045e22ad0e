"""Compressed inputs are read whole or refused, and a byte order mark is no text."""

import codecs
import lzma

import pytest

from jspeed.commands.sample import read_prompt
from jspeed.corpus.chunks import documents, pieces
from jspeed.corpus.named_data_sets import read_text
from jspeed.errors import BadInput

LONG = b"one " * 400_000
ONE, TWO = lzma.compress(LONG), lzma.compress(b"two")


def read(path):
    return b"".join(document for piece in pieces([path]) for segment in piece for document in documents(segment))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (ONE, LONG),
        (ONE + TWO, LONG + b"two"),
        (ONE + 8 * b"\0" + TWO + 4 * b"\0", LONG + b"two"),  # padding, as xz allows it
        (lzma.compress(b"") + TWO, b"two"),
        (ONE + lzma.compress(b"x" * 3_000_000), LONG + b"x" * 3_000_000),
        (lzma.compress(b"alone", format=lzma.FORMAT_ALONE), b"alone"),  # .lzma's own
    ],
    ids=range(6),
)
def test_all_streams_are_read(tmp_path, content, text):
    (tmp_path / "a.txt.xz").write_bytes(content)
    assert read(tmp_path / "a.txt.xz") == text


@pytest.mark.parametrize(
    "content",
    [
        ONE + b"junk",
        ONE + TWO[:-3],
        ONE + TWO[:20] + bytes(8) + TWO[28:],
        ONE + 3 * b"\0",
        ONE + 2 * b"\0" + TWO,
        ONE[:-7],
        4 * b"\0" + ONE,
        b"",
    ],
    ids=range(8),
)
def test_what_cannot_be_read_whole_is_refused(tmp_path, content):
    """The first stream alone was trained on, with exit code 0."""
    (tmp_path / "a.txt.xz").write_bytes(content)
    with pytest.raises(BadInput, match="a.txt.xz is corrupt or not xz"):
        read(tmp_path / "a.txt.xz")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.xz", "a.jsonl", "a.jsonl.xz"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    content = codecs.BOM_UTF8 + (b'{"text": "word"}\n{"text": "more"}' if ".jsonl" in name else b"wordmore")
    (tmp_path / name).write_bytes(lzma.compress(content) if name.endswith(".xz") else content)
    assert read(tmp_path / name) == b"wordmore"


def test_places_count_the_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"ab\xff")
    with pytest.raises(BadInput, match=r"byte 5\b"):
        read(tmp_path / "a.txt")


def test_a_mark_is_no_symbol_of_a_data_set_and_no_part_of_a_prompt(tmp_path):
    (tmp_path / "names.txt").write_bytes(codecs.BOM_UTF8 + b"emma")
    assert read_text(tmp_path / "names.txt") == "emma" == read_prompt(None, tmp_path / "names.txt")
