"""End-to-end training time of recipes on this machine, runs interleaved to cancel drift."""

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from benches.nanogpt import contest
from benches.versus import or_nan, our_run
from jspeed.base.files import write_whole
from jspeed.board.views import loss_plot
from jspeed.cli.flags import check_folders
from jspeed.errors import BadInput
from jspeed.fields import Count, File, Folder, Wants
from jspeed.plan.views.tables import Table
from jspeed.plan.views.terminal import print_table


def cpu(
    recipes: Annotated[tuple[str, ...], Wants("RECIPE")] = (),
    rounds: Count = 1,
    versus: Folder | None = None,
    python: File | None = None,
    json_: File | None = None,
    svg: File | None = None,
) -> int:
    """Run recipes to their end in turn, A B A B, and compare their timed seconds.

    Args:
        recipes: Names or paths; ratios are to the first. With --versus none is needed:
            shakespeare-char, and nanogpt in nanoGPT's setting.
        rounds: Runs of each, with seeds 1, 2, ...
        versus: Folder of a clone of karpathy/nanoGPT: race recipes for shakespeare-char against its
            setting for a CPU.
        python: With --versus, a Python that has PyTorch and NumPy; default: this one.
        json_: Write every run's record and the medians here.
        svg: Draw the validation curves of the first round here.
    """
    check_folders({"--json": json_, "--svg": svg})
    if versus is not None:
        if svg:
            raise BadInput("--versus draws nothing; leave --svg out")
        return contest(recipes or ("shakespeare-char", "nanogpt"), versus, python, rounds, json_)
    if python is not None:
        raise BadInput("--python is the one nanoGPT runs with; give --versus FOLDER too")
    if not recipes:
        raise BadInput("no recipe given; give two or more: --recipes stdlib mine.py")
    runs: dict[str, list[Mapping[str, Any]]] = {recipe: [] for recipe in recipes}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, rounds + 1):
            for recipe in recipes:
                run_dir = Path(folder) / f"{Path(recipe).stem}-{seed}"
                runs[recipe].append(our_run(recipe, None, run_dir, seed, {}, ()))
    summary = {recipe: _medians(found) for recipe, found in runs.items()}
    print_table(Console(), _table(summary))
    if json_:
        write_whole(json_, json.dumps({"summary": summary, "runs": runs}, indent=2) + "\n")
    if svg:
        curves = {
            recipe: [(p["timed_seconds"], p["val_loss"]) for p in found[0]["curve"]]
            for recipe, found in runs.items()
        }
        first = runs[recipes[0]][0]
        title = f"{' and '.join(recipes)}, seed 1, {first['devices']['kind']}"
        loss_plot.curves_svg(svg, curves, first["target_loss"], title)
    return 0


def _medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def median(name: str) -> float:
        return statistics.median(run[name] for run in runs)

    waits = [sum(run["host"].values()) / run["timed_seconds"] for run in runs]
    return {
        "n": len(runs),
        "reached": sum(run["reached"] for run in runs),
        "timed_seconds": median("timed_seconds"),
        "val_loss": statistics.mean(or_nan(run["val_loss"]) for run in runs),
        "steps": runs[0]["steps"],
        "step_ms": 1e3 * median("timed_seconds") / runs[0]["steps"],
        "compile_seconds": median("compile_seconds"),
        "host_fraction": statistics.median(waits),
    }


def _table(summary: dict[str, dict[str, Any]]) -> Table:
    base = next(iter(summary.values()))["timed_seconds"]
    rows = [
        [
            recipe,
            f"{row['timed_seconds']:.1f}",
            f"{row['timed_seconds'] / base:.2f}",
            f"{row['val_loss']:.4f}",
            f"{row['reached']}/{row['n']}",
            str(row["steps"]),
            f"{row['step_ms']:.0f}",
            f"{row['compile_seconds']:.1f}",
            f"{row['host_fraction']:.2%}",
        ]
        for recipe, row in summary.items()
    ]
    head = (
        "recipe",
        "timed s",
        "ratio",
        "loss",
        "reached",
        "steps",
        "ms/step",
        "compile s",
        "host",
    )
    return Table("medians", head, rows)
