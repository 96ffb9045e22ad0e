"""Texts in other fields and files than usual: named, read, or told what to do."""

import datetime
import json
import subprocess
import sys

import pyarrow
import pytest
from pyarrow import ipc, parquet

from jspeed.corpus.chunks import documents, holds_carriage_returns, pieces
from jspeed.corpus.sources import passed_over, text_files
from jspeed.corpus.tokenise import Tokenising, prepare_text
from jspeed.data.manifest import read_manifest

from ..multi_process import said

TEXTS = [f"story {number}" for number in range(50)]


def texts_of(path, field="text"):
    segments = [segment for piece in pieces([path], field=field) for segment in piece]
    return [text.decode() for segment in segments for text in documents(segment)]


def write(path, field):
    table = pyarrow.table({"id": range(50), field: TEXTS})
    kind = path.name.partition(".")[2]
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    elif kind == "parquet":
        parquet.write_table(table, path, row_group_size=7)
    else:
        new = ipc.new_file if kind == "file.arrow" else ipc.new_stream
        with new(path, table.schema) as sink:
            sink.write_table(table, max_chunksize=7)
    return path


FORMS = ["jsonl", "parquet", "arrow", "file.arrow"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("field", ["text", "content", "body\n<b>"])
def test_the_field_of_the_text_is_named_or_asked_for(tmp_path, form, field):
    path = write(tmp_path / f"a.{form}", field)
    assert texts_of(path, field) == TEXTS
    if field != "text":
        message = said(lambda: texts_of(path))
        assert "--text-field" in message and repr(field) in message and "\n" not in message


def test_a_data_set_saved_to_disk_is_read(tmp_path):
    """Splits as folders, state beside them, and a file that map() has made of the others."""
    for split in ("train", "test"):
        (tmp_path / "set" / split).mkdir(parents=True)
        write(tmp_path / "set" / split / "data-00000-of-00001.arrow", "content")
        for name in ("state.json", "dataset_info.json"):
            (tmp_path / "set" / split / name).write_text("{}")
    write(tmp_path / "set" / "train" / "cache-1f2e.arrow", "content")
    names = [name for name, _ in text_files([tmp_path / "set"])]
    assert names == ["test/data-00000-of-00001.arrow", "train/data-00000-of-00001.arrow"]
    assert "train/cache-1f2e.arrow" in passed_over([tmp_path / "set"])
    options = Tokenising("bytes", text_field="content")
    out = prepare_text([tmp_path / "set"], tmp_path / "out", options)
    manifest = read_manifest(out)
    assert manifest["source"]["text_field"] == "content"
    assert sum(file["documents"] for file in manifest["files"]) == 100
    other = Tokenising("bytes")
    assert "not empty" in said(lambda: prepare_text([tmp_path / "set"], out, other))


@pytest.mark.parametrize("content", [b"", b"ARROW1", b"not arrow at all, but a text" * 9])
def test_what_is_no_arrow_file_is_told(tmp_path, content):
    (tmp_path / "a.arrow").write_bytes(content)
    assert "is corrupt or not arrow" in said(lambda: texts_of(tmp_path / "a.arrow"))
    table = pyarrow.table({"text": [datetime.date.today()]})
    with ipc.new_stream(tmp_path / "b.arrow", table.schema) as sink:
        sink.write_table(table)
    assert 'column "text"' in said(lambda: texts_of(tmp_path / "b.arrow"))


@pytest.mark.parametrize(
    ("name", "content", "has"),
    [
        ("a.txt", b"one\r\ntwo\r\n", True),
        ("a.md", b"an old\rMac", True),
        ("a.txt", b"one\ntwo\n", False),
        ("a.jsonl", rb'{"text": "one\r\ntwo"}' + b"\n", True),
        ("a.jsonl", b'{"text": "one"}\r\n', False),
        ("a.jsonl", rb'{"text": "C:\\raw"}' + b"\n", False),
        ("a.jsonl", rb'{"text": "C:\\\raw"}' + b"\n", True),
    ],
)
def test_line_ends_of_windows_are_seen(tmp_path, name, content, has):
    path = tmp_path / name
    path.write_bytes(content)
    assert holds_carriage_returns(path) is has


def test_line_ends_of_windows_are_told(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r\n" * 400)
    command = [sys.executable, "-m", "jspeed", "prepare", "text", "a.txt", "--tokenizer", "bytes"]
    home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [*command, "--out=~/made"], cwd=tmp_path, env=home, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "note: texts have the line ends of Windows" in done.stderr
    assert (tmp_path / "made" / "manifest.json").exists() and not (tmp_path / "~").exists()


def zstd_frame(content, window, dictionary=None):
    """RFC 8878, section 3.1.1: a frame of one raw block, with a window of 2**window bytes."""
    head = bytes([0 if dictionary is None else 1, (window - 10) << 3])
    head += b"" if dictionary is None else bytes([dictionary])
    block = (len(content) << 3 | 1).to_bytes(3, "little") + content
    return (0xFD2FB528).to_bytes(4, "little") + head + block


def test_whole_zstd_files_that_need_more_are_no_damage(tmp_path):
    path = tmp_path / "a.txt.zst"
    for window, dictionary, told in [
        (20, None, None),
        (27, None, None),
        (28, None, "zstd -d --long=31"),
        (31, None, "zstd -d --long=31"),
        (20, 7, "-D DICTIONARY"),
    ]:
        path.write_bytes(zstd_frame(b"a text", window, dictionary))
        if told is None:
            assert texts_of(path) == ["a text"]
        else:
            message = said(lambda: texts_of(path))
            assert told in message and "fetch" not in message
    path.write_bytes(zstd_frame(b"a text", 20)[:-3])
    assert "is corrupt or not zstd" in said(lambda: texts_of(path))
