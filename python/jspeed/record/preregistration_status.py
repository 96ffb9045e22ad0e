"""Status of preregistered runs: which of those in plan.json exist, are missing or extra; rounds of a race."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import pairwise
from typing import NamedTuple

from jspeed.record.preregistration import ROUND, Preregistration
from jspeed.record.store import Records, Row


class Round(NamedTuple):
    """Timed seconds of two recipes that ran in turn."""

    a: list[float]
    b: list[float]


Rounds = dict[tuple[str, str], list[Round]]  # by recipe hashes


def missing(plan: Preregistration, records: Records) -> list[int]:
    """Return the indices of the missing runs of ``plan``."""
    present = records.preregistered.get(plan["sha256"], {})
    return [index for index, run in enumerate(plan["runs"]) if run["folder"] not in present]


def extra(plan: Preregistration, records: Records) -> list[Row]:
    """Return runs that name ``plan`` but that it does not list, or that are the second in their folder."""
    listed = {run["folder"] for run in plan["runs"]}
    present = records.preregistered.get(plan["sha256"], {})
    return [row for folder, rows in present.items() for row in (rows[1:] if folder in listed else rows)]


def complete(plan: Preregistration, records: Records) -> bool:
    """Whether every run of ``plan`` is there, and no other."""
    return not missing(plan, records) and not extra(plan, records)


def rounds(records: Records, counted: Callable[[Row], bool]) -> Rounds:
    """Return the complete rounds of races by recipe hashes (A, B), and swapped by (B, A).

    A round is complete when its four runs converged, are ``counted``, and ran one after another on one machine. Races
    with ``--steps`` are ignored: their times are not of the full schedules.
    """
    found: Rounds = defaultdict(list)
    for digest, (_, plan) in records.plans.items():
        if plan["kind"] != "race" or plan["steps"] is not None:
            continue
        present = records.preregistered.get(digest, {})
        for first in range(0, len(plan["runs"]) - ROUND + 1, ROUND):
            planned = plan["runs"][first : first + ROUND]
            rows = [row for run in planned for row in present.get(run["folder"], [])[:1] if counted(row)]
            seconds = [row.run["timed_seconds"] for row in rows if row.run["val_loss"] is not None]
            a, b, *rest = (run["recipe_hash"] for run in planned)
            if a != b and rest == [b, a] and len(seconds) == ROUND and in_turn(rows):
                of_a, of_b = [seconds[0], seconds[3]], [seconds[1], seconds[2]]
                found[a, b].append(Round(of_a, of_b))
                found[b, a].append(Round(of_b, of_a))
    return found


def in_turn(rows: Sequence[Row]) -> bool:
    """Whether runs ran one after another in this order, on one machine as far as they say (``machine`` may be null)."""
    machines = {row.run.get("machine") for row in rows} - {None}
    same = all(row.run["devices"] == rows[0].run["devices"] for row in rows) and len(machines) <= 1
    started = [datetime.fromisoformat(row.run["started"]) for row in rows]
    return same and all(one < two for one, two in pairwise(started))
