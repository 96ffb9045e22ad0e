"""Prepared data: what shards hold, that they appear whole or not at all, and each way input can be bad."""

import hashlib
import json
import lzma
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspeed.data import folder as folders
from jspeed.data import pieces, sources, tokenise
from jspeed.data import split as splits
from jspeed.errors import BadInput

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "prepare.py"
SHARED = ROOT.parent / "shared" / "data"
VOCABULARY = SHARED / "tiktoken_cache"
needs_gpt2 = pytest.mark.skipif(not VOCABULARY.is_dir(), reason=f"no GPT-2 vocabulary in {VOCABULARY}")


def read_shard(path):
    header = np.fromfile(path, dtype="<i4", count=256)
    tokens = np.fromfile(path, dtype="<u2", offset=1024)
    assert list(header[:3]) == [20240520, 1, len(tokens)] and not header[3:].any()
    return tokens


def read_split(folder, split):
    return np.concatenate([read_shard(path) for path in sorted(folder.glob(f"*_{split}_*.bin"))])


def documents_in(tokens, bos_id):
    starts = np.flatnonzero(tokens == bos_id)
    assert starts[0] == 0
    return [piece[1:] for piece in np.split(tokens, starts[1:])]


def byte_documents(folder, split):
    return [piece.astype(np.uint8).tobytes() for piece in documents_in(read_split(folder, split), 256)]


def check_manifest(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {file["name"] for file in manifest["files"]} | {"manifest.json"} == set(os.listdir(folder))
    for file in manifest["files"]:
        content = (folder / file["name"]).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
        tokens = read_shard(folder / file["name"])
        assert file["tokens"] == len(tokens)
        assert file["documents"] == np.count_nonzero(tokens == manifest["bos_id"])
    for split, total in manifest["splits"].items():
        its = [file for file in manifest["files"] if file["split"] == split]
        assert total["files"] == len(its)
        for what in ("bytes", "tokens", "documents"):
            assert total[what] == sum(file[what] for file in its)
    return manifest


def jsonl(path, texts):
    content = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)).encode()
    path.write_bytes(lzma.compress(content, preset=0) if path.suffix == ".xz" else content)
    return path


