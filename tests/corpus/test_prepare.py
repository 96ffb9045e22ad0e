"""``jspeed prepare text``: the tokens and documents of its shards, its splits, and its output."""

import gzip
import hashlib
import json
import lzma
import os
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jspeed.cli import main
from jspeed.corpus import chunks, sources, tokenise
from jspeed.corpus import split as splits
from jspeed.corpus.shards import folder

from ..call_script import call
from ..refusals import refused
from .prepared import (
    SHARED,
    VOCABULARY,
    byte_documents,
    check_manifest,
    content_of,
    documents_in,
    jsonl,
    needs_gpt2,
    prepare_bytes,
    read_split,
    script,
)


def names_of(out):
    return sorted(path.name for path in out.glob("*.bin"))


def test_documents_keep_their_order_and_start(tmp_path):
    texts = [f"document {i} {'é' * (i % 7)}\n" for i in range(200)]
    out = prepare_bytes(jsonl(tmp_path / "a.jsonl", texts), out=tmp_path / "set", val_fraction=0.1)
    check_manifest(out)
    train, val = byte_documents(out, "train"), byte_documents(out, "val")
    wanted = [text.encode() for text in texts]
    chosen = sorted(wanted, key=lambda text: hashlib.sha256(text).digest())[:20]
    assert val == [text for text in wanted if text in chosen]
    assert train == [text for text in wanted if text not in chosen]
    assert names_of(out) == ["set_train_000001.bin", "set_val_000000.bin"]


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=2, max_size=12
    ),
    shard_tokens=st.integers(1, 60),
    ending=st.sampled_from([".jsonl", ".jsonl.xz"]),
)
@example(["", "x" * 19], 1, ".jsonl")  # one document, cut in two; a byte less is refused
@example(["", "x" * 18], 1, ".jsonl")
def test_any_text_comes_back(texts, shard_tokens, ending):
    wanted = Counter(text.encode() for text in texts if text)
    # with its mark
    cut = wanted.total() == 1 and len(next(iter(wanted))) + 1 >= tokenise.ONE_DOCUMENT_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        source, out = jsonl(Path(folder, "a" + ending), texts), Path(folder, "out")
        if len(wanted) < 2 and not cut:
            refused("expected two or more", prepare_bytes, source, out=out)
            return
        prepare_bytes(source, out=out, shard_tokens=shard_tokens)
        manifest = check_manifest(out)
        train, val = (Counter(byte_documents(out, split)) for split in ("train", "val"))
        if cut:
            assert b"".join([*train, *val]) == next(iter(wanted))
            assert train.total() == val.total() == 1
        else:
            assert train + val == wanted and not train.keys() & val.keys()
        for split in ("train", "val"):
            sizes = [file["tokens"] for file in manifest["files"] if file["split"] == split]
            assert set(sizes[:-1]) <= {shard_tokens} and 0 < sizes[-1] <= shard_tokens


def test_a_long_document_goes_on_in_the_next_shard(tmp_path):
    out = prepare_bytes(
        jsonl(tmp_path / "a.jsonl", ["x" * 25, "y" * 25]), out=tmp_path / "o", shard_tokens=10
    )
    wanted = [("train", 1), ("train", 2), ("train", 3), ("val", 0), ("val", 1), ("val", 2)]
    assert names_of(out) == [f"o_{split}_00000{i}.bin" for split, i in wanted]
    files = check_manifest(out)["files"]
    assert [(file["tokens"], file["documents"]) for file in files] == [(10, 1), (10, 0), (6, 0)] * 2


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.xz"])
@pytest.mark.parametrize("more", [[], ["--val-input"], ["--end-of-text", "after"]])
def test_a_shard_size_that_is_asked_for(tmp_path, name, more):
    texts = [f"{i} " * 100 for i in range(40)]
    if name.endswith("txt"):
        (tmp_path / name).write_text("<|endoftext|>".join(texts))
    else:
        jsonl(tmp_path / name, texts)
    if more == ["--val-input"]:
        more = [*more, str(jsonl(tmp_path / "val.jsonl", ["v" * 2500]))]
    words = ["text", str(tmp_path / name), "--tokenizer", "bytes", *more]
    for size, out in ((1000, "small"), (100_000_000, "whole")):
        main.call([*words, "--out", str(tmp_path / out), "--shard-tokens", str(size)], "prepare")
    small, whole = (
        json.loads((tmp_path / out / "manifest.json").read_text()) for out in ("small", "whole")
    )
    for split in ("train", "val"):
        sizes = [file["tokens"] for file in small["files"] if file["split"] == split]
        assert set(sizes[:-1]) == {1000} and 0 < sizes[-1] <= 1000
        np.testing.assert_array_equal(
            read_split(tmp_path / "small", split), read_split(tmp_path / "whole", split)
        )
    assert small["source"] == whole["source"] | {"shard_tokens": 1000} and len(whole["files"]) == 2


