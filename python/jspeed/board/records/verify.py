"""Cross-check the files of a records folder: each problem as file, field, expected and found value.

One run.json is checked against itself when it is read; here files are checked against each other
and the current time. A consistent forgery of all related files is not detected; for that see git's
history and ``jspeed leaderboard reproduce``.
"""

import json
from collections.abc import Hashable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from jspeed.board.records import trust
from jspeed.board.records.preregistration import PlannedRun, Preregistration
from jspeed.board.records.store import Problem, Records, Row, plan_name, source_name
from jspeed.board.records.track import Index
from jspeed.errors import BadInput
from jspeed.fields import check_json, recipe_hash
from jspeed.record.audits import MOST_NUMBERS, SAME


def verify(records: Records, now: datetime) -> list[Problem]:
    """Return everything that is wrong with ``records`` at the UTC time ``now``."""
    problems = [*records.problems, *recipes(records), *parameters(records), *moments(records, now)]
    problems += [
        *plans(records, now),
        *seeds(records),
        *holdouts(records),
        *data(records),
        *weights(records),
        *audits(records, now),
        *trust.problems(records),
        *indexes(records),
    ]
    return problems


def wrong(path: Path, field: str, expected: str, found: Any) -> Problem:
    """Return one problem with its error message."""
    return Problem(path, f"{path}: field '{field}': expected {expected}, found {found}")


def recipes(records: Records) -> Iterator[Problem]:
    """The source that a run names is there, and makes the recipe's hash with the run's fields."""
    known: dict[tuple[str, str], str] = {}
    for row in records.rows:
        run, digest = row.run, row.run["recipe_sha256"]
        beside = row.path.with_name(source_name(digest))
        if digest not in records.sources or not beside.is_file():
            yield wrong(
                row.path,
                "recipe_sha256",
                f"the recipe's source at {beside}",
                "no file with this hash",
            )
            continue
        fields = json.dumps(run["fields"], sort_keys=True)
        if (digest, fields) not in known:
            known[digest, fields] = recipe_hash(records.sources[digest], run["fields"])
        if known[digest, fields] != run["recipe_hash"]:
            wanted = f"{known[digest, fields][:12]}..., which follows from fields and source"
            yield wrong(row.path, "recipe_hash", wanted, f"{run['recipe_hash'][:12]}...")


def parameters(records: Records) -> Iterator[Problem]:
    """Runs of one recipe list the same parameters, of which their numbers follow."""
    first: dict[str, Row] = {}
    for row in records.rows:
        if table := row.run.get("parameter_table"):
            other = first.setdefault(row.run["recipe_hash"], row)
            if other.run.get("parameter_table") != table:
                wanted = f"that of {other.path.name}, a run of the same recipe"
                yield wrong(
                    row.path,
                    "parameter_table",
                    wanted,
                    f"one of {row.run['parameters']:,} parameters",
                )


def moments(records: Records, now: datetime) -> Iterator[Problem]:
    """Every timestamp is in the past."""
    for row in records.rows:
        for name, moment in (("started", row.run["started"]), ("ended", row.run["ended"])):
            if datetime.fromisoformat(moment) > now:
                yield wrong(row.path, name, f"a time before now, {now:%Y-%m-%dT%H:%M:%SZ}", moment)


def plans(records: Records, now: datetime) -> Iterator[Problem]:
    """Every preregistered run is there, once, as planned, and after its plan.json; every run's plan
    is there."""
    for digest, (path, plan) in records.plans.items():
        if datetime.fromisoformat(plan["made"]) > now:
            yield wrong(path, "made", f"a time before now, {now:%Y-%m-%dT%H:%M:%SZ}", plan["made"])
        for index in records.missing(plan):
            run = plan["runs"][index]
            wanted = f"a run of {run['recipe']} with seed {run['seed']} among the records"
            yield wrong(path, f"runs[{index}]", wanted, "none; add it, whatever its result")
        for row in records.extra(plan):
            wanted = f"a folder of {path.name} that no other run has"
            yield wrong(row.path, "plan.folder", wanted, row.plan and row.plan["folder"])
        for run in plan["runs"]:
            for row in records.preregistered.get(digest, {}).get(run["folder"], []):
                yield from as_planned(row, run, plan, path)
    for row in records.rows:
        if row.plan and row.plan["sha256"] not in records.plans:
            wanted = f"a plan among the records, {plan_name(row.plan['sha256'])}"
            yield wrong(row.path, "plan.sha256", wanted, "none with this hash")


def as_planned(
    row: Row, planned: PlannedRun, plan: Preregistration, path: Path
) -> Iterator[Problem]:
    """A preregistered run has the recipe, seed and steps that its plan lists, and started after the
    plan was made."""
    run = row.run
    for name in ("recipe", "recipe_hash", "seed"):
        if run[name] != planned[name]:
            wanted = f"{planned[name]}, which {path.name} planned for {planned['folder']}"
            yield wrong(row.path, name, wanted, run[name])
    if run["asked_steps"] != plan["steps"]:
        yield wrong(
            row.path,
            "asked_steps",
            f"{plan['steps']}, which {path.name} planned",
            run["asked_steps"],
        )
    if datetime.fromisoformat(run["started"]) < datetime.fromisoformat(plan["made"]):
        yield wrong(
            row.path,
            "started",
            f"a time after {path.name} was made, {plan['made']}",
            run["started"],
        )