def prepare_bytes(*inputs, out, **options):
    return tokenise.prepare_text(inputs, out, "bytes", **options)


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def script(*arguments, **environment):
    command = [sys.executable, "-W", "error", str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    return done.returncode, done.stdout, done.stderr


# The standard library


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
    return tokenise.prepare_stdlib(tmp_path_factory.mktemp("stdlib") / "out")


def test_stdlib_holds_every_chosen_source_in_order(stdlib):
    manifest = check_manifest(stdlib)
    assert [manifest[key] for key in ("tokenizer", "vocab_size", "bos_id")] == ["bytes", 257, 256]
    assert sorted(os.listdir(stdlib)) == ["manifest.json", "stdlib_train_000001.bin", "stdlib_val_000000.bin"]
    root = Path(os.__file__).parent
    names = {"train": [], "val": []}
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        parts = set(name.split("/"))
        if not parts & (sources.LEFT_OUT_FOLDERS | sources.LEFT_OUT_FILES) and path.stat().st_size:
            if not any(part.startswith(("config-", "_sysconfigdata")) for part in parts):
                hashed = int(hashlib.sha256(name.encode()).hexdigest()[:16], 16)
                names["val" if hashed % 32 == 0 else "train"].append(name)
    for split, expected in names.items():
        assert byte_documents(stdlib, split) == [(root / name).read_bytes() for name in expected]
    assert manifest["splits"]["val"]["tokens"] >= 200_000
    assert manifest["splits"]["train"]["tokens"] >= 5_000_000


def test_stdlib_manifest_names_no_place(stdlib):
    text = (stdlib / "manifest.json").read_text()
    assert str(Path(os.__file__).parent) not in text and str(stdlib) not in text
    assert json.loads(text)["source"]["python"].split()[-1] == ".".join(map(str, sys.version_info[:3]))


def test_stdlib_is_prepared_once_and_quick_to_find(stdlib, tmp_path, monkeypatch):
    monkeypatch.setenv("JSPEED_CACHE", str(tmp_path))
    folder = tokenise.prepare_stdlib()
    assert folder == tokenise.stdlib_folder() and folder.parent == tmp_path / "data"
    assert content_of(folder) == content_of(stdlib)
    monkeypatch.setattr(tokenise, "write_folder", lambda *_, **__: pytest.fail("prepared again"))
    assert tokenise.prepare_stdlib() == folder
    assert min(timed(tokenise.prepare_stdlib) for _ in range(3)) < 0.2


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def test_another_python_gets_another_folder(monkeypatch):
    before = tokenise.stdlib_folder()
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    assert tokenise.stdlib_folder() != before


def test_stdlib_command(tmp_path):
    code, out, err = script("stdlib", "--out", tmp_path / "x", JSPEED_CACHE=str(tmp_path / "unused"))
    assert (code, err) == (0, "") and "tokens a second" in out
    before = content_of(tmp_path / "x")
    code, out, err = script("stdlib", "--out", tmp_path / "x")
    assert (code, err) == (0, "") and "already there" in out
    assert content_of(tmp_path / "x") == before and os.listdir(tmp_path) == ["x"]


def test_stdlib_refuses_a_folder_of_something_else(stdlib, tmp_path):
    out = tmp_path / "x"
    prepare_bytes(jsonl(tmp_path / "a.jsonl", "ab"), out=out)
    with pytest.raises(BadInput, match="not empty"):
        tokenise.prepare_stdlib(out)


# Text


def test_documents_keep_their_order_and_start(tmp_path):
    texts = [f"document {i} {'é' * (i % 7)}\n" for i in range(200)]
    out = prepare_bytes(jsonl(tmp_path / "a.jsonl", texts), out=tmp_path / "set", val_fraction=0.1)
    check_manifest(out)
    train, val = byte_documents(out, "train"), byte_documents(out, "val")
    wanted = [text.encode() for text in texts]
    chosen = sorted(wanted, key=lambda text: hashlib.sha256(text).digest())[:20]
    assert val == [text for text in wanted if text in chosen]
    assert train == [text for text in wanted if text not in chosen]
    assert {path.name for path in out.glob("*.bin")} == {"set_train_000001.bin", "set_val_000000.bin"}


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=2, max_size=12),
    shard_tokens=st.integers(1, 60),
    ending=st.sampled_from([".jsonl", ".jsonl.xz"]),
)
def test_any_text_comes_back(texts, shard_tokens, ending):
    wanted = Counter(text.encode() for text in texts if text)
    with tempfile.TemporaryDirectory() as folder:
        source, out = jsonl(Path(folder, "a" + ending), texts), Path(folder, "out")
        if len(wanted) < 2:
            with pytest.raises(BadInput, match="expected two or more"):
                prepare_bytes(source, out=out)
            return
        prepare_bytes(source, out=out, shard_tokens=shard_tokens)
        manifest = check_manifest(out)
        train, val = (Counter(byte_documents(out, split)) for split in ("train", "val"))
        assert train + val == wanted and not train.keys() & val.keys()
        for split in ("train", "val"):
            sizes = [file["tokens"] for file in manifest["files"] if file["split"] == split]
            assert set(sizes[:-1]) <= {shard_tokens} and 0 < sizes[-1] <= shard_tokens


def test_a_long_document_goes_on_in_the_next_shard(tmp_path):
    out = prepare_bytes(jsonl(tmp_path / "a.jsonl", ["x" * 25, "y" * 25]), out=tmp_path / "o", shard_tokens=10)
    names = sorted(path.name for path in out.glob("*.bin"))
    assert names == [f"o_train_00000{i}.bin" for i in (1, 2, 3)] + [f"o_val_00000{i}.bin" for i in (0, 1, 2)]
    files = check_manifest(out)["files"]
    assert [(file["tokens"], file["documents"]) for file in files] == [(10, 1), (10, 0), (6, 0)] * 2


