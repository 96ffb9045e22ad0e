"""Which runs of an announced plan exist, are missing or extra, and the rounds of a race."""

from collections import defaultdict
from collections.abc import Callable, Mapping

from jspeed.record.preregistration import Plan
from jspeed.record.store import Records, Row

ByFolder = Mapping[str, Mapping[str, list[Row]]]
Rounds = list[tuple[list[float], list[float]]]
TURNS = 4  # A B B A


def by_folder(records: Records) -> ByFolder:
    """Return the runs of plans by the plan's hash and folder; more than one in a folder is one too many."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in records.rows:
        if plan := row.plan:
            found.setdefault(plan["sha256"], {}).setdefault(plan["folder"], []).append(row)
    return found


def missing(plan: Plan, there: ByFolder) -> list[int]:
    """Return the indices of the runs of ``plan`` that are not there."""
    ours = there.get(plan["sha256"], {})
    return [index for index, run in enumerate(plan["runs"]) if run["folder"] not in ours]


def extra(plan: Plan, there: ByFolder) -> list[Row]:
    """Return runs that name ``plan`` but that it does not mean, or that are the second in their folder."""
    meant = {run["folder"] for run in plan["runs"]}
    ours = there.get(plan["sha256"], {})
    return [row for folder, rows in ours.items() for row in (rows[1:] if folder in meant else rows)]


def complete(plan: Plan, there: ByFolder) -> bool:
    """Whether every run of ``plan`` is there, and no other."""
    return not missing(plan, there) and not extra(plan, there)


def rounds(records: Records, there: ByFolder, counted: Callable[[Row], bool]) -> dict[tuple[str, str], Rounds]:
    """Return (times of A, times of B) in seconds of every whole round of a race, by recipe hashes (A, B) and (B, A).

    A round is whole when its four runs converged and are ``counted``. A race that was told to stop early (``--steps``)
    says nothing of the recipes' own lengths and has no rounds here.
    """
    found: dict[tuple[str, str], Rounds] = defaultdict(list)
    for digest, (_, plan) in records.plans.items():
        if plan["kind"] != "race" or plan["steps"] is not None:
            continue
        for first in range(0, len(plan["runs"]) - TURNS + 1, TURNS):
            turn = plan["runs"][first : first + TURNS]
            times: dict[str, list[float]] = defaultdict(list)
            for run in turn:
                for row in there.get(digest, {}).get(run["folder"], [])[:1]:
                    if row.run["val_loss"] is not None and counted(row):
                        times[run["recipe_hash"]].append(row.run["timed_seconds"])
            a, b = turn[0]["recipe_hash"], turn[1]["recipe_hash"]
            if a != b and len(times[a]) == len(times[b]) == TURNS // 2:
                found[a, b].append((times[a], times[b]))
                found[b, a].append((times[b], times[a]))
    return found
