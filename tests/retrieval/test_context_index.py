"""The index of contexts against NumPy, on text of training and validation; refusals."""

import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from jspeed._dataloader import Matches
from jspeed.data import TokenLoader
from jspeed.retrieval import ContextIndex

from ..data.on_disk import shards_of
from ..refusals import refused

BOS = 0


def documents(rows):
    """The documents of rows, each an array."""
    return [part for row in rows for part in np.split(row, np.flatnonzero(row == BOS)) if part.size]


def told(rows, steps, lengths, recent=96, top=8):
    """By brute force, for each position of ``rows``: length, occurrences and the next tokens with
    their counts."""
    windows = {}
    for length in lengths:
        long = [part for step in steps for part in documents(step) if part.size > length]
        wide = [np.lib.stride_tricks.sliding_window_view(part, length + 1) for part in long]
        windows[length] = np.concatenate([np.empty((0, length + 1), rows.dtype), *wide])
    answers = []
    for document in documents(rows):
        for end in range(1, document.size + 1):
            answer = (0, 0, [])
            for length in (length for length in sorted(lengths) if length <= end):
                seen, context = windows[length], document[end - length : end]
                after = seen[(seen[:, :-1] == context).all(1), -1][::-1][:recent]
                if after.size:
                    tokens, first, counts = np.unique(after, return_index=True, return_counts=True)
                    order = np.lexsort((first, -counts))[:top]
                    pairs = list(zip(tokens[order].tolist(), counts[order].tolist(), strict=True))
                    answer = (length, after.size, pairs)
            answers.append(answer)
    return answers


def listed(found: Matches):
    """The same of what the index answered."""
    top = found.tokens.shape[-1]
    pairs = np.stack([found.tokens, found.counts], -1).reshape(-1, top, 2).tolist()
    rows = zip(
        found.lengths.ravel().tolist(), found.occurrences.ravel().tolist(), pairs, strict=True
    )
    return [
        (length, times, [(token, count) for token, count in pairs if count])
        for length, times, pairs in rows
    ]


def text(rng, shape, words=12):
    """Documents of few words, about 30 tokens each, which repeat themselves."""
    tokens = np.minimum(rng.geometric(0.3, shape), words)
    tokens[rng.random(shape) < 1 / 30] = BOS
    return tokens.astype(np.uint16)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("threads", [1, 3])
def test_answers_are_those_of_brute_force(dtype, threads):
    rng = np.random.default_rng(threads)
    steps = [text(rng, (3, 70)).astype(dtype) for _ in range(4)]
    options = {"lengths": (2, 7, 3), "recent": 9, "top": 4}
    index = ContextIndex(3 * 70 * 4, bos_id=BOS, threads=threads, **options)
    for step, rows in enumerate(steps):
        found = index.query(step, rows[:, :-1])  # not contiguous
        assert found.lengths.shape == found.occurrences.shape == (3, 69) and found.tokens.shape == (
            3,
            69,
            4,
        )
        assert listed(found) == told(rows[:, :-1], steps[:step], **options)
        index.push(step, rows)
    assert (index.steps, index.num_tokens, index.capacity) == (4, 840, 840)
    assert "840 of 840 tokens in 4 steps" in repr(index)


def test_a_hundred_thousand_tokens_and_any_number_of_threads():
    rng = np.random.default_rng(0)
    steps, asked = [text(rng, (5, 2000), 50) for _ in range(10)], text(rng, (2, 20), 50)
    answers = []
    for threads in (1, 2, 5):
        index = ContextIndex(100_000, lengths=[1, 3, 5], bos_id=BOS, threads=threads)
        for step, rows in enumerate(steps):
            index.push(step, rows)
        answers.append(listed(index.query(10, asked)))
    assert answers[0] == answers[1] == answers[2] == told(asked, steps, (1, 3, 5))
    assert {length for length, _, _ in answers[0]} >= {1, 3, 5}
    assert max(times for _, times, _ in answers[0]) == 96


def test_validation_text_is_found_as_far_as_it_was_trained_on():
    """A sentence planted in the validation shard alone, twice, beside one that the training shard
    has too."""
    rng = np.random.default_rng(0)
    train = rng.integers(1, 1000, 4001, dtype=np.uint16)
    train[::200] = BOS
    shared, planted = train[410:440], np.arange(2000, 2030, dtype=np.uint16)
    val = np.concatenate([[BOS], planted, shared, [BOS], planted, [BOS]]).astype(np.uint16)
    index = ContextIndex(8000, lengths=(3, 5), bos_id=BOS)
    found = []
    with TokenLoader(shards_of(train), lanes=2, lane_len=500, bos_id=BOS) as batches:
        for batch in batches:
            found.append(index.query(batch.step, val[None]))
            index.push(batch.step, batch.tokens)
    # evaluated twice: a query leaves nothing behind
    found += [index.query(index.steps, val[None]) for _ in range(2)]
    assert len(found) == 6 and index.num_tokens == 4 * 2 * 501
    assert not found[0].lengths.any()
    for answer in found[1:]:
        lengths = answer.lengths[0].tolist()
        assert lengths[35:61] == [5] * 26 and not any(lengths[1:31]) and not any(lengths[62:])
        assert answer.tokens[0, 35:60, 0].tolist() == shared[5:].tolist()


def test_steps_follow_each_other_and_see_no_later_one():
    index = ContextIndex(8, lengths=[1], bos_id=BOS, threads=1)
    rows = np.array([[1, 2, 1, 2]], np.uint16)
    assert not index.query(0, rows).lengths.any()
    index.push(0, rows)
    for wrong in (0, 2):
        for call in (index.push, index.query):
            refused(f"step {wrong} should see .* holds 1 steps", call, wrong, rows)
    assert index.query(1, rows).tokens[0, :, 0].tolist() == [2, 1, 2, 1]


