"""Make preregistered runs: write plan.json before the first, then run each in a process of its own.

Repeating the command continues an interrupted series: a run that has ended is not made again; one
that was interrupted resumes from its checkpoint. Without one it stays in the plan as a run without
a result, so that no seed can be chosen.
"""

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from types import FrameType
from typing import NamedTuple

from jspeed.base.cores import cores
from jspeed.base.signals import ENDINGS, WARNINGS, handled
from jspeed.board import formatting, stats
from jspeed.board.records.preregistration import (
    NAME,
    ROUND,
    Kind,
    make_preregistration,
    parse_seeds,
    read_preregistration,
    write_preregistration,
)
from jspeed.board.records.remarks import remarks
from jspeed.board.views import loss_plot
from jspeed.cli.satellites import rank_of
from jspeed.errors import BadInput, say, writable_folder
from jspeed.fields import flag
from jspeed.record.run_json import read_run
from jspeed.record.schema import Run
from jspeed.run.checkpoint import newest
from jspeed.run.clock import utc_now
from jspeed.run.find_recipe import load_recipe
from jspeed.run.options import Options, check_options

# -P: a folder that is called jspeed is not imported
RUN = (sys.executable, "-P", "-m", "jspeed", "run")
OWN = ("recipe", "seed", "steps", "run_dir")  # what make_runs says of each run itself
REFUSED = {  # options that a series does not take, and why
    "resume": "the same --plan command continues a series",
    "init_from": "planned runs start from their seeds",
    **dict.fromkeys(
        ("coordinator", "processes", "process_id"), "runs are made in one process each"
    ),
    "seed": "the plan gives the seeds",
    "programs": "planned runs make their own",
}
P = 0.01  # below it the last line of a series says significant; the board uses the track's own rule


class SeriesRun(NamedTuple):
    """A run of a series: of a recipe by name or path, with the name, hash and seed that its
    plan.json states."""

    recipe_or_path: str
    recipe: str
    recipe_hash: str
    seed: int


def run_series(options: Options, text: str) -> int:
    """Make the runs of ``--plan`` ``text`` and return the exit code: 0 when their mean loss reached
    the target.

    Raises BadInput for a malformed ``text``, for another plan in the folder, and when a run has bad
    input.
    """
    for name, why in REFUSED.items():
        if getattr(options, name) != getattr(Options, name):
            raise BadInput(f"--plan and {flag(name)}: {why}; leave {flag(name)} out")
    check_options(options)
    recipe = options.recipe_or_default
    loaded = load_recipe(options)
    runs = [SeriesRun(recipe, loaded.recipe.name, loaded.hash, seed) for seed in parse_seeds(text)]
    folder = options.run_dir or default_folder(loaded.recipe.name)
    made = make_runs(folder, "seeds", options.steps, runs, arguments(options))
    notes = dict.fromkeys(f"note: {remark}" for run in made for remark in remarks(run))
    print(*notes, f"{folder}: plan.json and {len(made)} runs", summary(made), sep="\n")
    losses = [run["val_loss"] for run in made if run["val_loss"] is not None]
    valid = all(probe["passed"] for run in made for probe in run["probes"].values())
    if any(run["status"] == "interrupted" for run in made):
        return 1
    asked_for_less = options.steps is not None and all(
        run["steps"] == options.steps for run in made
    )
    return (
        0 if asked_for_less or (losses and valid and fmean(losses) <= made[0]["target_loss"]) else 1
    )


def race(
    a: str, b: str, rounds: int, folder: Path | None, steps: int | None, flags: Sequence[str]
) -> int:
    """Run recipes ``a`` and ``b`` in turn, A B B A with two new seeds in each round; draw all their
    losses as loss.svg and print the ratio of their times.

    Raises BadInput as :func:`run_series` does, and for ``flags`` that a race sets itself.
    """
    for name in ("--set", "--seed", "--run-dir", "--steps", "--plan", "--resume"):
        if any(word.split("=")[0] == name for word in flags):
            raise BadInput(
                f"--flags {shlex.join(flags)!r} holds {name}, which a race decides itself; put"
                " changed fields into a recipe file"
            )
    loaded = {each: load_recipe(Options(each, data=_data(flags), steps=steps)) for each in (a, b)}
    if loaded[a].hash == loaded[b].hash:
        raise BadInput(f"{a} and {b} are the same recipe; give two that differ")
    seeds = [
        (each, 2 * n + late)
        for n in range(1, rounds + 1)
        for each, late in ((a, -1), (b, -1), (b, 0), (a, 0))
    ]
    runs = [
        SeriesRun(each, loaded[each].recipe.name, loaded[each].hash, seed) for each, seed in seeds
    ]
    folder = folder or default_folder(f"{loaded[a].recipe.name}-{loaded[b].recipe.name}")
    load, have = os.getloadavg()[0], cores()
    if load > have / 2:
        say(
            f"note: {load:.1f} of {have} cores were busy in the last minute: times will scatter"
            " where other programs go on; race on a quiet machine, or give more --rounds"
        )
    made = make_runs(folder, "race", steps, runs, flags)
    turns = zip(*[iter(made)] * ROUND, strict=True)
    complete = [turn for turn in turns if all(run["val_loss"] is not None for run in turn)]
    count = f"{len(complete)} round{'s' if len(complete) != 1 else ''} of A B B A"
    print(f"{folder}: plan.json and {len(made)} runs, {count}")
    for name, own in ((a, [0, 3]), (b, [1, 2])):
        print(
            f"{name}:"
            f" {summary([turn[n] for turn in complete for n in own]) if complete else 'no round'}"
        )
    if complete:
        times = [[run["timed_seconds"] for run in turn] for turn in complete]
        ratio = stats.paired_ratio([((t[0], t[3]), (t[1], t[2])) for t in times])
        curves = {
            f"{run['recipe']}, seed {run['seed']}": [
                (point["timed_seconds"], point["val_loss"]) for point in run["curve"]
            ]
            for run in sorted(chain(*complete), key=lambda run: (run["recipe_hash"], run["seed"]))
        }
        title = f"{loaded[a].recipe.name} and {loaded[b].recipe.name}, in turn"
        loss_plot.curves_svg(folder / "loss.svg", curves, made[1]["target_loss"], title)
        print(f"all losses: {folder / 'loss.svg'}")
        unsure = "; one round has no interval, so give --rounds 2" if len(complete) == 1 else ""
        print(f"{b} takes {formatting.ratio(*ratio[:3])} x the time of {a}; {count}{unsure}")
        losses = fmean(turn[n]["val_loss"] for turn in complete for n in (1, 2))
        if losses > (target := made[1]["target_loss"]):
            print(f"{b} missed its target: mean loss {losses:.4f} > {target:g}; that is no gain")
    return 0 if complete else 1


