"""Prepared data appear complete or not at all; interrupted work resumes, and a full disk loses none
of it."""

import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest

from jspeed.corpus import chunks, sources, tokenise
from jspeed.corpus.shards import folder as folders
from jspeed.errors import BadInput, NoRoom

from ..refusals import refused
from .prepared import byte_documents, check_manifest, content_of, jsonl, prepare_bytes, read_split

INTERRUPTED = """
import sys, time
from pathlib import Path
from jspeed.corpus import chunks, tokenise, parallel_tokenise
from jspeed.errors import run_script

chunks.PIECE_BYTES = 1000
stop = int(sys.argv[3])
encode = parallel_tokenise.encode

def slow(*arguments):
    global stop
    if stop == 0:
        print("half", flush=True)
        time.sleep(60)
    stop -= 1
    return encode(*arguments)

parallel_tokenise.encode = slow
options = tokenise.Tokenising("bytes", processes=1)
run_script(lambda: tokenise.prepare_text([Path(sys.argv[1])], Path(sys.argv[2]), options) and None)
"""


PIECE = 1000  # bytes, as in the interrupted process


@pytest.fixture
def source(tmp_path):
    """A text of 200 documents."""
    return jsonl(tmp_path / "a.jsonl", [f"document {i} " * 20 for i in range(200)])


@pytest.fixture
def encoded(monkeypatch):
    """Where each call of ``encode`` is listed, on pieces as small as those of :func:`interrupt`."""
    monkeypatch.setattr(chunks, "PIECE_BYTES", PIECE)
    found, real = [], tokenise.parallel_tokenise.encode
    monkeypatch.setattr(
        tokenise.parallel_tokenise, "encode", lambda *a: (found.append(a), real(*a))[1]
    )
    return found


def pieces_of(source):
    return len(list(chunks.pieces([source])))


def interrupt(source, out, signal_number, after=5):
    command = [sys.executable, "-c", INTERRUPTED, source, out, str(after)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal_number)
        return process.wait(timeout=20)


