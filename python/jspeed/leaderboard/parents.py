"""Compare an entry with the recipe that it derives from, and estimate its time on the track's hardware."""

from collections.abc import Sequence
from typing import Literal

from jspeed.leaderboard import stats
from jspeed.leaderboard.board import Entry, RunLine, result
from jspeed.record.preregistration_status import Rounds
from jspeed.record.track import Track


def compare_with_parent(
    entry: Entry,
    parents: Sequence[Entry],
    raced: Rounds,
    track: Track,
    sigma: float | None,
) -> None:
    """Set ``better`` and ``anchored`` of ``entry``, which stay None where it has no parent to be measured against.

    ``parents`` are the entries of the recipe that it names as parent, ``raced`` the rounds by pairs of recipe hashes.
    ``anchored`` is the parent's official time x the ratio of a race, for an entry that ran on other hardware.
    """
    parent = chosen(entry, parents, raced)
    if parent is None:
        return
    assert entry["seconds"] and parent["seconds"]
    rounds = raced.get((parent["recipe_hash"], entry["recipe_hash"]), [])
    ratio = stats.paired_ratio(rounds) if rounds else stats.unpaired_ratio(times(parent), times(entry))
    saved = parent["steps"] - entry["steps"]
    price, source = price_of(parent, parents, track)
    pairwise = None
    if sigma and (price is not None or not saved):
        pairwise = stats.better_than(losses(entry), losses(parent), sigma, saved, price or 0.0)
    base = parent["seconds"]["mean"]
    same = parent["devices"] == entry["devices"]
    entry["better"] = {
        "parent": parent["recipe"],
        "parent_hash": parent["recipe_hash"],
        "parent_sha256": parent["recipe_sha256"],
        "how": "in turn" if rounds else "apart",
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
    if rounds and parent["valid"] and not track.fits(entry["devices"]):
        low, high = ratio.low and base * ratio.low, ratio.high and base * ratio.high
        entry["anchored"] = {"seconds": base * ratio.ratio, "low": low, "high": high}


def chosen(entry: Entry, parents: Sequence[Entry], raced: Rounds) -> Entry | None:
    """Return what ``entry`` is measured against: a parent it raced with, else one on its devices and data; the best."""
    if not entry["seconds"] or not entry["loss"]:
        return None
    ended = [
        (not parent["valid"], not parent["counted"], parent["seconds"]["mean"], parent)
        for parent in parents
        if parent["seconds"] and not parent["cut_short"] and parent is not entry
    ]
    together = [each for each in ended if raced.get((each[-1]["recipe_hash"], entry["recipe_hash"]))]
    same = [each for each in ended if each[-1]["devices"] == entry["devices"] and each[-1]["data"] == entry["data"]]
    best = min(together or same, key=lambda each: each[:-1], default=None)
    return best and best[-1]


def price_of(parent: Entry, parents: Sequence[Entry], track: Track) -> tuple[float | None, str | None]:
    """Return what a step of ``parent`` is worth in loss, and where that comes from: its track's rule, or its own runs.

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
            lengths.setdefault(other["steps"], []).extend(losses(other))
    price = stats.price_per_step(lengths)
    return price, None if price is None else f"runs of {parent['recipe']} with {len(lengths)} numbers of steps"


def times(entry: Entry) -> list[float]:
    """Return the timed seconds of all runs of ``entry`` that converged."""
    return [run["timed_seconds"] for run in entry["runs"] if run["val_loss"] is not None]


def losses(entry: Entry, of: Literal["val_loss", "holdout"] = "val_loss") -> list[float]:
    """Return the final losses of ``entry``, one for each seed; or those on the second validation range."""
    return [loss for run in by_seed(entry).values() if (loss := run[of]) is not None]


def by_seed(entry: Entry) -> dict[int, RunLine]:
    """Return the runs of ``entry`` that converged by seed: the first of each, for the same seed is no second sample."""
    found: dict[int, RunLine] = {}
    for run in entry["runs"]:
        if run["val_loss"] is not None:
            found.setdefault(run["seed"], run)
    return found


def verdict(
    entry: Entry, track: Track, ratio: stats.Ratio, pairwise: stats.Test | None
) -> Literal["yes", "no", "not shown"]:
    """Return ``yes``, ``no`` or ``not shown``: whether what the track ranks is better than the parent's.

    Steps are judged by the track's p, seconds by the 95 % interval of their ratio."""
    if entry["loss"] and entry["loss"]["mean"] > track.rules["target_loss"]:
        return "no"
    if track.rules["rank"] == "steps":
        return "yes" if pairwise and pairwise.p <= track.rules["significance.p"] else "not shown"
    if ratio.low is None or ratio.high is None:
        return "not shown"
    return "yes" if ratio.high < 1 else "no" if ratio.low > 1 else "not shown"
