"""tokenizer.json: equal to tiktoken, round trips, and vocabularies above 65,535."""

import json
import sys
from functools import partial

import numpy as np
import pytest
import tiktoken

from jspeed.corpus import tokenise, tokenizers
from jspeed.corpus.gpt2_tokenizer import gpt2_facts, gpt2_tokenizer_file, is_gpt2
from jspeed.corpus.tokenise import Tokenising
from jspeed.data import find_split, tokens
from jspeed.data.find_shards import map_tokens

from ..refusals import refused
from .prepared import VOCABULARY, jsonl, needs_gpt2

hf = pytest.importorskip("tokenizers", reason="the extra tokenizers is not installed")
decoders, models, pre = hf.decoders, hf.models, hf.pre_tokenizers

TEXTS = [
    "Hello, world!  Two spaces",
    "naïve café €5 🙂 x",
    "<|endoftext|> is only text here\n\n\ttab",
    "日本語",
]


def saved(path, made, *special):
    if special:
        made.add_special_tokens(list(special))
    made.save(str(path))
    return path


def byte_level(path, *special):
    made = hf.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = hf.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(TEXTS * 20, letters)
    return saved(path, made, *special)


def words(path, count):
    """A tokenizer of ``count`` ids: a word each, and the mark."""
    made = hf.Tokenizer(models.WordLevel({f"w{n}": n for n in range(count - 1)}, unk_token="w0"))
    made.pre_tokenizer = pre.WhitespaceSplit()
    return saved(path, made, "<|endoftext|>")


def pieces_with_bytes(path):
    """As SentencePiece's of Llama 2: a sign for the space, and bytes for what has no piece."""
    vocabulary = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    for piece in ["▁", *"Helowrd,!", "▁w", "▁wo"]:
        vocabulary[piece] = len(vocabulary)
    merges = [("▁", "w"), ("▁w", "o")]
    made = hf.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.pre_tokenizer = pre.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return saved(path, made, "<s>")


def openai_s():
    """GPT-2's tokenizer from OpenAI's encoder.json and vocab.bpe, which tiktoken's cache holds, and
    the former."""
    contents = sorted((path.read_text() for path in VOCABULARY.iterdir()), key=len)
    merges = [tuple(line.split()) for line in contents[0].splitlines()[1:]]
    made = hf.Tokenizer(models.BPE(json.loads(contents[1]), merges))
    made.pre_tokenizer, made.decoder = pre.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made, json.loads(contents[1])


@needs_gpt2
def test_gpt2_from_its_files_is_tiktokens(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(VOCABULARY))
    made, _ = openai_s()
    ours = tokenizers.named_tokenizer(
        str(saved(tmp_path / "tokenizer.json", made, "<|endoftext|>"))
    )
    theirs = tokenizers.named_tokenizer("gpt2")
    assert (ours.vocab_size, ours.bos_id, ours.dtype) == (
        theirs.vocab_size,
        theirs.bos_id,
        np.uint16,
    )
    for text in TEXTS[:2] + TEXTS[3:]:
        np.testing.assert_array_equal(ours.encode(text.encode()), theirs.encode(text.encode()))
    some = range(0, 50_257, 7)
    assert [ours.decode([token]) for token in some] == [theirs.decode([token]) for token in some]