def test_split_depends_on_contents_alone(tmp_path):
    texts = [f"text {i}" for i in range(300)] + ["copy"] * 9
    one = prepare_bytes(jsonl(tmp_path / "a.jsonl", texts), out=tmp_path / "one")
    two = prepare_bytes(jsonl(tmp_path / "b.jsonl.xz", texts[::-1]), out=tmp_path / "two")
    val = byte_documents(one, "val")
    assert val == byte_documents(two, "val")[::-1]
    assert byte_documents(one, "train") == byte_documents(two, "train")[::-1]
    assert len(set(val)) == 30  # a tenth of 301 distinct documents


@pytest.mark.parametrize(
    "count, fraction, validating",
    [
        (2, None, 1),
        (50, None, 5),
        (320, None, 32),
        (5000, None, 50),
        (50, 0.001, 1),
        (50, 0.999, 49),
        (50, 0.5, 25),
    ],
)
def test_how_many_validate(count, fraction, validating):
    hashes = np.random.default_rng(0).integers(0, 2**64, count, dtype=np.uint64)
    for seed in (0, 1):
        assert np.count_nonzero(splits.by_contents(hashes, fraction, seed)) == validating


def test_another_seed_takes_other_documents(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(200)] + ["text 7"] * 3)
    found = []
    for name, seed in (("a", 0), ("b", 1), ("c", 1), ("d", 2)):
        out = prepare_bytes(source, out=tmp_path / name, seed=seed)
        train, val = (set(byte_documents(out, part)) for part in ("train", "val"))
        assert len(val) == 20 and not train & val and len(train | val) == 200
        found.append(val)
    assert found[1] == found[2] and len({frozenset(val) for val in found}) == 3


def test_rows_are_split_as_train_test_split_does():
    # nanoGPT's readme: 4,007 of 8,013,769 documents validate. datasets draws default_rng(2357).permutation(n) and
    # tests on its first ceil(0.0005 n).
    validates = splits.by_rows(8_013_769, 0.0005, 2357)
    assert np.count_nonzero(validates) == 4_007
    order = np.random.default_rng(2357).permutation(1000)
    assert sorted(order[:1]) == np.flatnonzero(splits.by_rows(1000, 0.0005, 2357)).tolist()


def all_documents(*paths):
    return [document for path in paths for segment in pieces.segments(path) for document in pieces.documents(segment)]


def test_folders_files_and_endings(tmp_path):
    folder = tmp_path / "in"
    (folder / "b" / ".hidden").mkdir(parents=True)
    (folder / "b" / "z.txt").write_text("second\n")
    (folder / "c.txt.xz").write_bytes(lzma.compress(b"third"))
    jsonl(folder / "a.jsonl", ["first"])
    for ignored in ("notes.md", ".x.txt", "b/.hidden/y.txt"):
        (folder / ignored).write_text("ignored")
    (folder / "empty.txt").touch()
    (tmp_path / "alone.txt").write_text("before")
    files = sources.text_files([tmp_path / "alone.txt", folder, folder / "c.txt.xz"])
    assert [name for name, _ in files] == ["alone.txt", "a.jsonl", "b/z.txt", "c.txt.xz", "empty.txt"]
    assert all_documents(*(path for _, path in files)) == [b"before", b"first", b"second\n", b"third"]


@pytest.mark.parametrize("block", [1, 5, 13, 1 << 20])
def test_separators_split_a_text(tmp_path, monkeypatch, block):
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\n two \n<|endo<|endoftext|><|endoftext|>three<|endoftext|>\n")
    monkeypatch.setattr(pieces, "BLOCK_BYTES", block)
    for piece in (1, 20, 1 << 20):
        monkeypatch.setattr(pieces, "PIECE_BYTES", piece)
        assert all_documents(tmp_path / "a.txt") == [b"one", b"two \n<|endo", b"three"]


def test_same_input_gives_the_same_bytes(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(100)])
    one = prepare_bytes(source, out=tmp_path / "1" / "set", shard_tokens=100)
    two = prepare_bytes(source, out=tmp_path / "2" / "set", shard_tokens=100)
    assert content_of(one) == content_of(two)


