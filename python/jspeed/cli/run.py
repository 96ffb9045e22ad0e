"""``jspeed run``: train a recipe to its target loss under the clock; the run directory holds the
record."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from jspeed.base.standard_streams import interruptible, without_logs
from jspeed.cli.flags import Command, refuse
from jspeed.fields import Wants
from jspeed.run.options import BEST_ON_FINEWEB, Options


def say_what_next(options: Options) -> None:
    """After a first run on GPUs print how to train the record's recipe."""
    import jax

    asked_for_nothing = options.recipe is options.data is None
    if (
        asked_for_nothing
        and options.recipe_or_default != BEST_ON_FINEWEB
        and jax.default_backend() == "gpu"
    ):
        command = (
            "jspeed"
            if shutil.which("jspeed")
            else os.path.relpath(Path(sys.executable).with_name("jspeed"))
        )
        print(
            "These GPUs can train the record's recipe too, on FineWeb, 2 GB to download:\n"
            f"  {command} prepare fineweb --shards 9\n  {command} run {BEST_ON_FINEWEB}"
        )


def run(
    options: Options,
    show_recipe: bool = False,
    show_layout: bool = False,
    show_tiles: Annotated[str | None, Wants("NAME")] = None,
    plan: Annotated[str | None, Wants("n=N,seeds=A..B")] = None,
) -> int:
    """Train a recipe to its target loss under the clock.

    Exit code: 0 reached the target or ran what was asked, 1 ended without reaching it, 2 bad input,
    130 Ctrl-C, 143 SIGTERM.

    Args:
        show_recipe: Print the recipe's file, to copy and to change, and stop.
        show_layout: Print how each parameter would be sharded, and stop.
        show_tiles: Print which devices would hold each tile of the parameter of this name, and
            stop.
        plan: Make several preregistered runs one after another; plan.json lists them before the
            first: n=4,seeds=1..4.
    """
    with without_logs():
        from rich.console import Console

        from jspeed.cli import satellites
        from jspeed.run.console import layout_table, tile_table
        from jspeed.run.find_recipe import find
        from jspeed.run.setup import load_recipe_and_placement
        from jspeed.run.train import train

    if show_recipe:
        refuse({"--set": options.set_}, "--show-recipe prints the file as it is")
        print(find(options.recipe_or_default, options.set_, trace=False).source, end="")
        return 0
    if show_layout or show_tiles is not None:
        several: dict[str, object] = {"--plan": plan, "--coordinator": options.coordinator}
        several |= {"--processes": options.processes, "--process-id": options.process_id}
        refuse(
            several,
            f"{'--show-layout' if show_layout else '--show-tiles'} prints for one process and"
            " stops",
        )
        found, placed = load_recipe_and_placement(options)
        if show_layout:
            layout_table(Console(highlight=False), found.recipe, placed)
        if show_tiles is not None:
            tile_table(Console(highlight=False), found.recipe, placed, show_tiles)
        return 0
    with interruptible():
        if plan is not None:
            series = satellites.load(satellites.SERIES, "--plan")
            code: int = series.run_series(options, plan)
            return code
        added = satellites.hooks()

        def afterwards(options: Options, run_dir: Path) -> None:
            added.afterwards(options, run_dir)
            say_what_next(options)

        return train(options, replace(added, afterwards=afterwards), saves=True)


COMMAND = Command(
    run,
    (
        "  # the best recipe that can run here: stdlib, or r29 with a GPU and FineWeb",
        "--steps 20  # a short look; every schedule stays as it is",
        "stdlib --set MUON_LR=0.03 --seed 2  # fields of the recipe file changed",
        "stdlib --show-recipe  # its file, to copy (> mine.py) and to change",
        "mine.py --mesh data=8  # your own recipe, on eight devices (of a CPU: virtual ones)",
        "--plan n=5,seeds=1..5  # five preregistered runs, for the leaderboard",
        "--run-dir runs/long --checkpoint-every 500 --resume  # resumes where it was stopped",
    ),
    {
        "training": "data seed show_recipe target_loss set_ init_from",
        "placement": (
            "layout mesh show_layout show_tiles micro_batch attention table programs coordinator"
            " processes process_id"
        ),
        "length": (
            "steps max_minutes checkpoint_every keep_checkpoints keep_best stop_at_target resume"
            " plan"
        ),
        "output": "run_dir progress log accuracy profile sample",
    },
)
