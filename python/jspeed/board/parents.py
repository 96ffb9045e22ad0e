"""Compare an entry with the recipe that it derives from, and estimate its time on the track's
hardware."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Literal, NamedTuple

from jspeed.board import stats
from jspeed.board.board import Anchored, Better, Judged, losses, result, times
from jspeed.board.records.preregistration import ROUND
from jspeed.board.records.store import Records, Row
from jspeed.board.records.track import Track


class Round(NamedTuple):
    """Timed seconds of two recipes that ran in turn."""

    a: list[float]
    b: list[float]


Rounds = dict[tuple[str, str], list[Round]]  # by recipe hashes


def rounds(records: Records, counted: Callable[[Row], bool]) -> Rounds:
    """Return the complete rounds of races by recipe hashes (A, B), and swapped by (B, A).

    A round is complete when its four runs converged, are ``counted``, and ran one after another on
    one machine. Races with ``--steps`` are ignored: their times are not of the full schedules.
    """
    by_hashes: Rounds = defaultdict(list)
    for digest, (_, plan) in records.plans.items():
        if plan["kind"] != "race" or plan["steps"] is not None:
            continue
        present = records.preregistered.get(digest, {})
        for first in range(0, len(plan["runs"]) - ROUND + 1, ROUND):
            planned = plan["runs"][first : first + ROUND]
            rows = [
                row for run in planned for row in present.get(run["folder"], [])[:1] if counted(row)
            ]
            seconds = [row.run["timed_seconds"] for row in rows if row.run["val_loss"] is not None]
            a, b, *rest = (run["recipe_hash"] for run in planned)
            if a != b and rest == [b, a] and len(seconds) == ROUND and in_turn(rows):
                of_a, of_b = [seconds[0], seconds[3]], [seconds[1], seconds[2]]
                by_hashes[a, b].append(Round(of_a, of_b))
                by_hashes[b, a].append(Round(of_b, of_a))
    return by_hashes


def in_turn(rows: Sequence[Row]) -> bool:
    """Whether runs ran one after another in this order, on one machine as far as they say
    (``machine`` may be null)."""
    machines = {row.run["machine"] for row in rows} - {None}
    same = all(row.run["devices"] == rows[0].run["devices"] for row in rows) and len(machines) <= 1
    started = [datetime.fromisoformat(row.run["started"]) for row in rows]
    return same and all(one < two for one, two in pairwise(started))


def compare_with_parent(
    entry: Judged, parents: Sequence[Judged], raced: Rounds, track: Track, sigma: float | None
) -> tuple[Better | None, Anchored | None]:
    """Return ``better`` and ``anchored`` of ``entry``, None where it has no parent to be measured
    against.

    ``parents`` are the other entries of the recipe that it names as parent, ``raced`` the rounds by
    pairs of recipe hashes. ``anchored`` is the parent's official time x the ratio of a race, for an
    entry that ran on other hardware.
    """
    parent = parent_of(entry, parents, raced)
    if parent is None:
        return None, None
    assert entry["seconds"] and parent["seconds"]
    turns = raced.get((parent["recipe_hash"], entry["recipe_hash"]), [])
    ratio = (
        stats.paired_ratio(turns)
        if turns
        else stats.unpaired_ratio(times(parent["runs"]), times(entry["runs"]))
    )
    saved = parent["steps"] - entry["steps"]
    price, source = price_of(parent, parents, track)
    pairwise = None
    if sigma and (price is not None or not saved):
        pairwise = stats.better_than(
            losses(entry["runs"]), losses(parent["runs"]), sigma, saved, price or 0.0
        )
    base = parent["seconds"]["mean"]
    same = parent["devices"] == entry["devices"]
    better: Better = {
        "parent": parent["recipe"],
        "parent_hash": parent["recipe_hash"],
        "parent_sha256": parent["recipe_sha256"],
        "how": "in turn" if turns else "apart",
        "ratio": ratio.ratio,
        "low": ratio.low,
        "high": ratio.high,
        "n": ratio.n,
        "steps_saved": saved,
        "price_per_step": price,
        "price_from": source,
        "pairwise": pairwise and result(pairwise),
        "seconds_saved": base - entry["seconds"]["mean"] if same else base * (1 - ratio.ratio),
        "verdict": verdict(entry, track, ratio, pairwise),
    }
    if not turns or not parent["valid"] or track.admits(entry["devices"]):
        return better, None
    low, high = ratio.low and base * ratio.low, ratio.high and base * ratio.high
    return better, {"seconds": base * ratio.ratio, "low": low, "high": high}


def parent_of(entry: Judged, parents: Sequence[Judged], raced: Rounds) -> Judged | None:
    """Return the parent to compare ``entry`` with: the best that it raced, else the best on its
    devices and data."""
    if not entry["seconds"] or not entry["loss"]:
        return None
    ended = [
        (not parent["valid"], not parent["counted"], parent["seconds"]["mean"], parent)
        for parent in parents
        if parent["seconds"] and not parent["cut_short"]
    ]
    together = [
        each for each in ended if raced.get((each[-1]["recipe_hash"], entry["recipe_hash"]))
    ]
    same = [
        each
        for each in ended
        if each[-1]["devices"] == entry["devices"] and each[-1]["data"] == entry["data"]
    ]
    best = min(together or same, key=lambda each: each[:-1], default=None)
    return best and best[-1]


def price_of(
    parent: Judged, parents: Sequence[Judged], track: Track
) -> tuple[float | None, str | None]:
    """Return what a step of ``parent`` is worth in loss, and where that comes from: its track's
    rule, or its own runs.

    Its own runs tell when some had another length, that is, another STEPS and nothing else.
    """
    if (price := track.rules.get("significance.price_per_step")) is not None:
        return price, "the track"
    lengths: dict[int, list[float]] = {}
    for other in parents:
        if (
            other["recipe_sha256"] == parent["recipe_sha256"]
            and other["loss"]
            and other["counted"]
            and other["overrides"].keys() <= {"STEPS"}
        ):
            lengths.setdefault(other["steps"], []).extend(losses(other["runs"]))
    price = stats.price_per_step(lengths)
    return (
        price,
        None
        if price is None
        else f"runs of {parent['recipe']} with {len(lengths)} numbers of steps",
    )


def verdict(
    entry: Judged, track: Track, ratio: stats.Ratio, pairwise: stats.Test | None
) -> Literal["yes", "no", "not shown"]:
    """Return ``yes``, ``no`` or ``not shown``: whether what the track ranks is better than the
    parent's.

    Steps are judged by the track's p, seconds by the 95 % interval of their ratio."""
    if entry["loss"] and entry["loss"]["mean"] > track.rules["target_loss"]:
        return "no"
    if track.rules["rank"] == "steps":
        return "yes" if pairwise and pairwise.p <= track.rules["significance.p"] else "not shown"
    if ratio.low is None or ratio.high is None:
        return "not shown"
    return "yes" if ratio.high < 1 else "no" if ratio.low > 1 else "not shown"