@pytest.mark.parametrize(
    ("signal_number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)]
)
def test_interrupted_work_resumes(tmp_path, source, signal_number, code, encoded):
    wanted = content_of(prepare_bytes(source, out=tmp_path / "whole" / "out"))
    out = tmp_path / "deep" / "out"
    out.parent.mkdir()
    assert interrupt(source, out, signal_number) == code
    (left,) = out.parent.iterdir()
    assert left.name.startswith(".out.") and not list(left.rglob("*.bin"))
    journal = left / "main" / "journal"
    assert len(journal.read_text().splitlines()) == 5
    # A line cut in the middle, and bytes behind the last line, as a crash of the machine may leave
    # them.
    journal.write_text(journal.read_text() + '{"docu')
    with open(left / "main" / "tokens", "ab") as tokens:
        tokens.write(b"xxx")
    assert interrupt(source, out, signal_number, after=3) == code
    assert len(journal.read_text().splitlines()) == 8
    encoded.clear()
    prepare_bytes(source, out=out, processes=1)
    assert content_of(out) == wanted and os.listdir(out.parent) == ["out"]
    assert len(encoded) == pieces_of(source) - 8


def test_interrupted_work_resumes_in_shards_of_another_size(tmp_path, source, encoded):
    out, size = tmp_path / "new" / "out", {"shard_tokens": 9000}
    assert interrupt(source, out, signal.SIGKILL) == -signal.SIGKILL
    wanted = content_of(prepare_bytes(source, out=tmp_path / "whole" / "out", **size))
    encoded.clear()
    assert content_of(prepare_bytes(source, out=out, processes=1, **size)) == wanted
    assert len(encoded) == pieces_of(source) - 5 and os.listdir(tmp_path / "new") == ["out"]


def test_work_of_other_inputs_is_neither_resumed_nor_removed(tmp_path, source, capfd, encoded):
    given = source.read_bytes()
    assert interrupt(source, tmp_path / "out", signal.SIGKILL) == -signal.SIGKILL
    (left,) = tmp_path.glob(".out.*.work")
    prepare_bytes(jsonl(source, "ab"), out=tmp_path / "out")
    check_manifest(tmp_path / "out")
    assert f"{left} is unfinished work of other inputs or flags" in capfd.readouterr().err
    assert sorted(os.listdir(tmp_path)) == [left.name, "a.jsonl", "out"]

    source.write_bytes(given)
    os.rename(tmp_path / "out", tmp_path / "first")
    encoded.clear()
    prepare_bytes(source, out=tmp_path / "out", processes=1)
    assert 0 < len(encoded) < pieces_of(source)
    assert not left.exists()


def test_a_full_disk_keeps_the_work(tmp_path, source, monkeypatch):
    monkeypatch.setattr(chunks, "PIECE_BYTES", PIECE)
    wanted = content_of(prepare_bytes(source, out=tmp_path / "whole" / "out"))
    room, sync = 7, os.fsync

    def fsync(handle):
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(BadInput, match="space .*after 1[0-9]"):
        prepare_bytes(source, out=tmp_path / "new" / "out", processes=1)
    assert not (tmp_path / "new" / "out").exists()
    room = 10**6
    assert content_of(prepare_bytes(source, out=tmp_path / "new" / "out", processes=1)) == wanted
    assert os.listdir(tmp_path / "new") == ["out"]


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("where", "error", "kind"),
    [("_sealed", full, NoRoom), ("_extend", full, NoRoom)]
    + [("_sealed", lambda *_: 1 / 0, ZeroDivisionError)],
)
def test_an_error_while_shards_are_written_keeps_the_work(
    tmp_path, source, encoded, where, error, kind
):
    """Shards need the space of the tokens a second time; and what is no fault of the input."""
    out = tmp_path / "new" / "out"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(folders, where, error)
        with pytest.raises(kind, match="No space left on device|division by zero"):
            prepare_bytes(source, out=out)
    (left,) = out.parent.iterdir()
    assert left.name.endswith(".work")
    encoded.clear()
    prepare_bytes(source, out=out, processes=1)
    assert not encoded and os.listdir(out.parent) == ["out"]


