"""Everything that can be checked of a records folder without running anything: each problem as file, field, reason.

One run.json is checked against itself when it is read; here files are checked against each other, against the rules
of their tracks, and against the present. What this cannot see is a forger who changes every file that bears on a
number, with their hashes and names: then git's history is left, and ``leaderboard.py reproduce``.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from jspeed.fields import recipe_hash
from jspeed.record.preregistration import Plan, PlannedRun
from jspeed.record.preregistration_status import by_folder, extra, missing
from jspeed.record.store import Records, Row


def verify(records: Records, now: datetime) -> list[str]:
    """Return a sentence for everything that is wrong with ``records`` at the UTC time ``now``; none if all is well."""
    checks = (recipes, moments, plans, seeds, data)
    return [*records.problems, *(problem for check in checks for problem in check(records, now))]


def wrong(path: Path, field: str, expected: str, found: Any) -> str:
    """Return the sentence of one problem."""
    return f"{path}: field '{field}': expected {expected}, found {found}"


def evidence(records: Records) -> list[Row]:
    """Return the runs that have the evidence of schema 2."""
    return [row for row in records.rows if row.run["schema"] >= 2]


def recipes(records: Records, now: datetime) -> Iterator[str]:
    """The source that a run names is there, and makes the recipe's hash with the run's fields."""
    known: dict[tuple[str, str], str] = {}
    for row in evidence(records):
        run, digest = row.run, row.run["recipe_sha256"]
        if digest not in records.sources or records.sources[digest][0].parent != row.path.parent:
            beside = row.path.with_name(f"recipe-{digest[:8]}.py")
            yield wrong(row.path, "recipe_sha256", f"the recipe's source at {beside}", "no file with this hash")
            continue
        fields = json.dumps(run["fields"], sort_keys=True)
        if (digest, fields) not in known:
            known[digest, fields] = recipe_hash(records.sources[digest][1], run["fields"])
        if known[digest, fields] != run["recipe_hash"]:
            wanted = f"{known[digest, fields][:12]}..., which follows from fields and source"
            yield wrong(row.path, "recipe_hash", wanted, f"{run['recipe_hash'][:12]}...")


def moments(records: Records, now: datetime) -> Iterator[str]:
    """Nothing is from the future."""
    for row in records.rows:
        for name in ("started", "ended"):
            if name in row.run and datetime.fromisoformat(row.run[name]) > now:
                yield wrong(row.path, name, f"a time before now, {now:%Y-%m-%dT%H:%M:%SZ}", row.run[name])


def plans(records: Records, now: datetime) -> Iterator[str]:
    """Every planned run is there, once, as planned, and after the plan; every run's plan is there."""
    there = by_folder(records)
    for digest, (path, plan) in records.plans.items():
        if datetime.fromisoformat(plan["made"]) > now:
            yield wrong(path, "made", f"a time before now, {now:%Y-%m-%dT%H:%M:%SZ}", plan["made"])
        for index in missing(plan, there):
            run = plan["runs"][index]
            wanted = f"a run of {run['recipe']} with seed {run['seed']} among the records"
            yield wrong(path, f"runs[{index}]", wanted, "none; add it, whatever its result")
        for row in extra(plan, there):
            wanted = f"a folder of {path.name} that no other run has"
            yield wrong(row.path, "plan.folder", wanted, row.plan and row.plan["folder"])
        for run in plan["runs"]:
            for row in there.get(digest, {}).get(run["folder"], []):
                yield from as_planned(row, run, plan, path)
    for row in evidence(records):
        if row.plan and row.plan["sha256"] not in records.plans:
            beside = f"plan-{row.plan['sha256'][:8]}.json"
            yield wrong(row.path, "plan.sha256", f"a plan among the records, {beside}", "none with this hash")


def as_planned(row: Row, planned: PlannedRun, plan: Plan, path: Path) -> Iterator[str]:
    """One run is the one that its plan meant."""
    run = row.run
    for name in ("recipe", "recipe_hash", "seed"):
        if run[name] != planned[name]:
            wanted = f"{planned[name]}, which {path.name} planned for {planned['folder']}"
            yield wrong(row.path, name, wanted, run[name])
    if run["asked_steps"] != plan["steps"]:
        yield wrong(row.path, "asked_steps", f"{plan['steps']}, which {path.name} planned", run["asked_steps"])
    if datetime.fromisoformat(run["started"]) < datetime.fromisoformat(plan["made"]):
        yield wrong(row.path, "started", f"a time after {path.name} was made, {plan['made']}", run["started"])


def seeds(records: Records, now: datetime) -> Iterator[str]:
    """One recipe starts from one state for one seed, and from another for another seed."""
    by_state: dict[tuple[Any, ...], Row] = {}
    by_seed: dict[tuple[Any, ...], Row] = {}
    for row in evidence(records):
        run = row.run
        same = (run["recipe_hash"], run["devices"]["kind"], run["layout"], *run["mesh"].items())
        same += (run["versions"]["jax"], run["versions"]["jaxlib"])
        twin = by_state.setdefault((*same, run["initial_state"]), row)
        if twin.run["seed"] != run["seed"]:
            wanted = f"{twin.run['seed']}, because the run began in the state of {twin.path.name}"
            yield wrong(row.path, "seed", wanted, run["seed"])
            continue
        other = by_seed.setdefault((*same, run["seed"]), row)
        if other.run["initial_state"] != run["initial_state"]:
            wanted = f"{other.run['initial_state']}, that of {other.path.name}, which has the same seed"
            yield wrong(row.path, "initial_state", wanted, run["initial_state"])


def data(records: Records, now: datetime) -> Iterator[str]:
    """Runs of one recipe on data of one name and size trained and validated on the same bytes."""
    first: dict[tuple[str, ...], Row] = {}
    for row in evidence(records):
        mine = row.run["data"]
        other = first.setdefault((row.run["recipe_hash"], mine["fingerprint"], mine["val_fingerprint"]), row)
        theirs = other.run["data"]
        found, wanted = mine["val_sha256"], theirs["val_sha256"]
        if found and wanted and found != wanted and mine["val_tokens"] == theirs["val_tokens"]:
            yield wrong(row.path, "data.val_sha256", f"{wanted[:12]}..., that of {other.path.name}", f"{found[:12]}...")
        hashes = {shard["name"]: shard["sha256"] for shard in theirs["train_shards"]}
        for index, shard in enumerate(mine["train_shards"]):
            found, wanted = shard["sha256"], hashes.get(shard["name"])
            if found and wanted and found != wanted:
                place = f"data.train_shards[{index}].sha256"
                yield wrong(row.path, place, f"{wanted[:12]}..., that of {other.path.name}", f"{found[:12]}...")
                break