def test_shards_of_another_size_are_not_already_there(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [f"{i} " * 100 for i in range(40)])
    for first, then in ((1000, {}), (None, {"shard_tokens": 1000})):
        given = {"shard_tokens": first} if first else {}
        out = prepare_bytes(source, out=tmp_path / str(first), **given)
        assert prepare_bytes(source, out=out, **given) == out  # it is there
        refused("not empty", prepare_bytes, source, out=out, **then)


@pytest.mark.parametrize("size", ["0", "-1", "999", "2147483648", "1e6", "many"])
def test_a_shard_size_out_of_range_is_refused(tmp_path, size):
    source = jsonl(tmp_path / "a.jsonl", ["a", "b"])
    words = ["text", str(source), "--out", str(tmp_path / "o"), f"--shard-tokens={size}"]
    refused("--shard-tokens .*: expected a whole number", main.call, words, "prepare")
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_more_shards_than_their_names_can_number_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "MOST_SHARDS", 2)
    source = jsonl(tmp_path / "a.jsonl", ["x" * 25, "y" * 25])
    refused("more than 2 files", prepare_bytes, source, out=tmp_path / "o", shard_tokens=10)
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_seed_that_chooses_nothing_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one text " * 20)
    refused("--seed 3: ", prepare_bytes, tmp_path / "a.txt", out=tmp_path / "o", seed=3)
    assert os.listdir(tmp_path) == ["a.txt"]


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
    [(2, None, 1), (50, None, 5), (320, None, 32), (5000, None, 50)]
    + [(50, 0.001, 1), (50, 0.999, 49), (50, 0.5, 25)],
)
def test_how_many_validate(count, fraction, validating):
    hashes = np.random.default_rng(0).integers(0, 2**64, count, dtype=np.uint64)
    for seed in (0, 1):
        assert np.count_nonzero(splits.by_content_hash(hashes, fraction, seed)) == validating


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
    # nanoGPT's readme: 4,007 of 8,013,769 documents validate. datasets draws
    # default_rng(2357).permutation(n) and tests on its first ceil(0.0005 n).
    is_val = splits.by_permutation(8_013_769, 0.0005, 2357)
    assert np.count_nonzero(is_val) == 4_007
    order = np.random.default_rng(2357).permutation(1000)
    assert sorted(order[:1]) == np.flatnonzero(splits.by_permutation(1000, 0.0005, 2357)).tolist()


def all_documents(*paths):
    return [
        document
        for path in paths
        for segment in chunks.segments(path)
        for document in chunks.documents(segment)
    ]


def test_folders_files_and_endings(tmp_path):
    folder = tmp_path / "in"
    (folder / "b" / ".hidden").mkdir(parents=True)
    (folder / "b" / "z.txt").write_text("second\n")
    (folder / "c.txt.xz").write_bytes(lzma.compress(b"third"))
    jsonl(folder / "a.jsonl", ["first"])
    for ignored in ("data.csv", ".x.txt", "b/.hidden/y.txt", "tokenizer.json", "b/c.txt.bz2"):
        (folder / ignored).write_text("ignored")
    (folder / "linked").symlink_to(folder / "b")
    (folder / "empty.txt").touch()
    (tmp_path / "alone.txt").write_text("before")
    files = sources.text_files([tmp_path / "alone.txt", folder, folder / "c.txt.xz"])
    assert [name for name, _ in files] == "alone.txt a.jsonl b/z.txt c.txt.xz empty.txt".split()
    found = all_documents(*(path for _, path in files))
    assert found == [b"before", b"first", b"second\n", b"third"]
    names = ["data.csv", ".x.txt", "b/.hidden", "tokenizer.json", "b/c.txt.bz2", "linked"]
    assert sources.passed_over([tmp_path / "alone.txt", folder]) == sorted(names)


