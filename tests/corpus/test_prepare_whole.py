"""Prepared data appears whole or not at all, and interrupted work is taken up."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from jspeed.corpus import chunks, sources, tokenise
from jspeed.data import folder as folders
from jspeed.errors import BadInput

from .prepared import byte_documents, check_manifest, content_of, jsonl, prepare_bytes

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
run_script(lambda: tokenise.prepare_text([Path(sys.argv[1])], Path(sys.argv[2]), "bytes", processes=1) and None)
"""


def interrupt(source, out, signal_number, after=5):
    command = [sys.executable, "-c", INTERRUPTED, source, out, str(after)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal_number)
        return process.wait(timeout=20)


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_interrupted_work_is_taken_up(tmp_path, signal_number, code, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", [f"document {i} " * 20 for i in range(200)])
    wanted = content_of(prepare_bytes(source, out=tmp_path / "whole" / "out"))
    out = tmp_path / "deep" / "out"
    out.parent.mkdir()
    assert interrupt(source, out, signal_number) == code
    (left,) = out.parent.iterdir()
    assert left.name.startswith(".out.") and not list(left.rglob("*.bin"))
    journal = left / "main" / "journal"
    assert len(journal.read_text().splitlines()) == 5
    # A line cut in the middle, and bytes behind the last line, as a crash of the machine may leave them.
    journal.write_text(journal.read_text() + '{"docu')
    with open(left / "main" / "tokens", "ab") as tokens:
        tokens.write(b"xxx")
    assert interrupt(source, out, signal_number, after=3) == code
    assert len(journal.read_text().splitlines()) == 8
    monkeypatch.setattr(chunks, "PIECE_BYTES", 1000)
    encoded = []
    real = tokenise.parallel_tokenise.encode
    monkeypatch.setattr(tokenise.parallel_tokenise, "encode", lambda *a: (encoded.append(a), real(*a))[1])
    prepare_bytes(source, out=out, processes=1)
    assert content_of(out) == wanted and os.listdir(out.parent) == ["out"]
    assert len(encoded) == len(list(chunks.pieces([source]))) - 8


def test_work_of_other_inputs_is_not_taken_up(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [f"document {i} " * 20 for i in range(200)])
    assert interrupt(source, tmp_path / "out", signal.SIGKILL) == -signal.SIGKILL
    prepare_bytes(jsonl(tmp_path / "a.jsonl", "ab"), out=tmp_path / "out")
    check_manifest(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "out"]


def test_no_room_keeps_the_work(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", [f"document {i} " * 20 for i in range(200)])
    monkeypatch.setattr(chunks, "PIECE_BYTES", 1000)
    wanted = content_of(prepare_bytes(source, out=tmp_path / "whole" / "out"))
    room, sync = 7, os.fsync

    def fsync(handle):
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(BadInput, match="No space left on device.*goes on after the 1[0-9] documents done"):
        prepare_bytes(source, out=tmp_path / "new" / "out", processes=1)
    assert not (tmp_path / "new" / "out").exists()
    room = 10**6
    assert content_of(prepare_bytes(source, out=tmp_path / "new" / "out", processes=1)) == wanted
    assert os.listdir(tmp_path / "new") == ["out"]


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


def test_the_first_bad_line_is_the_one_that_is_said(tmp_path, monkeypatch):
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
        facts = tokenise.facts(tokenizer, "before", {})
        return folders.write_folder(out, tokenise.encoded(documents, tokenizer), facts, "s")

    def overtaken():
        yield from pairs
        write(winners)

    if equal:
        assert write(overtaken()) == check_manifest(out)
    else:
        with pytest.raises(BadInput, match="filled by something else"):
            write(overtaken())
    assert byte_documents(out, "train") == [winners[0][1]]
    assert os.listdir(tmp_path) == ["out"]


def test_failure_while_writing_removes_everything(tmp_path):
    def batches():
        yield folders.Batch("train", np.zeros(1 << 20, np.uint16), np.array([1 << 20]))
        raise OSError(28, "No space left on device")

    with pytest.raises(BadInput, match="No space left"):
        folders.write_folder(tmp_path / "new" / "out", batches(), {}, "s")
    assert not os.listdir(tmp_path)


def test_input_that_changes_between_the_readings(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", "ab")
    real = tokenise.parallel_tokenise.tokenise
    monkeypatch.setattr(tokenise.parallel_tokenise, "tokenise", lambda *a: (real(*a), jsonl(source, "abc")))
    with pytest.raises(BadInput, match="changed while it was read"):
        prepare_bytes(source, out=tmp_path / "out")
    assert os.listdir(tmp_path) == ["a.jsonl"]