def test_batches_leave_no_trace(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(100)])
    one = prepare_bytes(source, out=tmp_path / "1" / "set", shard_tokens=100)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 20)
    assert content_of(prepare_bytes(source, out=tmp_path / "2" / "set", shard_tokens=100)) == content_of(one)


def test_no_shard_name_is_in_both_splits(tmp_path):
    out = prepare_bytes(jsonl(tmp_path / "a.jsonl", "ab"), out=tmp_path / "web_val")
    assert sorted(path.name for path in out.glob("*.bin")) == ["text_train_000001.bin", "text_val_000000.bin"]


def test_command_takes_several_inputs(tmp_path):
    a, b = jsonl(tmp_path / "a.jsonl", "ab"), jsonl(tmp_path / "b.jsonl", "cd")
    out = tmp_path / "deep" / "out"
    code, stdout, err = script("text", a, b, "--out", out, "--tokenizer", "bytes", "--val-fraction", "0.5")
    assert (code, err) == (0, "") and "tokens a second" in stdout
    assert sorted(byte_documents(out, "train") + byte_documents(out, "val")) == [b"a", b"b", b"c", b"d"]
    assert check_manifest(out)["source"]["names"] == ["a.jsonl", "b.jsonl"]


# GPT-2


@needs_gpt2
def test_gpt2_ids(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(VOCABULARY))
    # shared/data/README.md: "hello world"; a separator inside a JSON document is ordinary text, not 50256.
    texts = {"hello world": [31373, 995], "<|endoftext|>": [27, 91, 437, 1659, 5239, 91, 29]}
    out = tokenise.prepare_text([jsonl(tmp_path / "a.jsonl", texts)], tmp_path / "o")
    found = [ids.tolist() for split in ("train", "val") for ids in documents_in(read_split(out, split), 50256)]
    assert sorted(found) == sorted(texts.values())
    manifest = check_manifest(out)
    assert [manifest[key] for key in ("tokenizer", "vocab_size", "bos_id")] == ["gpt2", 50257, 50256]


@needs_gpt2
def test_gpt2_counts_of_real_text(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(VOCABULARY))
    out = tokenise.prepare_text([SHARED / "webtext" / "webtext_val.jsonl.xz"], tmp_path / "web")
    totals = check_manifest(out)["splits"]
    # shared/data/README.md: 633 documents, 1,879,644 tokens.
    assert totals["train"]["tokens"] + totals["val"]["tokens"] == 1_879_644
    assert (totals["train"]["documents"], totals["val"]["documents"]) == (601, 32)
    import tiktoken

    first = json.loads(lzma.open(SHARED / "webtext" / "webtext_val.jsonl.xz").readline())["text"]
    pieces = documents_in(read_split(out, "train"), 50256) + documents_in(read_split(out, "val"), 50256)
    assert tiktoken.get_encoding("gpt2").encode_ordinary(first) in [piece.tolist() for piece in pieces]


