"""Compressed inputs are read whole or refused, and a byte order mark is no text."""

import codecs
import gzip
import lzma
import random
import sys
import tracemalloc

import pytest

from jspeed.corpus import chunks
from jspeed.corpus.chunks import documents, pieces
from jspeed.corpus.named_data_sets import some_text
from jspeed.inference.commands.sample import read_prompt

from ..refusals import refused

LONG = b"one " * 400_000
MORE = b"x" * 3_000_000
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"  # a frame of zstd that is no data


def zstd(content):
    return pytest.importorskip("pyarrow").Codec("zstd").compress(content, asbytes=True)


COMPRESS = {"xz": lzma.compress, "gz": gzip.compress, "zst": zstd}
NAMES = {"xz": "xz", "gz": "gzip", "zst": "zstd"}


def read(path):
    return b"".join(
        document for piece in pieces([path]) for segment in piece for document in documents(segment)
    )


@pytest.mark.parametrize("ending", COMPRESS)
def test_everything_is_read(tmp_path, ending):
    """All streams of an .xz, members of a .gz and frames of a .zst."""
    compress, path = COMPRESS[ending], tmp_path / f"a.txt.{ending}"
    one, two = compress(LONG), compress(b"two")
    cases = [
        (one, LONG),
        (one + two, LONG + b"two"),
        (compress(b"") + two, b"two"),
        (one + compress(MORE), LONG + MORE),
    ]
    cases += {
        "xz": [
            (one + 8 * b"\0" + two + 4 * b"\0", LONG + b"two"),  # padding, as xz allows it
            (lzma.compress(b"alone", format=lzma.FORMAT_ALONE), b"alone"),  # .lzma's own
        ],
        # padding, as gzip allows it
        "gz": [(one + 9 * b"\0", LONG), (one + b"\0" + two, LONG + b"two")],
        "zst": [(one + SKIPPABLE + two, LONG + b"two"), (SKIPPABLE + one, LONG)],
    }[ending]
    for content, text in cases:
        path.write_bytes(content)
        assert read(path) == text


@pytest.mark.parametrize("ending", COMPRESS)
def test_what_cannot_be_read_whole_is_refused(tmp_path, ending):
    """The first stream alone was trained on, with exit code 0."""
    compress, path = COMPRESS[ending], tmp_path / f"a.txt.{ending}"
    one, two = compress(LONG), compress(b"two")
    damaged = bytearray(two)
    damaged[len(two) // 2] ^= 255
    cases = [
        one + b"junk",
        one + b"j",
        one + two[:-3],
        one + two[:2],
        one + damaged,
        one[:-7],
        4 * b"\0" + one,
        b"",
    ]
    cases += [b"plain", one + 5 * b"\0" + b"junk"]
    cases += [one + 3 * b"\0", one + 2 * b"\0" + two] if ending == "xz" else []
    for content in cases:
        path.write_bytes(content)
        refused(f"a.txt.{ending} is corrupt or not {NAMES[ending]}", read, path)


def test_zstd_needs_a_package(tmp_path, monkeypatch):
    (tmp_path / "a.txt.zst").write_bytes(b"content")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(r"a.txt.zst needs pyarrow .*\[parquet\]'", read, tmp_path / "a.txt.zst")


@pytest.mark.parametrize(
    "name", ["a.txt", "a.txt.xz", "a.jsonl", "a.jsonl.xz", "a.jsonl.gz", "a.txt.zst", "A.TXT.GZ"]
)
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    content = codecs.BOM_UTF8 + (
        b'{"text": "word"}\n{"text": "more"}' if ".jsonl" in name else b"wordmore"
    )
    (tmp_path / name).write_bytes(COMPRESS.get(name.lower().rpartition(".")[2], bytes)(content))
    assert read(tmp_path / name) == b"wordmore"


def test_places_count_the_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"ab\xff")
    refused(r"byte 5\b", read, tmp_path / "a.txt")


def test_a_mark_is_no_symbol_and_no_part_of_a_prompt(tmp_path):
    (tmp_path / "names.txt").write_bytes(codecs.BOM_UTF8 + b"emma")
    assert some_text(tmp_path / "names.txt") == "emma" == read_prompt(None, tmp_path / "names.txt")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.txt.zst"])
def test_a_bomb_is_refused_before_it_is_held(name, tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "LEAST_BOMB", 1 << 20)
    path = tmp_path / name
    path.write_bytes(COMPRESS[path.suffix[1:]](b"a" * (24 << 20)))
    tracemalloc.start()
    try:
        refused("more than 100 times as much", read, path)
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


def test_lines_are_cut_as_readlines_cuts_them(tmp_path, monkeypatch):
    """So that what an older version began is resumed piece for piece."""
    monkeypatch.setattr(chunks, "PIECE_BYTES", 100)
    rng = random.Random(1)
    lines = [b"x" * rng.choice((0, 1, 50, 98, 99, 100, 101, 300)) for _ in range(500)]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    found = [segment.content for segment in chunks.segments(path)]
    with path.open("rb") as file:
        wanted = list(iter(lambda: b"".join(file.readlines(100)), b""))
    assert found == wanted
