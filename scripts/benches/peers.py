"""Others' own code in turn with ours, A B A B: nanoGPT's start and update, llm.c's loader,
transformers' tokens."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benches.loader import BOS, write_shards
from benches.nanogpt import SETS, SETTING, STEP, VALIDATION, nanogpt
from jspeed.base.files import write_whole
from jspeed.cli.flags import check_folders
from jspeed.cli.satellites import hooks
from jspeed.data import TokenLoader, open_shards
from jspeed.errors import BadInput, say
from jspeed.fields import Count, File, Folder
from jspeed.inference.generate import Generator, Sampling
from jspeed.inference.trained import load_model
from jspeed.plan.views.tables import Table
from jspeed.plan.views.terminal import print_table
from jspeed.run.find_recipe import find
from jspeed.run.setup import data_folder

SPEEDRUN = Path(__file__).parents[1] / "speedrun.py"
UPDATES, SETTLING = 200, 20  # measured, of one run; of them not in the median
LANES, LENGTH, EQUAL, TIMED = 32, 1024, 50, 850  # batches that are compared, and timed
TOKENS = 64  # generated; as many before them warm up
LOADER, GENERATE = (Path(__file__).with_name(name) for name in ("llmc_loader.c", "gpt2_tokens.py"))


@dataclass
class Row:
    """One comparison of costs: less is better. ``most``: what the ratio of medians, ours to theirs,
    must be at most; None where nothing is required."""

    what: str
    unit: str
    most: float | None
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Our median over theirs."""
        return statistics.median(self.ours) / statistics.median(self.theirs)


def versus(
    nanogpt: Folder | None = None,
    llmc: Folder | None = None,
    python: File | None = None,
    rounds: Count = 3,
    json_: File | None = None,
) -> int:
    """Run peers' own code in turn with jspeed's and compare medians; a peer that is not there is
    skipped with a sentence.

    Exit code 1: a ratio is above what it must be at most.

    Args:
        nanogpt: Folder of a clone of karpathy/nanoGPT: command to first step, and an update of its
            setting for a CPU, on one core and on two.
        llmc: Folder of a clone of karpathy/llm.c: its loader, compiled by cc, on the same shards.
        python: A Python with PyTorch for nanoGPT, and with transformers for the greedy tokens of a
            GPT-2 of 124 M random parameters; default: this one.
        rounds: Measurements of each.
        json_: Write every measurement here.
    """
    check_folders({"--json": json_})
    given, rows = python or Path(sys.executable), []
    with tempfile.TemporaryDirectory(prefix="jspeed-peers-") as name:
        for measure, folder in (of_nanogpt, nanogpt), (of_llmc, llmc), (of_transformers, None):
            found = measure(folder, given, rounds, Path(name))
            if isinstance(found, str):
                say(f"skipped: {found}")
            else:
                rows += found
    if not rows:
        raise BadInput("no peer to compare with; give --nanogpt, --llmc or --python, as said above")
    title = f"medians of n={rounds} in turn; load {os.getloadavg()[0]:.1f}"
    print_table(Console(highlight=False, width=110), table(rows, title))
    if json_:
        write_whole(json_, json.dumps([vars(row) for row in rows], indent=1) + "\n")
    return 1 if any(row.most is not None and row.ratio > row.most for row in rows) else 0


def table(rows: Sequence[Row], title: str) -> Table:
    """One row for each comparison; the last column is what the ratio must be at most."""
    cells = [
        [
            f"{row.what}, {row.unit}",
            f"{statistics.median(row.ours):.4g}",
            f"{statistics.median(row.theirs):.4g}",
            f"{row.ratio:.2f}",
            "" if row.most is None else f"<= {row.most:g}",
        ]
        for row in rows
    ]
    return Table(title, ("what", "jspeed", "peer", "ratio", "must"), cells)


def both(what: str, unit: str, wall: float | None, cpu: float | None) -> list[Row]:
    """Return the rows of wall and of processor time, with what each ratio must be at most."""
    return [Row(f"{what}, wall", unit, wall), Row(f"{what}, processor time", unit, cpu)]


def in_turn(
    rows: list[Row], rounds: int, ours: Callable[[], Any], theirs: Callable[[], Any]
) -> list[Row]:
    """Add to the rows what ours, theirs, theirs, ours, ... return; return the rows."""
    for number in range(rounds):
        for name, call in (("ours", ours), ("theirs", theirs))[:: -1 if number % 2 else 1]:
            for row, value in zip(rows, call(), strict=True):
                getattr(row, name).append(value)
    return rows


