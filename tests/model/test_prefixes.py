"""Longest prefixes and classes of GPT-2's tokens: the stored tables are regenerated from the
vocabulary."""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from jspeed.model.prefixes import gpt2_classes, gpt2_prefixes


def longest_prefixes(vocabulary: Sequence[bytes]) -> NDArray[np.int32]:
    """Return the id of the longest proper prefix of each token that is itself a token, -1 where
    there is none."""
    ids = {token: id for id, token in enumerate(vocabulary) if token}
    return np.array(
        [
            next(
                (ids[token[:end]] for end in range(len(token) - 1, 0, -1) if token[:end] in ids), -1
            )
            for token in vocabulary
        ],
        np.int32,
    )


def test_longest_prefixes_by_hand():
    vocabulary = [b"a", b"b", b"ab", b"abc", b"abcde", b"cd", b"", b" a", b"a"]
    assert longest_prefixes(vocabulary).tolist() == [-1, -1, 8, 2, 3, -1, -1, -1, -1]


@pytest.fixture
def without_a_network(monkeypatch, tmp_path):
    """No vocabulary in tiktoken's folder, and nobody to fetch it from."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def test_prefixes_need_no_vocabulary(without_a_network):
    gpt2_prefixes.cache_clear()
    assert gpt2_prefixes(50_256, 50_304).max() == 50_252


def test_prefixes_of_gpt2(gpt2_vocabulary):
    """The file is what its vocabulary gives; made with the lines below."""
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    made = longest_prefixes([encoding.decode_single_token_bytes(id) for id in range(50_256)])
    # np.savez_compressed(TABLE, prefixes=np.where(made < 0, NONE, made).astype(np.uint16))
    found = gpt2_prefixes(50_256, 50_304)
    np.testing.assert_array_equal(found[:50_256], made)
    few = longest_prefixes([encoding.decode_single_token_bytes(id) for id in range(4095)])
    np.testing.assert_array_equal(gpt2_prefixes(4095, 4096)[:4095], few)
    assert found.shape == (50_304,) and found.dtype == np.int32
    assert np.all(found[50_256:] == -1) and np.all(found[:256] == -1) and np.all(found < 50_256)
    # In a vocabulary of fewer byte pairs, what lies beyond them is no byte pair, nor the prefix of
    # one.
    few = gpt2_prefixes(4095, 4096)
    assert found[4095] >= 0 and few[4095] == -1 and few.max() < 4095
    np.testing.assert_array_equal(few[:300], np.where(found[:300] < 4095, found[:300], few[:300]))
    for id in np.random.default_rng(0).integers(256, 50_256, size=300):
        token, prefix = (encoding.decode_single_token_bytes(int(i)) for i in (id, found[id]))
        assert token.startswith(prefix) and len(prefix) < len(token)
        for end in range(len(prefix) + 1, len(token)):
            with pytest.raises(KeyError):
                encoding.encode_single_token(token[:end])


def text_of(token: bytes) -> str | None:
    """What tokens of one class have in common; None for one that is alone."""
    try:
        text = unicodedata.normalize("NFKD", token.decode())
    except UnicodeDecodeError:
        return None
    letters = "".join(letter for letter in text if not unicodedata.combining(letter))
    text = re.sub(r"[ \t\n\r]+", " ", unicodedata.normalize("NFC", letters).lower())
    return text if text == " " else text.strip() or None


def like_texts(vocabulary: Sequence[bytes]) -> NDArray[np.int32]:
    firsts: dict[str, int] = {}
    texts = map(text_of, vocabulary)
    return np.array(
        [id if text is None else firsts.setdefault(text, id) for id, text in enumerate(texts)],
        np.int32,
    )


def test_like_texts_by_hand():
    vocabulary = [
        b"a",
        b" A",
        b"\xc3\xa4",
        b"b",
        b"\n",
        b"  ",
        b"\xc3",
        b"\xcc\x88",
        b"\xef\xbc\xa2",
        b"a b",
        b"A\t b ",
    ]
    assert like_texts(vocabulary).tolist() == [0, 0, 0, 3, 4, 4, 6, 7, 3, 9, 9]


def test_classes_of_gpt2(gpt2_vocabulary):
    """The file is what its vocabulary gives; as many classes as PR 375 of modded-nanogpt counts."""
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    made = like_texts([encoding.decode_single_token_bytes(id) for id in range(50_256)])
    # np.savez_compressed(CLASSES, classes=made.astype(np.uint16))
    found = gpt2_classes(50_256, 50_304)
    np.testing.assert_array_equal(found[:50_256], made)
    assert found[50_256:].tolist() == list(range(50_256, 50_304)) and found.dtype == np.int32
    assert len(set(found[:50_257])) == 32_980 and np.sum(found != np.arange(50_304)) == 17_277
    np.testing.assert_array_equal(gpt2_classes(300, 384)[:300], made[:300])
