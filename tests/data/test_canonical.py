"""The canonical mask of GPT-2's vocabulary against tiktoken, and against the count that record 91
printed."""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from jspeed.corpus.tokenizers import gpt2_byte_pairs
from jspeed.data import canonical_mask

from ..refusals import refused

TEXT = Path(__file__).parents[3] / "shared" / "data" / "webtext" / "webtext_val.jsonl.xz"
SIZE = 50_304


@pytest.fixture(scope="module")
def made():
    """(GPT-2's encoding, its tokens, their mask), made once."""
    with pytest.MonkeyPatch.context() as patch:
        found = Path(__file__).parents[3] / "shared" / "data" / "tiktoken_cache"
        if not found.is_dir():
            pytest.skip(f"GPT-2's vocabulary is not in {found}")
        patch.setenv("TIKTOKEN_CACHE_DIR", str(found))
        import tiktoken

        pairs = gpt2_byte_pairs()
        return tiktoken.get_encoding("gpt2"), pairs, canonical_mask(pairs, SIZE)


def is_set(mask, first, second):
    return mask[first, second // 8] >> (second % 8) & 1


def test_as_many_bytes_are_set_as_record_91_printed(made):
    _, _, mask = made
    assert mask.shape == (SIZE, SIZE // 8) and mask.dtype == np.uint8 and not mask.flags.writeable
    assert np.count_nonzero(mask) == 58_810_565
    assert not mask[50_256:].any()
    assert not is_set(mask, np.arange(SIZE), np.arange(50_256, SIZE)[:, None]).any()


def test_no_neighbours_of_real_text_are_ruled_out(made):
    encoding, _, mask = made
    if not TEXT.exists():
        pytest.skip(f"there is no {TEXT}")
    ids: list[int] = []
    with lzma.open(TEXT, "rt", encoding="utf-8") as lines:
        for line in lines:
            ids += [50_256, *encoding.encode_ordinary(json.loads(line)["text"])]
            if len(ids) > 10**6:
                break
    tokens = np.array(ids[: 10**6])
    assert len(tokens) == 10**6 and not is_set(mask, tokens[:-1], tokens[1:]).any()


def test_what_is_ruled_out_is_never_written(made):
    """10^4 pairs, each after ten beginnings of one to three tokens."""
    encoding, _, mask = made
    rng = np.random.default_rng(0)
    tried = 0
    while tried < 10_000:
        first = int(rng.integers(50_256))
        followers = np.flatnonzero(np.unpackbits(mask[first], bitorder="little"))
        if not len(followers):
            continue
        second = int(rng.choice(followers))
        for before in rng.integers(50_256, size=(10, 3)).tolist():
            text = encoding.decode([*before[tried % 3 :], first, second], errors="replace")
            assert encoding.encode_ordinary(text)[-2:] != [first, second]
        tried += 1


def test_fewer_merges_rule_out_less(made):
    _, pairs, mask = made
    few = canonical_mask(pairs[:4096], 4096)
    whole = mask[:4096, : 4096 // 8]
    assert not np.any(few & ~whole) and np.any(few != whole)


@pytest.mark.parametrize(
    ("tokens", "size", "why"),
    [
        ([b"a"], 0, "a mask of 1 tokens in 0 columns; expected as many columns as tokens or more"),
        ([b"a"], 12, "a multiple of 8"),
        ([b"a", b"ab"], 8, 'token 1, "ab", is not made of two earlier tokens'),
        ([b"a", b"b", b"abab"], 8, 'token 2, "abab", is not made'),
    ],
)
def test_refused(tokens, size, why):
    refused(why, canonical_mask, tokens, size)


def test_a_mask_that_no_machine_has_the_memory_for_is_refused():
    for size in (2**26, 2**33, 2**63):
        refused("MB in one piece, .* lower its size", canonical_mask, [b"a"], size)
