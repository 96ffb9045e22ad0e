"""Benchmark the table in the host's memory: rows a second and core, NumPy and a copy beside."""

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jspeed.data import find_split
from jspeed.data.find_shards import map_tokens
from jspeed.errors import BadInput
from jspeed.fields import Count
from jspeed.host_table import RowTable
from jspeed.host_table.shares import Share
from jspeed.recipes import r92
from jspeed.speedrun.ngrams import bigram_rows, trigram_rows

from .index import cpu_seconds
from .loader import Row, show

LISTED = 65_536  # rows of a list
STEP = r92.LANES * 32_768  # tokens of a step of r92's second stage
LEAST = 32  # steps
ROW = 2 * r92.WIDTH + 12  # bytes of a row in use
BLOCK = 128  # rows that NumPy updates at a time
GATHER, UPDATE = 5e6, 1.5e6  # rows a second and core that must be reached, random rows of 768
RATES = {"learning_rate": 0.01, "beta2": 0.95, "eps": 1e-10, "weight_decay": 0.1}
BF16 = ml_dtypes.bfloat16


def lists(kind: str, rows: int) -> Iterator[np.ndarray]:
    """Lists of rows, uniform, or by Zipf's law with the places in the table shuffled."""
    rng = np.random.default_rng(0)
    if kind == "random":
        while True:
            yield rng.integers(0, rows, LISTED)
    where = rng.permutation(rows)
    chances = np.cumsum(1 / (np.arange(rows) + 2.7))
    while True:
        yield where[np.searchsorted(chances / chances[-1], rng.random(LISTED))]