def missing(python: Path, *modules: str) -> str | None:
    """Return a sentence about the first of ``modules`` that a Python lacks; None if it has all."""
    for module in modules:
        try:
            done = subprocess.run([python, "-c", f"import {module}"], capture_output=True)
        except OSError as error:
            return f"{python} does not start ({error.strerror}); give another with --python FILE"
        if done.returncode:
            return f"{python} has no {module}; give a Python that has it with --python FILE"
    return None


def command(
    words: Sequence[object], number: int, log: Path, until: Callable[[], bool] | None, cwd: Path
) -> tuple[float, float]:
    """Run a command on ``number`` cores with its output in ``log``; return (wall, processor)
    seconds to its end, or to where ``until`` first holds, at which it is killed.

    Raises :class:`BadInput` with its last line when it fails, or ends before.
    """
    few = set(sorted(os.sched_getaffinity(0))[:number])
    threads = os.environ | {"OMP_NUM_THREADS": str(number), "PYTHONUNBUFFERED": "1"}
    began = time.perf_counter()
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [str(word) for word in words],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=threads,
        )
        os.sched_setaffinity(process.pid, few)  # before it has threads, which inherit it
    ended = 0
    while not ended:
        time.sleep(0.005)
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
        took, reached = time.perf_counter() - began, until is not None and until()
        if reached and not ended:
            process.kill()
            ended, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if not reached and (until or process.returncode not in (0, 1)):
        said = (log.read_text(errors="replace").splitlines() or ["nothing"])[-1]
        raise BadInput(f"{words[1]} ended with exit code {process.returncode} and said: {said}")
    return took, used.ru_utime + used.ru_stime


def of_nanogpt(folder: Path | None, python: Path, rounds: int, place: Path) -> list[Row] | str:
    """Compare starts and updates with nanoGPT's train.py; or return why not."""
    lacks = missing(python, "torch") if folder else "no --nanogpt DIR"
    if folder is None or lacks:
        return f"nanoGPT's start and update: {lacks}"
    data = data_folder(find("shakespeare-char").recipe, None, hooks())
    copy, most = nanogpt(folder, data, place / "nanoGPT"), len(os.sched_getaffinity(0))
    log, run, lines = place / "log", place / "run", place / "run" / "metrics.jsonl"
    train = [python, "train.py", "config/train_shakespeare_char.py", "--eval_iters=20"]

    def theirs(updates: int, number: int, start: bool = False) -> tuple[float, float]:
        words = [*train, *SETTING.split(), f"--max_iters={updates}"]
        until = (lambda: "\niter 0:" in log.read_text()) if start else None
        return command(words, number, log, until, copy)

    def ours(recipe: str, steps: int, number: int, start: bool = False) -> tuple[float, float]:
        shutil.rmtree(run, ignore_errors=True)
        words = [sys.executable, SPEEDRUN, recipe, "--steps", steps, "--run-dir", run]
        words += ["--no-progress", "--no-sample"]
        words += ["--set", *SETS[recipe]] if recipe in SETS else []
        until = (lambda: lines.is_file() and "train_loss" in lines.read_text()) if start else None
        return command(words, number, log, until, place)

    def update(who: str, number: int) -> tuple[float, float]:
        """Milliseconds: wall of the median update, processor time of UPDATES more updates."""
        if who == "theirs":
            once, many = theirs(0, number)[1], theirs(UPDATES, number)[1]
            seconds = of_log(log.read_text())
        else:
            once, many = (ours("nanogpt", steps, number)[1] for steps in (1, 1 + UPDATES))
            seconds = of_metrics(lines.read_text())
        return 1e3 * statistics.median(seconds[SETTLING:]), 1e3 * (many - once) / UPDATES

    ours("shakespeare-char", 1, most)  # compiles
    starts = partial(ours, "shakespeare-char", 9, most, True), partial(theirs, 9, most, True)
    rows = in_turn(both("command to first step", "s", None, None), rounds, *starts)
    for number in range(1, min(2, most) + 1):
        ours("nanogpt", 1, number)
        pair = both(f"an update of nanoGPT's CPU setting on {number} core(s)", "ms", 0.9, None)
        calls = (partial(update, who, number) for who in ("ours", "theirs"))
        rows += in_turn(pair, rounds, *calls)
    return rows