def seeds(records: Records) -> Iterator[Problem]:
    """The same recipe and seed give the same initial state; different seeds give different ones."""
    by_state: dict[Hashable, Row] = {}
    by_seed: dict[Hashable, Row] = {}
    for row in records.rows:
        run, versions, mesh = row.run, row.run["versions"], tuple(row.run["mesh"].items())
        placed = run["devices"]["kind"], run["layout"], mesh
        # what the state depends on too
        setting = run["recipe_hash"], placed, versions["jax"], versions["jaxlib"]
        twin = by_state.setdefault((setting, run["initial_state"]), row)
        if twin.run["seed"] != run["seed"]:
            wanted = f"{twin.run['seed']}, because the run began in the state of {twin.path.name}"
            yield wrong(row.path, "seed", wanted, run["seed"])
            continue
        other = by_seed.setdefault((setting, run["seed"]), row)
        if other.run["initial_state"] != run["initial_state"]:
            wanted = (
                f"{other.run['initial_state']}, that of {other.path.name}, which has the same seed"
            )
            yield wrong(row.path, "initial_state", wanted, run["initial_state"])


def holdouts(records: Records) -> Iterator[Problem]:
    """Runs with the same first range of the same validation shards have the same second range."""
    known: dict[tuple[str | None, str, int, int], Row] = {}
    for row in records.rows:
        if mine := row.run.get("holdout"):
            data = row.run["data"]
            key = data["val_sha256"], data["val_fingerprint"], mine["first"], mine["tokens"]
            other = known.setdefault(key, row)
            theirs = other.run["holdout"]["sha256"]
            if theirs != mine["sha256"]:
                yield wrong(
                    row.path,
                    "holdout.sha256",
                    f"{theirs[:12]}..., that of {other.path.name}",
                    mine["sha256"],
                )


def data(records: Records) -> Iterator[Problem]:
    """Runs of one recipe on data of one name and size trained and validated on the same bytes."""
    first: dict[tuple[str, ...], Row] = {}
    for row in records.rows:
        mine = row.run["data"]
        other = first.setdefault(
            (row.run["recipe_hash"], mine["fingerprint"], mine["val_fingerprint"]), row
        )
        theirs = other.run["data"]
        found, wanted = mine["val_sha256"], theirs["val_sha256"]
        if found and wanted and found != wanted and mine["val_tokens"] == theirs["val_tokens"]:
            yield wrong(
                row.path,
                "data.val_sha256",
                f"{wanted[:12]}..., that of {other.path.name}",
                f"{found[:12]}...",
            )
        hashes = {shard["name"]: shard["sha256"] for shard in theirs["train_shards"]}
        for index, shard in enumerate(mine["train_shards"]):
            found, wanted = shard["sha256"], hashes.get(shard["name"])
            if found and wanted and found != wanted:
                place = f"data.train_shards[{index}].sha256"
                yield wrong(
                    row.path,
                    place,
                    f"{wanted[:12]}..., that of {other.path.name}",
                    f"{found[:12]}...",
                )
                break


def weights(records: Records) -> Iterator[Problem]:
    """Every weights-HASH.json is beside the run that it names."""
    beside = {(row.path.parent, row.run["sha256"]) for row in records.rows}
    for path, kept in records.weights.items():
        if (path.parent, kept["run"]) not in beside:
            yield wrong(path, "run", "the sha256 of a run beside it", f"{kept['run'][:12]}...")


def audits(records: Records, now: datetime) -> Iterator[Problem]:
    """Every audit-HASH.json is beside the run that it names and found its loss again. It is of the
    parameters that are kept for that run, and for no other."""
    beside = {(row.path.parent, row.run["sha256"]): row.run for row in records.rows}
    kept = {weights["run"]: weights["sha256"] for weights in records.weights.values()}
    audited: dict[str, str] = {}
    for path, audit in records.audits.items():
        other = audited.setdefault(audit["weights"], audit["run"])
        if other != audit["run"]:
            wanted = f"other parameters than those audited for run {other[:12]}..."
            yield wrong(path, "weights", wanted, f"{audit['weights'][:12]}...")
        run = beside.get((path.parent, audit["run"]))
        if run is None:
            yield wrong(path, "run", "the sha256 of a run beside it", f"{audit['run'][:12]}...")
            continue
        second = run.get("holdout") or run.get("unread")
        for name, found, recorded in (
            ("val_loss", audit["val_loss"], run["val_loss"]),
            ("second", audit["second"], second["val_loss"] if second else audit["second"]),
        ):
            if found is None or recorded is None:
                agree = found is recorded
            else:
                agree = abs(found - recorded) <= SAME
            if not agree:
                yield wrong(path, name, f"{recorded} within {SAME:g}, as the run says", found)
        if audit["causality"].get("passed") is not True:
            yield wrong(path, "causality.passed", "true", audit["causality"].get("passed"))
        if (most := MOST_NUMBERS["evaluation"]) < audit["numbers"].get("evaluation", 0):
            yield wrong(path, "numbers.evaluation", f"at most {most}", audit["numbers"])
        made, ended = map(datetime.fromisoformat, (audit["made"], run["ended"]))
        if not ended <= made <= now:
            yield wrong(path, "made", "a time between the run's end and now", audit["made"])
        if audit["weights"] != kept.get(run["sha256"], audit["weights"]):
            wanted = f"{kept[run['sha256']][:12]}..., that of the parameters kept for the run"
            yield wrong(path, "weights", wanted, f"{audit['weights'][:12]}...")


def indexes(records: Records) -> Iterator[Problem]:
    """A row has one more token than it trains on; so an index of a run's tokens holds at most twice
    as many."""
    for row in records.rows:
        if (index := dict(row.run).get("retrieval")) is None:
            continue
        try:
            check_json(index, Index)
        except BadInput as error:
            yield Problem(row.path, f"{row.path}: in 'retrieval': {error}")
            continue
        trained, held = row.run["tokens"], cast(Index, index)["tokens"]
        if not trained <= held <= 2 * trained:
            wanted = f"the tokens trained on, {trained}, and one more for each row"
            yield wrong(row.path, "retrieval.tokens", wanted, held)
