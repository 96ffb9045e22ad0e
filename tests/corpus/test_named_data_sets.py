"""Named data sets: published document and token counts, splits and separator tokens."""

import json
import shlex
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jspeed.base.files import sha256_of
from jspeed.corpus import download, named_data_sets, tokenise, tokenizers
from jspeed.corpus.command import names, shakespeare, shakespeare_char
from jspeed.corpus.tokenise import Tokenising, prepare_stdlib
from jspeed.data import find_split
from jspeed.data.find_shards import map_tokens
from jspeed.data.tokens import TOKENIZERS
from jspeed.errors import BadInput
from jspeed.run.find_recipe import load_recipe
from jspeed.run.options import Options

from ..refusals import refused

SHARED = Path(__file__).parents[3] / "shared" / "data"
NAMES, SHAKESPEARE = (
    SHARED / "classics" / name for name in ("names.txt", "tinyshakespeare_input.txt")
)
needs_classics = pytest.mark.skipif(not NAMES.is_file(), reason=f"no names.txt in {NAMES.parent}")


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch):
    if (SHARED / "tiktoken_cache").is_dir():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))


def tokens(folder, split):
    (path,) = folder.glob(f"*_{split}_*.bin")
    return np.fromfile(path, "<u2", offset=1024)


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


@needs_classics
def test_names(tmp_path):
    out = named_data_sets.prepare_names(tmp_path / "names", NAMES)
    facts = manifest(out)
    assert (facts["vocab_size"], facts["bos_id"], facts["pad_id"], facts["truncated"]) == (
        28,
        26,
        27,
        0,
    )
    streams = [tokens(out, split) for split in ("train", "val")]
    rows = np.concatenate([stream[:-1].reshape(-1, 32) for stream in streams])
    assert rows.shape == (32_033, 32) and all(stream[-1] == 26 for stream in streams)
    # seeds.md: 228,146 targets; its matrix of 33 columns has 796,910 PADs, one more a row than
    # ours.
    inputs = np.concatenate([stream[:-1] for stream in streams])
    targets = np.concatenate([stream[1:] for stream in streams])
    assert np.count_nonzero((inputs != 27) & (targets != 27)) == 228_146
    assert np.count_nonzero(rows == 27) == 796_910 - 32_033
    tokenizer = tokenizers.tokenizer_of(facts)
    names = NAMES.read_text().split("\n")
    assert sorted(tokenizer.decode(row).decode() for row in rows) == sorted(names)
    assert max(map(len, names)) == 15 and len(set("".join(names))) == 26
    train, val = (
        {tokenizer.decode(row) for row in stream[:-1].reshape(-1, 32)} for stream in streams
    )
    assert not train & val
    assert [facts["splits"][split]["documents"] for split in ("train", "val")] == [
        len(s) // 32 for s in streams
    ]


def test_long_names_are_cut_without_an_end_they_do_not_have(tmp_path):
    (tmp_path / "names.txt").write_text(
        "\n".join(["abcdefgh", "abcdefg", "ab", "ba", "a", "b", "bb", "aa"] * 2) + "\n\n"
    )
    out = named_data_sets.prepare_names(tmp_path / "out", tmp_path / "names.txt", row=8)
    bos, pad = manifest(out)["bos_id"], manifest(out)["pad_id"]
    assert (bos, pad, manifest(out)["truncated"]) == (8, 9, 2)
    rows = {
        tuple(row)
        for split in ("train", "val")
        for row in tokens(out, split)[:-1].reshape(-1, 8).tolist()
    }
    assert (bos, 0, 1, bos, pad, pad, pad, pad) in rows
    assert (bos, *range(7)) in rows  # the next row's BOS ends it
    assert (bos, *range(6), pad) in rows and len(rows) == 8


@pytest.mark.parametrize("row", [2, 4097, 10**9])
def test_a_row_is_bounded_before_any_is_made(tmp_path, row):
    (tmp_path / "names.txt").write_text("ada\nbob\n")
    with pytest.raises(BadInput, match=f"--row {row}: .* give 3 to 4,096 tokens"):
        named_data_sets.prepare_names(tmp_path / "out", tmp_path / "names.txt", row=row)
    assert [path.name for path in tmp_path.iterdir()] == ["names.txt"]