def of_metrics(lines: str) -> list[float]:
    """Return the seconds of each step after the first, from the lines of a metrics.jsonl."""
    steps = [line for line in map(json.loads, lines.splitlines()) if "train_loss" in line]
    return np.diff([line["timed_seconds"] for line in steps]).tolist()


def of_log(log: str) -> list[float]:
    """Return the seconds of each update that did not evaluate, from nanoGPT's log."""
    evaluated = {number for number, _ in VALIDATION.findall(log)}
    return [float(ms) / 1e3 for number, ms in STEP.findall(log) if number not in evaluated]


def of_llmc(folder: Path | None, _: Path, rounds: int, place: Path) -> list[Row] | str:
    """Compare loaders on the same shards, batch for batch; or return why not."""
    if folder is None:
        return "llm.c's loader: no --llmc DIR"
    if not (folder / "llmc" / "dataloader.h").is_file():
        return f"llm.c's loader: {folder} has no llmc/dataloader.h; give a clone of karpathy/llm.c"
    program, shards = place / "loader", place / "shards"
    words = ["cc", "-O3", "-march=native", f"-I{folder.resolve()}", LOADER, "-o", program, "-lm"]
    try:
        subprocess.run([str(word) for word in words], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"llm.c's loader: {error}; install a C compiler as cc"
    shards.mkdir()
    write_shards(shards, 3, 10_000_000)
    options: dict[str, Any] = {"lanes": LANES, "lane_len": LENGTH, "bos_id": BOS, "epochs": None}

    def ours() -> list[float]:
        with TokenLoader(open_shards(f"{shards}/*.bin"), **options) as loader:
            for _ in range(TIMED):
                next(loader)
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(TIMED):
                next(loader)
            return a_token([time.perf_counter() - wall, time.process_time() - cpu])

    def theirs() -> list[float]:
        numbers = map(str, (LANES, LENGTH, EQUAL, TIMED))
        done = subprocess.run([program, f"{shards}/*.bin", *numbers], capture_output=True)
        if done.returncode:
            raise BadInput(f"llm.c's loader ended with exit code {done.returncode}")
        pairs = np.frombuffer(done.stdout, np.int32).reshape(EQUAL, 2, LANES, LENGTH)
        with TokenLoader(open_shards(f"{shards}/*.bin"), **options) as loader:
            for number, pair in enumerate(pairs):
                batch = next(loader)
                if not np.array_equal(pair, [batch.inputs, batch.targets]):
                    raise BadInput(f"batch {number} of llm.c's loader is not ours; report this")
        return a_token([float(word) for word in done.stderr.split()])

    def a_token(seconds: list[float]) -> list[float]:
        return [1e9 * each / (TIMED * LANES * LENGTH) for each in seconds]

    return in_turn(
        both("a token of the loader, equal batches", "ns", 1, None), rounds, ours, theirs
    )


def of_transformers(_: Path | None, python: Path, rounds: int, place: Path) -> list[Row] | str:
    """Compare greedy tokens of a GPT-2 of 124 M random parameters; or return why not."""
    if lacks := missing(python, "torch", "transformers"):
        return f"transformers' tokens: {lacks}"
    texts = []

    def theirs(save: Path | str = "") -> list[float]:
        words = [python, GENERATE, save, BOS, TOKENS]
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
        if done.returncode:
            raise BadInput(f"transformers ended and said: {done.stderr.splitlines()[-1]}")
        *seconds, ids = json.loads(done.stdout.splitlines()[-1])
        texts.append(ids)
        return [1e3 * each / TOKENS for each in seconds]

    theirs(place / "gpt2")
    generator = Generator(load_model(place / "gpt2"), 1, Sampling(0.0, bos=False))

    def ours() -> list[float]:
        wall, cpu = time.perf_counter(), time.process_time()
        texts.append([int(token[0]) for token in generator([[BOS]], TOKENS)])
        spent = time.perf_counter() - wall, time.process_time() - cpu
        return [1e3 * each / TOKENS for each in spent]

    ours()
    rows = in_turn(both("a greedy token of GPT-2 124M", "ms", None, 1), rounds, ours, theirs)
    same = all(text == texts[0] for text in texts)
    print(f"{TOKENS} greedy tokens of random weights: {'the same' if same else 'not the same'}")
    return rows