def test_memory_is_stated_and_enforced():
    index = ContextIndex(6, lengths=[1, 2], bos_id=BOS, threads=1)
    assert index.nbytes == 6 * (4 + 2 * 8) + 2 * 16 * 8  # slots come in lines of eight
    index.push(0, np.ones((1, 4), np.uint16))
    refused("the index holds 4 and has room for 6", index.push, 1, np.ones((1, 3), np.uint16))
    index.push(1, np.ones((1, 2), np.uint16))
    assert (index.num_tokens, index.steps) == (6, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"capacity": 0}, "capacity should be from 1 to 4294967295 but is 0"),
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": [6, 300]}, "a length of context should be from 1 to 255 but is 300"),
        ({"recent": 300}, "recent should be from 1 to 255 but is 300"),
        ({"recent": 4}, "top should be from 1 to 4 but is 8"),
        ({"bos_id": -1}, "bos_id should be"),
        ({"threads": 0}, "threads should be"),
    ],
)
def test_arguments_are_checked(options, text):
    refused(text, ContextIndex, **{"capacity": 100} | options)


@pytest.mark.parametrize(
    "rows",
    [
        np.ones(3, np.uint16),
        np.ones((1, 3)),
        np.ones((1, 3), np.int32),
        [[1, 2]],
        np.ones((2, 0), np.uint16),
        np.ones((1, 2, 3), np.uint16),
        None,
    ],
)
def test_rows_are_tokens(rows):
    index = ContextIndex(10, threads=1)
    for call in (index.push, index.query):
        refused("rows should be an array", call, 0, rows)
    assert index.steps == 0


def unaligned(rows):
    memory = np.zeros(rows.nbytes + 1, np.uint8)[1:].view(rows.dtype).reshape(rows.shape)
    memory[:] = rows
    return memory


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<u4", ">u4"])
@pytest.mark.parametrize(
    "form",
    [
        np.asfortranarray,
        unaligned,
        lambda rows: rows.repeat(2, 1)[:, ::2],
        lambda rows: rows[::-1][::-1],
    ],
)
def test_any_layout_and_byte_order_of_rows_is_read(dtype, form):
    rows = np.array([[331, 332, 333], [7, 8, 9]])
    index = ContextIndex(6, lengths=[1], bos_id=BOS, threads=1)
    given = form(rows.astype(dtype))
    given.setflags(write=False)
    index.push(0, given)
    assert index.query(1, given).tokens[:, :, 0].tolist() == [[332, 333, 0], [8, 9, 0]]


FORKS = """
    import os, sys, threading
    import numpy as np
    from jspeed.data import LoaderForkedError
    from jspeed.retrieval import ContextIndex
    rows = np.random.default_rng(0).integers(0, 50_000, (8, 20_000), np.uint16)
    index = ContextIndex(rows.size * 40, threads=2)
    pushes = threading.Thread(target=lambda: [index.push(step, rows) for step in range(40)])
    pushes.start()
    for _ in range(40):
        child = os.fork()
        if not child:
            for call in ("index.query(0, rows)", "index.push(0, rows)", "index.steps"):
                try:
                    eval(call)
                except LoaderForkedError as error:
                    assert "this index was made in process" in str(error)
                else:
                    os._exit(1)
            os._exit(repr(index) != "ContextIndex(made before a fork)")
        assert os.waitpid(child, 0)[1] == 0
    pushes.join()
    pushes = None
    for _ in range(40):  # its threads may sleep, or be about to
        index.query(40, rows[:1, :100])
        child = os.fork()
        if not child:
            del index
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
"""


def test_a_fork_during_a_push_does_not_hang():
    subprocess.run([sys.executable, "-c", textwrap.dedent(FORKS)], check=True, timeout=60)


def test_threads_that_cannot_be_had_are_done_without():
    """There is address space for the index, and none for the stack of a thread."""
    code = """
    import resource
    import numpy as np
    from jspeed.retrieval import ContextIndex
    rows = np.array([[331, 332, 333, 331]], np.uint16)
    most = 4096 * int(open("/proc/self/statm").read().split()[0]) + 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    index = ContextIndex(4, lengths=[1], threads=8)
    index.push(0, rows)
    assert index.query(1, rows).tokens[0, :, 0].tolist() == [332, 333, 331, 332]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


def test_no_rows_are_a_step_too():
    index = ContextIndex(10, threads=1)
    index.push(0, np.ones((0, 3), np.uint16))
    assert index.steps == 1 and index.query(1, np.ones((0, 3), np.uint16)).tokens.shape == (0, 3, 8)


def test_answers_are_read_only_and_stay_when_the_index_goes():
    index = ContextIndex(10, lengths=[1], threads=1)
    index.push(0, np.array([[1, 2]], np.uint16))
    found = index.query(1, np.array([[1]], np.uint16))
    del index
    assert found.tokens[0, 0].tolist() == [2] + [0] * 7
    with pytest.raises(ValueError, match="read-only"):
        found.tokens[0, 0] = 3


def test_other_threads_run_and_ask_meanwhile():
    index = ContextIndex(100_000, lengths=[1], bos_id=BOS, threads=1)
    rows = text(np.random.default_rng(0), (1, 100_000))
    index.push(0, rows)
    answers = []
    asking = [
        threading.Thread(target=lambda: answers.append(index.query(1, rows))) for _ in range(2)
    ]
    began = [thread.start() for thread in asking]
    turns = 0
    while any(thread.is_alive() for thread in asking):
        time.sleep(0.001)
        turns += 1
    assert len(began) == len(answers) == 2 and turns > 3
    assert np.array_equal(answers[0].tokens, answers[1].tokens)
