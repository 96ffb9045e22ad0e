"""Read, write and check plan.json, which lists preregistered runs: runs fixed before the first of
them starts.

A plan lists folders, each with the recipe, its hash and the seed that belong there. Runs in those
folders name their plan, so a run that is missing, extra or of another configuration shows. Two
recipes in turn, A B B A, are a plan too: a race, whose times are comparable because both ran on one
machine in alternation.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from jspeed import fields
from jspeed.base.files import read_input, write_whole
from jspeed.errors import BadInput
from jspeed.fields import AtLeastOne, FolderName, Rule, Whole
from jspeed.record.run_json import content_hash
from jspeed.record.schema import MOST_SEED, Announced, Moment

NAME = "plan.json"
SCHEMA = 1
Kind = Literal["seeds", "race"]
FOLDER = re.compile(rf"\d+-{fields.FOLDER.pattern}-s\d+")
PLAN_PARTS = {"n": "[1-9][0-9]{0,17}", "seeds": r"([0-9]{1,18})\.\.([0-9]{1,18})"}
ROUND = 4  # runs of a round of a race: A B B A
MOST_RUNS = 1000  # of a plan; more would be a mistake in the command
REMEDY = "a plan.json comes from jspeed run --plan or jspeed leaderboard race and is not edited"


class PlannedRun(TypedDict):
    """A run to be made."""

    folder: Annotated[str, Rule("a name such as 1-stdlib-s1", FOLDER.fullmatch)]
    recipe: FolderName
    recipe_hash: str
    seed: Whole


class Preregistration(TypedDict):
    """The content of a plan.json."""

    schema: Annotated[int, fields.version(SCHEMA)]
    kind: Kind
    made: Moment
    steps: AtLeastOne | None  # that --steps asks for; null for the whole schedule
    runs: list[PlannedRun]
    sha256: str  # of all other fields as canonical JSON


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of ``n=4``, ``seeds=1..4`` or both; n alone means 1 to n. Raises BadInput
    for anything else."""
    parts = [part.partition("=") for part in text.split(",")]
    given = {name: re.fullmatch(PLAN_PARTS.get(name, "(?!)"), value) for name, _, value in parts}
    if not all(given.values()) or len(given) < len(parts):
        raise BadInput(f"--plan {text}: expected n=N, seeds=A..B or both, such as n=4,seeds=1..4")
    count, ends = given.get("n"), given.get("seeds")
    first, last = (int(ends[1]), int(ends[2])) if ends else (1, int(count[0]) if count else 0)
    number = last - first + 1
    if number < 1:
        raise BadInput(f"--plan {text}: the last seed is below the first; swap them")
    if count and number != int(count[0]):
        raise BadInput(f"--plan {text}: n={count[0]} but there are {number} seeds; make them agree")
    if number > MOST_RUNS or last > MOST_SEED:
        raise BadInput(
            f"--plan {text}: {number} runs up to seed {last}; give at most {MOST_RUNS} runs, with"
            f" seeds up to {MOST_SEED}"
        )
    return list(range(first, last + 1))


def make_preregistration(
    kind: Kind, made: str, steps: int | None, runs: Sequence[tuple[str, str, int]]
) -> Preregistration:
    """Return the plan of ``runs``, each (recipe, recipe hash, seed), in order; ``made`` is a UTC
    time in ISO 8601."""
    listed: list[PlannedRun] = [
        {
            "folder": f"{number}-{recipe}-s{seed}",
            "recipe": recipe,
            "recipe_hash": digest,
            "seed": seed,
        }
        for number, (recipe, digest, seed) in enumerate(runs, 1)
    ]
    plan: Preregistration = {
        "schema": SCHEMA,
        "kind": kind,
        "made": made,
        "steps": steps,
        "runs": listed,
        "sha256": "",
    }
    return plan | {"sha256": content_hash(plan)}


def write_preregistration(folder: Path, plan: Preregistration) -> Path:
    """Write ``plan`` whole as ``folder/plan.json`` and return that path."""
    path = folder / NAME
    write_whole(path, json.dumps(plan, indent=2) + "\n")
    return path


def read_preregistration(path: Path) -> Preregistration:
    """Return the plan at ``path``, checked; BadInput otherwise."""
    return parse_preregistration(read_input(path, "give a folder that holds a plan.json"), path)


def parse_preregistration(content: bytes, path: Path) -> Preregistration:
    """Return the plan that ``content`` holds, checked; ``path`` names it in error messages."""
    return fields.parse_json(content, path, _check, REMEDY)


def _check(plan: Any) -> None:
    fields.check_json(plan, Preregistration)
    folders = {run["folder"] for run in plan["runs"]}
    if len(folders) != len(plan["runs"]) or len(folders) < (2 if plan["kind"] == "race" else 1):
        what = f"{len(plan['runs'])} runs in {len(folders)} folders"
        raise BadInput(f"field 'runs': expected a folder of its own for every run, found {what}")
    if content_hash(plan) != plan["sha256"]:
        raise BadInput("field 'sha256': expected the hash of the other fields, found another")


def lies_in_plan(run_dir: Path | None) -> bool:
    """Whether a plan.json lies beside the folder of a run."""
    return run_dir is not None and (Path(os.path.abspath(run_dir)).parent / NAME).exists()


def announcement_of(
    run_dir: Path | None, recipe_hash: str, seed: int, steps: int | None
) -> Announced | None:
    """Return the run.json field ``plan`` of a run in ``run_dir``; None where no plan.json lies
    beside that folder.

    Raises BadInput when the plan has another recipe, seed or number of steps for this folder, or no
    run.
    """
    if run_dir is None or not lies_in_plan(run_dir):
        return None
    path = Path(os.path.abspath(run_dir)).parent / NAME
    plan = read_preregistration(path)
    planned = next(
        (
            run
            for run in plan["runs"]
            if run["folder"] == os.path.basename(os.path.abspath(run_dir))
        ),
        None,
    )
    if planned is None:
        folders = ", ".join(run["folder"] for run in plan["runs"])
        raise BadInput(
            f"--run-dir {run_dir}: {path} has no run for this folder, only for {folders}; choose"
            " another"
        )
    for name, wanted, have in (
        ("recipe hash", planned["recipe_hash"], recipe_hash),
        ("seed", planned["seed"], seed),
        ("--steps", plan["steps"], steps),
    ):
        if wanted != have:
            raise BadInput(
                f"--run-dir {run_dir}: {path} plans {name} {wanted} for this folder, found {have};"
                " give what was planned, or make another plan"
            )
    return {"sha256": plan["sha256"], "folder": planned["folder"]}
