"""Loss against training seconds: jspeed and another training program on the same tokens, in
turn."""

import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from jspeed.base.files import write_whole
from jspeed.board.views import loss_plot
from jspeed.errors import BadInput
from jspeed.plan.views.tables import Table
from jspeed.plan.views.terminal import print_table
from jspeed.record.run_json import read_run
from jspeed.record.schema import Run

SPEEDRUN = Path(__file__).parents[1] / "speedrun.py"
# A validation in modded-nanogpt's log: step:125/1770 val_loss:4.6549 train_time:12345ms
# step_avg:98.76ms
VALIDATION = re.compile(r"step:(\d+)/\d+\s+val_loss:(\S+)\s+train_time:(\d+)ms")
LEVELS = (7.0, 6.0, 5.0, 4.5, 4.2, 4.0, 3.8, 3.7, 3.6, 3.5, 3.45, 3.4, 3.35, 3.3, 3.28)
Curve = list[tuple[int, float, float]]  # step, training seconds, validation loss


def race(
    recipe: str,
    command: str,
    data: Path,
    rounds: int,
    flags: Mapping[str, object],
    sets: Sequence[str],
    json_file: Path | None,
    svg_file: Path | None,
) -> int:
    """Run ``rounds`` trainings of both (ours theirs, theirs ours, ...) and compare their curves.

    ``flags`` are more flags of speedrun.py; None leaves one out. Raises :class:`BadInput` when one
    of the two fails or leaves no curve.
    """
    curves: dict[str, list[Curve]] = {"ours": [], "theirs": []}
    target = title = None
    with tempfile.TemporaryDirectory(prefix="jspeed-versus-") as folder:
        for number in range(rounds):
            for who in ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours"):
                print(f"round {number + 1}, {who}:", flush=True)
                if who == "theirs":
                    curves[who].append(their_curve(command, data))
                    continue
                run = our_run(recipe, data, Path(folder) / str(number), number + 1, flags, sets)
                curves[who].append(
                    [(p["step"], p["timed_seconds"], or_nan(p["val_loss"])) for p in run["curve"]]
                )
                target, title = (
                    run["target_loss"],
                    f"{run['recipe']} against {command[:40]}, {run['devices']['kind']}",
                )
    needed = compare(curves["ours"], curves["theirs"])
    console = Console(highlight=False, width=150)
    for number in range(rounds):
        print_table(
            console,
            curve_table(f"round {number + 1}", curves["ours"][number], curves["theirs"][number]),
        )
    if needed:
        print_table(console, needed_table(needed, rounds))
    else:
        console.print("there is no loss that both reached")
    if json_file:
        content = {
            "recipe": recipe,
            "command": command,
            "sets": list(sets),
            "curves": curves,
            "needed": needed,
        }
        write_whole(json_file, json.dumps(content, indent=1) + "\n")
    if svg_file:
        name = {"ours": "jspeed", "theirs": "theirs"}
        points = {
            f"{name[who]}, round {number}": [(seconds, loss) for _, seconds, loss in curve]
            for who in curves
            for number, curve in enumerate(curves[who], 1)
        }
        loss_plot.curves_svg(
            svg_file, points, target, title or recipe, "training seconds, each by its own clock"
        )
    return 0


def our_run(
    recipe: str,
    data: Path | None,
    run_dir: Path,
    seed: int,
    flags: Mapping[str, object],
    sets: Sequence[str],
) -> Run:
    """Train ``recipe`` with speedrun.py, on its own data without ``data``, and return its
    run.json."""
    words = [
        sys.executable,
        SPEEDRUN,
        recipe,
        "--run-dir",
        run_dir,
        "--seed",
        seed,
        "--no-progress",
        "--no-sample",
    ]
    for flag, value in {"--data": data, **flags}.items():
        words += [] if value is None else [flag, value]
    words += ["--set", *sets] if sets else []
    done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):
        raise BadInput(f"{recipe} ended with exit code {done.returncode}; see its message above")
    print(f"{recipe}, seed {seed}: {done.stdout.splitlines()[-1]}", flush=True)
    return read_run(run_dir / "run.json")