@needs_classics
@pytest.mark.parametrize("characters", [True, False])
def test_shakespeare(tmp_path, characters):
    out = named_data_sets.prepare_shakespeare(tmp_path / "out", characters, SHAKESPEARE)
    facts, text = manifest(out), SHAKESPEARE.read_text()
    train, val = tokens(out, "train"), tokens(out, "val")
    # nanoGPT's readmes: 1,003,854 and 111,540 characters of 65 kinds; 301,966 and 36,059 GPT-2
    # tokens.
    assert (len(train), len(val)) == ((1_003_854, 111_540) if characters else (301_966, 36_059))
    assert facts["bos_id"] is None
    if characters:
        symbols = sorted(set(text))
        assert facts["vocab_size"] == 65 and facts["symbols"] == symbols
        assert "".join(symbols[token] for token in [*train, *val]) == text
    else:
        import tiktoken

        encode = tiktoken.get_encoding("gpt2").encode_ordinary
        cut = int(len(text) * 0.9)
        assert encode(text[:cut]) == train.tolist() and encode(text[cut:]) == val.tolist()
    tokenizer = tokenizers.tokenizer_of(facts)
    assert tokenizer.decode(train[:100]).decode() == text[: len(tokenizer.decode(train[:100]))]
    assert tokenizer.byte_lengths()[np.concatenate([train, val])].sum() == len(text.encode())


