"""Benchmark the token loader on synthetic shards, with a pass/fail limit for each performance
promise."""

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benches.synthetic import document_starts, zipf_ids
from jspeed._dataloader import HEADER_BYTES, header
from jspeed.base.cores import cores
from jspeed.base.files import write_whole
from jspeed.cli.flags import check_folders
from jspeed.corpus.tokenizers import gpt2_byte_pairs
from jspeed.data import Shards, Stage, TokenLoader, canonical_mask, open_shards
from jspeed.data.find_shards import map_tokens
from jspeed.errors import BadInput, say
from jspeed.fields import File

BOS = 50_256
# The record's three stages; the tables of documents are larger because these shards have more short
# documents.
SHAPES = ((16_384, 896, 128), (32_768, 2048, 256), (49_152, 2048, 384))


@dataclass
class Row:
    """One measurement. ``passed`` is None where there is nothing to pass."""

    what: str
    value: float
    unit: str
    below: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool | None:
        return None if self.below is None else self.value < self.below


def write_shards(folder: Path, count: int, tokens: int) -> None:
    """Write shards of ids as frequent as words, in documents as long as FineWeb's; none starts with
    a document."""
    rng = np.random.default_rng(0)
    text = zipf_ids(rng, BOS, (1_000_000,)).astype(np.uint16)
    for index in range(count):
        body = np.resize(text, tokens)
        body[document_starts(rng, tokens, None)[1:]] = BOS
        with open(folder / f"synthetic_train_{index + 1:06}.bin", "wb") as file:
            file.write(header(tokens) + body.tobytes())
            os.fsync(file.fileno())


def write_sparse(folder: Path, count: int) -> None:
    """Write shards of 100M tokens that take no space: a header and a hole."""
    folder.mkdir()
    for index in range(count):
        path = folder / f"sparse_train_{index + 1:06}.bin"
        path.write_bytes(header(100_000_000))
        os.truncate(path, HEADER_BYTES + 200_000_000)


def parity(shards: Shards, steps: int, **more) -> TokenLoader:
    """The loader of the record: eight lanes of documents in three stages of ``steps`` batches
    each."""
    schedule = [Stage(steps, *shape) for shape in SHAPES]
    return TokenLoader(shards, align="bos", bos_id=BOS, schedule=schedule, epochs=None, **more)


def median(
    times: int, work: Callable[[], object], before: Callable[[], object] = lambda: None
) -> float:
    """Median wall time of ``work`` in milliseconds; ``before`` is not counted."""
    took = []
    for _ in range(times):
        before()
        began = time.perf_counter()
        work()
        took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took)