def or_nan(loss: float | None) -> float:
    """Return a loss of run.json, which has null for one that is not finite: nan."""
    return math.nan if loss is None else loss


def their_curve(command: str, data: Path) -> Curve:
    """Run the shell command, show its validations as they come, and return them."""
    folder = str(data.resolve())
    environment = os.environ | {"JSPEED_DATA": folder, "DATA_PATH": folder}
    curve: Curve = []
    with subprocess.Popen(
        command, shell=True, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        for line in process.stdout or ():
            if point := parse(line):
                curve.append(point)
                print(line.strip(), flush=True)
    if process.returncode:
        raise BadInput(
            f"--versus {command}: ended with exit code {process.returncode}; see its message above"
        )
    if not curve:
        raise BadInput(
            f"--versus {command}: printed no validation that can be read; expected modded-nanogpt's"
            " log on standard output, with lines like 'step:125/1770 val_loss:4.6549"
            " train_time:12345ms step_avg:98.76ms'"
        )
    return curve


def parse(line: str) -> tuple[int, float, float] | None:
    """Read (step, seconds, loss) from a line of modded-nanogpt's log; None for a line that is no
    validation."""
    found = VALIDATION.search(line)
    try:
        return (int(found[1]), int(found[3]) / 1e3, float(found[2])) if found else None
    except ValueError:
        return None


def first_at(points: Iterable[tuple[float, float]], loss: float) -> float | None:
    """The x of (x, loss) ``points`` at which they first reach ``loss``, linear between two; None if
    they never do."""
    before: tuple[float, float] | None = None
    for x, value in points:
        if value <= loss:
            return (
                before[0] + (x - before[0]) * (before[1] - loss) / (before[1] - value)
                if before
                else x
            )
        if math.isfinite(value):
            before = x, value
    return None


def seconds_to(curve: Curve, loss: float) -> float | None:
    """Seconds at which a curve first reaches ``loss``; None if it never does."""
    return first_at([(seconds, value) for _, seconds, value in curve], loss)


def median_seconds(curves: list[Curve], loss: float) -> float:
    """Median over the curves that reach ``loss``."""
    return statistics.median(s for curve in curves if (s := seconds_to(curve, loss)) is not None)


def compare(ours: list[Curve], theirs: list[Curve]) -> list[dict[str, float]]:
    """Median seconds of each to every loss that all runs reach, and to the lowest such loss."""
    every = [[value for *_, value in curve if math.isfinite(value)] for curve in (*ours, *theirs)]
    if not all(every):
        return []
    start = min(values[0] for values in every)
    lowest = max(min(values) for values in every)
    rows = []
    for loss in (*(level for level in LEVELS if lowest < level < start), lowest):
        mine, other = (median_seconds(curves, loss) for curves in (ours, theirs))
        rows.append(
            {
                "loss": loss,
                "ours": mine,
                "theirs": other,
                "ratio": other / mine if mine else math.nan,
            }
        )
    return rows


def curve_table(title: str, ours: Curve, theirs: Curve) -> Table:
    """Both curves of one round side by side, by the order of their validations."""
    rows = []
    for row in range(max(len(ours), len(theirs))):
        cells = []
        for curve in (ours, theirs):
            step, seconds, loss = curve[row] if row < len(curve) else (None, 0.0, 0.0)
            cells += ["", "", ""] if step is None else [str(step), f"{seconds:.1f}", f"{loss:.4f}"]
        rows.append(cells)
    return Table(title, ("our step", "seconds", "loss", "their step", "seconds", "loss"), rows)


def needed_table(needed: list[dict[str, float]], rounds: int) -> Table:
    """Seconds to each common loss; a ratio above 1 says that the other program takes longer."""
    rows = [
        [f"{r['loss']:.4f}", f"{r['ours']:.1f}", f"{r['theirs']:.1f}", f"{r['ratio']:.2f}"]
        for r in needed
    ]
    title = f"seconds to a loss, median of n={rounds}, each by its own clock; ratio: theirs to ours"
    return Table(title, ("loss", "ours", "theirs", "ratio"), rows)