@needs_classics
def test_stories_and_openwebtext(tmp_path):
    import tiktoken

    encode = tiktoken.get_encoding("gpt2").encode_ordinary
    stories = [f"Once there was a fox number {i}.\nIt was   quick." for i in range(40)]
    for name, part in (("train.txt", stories[:30]), ("valid.txt", stories[30:])):
        (tmp_path / name).write_text("".join(f"{story}\n<|endoftext|>\n" for story in part))
    options = Tokenising(val_input=(tmp_path / "valid.txt",), end_of_text="after")
    out = named_data_sets.prepare_hub_text(
        "tinystories", tmp_path / "s", [tmp_path / "train.txt"], options
    )
    for split, part in (("train", stories[:30]), ("val", stories[30:])):
        assert tokens(out, split).tolist() == [
            token for story in part for token in [*encode(story), 50256]
        ]

    texts = [f"Document {i} says {'so ' * (i % 5)}" for i in range(1000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "owt.jsonl").write_text(lines)
    options = Tokenising(val_fraction=0.01, seed=2357, end_of_text="after")
    out = named_data_sets.prepare_hub_text(
        "openwebtext", tmp_path / "o", [tmp_path / "owt.jsonl"], options
    )
    is_val = set(np.random.default_rng(2357).permutation(1000)[:10].tolist())
    for split in ("train", "val"):
        part = [text for i, text in enumerate(texts) if (i in is_val) == (split == "val")]
        assert tokens(out, split).tolist() == [
            token for text in part for token in [*encode(text), 50256]
        ]
    assert manifest(out)["mark"] == "after" and manifest(out)["source"]["split"] == "rows"
    with pytest.raises(BadInput, match="not empty"):  # another rule chose other documents
        tokenise.prepare_text([tmp_path / "owt.jsonl"], out, options)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"", "holds no text"),
        (b" \n\n", "holds no text"),
        (b"ab\xff", "not UTF-8 at byte 2"),
    ],
)
def test_bad_input(tmp_path, content, words):
    path = tmp_path / "input.txt"
    if content is not None:
        path.write_bytes(content)
    for prepare in (
        lambda out: named_data_sets.prepare_names(out, path),
        lambda out: named_data_sets.prepare_shakespeare(out, True, path),
    ):
        refused(words, prepare, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_more_characters_than_uint16_holds(tmp_path):
    points = [point for point in range(0x20, 0x20000) if not 0xD800 <= point < 0xE000]
    (tmp_path / "all.txt").write_text("".join(map(chr, points)), encoding="utf-8")
    out = named_data_sets.prepare_shakespeare(tmp_path / "out", True, tmp_path / "all.txt")
    tokens = np.concatenate(
        [map_tokens(find_split(out, split).paths[0], "<u4") for split in ("train", "val")]
    )
    np.testing.assert_array_equal(tokens, range(128_992))


def test_symbols_refuse_what_they_lack():
    tokenizer = tokenizers.symbols_tokenizer("symbols", ["b", "a"], 3, 2)
    assert tokenizer.encode(b"ab").tolist() == [1, 0] and tokenizer.decode([1, 2, 0]) == b"ab"
    refused("character 'c' is not among the 2 symbols", tokenizer.encode, b"abc")


def test_the_data_of_recipes_have_the_expected_tokenizers(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(["abc", "bcd", "cde", "def", "efg"] * 9))
    made = {
        "names": named_data_sets.prepare_names(tmp_path / "names", tmp_path / "a.txt"),
        "shakespeare-char": named_data_sets.prepare_shakespeare(
            tmp_path / "char", True, tmp_path / "a.txt"
        ),
        "stdlib": prepare_stdlib(tmp_path / "stdlib"),
    }
    for name, folder in made.items():
        assert manifest(folder)["tokenizer"] == TOKENIZERS[name]
    others = {name for name, its in TOKENIZERS.items() if its == "gpt2"}
    assert set(made) | others == set(TOKENIZERS)


@needs_classics
def test_advice_names_the_recipe_and_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JSPEED_CACHE", str(tmp_path / "cache"))
    names(NAMES)
    # README's line
    assert capsys.readouterr().out.endswith("\ntrain on it: jspeed run microgpt-names\n")
    (tmp_path / "names.txt").write_text("\n".join(["abc", "bcd", "cde", "def", "efg"] * 9))
    names(tmp_path / "names.txt", out=tmp_path / "o")
    assert capsys.readouterr().out.endswith(f"jspeed run microgpt-names --data {tmp_path}/o\n")


def test_a_named_text_has_one_line_of_advice(tmp_path, monkeypatch, capsys):
    """Once also that of any text, with another recipe."""
    monkeypatch.setenv("JSPEED_CACHE", str(tmp_path / "cache"))
    (tmp_path / "play.txt").write_text("To be or not to be.\n" * 99)
    shakespeare_char(tmp_path / "play.txt")

    def no_network(*_, **__):
        raise BadInput("not fetched")

    monkeypatch.setattr(download, "fetch", no_network)
    said = capsys.readouterr().out
    assert said.count("jspeed run") == 1
    assert said.endswith("train on it: jspeed run shakespeare-char\n")
    with pytest.raises(BadInput, match="not fetched"):  # it is somebody's, not Shakespeare's
        shakespeare_char()
    genuine = named_data_sets.SHAKESPEARE._replace(sha256=sha256_of(tmp_path / "play.txt"))
    monkeypatch.setattr(named_data_sets, "SHAKESPEARE", genuine)
    with pytest.raises(BadInput, match="not fetched"):  # other tokens of the same text
        shakespeare(out=tmp_path / "cache" / "data" / "shakespeare-char")
    shakespeare_char()  # downloads nothing
    again = capsys.readouterr().out
    assert "is already there" in again and again.endswith("jspeed run shakespeare-char\n")


def test_what_is_printed_trains_what_was_prepared(tmp_path, capsys):
    """Rows and symbols of its own, in a folder whose name a shell would cut."""
    (tmp_path / "names.txt").write_text("\n".join(["abc", "bcd", "cde", "def", "efg"] * 9))
    names(tmp_path / "names.txt", row=8, out=tmp_path / "my names")
    line = capsys.readouterr().out.rpartition("train on it: jspeed run ")[2]
    name, _, folder = shlex.split(line)
    recipe = load_recipe(Options(name, data=Path(folder))).recipe
    made = manifest(tmp_path / "my names")
    assert (recipe.stages[0].lane_len, recipe.eval_len) == (8, 8)
    assert (recipe.vocab_size, recipe.data.bos_id) == (made["vocab_size"], made["bos_id"]) == (9, 7)


def test_without_a_network_it_says_input(tmp_path, monkeypatch):
    def cut(*_):
        raise OSError("no network")

    def no_hub(*_):
        raise BadInput("it cannot be asked; run again")

    monkeypatch.setattr(download, "ATTEMPTS", 1)
    monkeypatch.setattr(download, "_get", cut)
    for name in ("describe_hub", "list_hub"):
        monkeypatch.setattr(download, name, no_hub)
    for prepared in (
        named_data_sets.prepare_names,
        partial(named_data_sets.prepare_shakespeare, characters=True),
        partial(named_data_sets.prepare_hub_text, "tinystories"),
        partial(named_data_sets.prepare_hub_text, "openwebtext"),
    ):
        refused("--input", prepared, tmp_path / "out")


def test_validation_files_alone_are_refused(tmp_path):
    with pytest.raises(BadInput, match="--val-input needs --input"):
        options = Tokenising(val_input=(tmp_path / "valid.txt",))
        named_data_sets.prepare_hub_text("tinystories", tmp_path / "out", options=options)