@pytest.mark.parametrize(
    "locale",
    [
        pytest.param({"LC_ALL": "C.UTF-8"}, marks=pytest.mark.slow),
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=["UTF-8", "C"],
)
def test_names_that_are_not_utf8(tmp_path, locale):
    """There was a traceback, and the manifest could not hold them."""
    odd = os.fsdecode(b"caf\xe9")
    folder = tmp_path / odd
    folder.mkdir()
    jsonl(folder / f"{odd}.jsonl", ["one", "two"])
    (folder / f"{odd}.txt").write_text("three")
    (folder / f"{odd}.csv").touch()
    flags = ["--tokenizer", "bytes", "--out", tmp_path / f"{odd}.out"]
    code, stdout, err = script("text", folder, folder / f"{odd}.txt", *flags, **locale)
    assert code == 0 and r"caf\udce9.out is ready" in stdout and err.endswith(": caf\\udce9.csv\n")
    text = (tmp_path / f"{odd}.out" / "manifest.json").read_text()
    assert json.loads(text)["source"]["names"] == [r"caf\xe9.jsonl", r"caf\xe9.txt"]
    code, _, err = script("text", tmp_path / f"no{odd}", "--out", tmp_path / "out", **locale)
    assert code == 2 and err.count("\n") == 1 and "does not exist" in err


def test_parquet_and_tokenizers_of_names_that_are_not_utf8(tmp_path):
    pa, hf = pytest.importorskip("pyarrow"), pytest.importorskip("tokenizers")
    from pyarrow import parquet

    odd = os.fsdecode(b"caf\xe9")
    parquet.write_table(pa.table({"text": ["b a", "a"]}), tmp_path / "a.parquet")
    made = hf.Tokenizer(hf.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.save(str(tmp_path / "a.json"))
    for ending in ("parquet", "json"):
        (tmp_path / f"a.{ending}").rename(tmp_path / f"{odd}.{ending}")
    options = tokenise.Tokenising(str(tmp_path / f"{odd}.json"), end_of_text="none")
    out = tokenise.prepare_text([tmp_path / f"{odd}.parquet"], tmp_path / "out", options)
    assert (out / "tokenizer.json").is_file()


def test_every_text_of_a_folder_is_read(tmp_path):
    """Of endings in capitals, Markdown and compressed files nothing was read, without a word."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "A.TXT").write_text("one")
    (folder / "b.Md").write_text("two")
    (folder / "c.text").write_text("three")
    jsonl(folder / "d.NDJSON", ["four"])
    jsonl(folder / "e.jsonl.gz", ["five"])
    jsonl(folder / "F.JSONL.XZ", ["six"])
    (folder / "g.txt.GZ").write_bytes(gzip.compress(b"seven"))
    (folder / "data.csv").write_text("0")
    wanted = [b"one", b"six", b"two", b"three", b"four", b"five", b"seven"]
    assert all_documents(*(path for _, path in sources.text_files([folder]))) == wanted
    for path in folder.iterdir():
        if path.name != "data.csv":
            assert sources.text_files([path])  # by its name too
    code, stdout, err = script("text", folder, "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert code == 0 and err.count("\n") == 1 and err.endswith(": data.csv\n")
    assert err.startswith("note: 1 of ")
    splits = check_manifest(tmp_path / "out")["splits"]
    assert splits["train"]["documents"] + splits["val"]["documents"] == 7


@pytest.mark.parametrize("block", [1, 5, 13, 1 << 20])
def test_separators_split_a_text(tmp_path, monkeypatch, block):
    mark = "<|endoftext|>"
    (tmp_path / "a.txt").write_text(f"one\n{mark}\n two \n<|endo{mark}{mark}three{mark}\n")
    monkeypatch.setattr(chunks, "BLOCK_BYTES", block)
    for piece in (1, 20, 1 << 20):
        monkeypatch.setattr(chunks, "PIECE_BYTES", piece)
        assert all_documents(tmp_path / "a.txt") == [b"one", b"two \n<|endo", b"three"]


def test_batches_leave_no_trace(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(100)])
    one = prepare_bytes(source, out=tmp_path / "1" / "set", shard_tokens=100)
    monkeypatch.setattr(chunks, "PIECE_BYTES", 20)
    two = prepare_bytes(source, out=tmp_path / "2" / "set", shard_tokens=100)
    assert content_of(two) == content_of(one)


def test_no_shard_name_is_in_both_splits(tmp_path):
    out = prepare_bytes(jsonl(tmp_path / "a.jsonl", "ab"), out=tmp_path / "web_val")
    assert names_of(out) == ["text_train_000001.bin", "text_val_000000.bin"]


def test_command_takes_several_inputs(tmp_path):
    a, b = jsonl(tmp_path / "a.jsonl", "ab"), jsonl(tmp_path / "b.jsonl", "cd")
    out, flags = tmp_path / "deep" / "out", "--tokenizer bytes --val-fraction 0.5".split()
    code, stdout, err = script("text", a, b, "--out", out, *flags)
    assert (code, err) == (0, "") and "tokens a second" in stdout
    found = byte_documents(out, "train") + byte_documents(out, "val")
    assert sorted(found) == [b"a", b"b", b"c", b"d"]
    assert check_manifest(out)["source"]["names"] == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("count", "flags", "said"),
    [
        (100, [], "10.0% of the documents are for validation: 1%, at least 32 but at most a tenth"),
        pytest.param(4000, [], "1.0% of the documents are for", marks=pytest.mark.slow),
        pytest.param(100, ["--val-fraction", "0.2"], None, marks=pytest.mark.slow),
    ],
)
def test_the_command_prints_the_validation_share(tmp_path, count, flags, said):
    source = jsonl(tmp_path / "a.jsonl", map(str, range(count)))
    flags = ["--out", tmp_path / "out", "--tokenizer", "bytes", *flags]
    code, stdout, _ = script("text", source, *flags)
    assert code == 0 and (said in stdout if said else "for validation" not in stdout)


def test_a_single_document_is_cut(tmp_path):
    (tmp_path / "novel.txt").write_bytes(text := bytes(range(97, 123)) * 40)
    out = prepare_bytes(tmp_path / "novel.txt", out=tmp_path / "out")
    (train,), (val,) = (byte_documents(out, part) for part in ("train", "val"))
    assert train + val == text and len(val) == 104
    out = prepare_bytes(tmp_path / "novel.txt", out=tmp_path / "half", val_fraction=0.5)
    assert abs(len(byte_documents(out, "val")[0]) - 520) <= 1


@pytest.mark.parametrize("separator", ["after", "none"])
def test_separators_and_own_validation_files(tmp_path, separator):
    train, val = jsonl(tmp_path / "a.jsonl", ["ab", "", "c"]), jsonl(tmp_path / "b.jsonl", ["d"])
    out = prepare_bytes(train, out=tmp_path / "out", val_input=[val], end_of_text=separator)
    wanted = {"after": [[97, 98, 256, 99, 256], [100, 256]], "none": [[97, 98, 99], [100]]}
    assert [read_split(out, part).tolist() for part in ("train", "val")] == wanted[separator]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["mark"] == separator
    assert manifest["bos_id"] == {"after": 256, "none": None}[separator]
    assert [manifest["splits"][part]["documents"] for part in ("train", "val")] == [2, 1]
    # already there
    assert prepare_bytes(train, out=out, val_input=[val], end_of_text=separator) == out
    refused("not empty", prepare_bytes, train, out=out, val_input=[val])


def test_parquet(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [f"text é {i}" for i in range(50)] + [""]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"id": range(51), "text": texts}), path, row_group_size=7)
    assert all_documents(path) == [text.encode() for text in texts[:-1]]
    used = []
    monkeypatch.setattr(chunks, "PIECE_BYTES", 1)
    assert len(list(chunks.pieces([path], used.append))) == 8 and sum(used) == path.stat().st_size
    (tmp_path / "bad.parquet").write_bytes(path.read_bytes()[:-30])
    refused("bad.parquet is corrupt", prepare_bytes, tmp_path / "bad.parquet", out=tmp_path / "out")


@pytest.mark.parametrize(
    "kind", "string large_string string_view binary large_binary binary_view dictionary".split()
)
def test_text_of_any_type_of_parquet(tmp_path, kind):
    """All but the first two were refused, for lacking the column."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = ["one", "é €", "", "one"] * 5
    values = [text.encode() for text in texts] if "binary" in kind else texts
    dictionary = kind == "dictionary"
    array = pa.array(values, None if dictionary else getattr(pa, kind)())
    array = array.dictionary_encode() if dictionary else array
    parquet.write_table(pa.table({"text": array}), tmp_path / "A.Parquet", row_group_size=6)
    assert all_documents(tmp_path / "A.Parquet") == [text.encode() for text in texts if text]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"txt": [["a"]]}, 'lacks the column "text"; it has .txt.: name the text'),
        ({"text": [[1]]}, r'column "text" of .* holds int64; expected strings'),
        ({"text": [[["a"]]]}, r'column "text" of .* holds list<'),
        ({"text": [[{"text": "a"}]]}, r'column "text" of .* holds struct<text: string>'),
        ({"text": [["a"], ["b"]]}, '2 columns called "text"; rename all but one'),
        ({"text": [[b"a", b"b\xff"]]}, "is not UTF-8 at byte 1"),
        ({"text": [["a", None]]}, 'row 1 of row group 0 .* has no "text"'),
    ],
)
def test_other_columns_of_parquet_are_refused(tmp_path, columns, message):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    arrays = [(name, pa.array(values)) for name, its in columns.items() for values in its]
    table = pa.Table.from_arrays([array for _, array in arrays], names=[name for name, _ in arrays])
    parquet.write_table(table, tmp_path / "bad.parquet")
    refused(message, prepare_bytes, tmp_path / "bad.parquet", out=tmp_path / "out")
    assert os.listdir(tmp_path) == ["bad.parquet"]