def test_no_vocabulary_is_a_sentence(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", "ab")
    nowhere = dict.fromkeys(["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"], "http://127.0.0.1:9")
    cache = tmp_path / "cache"
    code, out, err = script("text", source, "--out", tmp_path / "o", TIKTOKEN_CACHE_DIR=str(cache), **nowhere)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("error: ") and "TIKTOKEN_CACHE_DIR" in err
    assert not (tmp_path / "o").exists()


# Whole or not at all

INTERRUPTED = """
import sys, time
from pathlib import Path
from jspeed.data import pieces, tokenise, work
from jspeed.errors import run_script

pieces.PIECE_BYTES = 1000
stop = int(sys.argv[3])
encode = work.encode

def slow(*arguments):
    global stop
    if stop == 0:
        print("half", flush=True)
        time.sleep(60)
    stop -= 1
    return encode(*arguments)

work.encode = slow
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
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    encoded = []
    real = tokenise.work.encode
    monkeypatch.setattr(tokenise.work, "encode", lambda *a: (encoded.append(a), real(*a))[1])
    prepare_bytes(source, out=out, processes=1)
    assert content_of(out) == wanted and os.listdir(out.parent) == ["out"]
    assert len(encoded) == len(list(pieces.pieces([source]))) - 8


def test_work_of_other_inputs_is_not_taken_up(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [f"document {i} " * 20 for i in range(200)])
    assert interrupt(source, tmp_path / "out", signal.SIGKILL) == -signal.SIGKILL
    prepare_bytes(jsonl(tmp_path / "a.jsonl", "ab"), out=tmp_path / "out")
    check_manifest(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "out"]


def test_no_room_keeps_the_work(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", [f"document {i} " * 20 for i in range(200)])
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
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
    assert len(list(pieces.pieces([path for _, path in sources.text_files([tmp_path / "in"])]))) > 4


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
    real = tokenise.work.tokenise
    monkeypatch.setattr(tokenise.work, "tokenise", lambda *a: (real(*a), jsonl(source, "abc")))
    with pytest.raises(BadInput, match="changed while it was read"):
        prepare_bytes(source, out=tmp_path / "out")
    assert os.listdir(tmp_path) == ["a.jsonl"]


# Bad input

GOOD = b'{"text": "a"}\n{"text": "b"}\n'
BAD_FILES = {
    "unknown ending": ("a.csv", GOOD, r"a\.csv has an unknown ending; expected \.txt, "),
    "not JSON": ("a.jsonl", GOOD + b'{"text": \n', r"line 3 of .*a\.jsonl is not JSON"),
    "nested too deep": ("a.jsonl", GOOD + b"[" * 200_000, r"line 3 of .* is not JSON"),
    "not an object": ("a.jsonl", b"[1]\n", r"line 1 of .*a\.jsonl lacks the string field"),
    "no text": ("a.jsonl", GOOD + b'\n{"txt": ""}\n', r"line 4 of .*a\.jsonl lacks the string field"),
    "text is a number": ("a.jsonl", b'{"text": 1}\n', r"line 1 of .*a\.jsonl lacks the string field"),
    "half a surrogate pair": ("a.jsonl", b'{"text": "\\ud800"}\n', r"line 1 of .* surrogate"),
    "not UTF-8 in JSON": ("a.jsonl", GOOD + b'{"text": "\xff"}\n', r"a\.jsonl is not UTF-8 at byte 38"),
    "not UTF-8": ("a.txt", b"abc\xff", r"a\.txt is not UTF-8 at byte 3"),
    "not UTF-8 later": ("a.txt", b"ab<|endoftext|>c\xffd<|endoftext|>", r"a\.txt is not UTF-8 at byte 16"),
    "not xz": ("a.jsonl.xz", GOOD, r"a\.jsonl\.xz is corrupt or not xz"),
    "cut short": ("a.jsonl.xz", lzma.compress(GOOD * 99)[:-9], r"a\.jsonl\.xz is corrupt or not xz"),
    "no documents": ("a.jsonl", b'\n{"text": ""}\n', r"holds no documents"),
    "empty": ("a.txt", b"", r"holds no documents"),
    "one document": ("a.txt", b"abc", r"holds one document"),
    "not parquet": ("a.parquet", GOOD, r"a\.parquet is corrupt or not parquet"),
    "copies": ("a.jsonl", GOOD[:14] * 5, r"holds one document, or copies"),
}


@pytest.mark.parametrize("name, content, sentence", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_file(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=sentence) as raised:
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
    (tmp_path / "in" / "readme.md").touch()
    with pytest.raises(BadInput, match=r"input folder .*in holds no \.txt, "):
        prepare_bytes(tmp_path / "in", out=tmp_path / "out")
    with pytest.raises(BadInput, match="name too long"):
        prepare_bytes(tmp_path / ("x" * 300), out=tmp_path / "out")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(BadInput, match="neither a file nor a folder"):
        prepare_bytes(tmp_path / "pipe.txt", out=tmp_path / "out")
    with pytest.raises(BadInput, match="no input was given"):
        prepare_bytes(out=tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["in", "pipe.txt"]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, float("nan")])
def test_bad_fraction(tmp_path, fraction):
    with pytest.raises(BadInput, match="between 0 and 1"):
        prepare_bytes(jsonl(tmp_path / "a.jsonl", "ab"), out=tmp_path / "out", val_fraction=fraction)


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
    assert byte_documents(prepare_bytes(source, out=tmp_path / "in"), "train")  # an empty folder is fine


def test_a_single_document_is_cut(tmp_path):
    (tmp_path / "novel.txt").write_bytes(text := bytes(range(97, 123)) * 40)
    out = prepare_bytes(tmp_path / "novel.txt", out=tmp_path / "out")
    (train,), (val,) = (byte_documents(out, part) for part in ("train", "val"))
    assert train + val == text and len(val) == 104
    out = prepare_bytes(tmp_path / "novel.txt", out=tmp_path / "half", val_fraction=0.5)
    assert abs(len(byte_documents(out, "val")[0]) - 520) <= 1


@pytest.mark.parametrize("mark", ["after", "none"])
def test_marks_and_own_validation_files(tmp_path, mark):
    train, val = jsonl(tmp_path / "a.jsonl", ["ab", "", "c"]), jsonl(tmp_path / "b.jsonl", ["d"])
    out = prepare_bytes(train, out=tmp_path / "out", val_inputs=[val], mark=mark)
    wanted = {"after": ([97, 98, 256, 99, 256], [100, 256]), "none": ([97, 98, 99], [100])}[mark]
    assert [read_split(out, part).tolist() for part in ("train", "val")] == list(wanted)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["mark"] == mark and manifest["bos_id"] == {"after": 256, "none": None}[mark]
    assert [manifest["splits"][part]["documents"] for part in ("train", "val")] == [2, 1]
    assert prepare_bytes(train, out=out, val_inputs=[val], mark=mark) == out  # already there
    with pytest.raises(BadInput, match="not empty"):
        prepare_bytes(train, out=out, val_inputs=[val])


def test_parquet(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [f"text é {i}" for i in range(50)] + [""]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"id": range(51), "text": texts}), path, row_group_size=7)
    assert all_documents(path) == [text.encode() for text in texts[:-1]]
    used = []
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1)
    assert len(list(pieces.pieces([path], used.append))) == 8 and sum(used) == path.stat().st_size
    for column, sentence in (({"txt": ["a"]}, "lacks the string column"), ({"text": [1]}, "lacks the string column")):
        parquet.write_table(pa.table(column), tmp_path / "bad.parquet")
        with pytest.raises(BadInput, match=sentence):
            prepare_bytes(tmp_path / "bad.parquet", out=tmp_path / "out")
    parquet.write_table(pa.table({"text": ["a", None]}), tmp_path / "bad.parquet")
    with pytest.raises(BadInput, match='row 1 of row group 0 .* has no "text"'):
        prepare_bytes(tmp_path / "bad.parquet", out=tmp_path / "out")
    (tmp_path / "bad.parquet").write_bytes(path.read_bytes()[:-30])
    with pytest.raises(BadInput, match="bad.parquet is corrupt"):
        prepare_bytes(tmp_path / "bad.parquet", out=tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gpt3", r"tokenizer 'gpt3' is unknown; did you mean 'gpt2'\?"),
        ("cl100k_base", "has 100,277 ids but a shard holds at most 65,535"),
    ],
)
def test_bad_tokenizer(tmp_path, name, sentence):
    with pytest.raises(BadInput, match=sentence):
        tokenise.prepare_text([jsonl(tmp_path / "a.jsonl", "ab")], tmp_path / "out", name)


@pytest.mark.parametrize("arguments", [["text"], ["text", "a.txt", "--out", "o"], ["text", "--out", "o"], ["nonsense"]])
def test_bad_command_exits_with_2(tmp_path, arguments):
    code, out, err = script(*arguments)
    assert (code, out) == (2, "") and err and "Traceback" not in err