def widened(words: np.ndarray) -> np.ndarray:
    """Bf16, as uint16, in fp32; by its dtype NumPy takes many times as long."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def numpy_update(
    table: np.ndarray, square: np.ndarray, rows: np.ndarray, gradients: np.ndarray
) -> None:
    """What :meth:`RowTable.update` does, by NumPy, in blocks that stay in the cache; decay of mean
    squares left out."""
    order = np.argsort(rows, kind="stable")
    named, starts = np.unique(rows[order], return_index=True)
    ends = np.append(starts[1:], len(rows))
    for block in np.split(np.arange(len(named)), range(BLOCK, len(named), BLOCK)):
        which, first = named[block], starts[block[0]]
        values = widened(gradients[order[first : ends[block[-1]]]])
        sums = np.add.reduceat(values, starts[block] - first)
        square[which] += 0.05 * np.mean(np.square(sums), 1)
        old = widened(table[which])
        change = (0.01 / (np.sqrt(square[which]) + 1e-10))[:, None] * sums
        change += 1e-5 * old * (change * old > 0)
        bits = (old - change).view(np.uint32)
        bits += 0x7FFF + ((bits >> 16) & 1)
        table[which] = bits >> 16


def measured(kind: str, rows: int, width: int, rounds: int, threads: int) -> Iterator[Row]:
    """What there is to say of lists of one kind."""
    rng = np.random.default_rng(1)
    table, beside = RowTable(rows, width, threads=threads), np.ones((rows, width), BF16)
    square, plain = np.ones(rows, np.float32), np.empty((LISTED, width), BF16)
    gradients = rng.standard_normal((LISTED, width), np.float32).astype(BF16)
    drawn = lists(kind, rows)

    def update(named: np.ndarray) -> None:
        table.update(table.updates, named, gradients[: len(named)], **RATES)

    if kind == "random":  # all rows are in use before the first round
        for part in np.split(rng.permutation(rows), range(LISTED, rows, LISTED)):
            update(part)
    else:
        for _ in range(32):
            update(next(drawn))
    out = table.gather(next(drawn))
    copied = beside[:LISTED].copy()
    words = beside.view(np.uint16)
    calls: dict[str, Callable[[np.ndarray], Any]] = {
        "gather": lambda named: table.gather(named, out),
        "gather, NumPy": lambda named: np.take(
            words, named, axis=0, out=plain.view(np.uint16), mode="clip"
        ),
        "copy": lambda named: np.copyto(copied, beside[-LISTED:]),
        "update": update,
        "update, NumPy": lambda named: numpy_update(
            words, square, named, gradients.view(np.uint16)
        ),
    }
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        named = next(drawn)
        for name, call in calls.items():
            took[name].append(cpu_seconds(partial(call, named))[0] / LISTED)
    row = 2 * width  # bytes
    copy = 2 * row / min(took["copy"])  # read and written, a second
    moved = {"gather": 2 * row, "update": 3 * row}
    must = {"gather": 1e9 / GATHER, "update": 1e9 / UPDATE}
    asked = kind == "random" and width == 768
    for name, seconds in took.items():
        least, middle = min(seconds), statistics.median(seconds)
        note = f"{1e-6 / least:.2f} M rows/s, median {1e-6 / middle:.2f}"
        if name in moved:
            note += f"; {100 * moved[name] / least / copy:.0f} % of a copy"
        limit = must.get(name) if asked else None
        yield Row(f"{name}, {kind}", 1e9 * least, "ns a row", limit, note)
    note = f"{table.used:,} of {rows:,} rows in use"
    yield Row(f"memory, {kind}", table.nbytes / 1e6, "MB", None, note)


def asked(rounds: int) -> Iterator[Row]:
    """What one of two processes with four devices each takes to find what all ask it for, in r92's
    longest and second stage."""
    spec, share = r92.PARAMETERS["ngrams"], Share(8, 0, 4)
    rng = np.random.default_rng(0)
    for length in (32_768, 49_152):
        took = []
        for _ in range(rounds):
            looked_up = rng.integers(0, r92.NGRAMS, (r92.LANES, 2 * length), np.int32)
            took.append(cpu_seconds(partial(share.asked, spec, looked_up))[0])
        note = f"of {looked_up.size:,} look-ups, half of the rows; the median"
        yield Row("a share's rows are found", 1e3 * statistics.median(took), "ms", None, note)


def named(tokens: np.ndarray) -> np.ndarray:
    """The rows that r92 looks up for ``tokens`` ``[B, T]``, two for each."""
    half = r92.NGRAMS // 2
    tokens_BT = jnp.asarray(tokens, jnp.int32)
    both = bigram_rows(tokens_BT, half), half + trigram_rows(tokens_BT, half)
    return np.concatenate([np.asarray(each).reshape(-1) for each in both])


def extrapolated(counts: list[np.ndarray], times: float) -> float:
    """Rows in use after ``times`` as many tokens as the last of ``counts``, bigrams' and trigrams'
    rows after half of the tokens and after all.

    Different n-grams grow as a power of tokens, that of the last doubling (Heaps' law); and so many
    hashes, of which some are equal, fill ``1 - exp(-n / rows)`` of the rows.
    """
    half = r92.NGRAMS // 2
    before, now = (-half * np.log1p(-count / half) for count in counts)
    return float(np.sum(-half * np.expm1(-now * times ** np.log2(now / before) / half)))


def in_text(folder: Path) -> Iterator[Row]:
    """How many rows of r92's table a text names."""
    shards = find_split(folder, "train")
    text = np.concatenate([map_tokens(path, shards.dtype) for path in shards.paths])
    steps = len(text) // STEP
    if steps < LEAST:
        raise BadInput(
            f"{folder} has {len(text):,} training tokens, but {LEAST * STEP:,} are needed to"
            " extrapolate from; give a larger --data"
        )
    used = np.zeros(r92.NGRAMS, bool)
    marks = {steps >> shift for shift in range(6)} - {0}
    counts, shares, again, waited = [], [], [], []
    recent: deque[np.ndarray] = deque(maxlen=r92.TABLES_EVERY[-1] + 1)
    for step in range(steps):
        which = named(text[step * STEP :][:STEP].reshape(r92.LANES, -1))
        used[which] = True
        shares.append(len(np.unique(which)) / len(which))
        if step:
            again.append(np.isin(recent[-1], which, kind="table").mean())
        recent.append(which)
        if len(recent) == recent.maxlen:
            *since, last, after = recent
            both = last[np.isin(last, after, kind="table")]
            waited.append(np.isin(np.stack([*since, last]), both, kind="table").mean())
        if step + 1 in marks:
            counts.append(used.reshape(2, -1).sum(1))
            count = int(counts[-1].sum())
            note = f"{100 * count / len(used):.0f} % of the table, {count * ROW / 1e9:.1f} GB"
            tokens = (step + 1) * STEP / 1e6
            yield Row(f"rows named by {tokens:.1f} M tokens", count / 1e6, "M rows", None, note)
    note = f"of the look-ups of {STEP:,} tokens; a mean of {steps} steps"
    yield Row("distinct rows of a step", 100 * float(np.mean(shares)), "%", None, note)
    note = "of a step's look-ups"
    yield Row("of rows that the next step names", 100 * float(np.mean(again)), "%", None, note)
    note = f"of those since an update, each {r92.TABLES_EVERY[-1]} steps: what a step waits for"
    yield Row("of rows that both steps name", 100 * float(np.mean(waited)), "%", None, note)
    expected, found = extrapolated(counts[-3:-1], 2), float(np.sum(counts[-1]))
    note = f"of those of {2 * (steps // 2) * STEP / 1e6:.1f} M tokens, by the law from half of them"
    yield Row("extrapolated", 100 * expected / found, "%", None, note)
    whole = r92.RECIPE.tokens
    most = extrapolated(counts[-2:], whole / (steps * STEP))
    note = f"{100 * most / len(used):.0f} % of the table, {most * ROW / 1e9:.0f} GB"
    yield Row(f"rows of a run, {whole / 1e6:.0f} M tokens", most / 1e6, "M rows", None, note)


def rows(
    data: Path | None = None,
    rows: Count = 700_000,
    width: Count = 768,
    rounds: Count = 12,
    threads: Count = 1,
) -> int:
    """Measure the table in the host's memory, CPU time of all threads, the least of some rounds;
    exit code 1 when it is too slow.

    Args:
        data: A folder of shards of GPT-2 tokens: count instead how many rows of r92's table they
            name, and so how much memory a run takes.
        rows: Rows of the table: by default 1 GB.
        width: Numbers of a row.
        rounds: Lists of 65,536 rows, each measured by all calls in turn.
        threads: Threads of the table.
    """
    if data:
        show(list(in_text(data)))
        return 0
    kinds = ("random", "zipf")
    found = [row for kind in kinds for row in measured(kind, rows, width, rounds, threads)]
    show([*found, *asked(rounds)])
    return int(any(row.passed is False for row in found))