@contextmanager
def small_files():
    """No file of this process may grow beyond 20 kB, as when the space runs out in the middle of a
    write."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(("text", "count"), [("x", 2000), ("document " * 20, 200)])
def test_a_disk_that_stays_full_keeps_the_work(tmp_path, monkeypatch, text, count):
    """One-letter documents fill their table first. The same command again removes nothing."""
    source = jsonl(tmp_path / "a.jsonl", [f"{text}{i}" for i in range(count)])
    out = tmp_path / "new" / "out"
    monkeypatch.setattr(chunks, "PIECE_BYTES", 5000)
    lines = []
    for _ in range(2):
        with (
            small_files(),
            pytest.raises(NoRoom, match="File too large.*the same command resumes after"),
        ):
            prepare_bytes(source, out=out, processes=1)
        (left,) = out.parent.iterdir()
        lines.append((left / "main" / "journal").read_text().splitlines())
    assert lines[0] == lines[1] and len(lines[0]) > 1
    assert prepare_bytes(source, out=out, processes=1) == out and os.listdir(out.parent) == ["out"]
    check_manifest(out)


def test_an_edited_tokenizer_file_is_read_again(tmp_path):
    """Twice in one process, as a notebook does."""
    pytest.importorskip("tokenizers")
    source, path = jsonl(tmp_path / "a.jsonl", ["a b", "b a", "a a"]), tmp_path / "words.json"
    made = []
    for vocabulary in ({"a": 0, "b": 1}, {"a": 5, "b": 3}):
        path.write_text(json.dumps(word_tokenizer(vocabulary)))
        options = tokenise.Tokenising(str(path), end_of_text="none", processes=1)
        out = tokenise.prepare_text([source], tmp_path / f"out{len(made)}", options)
        made.append(set(read_split(out, "train").tolist()))
    assert made[0] <= {0, 1} and made[1] <= {3, 5}


def word_tokenizer(vocabulary):
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"},
    }


def test_a_folder_that_another_process_prepares_is_named(tmp_path, monkeypatch):
    source, out = jsonl(tmp_path / "a.jsonl", "ab"), tmp_path / "out"
    real, errors = tokenise.parallel_tokenise.tokenise, []

    def meanwhile(*arguments):
        if not errors:
            errors.append("")
            refused("another process is preparing .*out", prepare_bytes, source, out=out)
        return real(*arguments)

    monkeypatch.setattr(tokenise.parallel_tokenise, "tokenise", meanwhile)
    prepare_bytes(source, out=out)


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    check_manifest(prepare_bytes(jsonl(tmp_path / "a.jsonl", "ab"), out=tmp_path / "out"))


@pytest.mark.parametrize("processes", [2, 3])
def test_any_number_of_processes_writes_the_same_bytes(tmp_path, processes):
    text = "".join(f"line {i} of a text that goes on\n" for i in range(200))
    (tmp_path / "in").mkdir()
    jsonl(tmp_path / "in" / "a.jsonl.xz", [f"{i} {text * (i % 9)}" for i in range(600)])
    (tmp_path / "in" / "b.txt").write_text("<|endoftext|>".join(f"{i} {text}" for i in range(700)))
    outs = [tmp_path / str(count) / "out" for count in (1, processes)]
    for out, count in zip(outs, (1, processes), strict=True):
        prepare_bytes(tmp_path / "in", out=out, processes=count)
    assert content_of(outs[0]) == content_of(outs[1])
    assert len(list(chunks.pieces([path for _, path in sources.text_files([tmp_path / "in"])]))) > 4


def test_the_first_bad_line_is_named(tmp_path, monkeypatch):
    good = json.dumps({"text": "x" * 3000}).encode() + b"\n"
    (tmp_path / "a.jsonl").write_bytes(good * 3000 + b"[]\n" + good * 2000 + b"{}\n" + good * 3000)
    for processes in (1, 2):
        with pytest.raises(BadInput, match="line 3001 of"):
            prepare_bytes(tmp_path / "a.jsonl", out=tmp_path / "new" / "out", processes=processes)
        assert os.listdir(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize("equal", [True, False])
def test_two_preparations_at_once(tmp_path, equal):
    out = tmp_path / "out"
    pairs = [("train", b"a"), ("val", b"b")]
    winners = pairs if equal else [("train", b"c"), ("val", b"b")]

    def write(documents):
        tokenizer = tokenise.bytes_tokenizer()
        facts = tokenise.describe(tokenizer, "before", {})
        tokens = (
            (split, np.append(np.array([256], "<u2"), tokenizer.encode(text)))
            for split, text in documents
        )
        folders.write_folder(
            out, (folders.EncodedDocuments.one(*each) for each in tokens), facts, "s"
        )

    def overtaken():
        yield from pairs
        write(winners)

    if equal:
        write(overtaken())
        check_manifest(out)
    else:
        refused("filled by something else", write, overtaken())
    assert byte_documents(out, "train") == [winners[0][1]]
    assert os.listdir(tmp_path) == ["out"]


def test_failure_while_writing_removes_everything(tmp_path):
    def batches():
        yield folders.EncodedDocuments("train", np.zeros(1 << 20, np.uint16), np.array([1 << 20]))
        raise OSError(28, "No space left on device")

    refused("No space left", folders.write_folder, tmp_path / "new" / "out", batches(), {}, "s")
    assert not os.listdir(tmp_path)


def test_input_that_changes_between_the_readings(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", "ab")
    real = tokenise.parallel_tokenise.tokenise
    monkeypatch.setattr(
        tokenise.parallel_tokenise, "tokenise", lambda *a: (real(*a), jsonl(source, "abc"))
    )
    refused("changed while it was read", prepare_bytes, source, out=tmp_path / "out")
    assert os.listdir(tmp_path) == ["a.jsonl"]