# GPT-2


def gpt2_documents(out):
    splits = (documents_in(read_split(out, split), 50256) for split in ("train", "val"))
    return [ids.tolist() for documents in splits for ids in documents]


@needs_gpt2
def test_gpt2_ids(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(VOCABULARY))
    # shared/data/README.md: "hello world"; a separator inside a JSON document is ordinary text, not
    # 50256.
    texts = {"hello world": [31373, 995], "<|endoftext|>": [27, 91, 437, 1659, 5239, 91, 29]}
    out = tokenise.prepare_text([jsonl(tmp_path / "a.jsonl", texts)], tmp_path / "o")
    assert sorted(gpt2_documents(out)) == sorted(texts.values())
    facts = {"tokenizer": "gpt2", "vocab_size": 50257, "bos_id": 50256}
    assert check_manifest(out).items() >= facts.items()


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
    assert tiktoken.get_encoding("gpt2").encode_ordinary(first) in gpt2_documents(out)


@pytest.mark.slow
def test_ten_short_lines_train(tmp_path):
    """One document of 300 bytes: its last tenth is for validation."""
    lines = [f"line {n}: the quick brown fox {n}\n" for n in range(10)]
    (tmp_path / "ten.txt").write_text("".join(lines))
    done = call(tmp_path, *"prepare.py text ten.txt --tokenizer bytes --out shards".split())
    assert done.code == 0, done.err
    sets = "WIDTH=16 LAYERS=1 HEADS=1 MLP_WIDTH=16 LANES=8 LANE_LEN=8 EVAL_LEN=8".split()
    run = ["--data", "shards", "--run-dir", "run", "--steps", 20, "--no-sample"]
    done = call(tmp_path, "speedrun.py", "stdlib", *run, "--set", *sets, "EVAL_TOKENS=16")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "run/run.json").read_text())["steps"] == 20


def test_a_missing_vocabulary_has_an_error_message(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", "ab")
    proxies = "https_proxy HTTPS_PROXY all_proxy ALL_PROXY".split()
    variables = {"TIKTOKEN_CACHE_DIR": str(tmp_path / "cache")}
    variables |= dict.fromkeys(proxies, "http://127.0.0.1:9")
    code, out, err = script("text", source, "--out", tmp_path / "o", **variables)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("error: ") and "TIKTOKEN_CACHE_DIR" in err
    assert not (tmp_path / "o").exists()
