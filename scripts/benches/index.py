"""Benchmark the index of contexts: tokens a second and core, and what a step of a record would
take, by arithmetic."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jspeed._dataloader import ContextIndex, Matches
from jspeed.data import find_split
from jspeed.data.find_shards import map_tokens
from jspeed.errors import BadInput
from jspeed.fields import Count

from .loader import BOS, Row, megabytes, show

ROWS = 8
STEP = ROWS * 49_152  # tokens of the record's longest step
STEP_MS = 20


def repeating_text(tokens: int) -> np.ndarray:
    """Return documents of Zipf-distributed tokens, a fifth of them in passages of 8 to 64 copied
    from earlier."""
    rng = np.random.default_rng(0)
    chances = np.cumsum(1 / (np.arange(BOS) + 2.7))
    text = np.searchsorted(chances / chances[-1], rng.random(tokens)).astype(np.uint16)
    for at in np.sort(rng.integers(1000, tokens - 64, tokens // 180)):
        length, source = rng.integers(8, 65), rng.integers(0, at - 64)
        text[at : at + length] = text[source : source + length]
    text[rng.integers(0, tokens, tokens // 690)] = BOS
    return text


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of the process, all threads, and what ``work`` returned."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def steps(text: np.ndarray, first: int, count: int) -> Iterator[np.ndarray]:
    """So many steps of ``text`` from its token ``first`` on."""
    for start in range(first, first + count * STEP, STEP):
        yield text[start : start + STEP].reshape(ROWS, -1)


Asked = dict[str, Any]  # arguments of ContextIndex


def seconds_a_token(
    text: np.ndarray, held: int, threads: int, asked: Asked
) -> tuple[float, float, ContextIndex, Matches, np.ndarray]:
    """CPU seconds a token of push and of query once ``held`` tokens are there, medians of three
    steps; and what the last of these was told, and is."""
    index = ContextIndex(held + 3 * STEP, threads=threads, **asked)
    whole = held // STEP
    for rows in steps(text, 0, whole):
        index.push(index.steps, rows)
    index.push(index.steps, text[None, whole * STEP : held])
    took = []
    for rows in steps(text, held, 3):
        query, found = cpu_seconds(partial(index.query, index.steps, rows))
        push, _ = cpu_seconds(partial(index.push, index.steps, rows))
        took.append((push, query))
    push, query = np.median(took, 0) / STEP
    return push, query, index, found, rows


def rows(text: np.ndarray, held: int, asked: Asked) -> Iterator[Row]:
    """What there is to say of an index of ``held`` tokens."""
    before = megabytes("RssAnon")
    push, query, index, found, step = seconds_a_token(text, held, 1, asked)
    grown = megabytes("RssAnon") - before
    at = f"{held / 1e6:g} M tokens held"
    yield Row(
        "push", 1e-6 / push, "M tokens/s and core", None, f"{at}, {1e9 * push:.0f} ns a token"
    )
    yield Row(
        "query", 1e-6 / query, "M tokens/s and core", None, f"{at}, {1e9 * query:.0f} ns a token"
    )
    matched, times = found.lengths > 0, found.occurrences
    note = f"{min(asked['lengths'])} tokens or more, {times[matched].mean():.3g} times"
    yield Row("positions whose context occurred", 100 * float(matched.mean()), "%", None, note)
    told = (found.tokens[:, :-1] == step[:, 1:, None]) & (found.counts[:, :-1] > 0)
    note = (
        f"first of those told; among all {asked['top']}: {100 * float(told.any(-1).mean()):.3g} %"
    )
    yield Row(
        "positions whose next token is told", 100 * float(told[..., 0].mean()), "%", None, note
    )
    stated = f"{index.nbytes / 1e6:.0f} MB; the process grew by {grown:.0f} MB"
    yield Row("memory over what is stated", 1e6 * grown / index.nbytes, "x", 1.5, stated)
    for cores in (16, 96):
        push, query, *_ = seconds_a_token(text, held, cores, asked)
        note = f"by arithmetic: CPU time of {cores} threads"
        yield Row(
            f"a step of {STEP:,} tokens on {cores} cores",
            1e3 * STEP * (push + query) / cores,
            "ms",
            STEP_MS,
            note,
        )


def index(
    data: Path | None = None,
    tokens: tuple[Count, ...] = (1_000_000, 10_000_000),
    lengths: tuple[Count, ...] = (6, 10, 20),
    recent: Count = 96,
    top: Count = 8,
) -> int:
    """Measure the index of contexts; exit code 1 when it would not fit beside a step of 20 ms.

    Args:
        data: A folder of shards of GPT-2 tokens whose training text to use, instead of made-up
            text.
        tokens: How many tokens the index holds; each is measured.
        lengths: Tokens of the contexts to look for.
        recent: How many occurrences of a context count.
        top: How many next tokens are told.
    """
    need = max(tokens) + 3 * STEP
    if data:
        shards = find_split(data, "train")
        if shards.num_tokens < need:
            raise BadInput(
                f"{data} has {shards.num_tokens:,} training tokens, but {need:,} are needed; give"
                " fewer --tokens"
            )
        text = np.concatenate([map_tokens(path, shards.dtype) for path in shards.paths])[:need]
    else:
        text = repeating_text(need)
    asked = {"lengths": lengths, "recent": recent, "top": top}
    found = [row for held in tokens for row in rows(text, held, asked)]
    show(found)
    return int(any(row.passed is False for row in found))