def drop_page_cache(folder: Path) -> None:
    """Drop the shards from the page cache."""
    for path in folder.glob("*.bin"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_batch(folder: Path, times: int) -> Iterator[Row]:
    """Milliseconds from opening shards to the first batch, with and without the page cache."""

    def work() -> None:
        with parity(open_shards(f"{folder}/*.bin"), 10) as loader:
            next(loader)

    work()
    yield Row("first batch after open, warm", median(times, work), "ms", 1)
    yield Row(
        "first batch after open, cold",
        median(max(5, times // 5), work, lambda: drop_page_cache(folder)),
        "ms",
        20,
    )


def opening(folder: Path) -> Iterator[Row]:
    """Milliseconds to open and validate many shards, whose bodies are holes."""
    write_sparse(folder, 1030)
    paths = sorted(folder.iterdir())
    for count, below in (103, 10), (1030, 100):
        yield Row(
            f"open and validate {count} shards of 200 MB",
            median(9, partial(open_shards, paths[:count])),
            "ms",
            below,
        )


def work(shards: Shards, steps: int) -> Iterator[Row]:
    """CPU milliseconds of the process, all threads, for a million tokens."""
    took = []
    for _ in range(5):
        with parity(shards, steps) as loader:
            began = time.process_time()
            tokens = sum(batch.inputs.size for batch in loader)
            took.append(1e3 * (time.process_time() - began) / (tokens / 1e6))
    yield Row(
        "CPU time per 1M trained tokens, 8 lanes", statistics.median(took), "ms", 1.5, "median of 5"
    )


def small(shards: Shards, count: int) -> Iterator[Row]:
    """CPU microseconds of the process, all threads, for a batch of 32 lanes of 1,024 tokens."""
    options: dict[str, Any] = {"lanes": 32, "lane_len": 1024, "bos_id": BOS, "epochs": None}
    packed: dict[str, Any] = {"align": "bos", "max_doc_len": 1024, "max_docs": 64}
    contiguous: dict[str, Any] = {}
    for name, more, below in ("contiguous", contiguous, 20), ("of documents", packed, 30):
        took = []
        for _ in range(5):
            with TokenLoader(shards, **options, **more) as loader:
                for _ in range(count):  # the shards' pages, and memory of batches
                    next(loader)
                began = time.process_time()
                for _ in range(count):
                    next(loader)
                took.append(1e6 * (time.process_time() - began) / count)
        note = f"median of 5 times {count}"
        yield Row(f"CPU time of 32 x 1,024, {name}", statistics.median(took), "us", below, note)


def waiting(shards: Shards, steps: int, seconds: float) -> Iterator[Row]:
    """Milliseconds that a consumer which takes ``seconds`` a step waits for batches."""
    waits = []
    with parity(shards, -(-steps // 3), prefetch=2) as loader:
        loader.start()
        for _ in range(steps):
            time.sleep(seconds)
            began = time.perf_counter()
            next(loader)
            waits.append(1e3 * (time.perf_counter() - began))
        empty = loader.stats()["queue_empty"]
    p50, p99 = np.percentile(waits, [50, 99])
    against = f"{steps} steps of {1e3 * seconds:.0f} ms, depth 2"
    yield Row("wait per step, p50", float(p50), "ms", 0.05, against)
    yield Row("wait per step, p99", float(p99), "ms", 0.5, against)
    yield Row(
        "wait, sum",
        sum(waits),
        "ms",
        50,
        f"longest {max(waits):.2f} ms, queue found empty {empty} times",
    )


def resuming(shards: Shards, steps: int) -> Iterator[Row]:
    """Milliseconds to resume from early and late steps: it must not grow with the step."""
    states = []
    with parity(shards, steps) as loader:
        for index, _ in enumerate(loader):
            if index % (3 * steps // 10) == 0:
                states.append(loader.state_dict())

    def resume(state: dict[str, Any], read: bool) -> None:
        with parity(shards, steps) as loader:
            loader.load_state_dict(state)
            if read:
                next(loader)

    resume(states[0], True)
    without = [median(15, partial(resume, state, False)) for state in states]
    # of one stage, so that batches are of one size
    inner = [state for state in states if int(state["step"]) < steps]
    with_read = [median(15, partial(resume, state, True)) for state in inner]
    at = f"steps {states[0]['step']} to {states[-1]['step']}"
    yield Row("resume, worst step", max(without), "ms", 1, at)
    yield Row("resume, worst over best step", max(without) / min(without), "x", None, at)
    yield Row(
        "resume and first batch, worst step",
        max(with_read),
        "ms",
        None,
        f"to step {inner[-1]['step']}",
    )


def megabytes(field: str) -> float:
    """What Linux says of this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1000


def memory(shards: Shards) -> Iterator[Row]:
    """Megabytes by which the process grows over an epoch: its heap, and mapped pages."""
    with TokenLoader(shards, align="bos", bos_id=BOS, lane_len=16_384, max_doc_len=896) as loader:
        next(loader)
        heap, mapped, most = megabytes("RssAnon"), megabytes("RssFile"), 0.0
        for batch in loader:
            if batch.step % 16 == 0:
                most = max(most, megabytes("RssFile") - mapped)
        heap = megabytes("RssAnon") - heap
    two = 2 * max(path.stat().st_size for path in shards.paths) / 1e6
    yield Row("heap growth over an epoch", heap, "MB", 32)
    yield Row("mapped growth over an epoch", most, "MB", two, "two shards")


def masks(times: int) -> Iterator[Row]:
    """Seconds to build the canonical mask of GPT-2's vocabulary, which tiktoken must have or be
    able to fetch."""
    pairs = gpt2_byte_pairs()
    began = time.process_time()
    took = median(times, partial(canonical_mask, pairs, 50_304)) / 1e3
    each = (time.process_time() - began) / times
    yield Row("canonical mask, CPU time", each, "s", 1, f"316 MB, mean of {times}")
    yield Row("canonical mask", took, "s", None, f"median of {times}")


def memmap(shards: Shards, steps: int) -> Iterator[np.ndarray]:
    """The same batches from np.memmap: an index of each shard's document starts, slices,
    concatenations."""
    todo = [shape for shape in SHAPES for _ in range(steps)]
    while True:
        for path in shards.paths:
            tokens = map_tokens(path)
            starts = np.append(np.flatnonzero(tokens == BOS), len(tokens)).tolist()
            at = 0
            while todo:
                rows, (length, cut, _) = [], todo[0]
                for _ in range(8):
                    pieces, held = [], 0
                    while held <= length and at < len(starts) - 1:
                        begin = starts[at]
                        end = min(starts[at + 1], begin + cut, begin + length + 1 - held)
                        pieces.append(tokens[begin:end])
                        held, at = held + end - begin, at + 1
                    rows += [np.concatenate(pieces)] if held > length else []
                if len(rows) < 8:
                    break
                todo.pop(0)
                yield np.stack(rows)
            if not todo:
                return


def torch_loader(shards: Shards, steps: int) -> Iterator[object] | None:
    """The memmap generator in a torch DataLoader with one worker, or None without torch."""
    try:
        import torch
    except ImportError:
        return None

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self):
            return map(torch.from_numpy, memmap(shards, steps))

    return iter(
        torch.utils.data.DataLoader(Batches(), batch_size=None, num_workers=1, prefetch_factor=2)
    )


def against_others(shards: Shards, steps: int) -> Iterator[Row]:
    """Throughput in tokens a second, and over that of a NumPy memmap generator and of torch's
    DataLoader."""
    for batch, tokens in islice(
        zip(parity(shards, steps), memmap(shards, steps), strict=True), 3 * steps
    ):
        assert np.array_equal(batch.tokens, tokens), "the two do not follow the same rules"

    def rate(batches: Iterator[object]) -> float:
        began = time.perf_counter()
        count = sum(map(lambda _: 1, batches))
        assert count == 3 * steps
        return sum(8 * steps * shape[0] for shape in SHAPES) / 1e6 / (time.perf_counter() - began)

    ours = statistics.median(rate(parity(shards, steps)) for _ in range(3))
    theirs = statistics.median(rate(memmap(shards, steps)) for _ in range(3))
    yield Row(
        "throughput without a consumer",
        ours,
        "M tokens/s",
        None,
        f"{3 * steps} batches, median of 3",
    )
    yield Row(
        "rate over a NumPy memmap generator's",
        ours / theirs,
        "x",
        None,
        f"it makes {theirs:.0f} M tokens/s",
    )
    if batches := torch_loader(shards, steps):
        yield Row(
            "rate over a torch DataLoader's",
            ours / rate(batches),
            "x",
            None,
            "one worker, the same generator",
        )


def show(rows: list[Row]) -> None:
    """Print the rows, each with its limit."""
    table = Table(box=None, pad_edge=False)
    for name in ("what", "measured", "must be", "", ""):
        table.add_column(
            name, justify="right" if name in ("measured", "must be") else "left", no_wrap=True
        )
    for row in rows:
        mark = {True: "[green]pass[/]", False: "[bold red]FAIL[/]", None: ""}[row.passed]
        bound = "" if row.below is None else f"< {row.below:g} {row.unit}"
        table.add_row(row.what, f"{row.value:.3g} {row.unit}", bound, mark, f"[dim]{row.note}[/]")
    Console(highlight=False, width=150).print(table)


def loader(json_: File | None = None, quick: bool = False) -> int:
    """Measure the token loader on synthetic shards in a temporary folder; exit code 1 when a gate
    does not hold.

    Args:
        json_: Also write the rows and the machine to this file.
        quick: Smaller shards and 150 steps instead of 1300.
    """
    check_folders({"--json": json_})
    rows: list[Row] = []
    steps = 10 if quick else 40
    with tempfile.TemporaryDirectory(prefix="jspeed-bench-") as temporary:
        folder = Path(temporary, "shards")
        folder.mkdir()
        write_shards(folder, 3, 10_000_000 if quick else 100_000_000)
        shards = open_shards(f"{folder}/*.bin")
        for part in (
            first_batch(folder, 25),
            opening(Path(temporary, "sparse")),
            work(shards, steps),
            small(shards, 200 if quick else 2000),
            waiting(shards, 150 if quick else 1300, 0.03),
            resuming(shards, steps),
            memory(shards),
            against_others(shards, steps),
        ):
            rows += part
    try:
        rows += masks(5)
    except BadInput as error:
        say(f"note: no row of the canonical mask: {error}")
    show(rows)
    if json_:
        machine = {
            "cpus": cores(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        }
        content = {
            "machine": machine,
            "quick": quick,
            "rows": [asdict(row) | {"passed": row.passed} for row in rows],
        }
        write_whole(json_, json.dumps(content, indent=1) + "\n")
    return int(any(row.passed is False for row in rows))