@needs_gpt2
def test_gpt2_as_a_file_is_openai_s(tmp_path, monkeypatch):
    """The same ids and merges, by OpenAI's files; the same ids of text, by tiktoken."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(VOCABULARY))
    (path := tmp_path / "tokenizer.json").write_text(gpt2_tokenizer_file())
    ours, theirs = hf.Tokenizer.from_file(str(path)), tiktoken.get_encoding("gpt2")
    made, vocabulary = openai_s()
    assert ours.get_vocab() == vocabulary and is_gpt2(path)
    model, its = (json.loads(one.to_str())["model"] for one in (ours, made))
    assert model["merges"] == its["merges"] and len(its["merges"]) == 50_000
    for text in [*TEXTS[:2], "\u3000 \x00\r\n", TEXTS[3], "I'll don't 1234 " * 9]:
        assert ours.encode(text).ids == theirs.encode(text)
        assert ours.decode(ours.encode(text).ids) == text
    assert ours.encode("a<|endoftext|>").ids == [64, 50_256]


@needs_gpt2
def test_gpt2_s_own_files_are_known(tmp_path):
    """Whatever special tokens were added; not where text is cut or merged otherwise."""
    made, vocabulary = openai_s()
    path, listed = tmp_path / "tokenizer.json", tmp_path / "vocab.json"
    listed.write_text(json.dumps(vocabulary, ensure_ascii=False, indent=1))
    assert is_gpt2(listed) and is_gpt2(saved(path, made, "<|endoftext|>"))
    assert is_gpt2(saved(path, made, "[PAD]"))
    described = json.loads(path.read_text())
    with_space = described["pre_tokenizer"] | {"add_prefix_space": True}
    named = {"id": 50_258, "content": "<name>", "special": False}
    for change in (
        {"pre_tokenizer": with_space},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"normalizer": {"type": "Lowercase"}},
        {"added_tokens": [*described["added_tokens"], named]},
        {"model": {"vocab": vocabulary | {"!": 1, '"': 0}}},
        {"model": None},
    ):
        path.write_text(json.dumps(described | change))
        assert not is_gpt2(path)
    assert not is_gpt2(tmp_path / "none.json")


GPT2, BOS = tokens.GPT2, tokens.GPT2_BOS


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"vocab_size": 50_257}, GPT2),
        ({"vocab_size": 50_304, "bos_token_id": BOS, "eos_token_id": BOS}, GPT2),
        # which its table lacks
        ({"vocab_size": 50_257, "bos_token_id": None, "eos_token_id": 50_257}, GPT2),
        (
            {"vocab_size": 50_304, "bos_token_id": 50_257, "eos_token_id": [50_258, 198]},
            GPT2 | {"bos_id": 50_257, "vocab_size": 50_259, "end_ids": [50_258, 198]},
        ),
        (
            {"vocab_size": 99, "tokenizer": {"tokenizer": "bytes"}, "bos_token_id": 1},
            {"tokenizer": "bytes"},
        ),
    ],
)
def test_a_gpt2_without_a_tokenizer_s_file_reads_gpt2_s_ids(tmp_path, config, facts):
    assert gpt2_facts(tmp_path, config) == facts


def test_a_gpt2_reads_the_ids_of_the_file_beside_it(tmp_path):
    made = tokenizers.named_tokenizer(
        str(byte_level(tmp_path / "tokenizer.json", "<s>", "<|endoftext|>"))
    )
    facts, ids = made.facts, made.vocab_size
    # as transformers writes when nobody says another
    left_over = {"bos_token_id": BOS, "eos_token_id": BOS}
    for config in ({"vocab_size": ids}, {"vocab_size": 50_304} | left_over):
        assert gpt2_facts(tmp_path, config) == facts
    named = {"vocab_size": ids, "bos_token_id": made.bos_id, "eos_token_id": made.bos_id - 1}
    assert gpt2_facts(tmp_path, named) == facts | {"end_ids": [made.bos_id - 1]}


@pytest.mark.parametrize(
    ("ids", "file"), [(1_000, None), (21_128, None), (50_265, None), (50_257, "vocab.txt")]
)
def test_a_gpt2_of_ids_that_nothing_explains_is_refused(tmp_path, ids, file):
    """Text became GPT-2's ids, which a smaller table does not have, or has for other texts."""
    if file:
        (tmp_path / file).touch()
    what = f"its {file} is not GPT-2's" if file else f"it has {ids:,} ids, not GPT-2's"
    refused(f"has no tokenizer.json .*, and {what}", gpt2_facts, tmp_path, {"vocab_size": ids})


@pytest.mark.parametrize(
    "make", [lambda path: byte_level(path, "<|endoftext|>"), pieces_with_bytes]
)
def test_text_comes_back_token_by_token(tmp_path, make):
    tokenizer = tokenizers.named_tokenizer(str(make(tmp_path / "tokenizer.json")))
    for text in TEXTS:
        ids = tokenizer.encode(text.encode())
        assert tokenizer.bos_id not in ids
        assert b"".join(tokenizer.decode([token]) for token in ids.tolist()) == text.encode()
        assert tokenizer.byte_lengths()[ids].sum() == len(text.encode())
    assert tokenizer.decode([tokenizer.bos_id]) == b""


