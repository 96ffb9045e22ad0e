"""The FineWeb recipes at one small size on the same tokens in the same order: which loss after how many tokens."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from jspeed.errors import BadInput
from jspeed.files import write_whole
from jspeed.record import picture
from jspeed.record.runfile import read_run

SPEEDRUN = Path(__file__).parents[1] / "speedrun.py"
TOKENS_PER_STEP = 2048
MICRO_BATCH = 2048  # tokens; the quickest of 512 to 4096 on two cores, where the head is most of the work
SMALL = ["WIDTH=256", "LAYERS=6", "MLP_WIDTH=1024", "COMPUTE=float32", "EVAL_TOKENS=16384", "EVAL_CHUNK=256"]
ROWS = ["LANES=8", "LANE_LEN=256", "EVAL_LEN=256"]
PACKED = [
    "LANES=2",
    "LANE_LEN=1024",
    "EVAL_LEN=1024",
    "MAX_DOCS=64",
    "HEADS=2",
    "NO_ATTENTION=3",
    "LONG_LAYERS=(0,2,5)",
]
# What shrinks with the run: windows to the lane, warm-ups to the steps. Learning rates stay the recipes' own, except
# llmc's: AdamW wants a higher one at a width of 256.
SETS = {
    "llmc": [*SMALL, *ROWS, "HEADS=4", "WARMUP=20", "LEARNING_RATE=0.002"],
    "track3": [*SMALL, *ROWS, "HEADS=2"],
    "r21": [*SMALL, *PACKED, "WINDOW=512", "BLOCK=64", "MOMENTUM_WARMUP=40"],
}


def quality(
    data: Path,
    steps: int = 180,
    fractions: Annotated[tuple[float, ...], tyro.conf.arg(metavar="F ...")] = (1.0, 0.5, 1 / 3),
    json_file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE")] = None,
    svg_file: Annotated[Path | None, tyro.conf.arg(name="svg", metavar="FILE")] = None,
) -> None:
    """Train llmc, track3 and r21 at width 256 and 6 layers, and compare the tokens they need for one loss.

    Args:
        data: Folder of GPT-2 token shards.
        steps: Steps of 2,048 tokens for llmc, the baseline.
        fractions: Steps of llmc, track3 and r21, as parts of that; each runs its whole schedule.
        json_file: Write curves and tokens needed here.
        svg_file: Draw the validation curves against tokens here.
    """
    if len(fractions) != len(SETS):
        raise BadInput(f"--fractions: {len(fractions)} given; expected one each for {', '.join(SETS)}")
    curves: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for (recipe, sets), fraction in zip(SETS.items(), fractions, strict=True):
            curves[recipe] = _train(recipe, sets, round(fraction * steps), data, Path(folder) / recipe)
    rows = _compare(curves)
    Console().print(_table(rows))
    if json_file:
        write_whole(json_file, json.dumps({"curves": curves, "needed": rows}, indent=2) + "\n")
    if svg_file:
        points = {recipe: [(tokens / 1e6, loss) for tokens, loss in curve] for recipe, curve in curves.items()}
        title = "width 256, 6 layers, same tokens in the same order"
        picture.curves_svg(svg_file, points, rows["llmc"]["loss"], title, "million tokens")


def _train(recipe: str, sets: list[str], steps: int, data: Path, run_dir: Path) -> list[tuple[float, float]]:
    """Run ``recipe`` and return its validation curve as (tokens, nats per token)."""
    own = [f"STEPS={steps}", f"EVAL_EVERY={max(1, steps // 8)}"]
    command = [sys.executable, SPEEDRUN, recipe, "--data", data, "--run-dir", run_dir, "--no-progress", "--no-sample"]
    done = subprocess.run(
        [*map(str, command), "--micro-batch", str(MICRO_BATCH), "--target-loss", "0.1", "--set", *sets, *own],
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode not in (0, 1):
        raise BadInput(f"{recipe} ended with exit code {done.returncode}; see its message above")
    print(f"{recipe}: {done.stdout.splitlines()[-1]}", flush=True)
    curve = read_run(run_dir / "run.json")["curve"]
    return [(point["step"] * TOKENS_PER_STEP, point["val_loss"]) for point in curve]


def _compare(curves: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, Any]]:
    """Tokens at which each curve first meets the first recipe's final loss, linear between two evaluations."""
    baseline = next(iter(curves.values()))
    total, goal = baseline[-1]
    rows = {}
    for recipe, curve in curves.items():
        needed = None
        for (t0, l0), (t1, l1) in zip(curve, curve[1:], strict=False):
            if l1 <= goal and needed is None:
                needed = t0 + (t1 - t0) * (l0 - goal) / (l0 - l1)
        fraction = needed / total if needed else None
        rows[recipe] = {"tokens": curve[-1][0], "loss": curve[-1][1], "needed": needed, "fraction": fraction}
    return rows


def _table(rows: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("recipe", "tokens", "final loss", "tokens to llmc's final loss", "fraction"):
        table.add_column(name, justify="left" if name == "recipe" else "right")
    for recipe, row in rows.items():
        needed = f"{row['needed']:,.0f}" if row["needed"] else "not reached"
        fraction = f"{row['fraction']:.2f}" if row["fraction"] else "-"
        table.add_row(recipe, f"{row['tokens']:,}", f"{row['loss']:.4f}", needed, fraction)
    return table