def _data(flags: Sequence[str]) -> Path | None:
    """Return the folder that ``flags`` of ``jspeed run`` name with --data."""
    words = [
        part
        for word in flags
        for part in (word.split("=", 1) if word.startswith("--data=") else [word])
    ]
    return Path(words[words.index("--data") + 1]) if "--data" in words[:-1] else None


def make_runs(
    folder: Path,
    kind: Kind,
    steps: int | None,
    runs: Sequence[SeriesRun],
    flags: Sequence[str],
    script: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Run]:
    """Preregister ``runs`` in plan.json and make those that are missing.

    ``script`` is the speedrun.py of another commit, run in another ``environment``. Returns all
    runs in order. Raises BadInput for a run that fails, and SystemExit with the code of one that
    was told to stop.
    """
    if rank_of(os.environ):
        raise BadInput("a series makes its runs in one process each; start it without a launcher")
    preregistration = make_preregistration(kind, utc_now(), steps, [run[1:] for run in runs])
    path = folder / NAME
    if path.exists():
        earlier = read_preregistration(path)
        if any(earlier[name] != preregistration[name] for name in ("kind", "steps", "runs")):
            raise BadInput(
                f"{path} holds another plan; give the same command to continue it, or another"
                " --run-dir"
            )
    else:
        writable_folder(folder, "run directory")
        write_preregistration(folder, preregistration)
    folders = [folder / run["folder"] for run in preregistration["runs"]]
    for run, run_dir in zip(runs, folders, strict=True):
        again: list[str] = []
        if (run_dir / "run.json").exists():
            if read_run(run_dir)["status"] != "interrupted":
                continue
            if newest(run_dir / "checkpoints")[0] is None:
                print(
                    f"note: {run_dir.name} was interrupted and has no checkpoint: it stays without"
                    " a result",
                    flush=True,
                )
                continue
            again = ["--resume"]
        print(f"--- {run_dir.name}", flush=True)
        command = [
            *(RUN if script is None else (sys.executable, str(script))),
            run.recipe_or_path,
            *flags,
        ]
        command += ["--seed", str(run.seed), "--run-dir", str(run_dir)]
        command += [*again, *(["--steps", str(steps)] if steps else [])]
        code = run_child(command, environment)
        if code in (130, 143):
            raise SystemExit(code)
        if code not in (0, 1):
            raise BadInput(
                f"{run_dir}: the run ended with exit code {code}, as said above; the plan is not"
                " complete"
            )
    return [read_run(run_dir) for run_dir in folders]


def run_child(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run ``command`` and return its exit code (of a signal: 128 + its number).

    What ends a run early is forwarded to it; Ctrl-C it gets itself.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child:
            child.send_signal(number)

    with (
        handled((*ENDINGS, *WARNINGS), forward),
        handled((signal.SIGINT,), lambda *_: None),
    ):
        child = subprocess.Popen(command, env=environment)
        for number in received[:]:  # what came before the child was there
            child.send_signal(number)
        code = child.wait()
        return 128 - code if code < 0 else code


def default_folder(name: str) -> Path:
    """Return a folder of its own under runs/."""
    return Path("runs") / f"{name}-{utc_now().replace(':', '').replace('-', '')}-plan"


def arguments(options: Options) -> list[str]:
    """Return the flags of ``jspeed run`` for ``options``, without those of each run (OWN)."""
    flags: list[str] = []
    for field in dataclasses.fields(options):
        value, name = getattr(options, field.name), flag(field.name)
        if field.name in OWN or value == field.default:
            continue
        if isinstance(value, bool):
            flags.append(name if value else f"--no-{name[2:]}")
        else:
            flags += [name, *(value if isinstance(value, tuple) else [str(value)])]
    return flags


def summary(runs: Sequence[Run]) -> str:
    """Return the mean loss and time of ``runs`` and what they show, as one line."""
    losses = [run["val_loss"] for run in runs if run["val_loss"] is not None]
    if not losses:
        return "no run converged"
    mean, target, n = fmean(losses), runs[0]["target_loss"], len(losses)
    seconds = fmean(run["timed_seconds"] for run in runs if run["val_loss"] is not None)
    reached = "<=" if mean <= target else ">"
    line = (
        f"mean loss {mean:.4f} {reached} {target:g}, mean time {formatting.seconds(seconds)}, n={n}"
    )
    if n < 2:
        return f"{line}: one run, too few to tell"
    sd = stdev(losses)
    p = stats.t_below(mean, sd, n, target).p
    line += f"; sd {sd:.4f}, {formatting.chance(p)}"
    if p <= P:
        return line
    needed = stats.more_runs(mean, sd, n, target, P, known=False)
    return f"{line}: not significant" + (f" yet, needs about {needed} more" if needed else "")