def test_words_of_a_large_vocabulary_become_uint32_shards(tmp_path):
    """Ids above 65,535, as llm.c has them: magic 20240801, version 7. The folder brings its
    tokenizer with it."""
    path = words(tmp_path / "large.json", 70_001)
    texts = [f"w{n} w{69_999 - n}" for n in range(0, 60, 2)]
    out = tokenise.prepare_text(
        [jsonl(tmp_path / "a.jsonl", texts)], tmp_path / "out", Tokenising(str(path), 0.1)
    )
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["vocab_size"] == 70_001 and manifest["bos_id"] == 70_000
    found = []
    for split in ("train", "val"):
        (shard,) = find_split(out, split).paths
        assert np.fromfile(shard, "<i4", 3).tolist() == [
            20240801,
            7,
            manifest["splits"][split]["tokens"],
        ]
        found += np.array_split(map_tokens(shard, "<u4"), manifest["splits"][split]["documents"])
    assert sorted(map(list, found)) == sorted([70_000, n, 69_999 - n] for n in range(0, 60, 2))
    again = tokenizers.tokenizer_of(manifest, out)
    assert again.decode([5, 69_999]).split() == [b"w5", b"w69999"]
    (out / "tokenizer.json").write_bytes(words(tmp_path / "other.json", 70_002).read_bytes())
    refused("tokenised with tokenizer.json@", tokenizers.tokenizer_of, manifest, out)


def test_bad_tokenizer_files(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", ["a", "b"])

    def refuses(name, words):
        made = Tokenising(str(tmp_path / name))
        refused(words, tokenise.prepare_text, [source], tmp_path / "out", made)

    refuses("none.json", "cannot be read")
    (tmp_path / "no.json").write_text('{"model": 3}')
    refuses("no.json", "is no tokenizer.json that tokenizers .* reads")
    byte_level(tmp_path / "unmarked.json")
    refuses("unmarked.json", "it has no special ones.*, or give --end-of-text none")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refuses("no.json", r"pip install 'jspeed\[tokenizers\]'")


def test_any_special_token_can_separate_documents(tmp_path):
    """A tokenizer whose separator has a name of its own, such as nanochat's, could not be used."""
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    path = str(byte_level(tmp_path / "mine.json", "<|bos|>", "<|user|>"))

    prepare = partial(tokenise.prepare_text, [source])
    for words, given, options in (
        (r"--separator-token \(it has <\|bos\|>, <\|user\|>\), or", path, {}),
        (r"--separator-token <\|bo\|> .*mean '<\|bos\|>'", path, {"separator_token": "<|bo|>"}),
        ("out --separator-token", path, {"separator_token": "<|bos|>", "end_of_text": "none"}),
        ("tokenizer bytes; it has no special", "bytes", {"separator_token": "a"}),
    ):
        refused(words, prepare, tmp_path / "out", Tokenising(given, 0.5, **options))
    assert not (tmp_path / "out").exists()
    found = {}
    for token in ("<|bos|>", "<|user|>"):
        for processes in (1, 2):
            options = Tokenising(path, 0.5, separator_token=token, processes=processes)
            out = prepare(tmp_path / f"{token[2:5]}{processes}", options)
            found[token] = json.loads((out / "manifest.json").read_text())["bos_id"]
            for split in ("train", "val"):
                ids = map_tokens(find_split(out, split).paths[0])
                assert ids[0] == found[token] and np.count_nonzero(ids == found[token]) == 2
    assert len(set(found.values())) == 2


def test_a_wide_encoding_of_tiktoken(tmp_path, monkeypatch):
    """As o200k_base: more than 65,536 ids and a gap before the special ones."""
    import tiktoken

    pairs = [bytes([a, b]) for a in range(256) for b in range(256)]
    ranks = {token: n for n, token in enumerate([*(bytes([n]) for n in range(256)), *pairs])}
    wide = tiktoken.Encoding(
        "o200k_base",
        pat_str=r"\S+|\s+",
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 66_000},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: wide)
    tokenizer = tokenizers.named_tokenizer("o200k_base")
    ids = tokenizer.encode(b"\xc3\xbfx zz")
    assert ids.dtype == np.uint32 and ids.max() > 30_000
    assert tokenizer.decode(ids) == b"\xc3\xbfx zz"
    assert tokenizer.bos_id == 66_000 and tokenizer.decode([65_900, 66_000, 97]) == b"a"
    assert tokenizer.byte_lengths().shape == (66_001,)
