"""The loader with matches against a plain loader and an index of its own."""

from types import SimpleNamespace

import numpy as np
import pytest

from jspeed.base.beside import split
from jspeed.data import StateMismatchError, TokenLoader
from jspeed.errors import BadInput
from jspeed.retrieval import ContextIndex, Matches, Retrieval, Retriever
from jspeed.retrieval.rows import packed

from ..data.on_disk import shards_of
from ..refusals import refused
from .test_context_index import BOS, text

HOW = {"lengths": (1, 3), "recent": 9, "top": 2}
ASKED = Retrieval(**HOW)
STAGES = [
    SimpleNamespace(steps=n, lane_len=length, max_doc_len=40, max_docs=None)
    for n, length in ((3, 60), (2, 90))
]
CAPACITY = 4 * (3 * 61 + 2 * 91)


def train_text():
    tokens = text(np.random.default_rng(3), 4001)
    tokens[0] = BOS
    return tokens


def loader_of(tokens=None):
    shards = shards_of(train_text() if tokens is None else tokens)
    return TokenLoader(shards, lanes=4, schedule=STAGES, align="bos", bos_id=BOS, epochs=None)


def retriever(lanes=slice(0, 4), tokens=None, capacity=CAPACITY, dtype=np.uint16):
    more = {"capacity": capacity, "bos_id": BOS, "dtype": np.dtype(dtype), "lanes": lanes}
    return Retriever(loader_of(tokens), **HOW, **more)


VAL = text(np.random.default_rng(4), (2, 31))


def expected():
    """Of each step its tokens, their matches in the steps before, and those of VAL after it."""
    index = ContextIndex(CAPACITY, bos_id=BOS, **HOW)
    steps = []
    with loader_of() as batches:
        for batch in batches:
            found = index.query(batch.step, batch.tokens[:, :-1])
            index.push(batch.step, batch.tokens)
            steps.append((batch.tokens, found, index.query(index.steps, VAL[:, :-1])))
    return steps


def assert_same(rows, tokens, found):
    ours, matches = split(ASKED, rows)
    np.testing.assert_array_equal(ours, tokens)
    for part, other in zip(
        matches, (found.tokens, found.counts, found.lengths, found.occurrences), strict=True
    ):
        np.testing.assert_array_equal(part, other)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_step_is_told_of_those_before_an_evaluation_of_all(dtype):
    steps = expected()
    with retriever(dtype=dtype) as ours:
        assert not split(ASKED, ours.looked_up(VAL))[1].lengths_BT.any()
        for tokens, found, of_val in steps:
            rows = next(ours).tokens
            assert rows.dtype == dtype and rows.flags.c_contiguous
            assert_same(rows, tokens, found)
            for _ in range(2):  # a query leaves nothing behind
                assert_same(ours.looked_up(VAL), VAL, of_val)
        with pytest.raises(StopIteration):
            next(ours)
        assert_same(ours.looked_up(VAL), VAL, steps[-1][2])
    assert not steps[0][1].lengths.any() and all(found.lengths.any() for _, found, _ in steps[1:])


def test_each_process_has_its_lanes_and_knows_the_tokens_of_all():
    steps = expected()
    with retriever(slice(0, 2)) as first, retriever(slice(2, 4)) as second:
        for tokens, found, _ in steps:
            rows = np.concatenate([next(first).tokens, next(second).tokens])
            assert_same(rows, tokens, found)
            assert first.state_dict() == second.state_dict()


def test_it_resumes_with_the_tokens_of_the_steps_before():
    steps = expected()
    with retriever() as ours:
        start = ours.state_dict()
        for _ in range(2):
            next(ours)
        state = ours.state_dict()
    assert state["step"] == 2 and start["step"] == 0
    with retriever() as again:
        again.load_state_dict(state)
        assert again.state_dict() == state
        for tokens, found, _ in steps[2:]:
            assert_same(next(again).tokens, tokens, found)
    with retriever(tokens=train_text()[:3000]) as other, pytest.raises(StateMismatchError):
        other.load_state_dict(state)


def test_a_run_without_room_for_its_index_ends_before_it_begins():
    refused("lower its capacity", retriever, capacity=2**32 - 2)


def test_what_the_loader_refuses_is_raised_in_the_loop():
    """Here a step past what the index has room for."""
    with retriever(capacity=4 * 61) as ours:
        next(ours)
        with pytest.raises(BadInput, match="step 1 has 244 tokens, but the index holds 244"):
            next(ours), next(ours)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_rows_are_unpacked_as_they_were_packed(dtype):
    rng = np.random.default_rng(0)
    asked = Retrieval(top=3)
    tokens = rng.integers(0, 60_000, (2, 8)).astype(dtype)
    matches = Matches(
        *(rng.integers(0, 255, shape) for shape in ((2, 7, 3), (2, 7, 3), (2, 7), (2, 7)))
    )
    rows = packed(tokens, matches, dtype)
    assert rows.dtype == dtype and rows.shape == (2, 8 + 7 * asked.words)
    ours, found = split(asked, rows)
    np.testing.assert_array_equal(ours, tokens)
    for part, other in zip(found, matches, strict=True):
        np.testing.assert_array_equal(part, other)
    whole, nothing = split(None, rows)
    assert whole is rows and nothing is None
