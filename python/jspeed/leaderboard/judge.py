"""Compute the board from the records: group runs into entries and judge each by its track's rules.

An entry is the runs of one recipe hash on the same data and devices. It is *valid* when its track's rules hold, and,
independently, *better* when it is faster than its parent. The result is plain data, the content of leaderboard.json,
from which table, page and README's block are made.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from jspeed.leaderboard import formatting, stats
from jspeed.leaderboard.board import BoardTrack, Entry, EntryData, RunLine, Spread, TestResult, kind_of, result
from jspeed.leaderboard.parents import compare_with_parent, losses
from jspeed.leaderboard.recipe_card import card
from jspeed.record.preregistration_status import Rounds, extra, rounds
from jspeed.record.same_data import DataSet, data_of_track, data_sets
from jspeed.record.schema import Run, shards_of
from jspeed.record.store import Records, Row
from jspeed.record.track import Track, track_without_rules


class TrackRuns(NamedTuple):
    """The runs of a track, their data by path, and the track's data."""

    rows: list[Row]
    sets: Mapping[Path, DataSet]
    pinned: DataSet

    def difference(self, row: Row) -> str | None:
        """Return how the data of ``row`` differ from the track's, as a phrase; None where they do not."""
        return self.pinned.difference(self.sets[row.path])


def board(records: Records) -> list[BoardTrack]:
    """Return the tracks in their order, those without runs last, each with its rules and its ``entries``: valid ones
    first, by rank."""
    tracks = tracks_of(records)
    raced = counted_rounds(records, tracks)
    judged = [judged_track(records, track, rows, raced) for track, rows in tracks.values()]
    return sorted(judged, key=lambda track: (not track["entries"], track.get("order", math.inf), track["track"]))


def tracks_of(records: Records) -> dict[str, tuple[Track, TrackRuns]]:
    """Return every track by name with its runs and their data."""
    by_track: dict[str, list[Row]] = defaultdict(list)
    for row in records.rows:
        by_track[row.track].append(row)
    tracks = {}
    for name in sorted(records.tracks.keys() | by_track.keys()):
        rows = by_track[name]
        track = records.tracks.get(name) or track_without_rules(name, rows[0].run)
        sets = data_sets(rows)
        tracks[name] = track, TrackRuns(rows, sets, data_of_track(track, rows, sets, records))
    return tracks


def counted_rounds(records: Records, tracks: Mapping[str, tuple[Track, TrackRuns]]) -> Rounds:
    """Return the rounds of races on the tracks' data and from clean commits, on any hardware."""

    def counted(row: Row) -> bool:
        known = row.planned_and_clean and not of_unknown_data(row.run)
        return known and tracks[row.track][1].difference(row) is None

    return rounds(records, counted)


def raced(records: Records) -> Rounds:
    """Return :func:`counted_rounds` of ``records``."""
    return counted_rounds(records, tracks_of(records))


def judged_track(records: Records, track: Track, found: TrackRuns, raced: Rounds) -> BoardTrack:
    """Return one track with its judged entries."""
    groups: dict[EntryKey, list[Row]] = defaultdict(list)
    for row in found.rows:
        groups[entry_key(row, found.sets[row.path], track)].append(row)
    entries = [entry_of(records, found, group) for group in groups.values()]
    for entry, group in zip(entries, groups.values(), strict=True):
        add_plans(entry, group, records)
        count(entry, group, track, found.difference(group[0]))
    counted = [losses(entry) for entry in entries if entry["counted"]]
    sigma = track.rules.get("significance.sigma") or stats.pooled_sigma(counted)
    by_recipe: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        judge(entry, track, sigma)
        by_recipe[entry["recipe"]].append(entry)
    for entry in entries:
        compare_with_parent(entry, by_recipe[entry["parent"] or ""], raced, track, sigma)
    entries.sort(key=lambda e: (not e["valid"], rank_value(e, track) or math.inf, e["recipe"], e["recipe_hash"]))
    places: Counter[tuple[str, int] | None] = Counter()
    for entry in entries:
        if entry["valid"]:
            kind = None if track.rules["rank"] == "steps" else kind_of(entry["devices"])
            places[kind] += 1
            entry["rank"] = places[kind]  # seconds are ranked among runs on one kind and number of devices
    names: dict[str, int] = defaultdict(int)
    for entry in entries:
        base = f"{track.name}/{entry['recipe']}-{entry['recipe_hash'][:8]}".replace("/", "-")
        names[base] += 1
        entry["id"] = base if names[base] == 1 else f"{base}-{names[base]}"
    return {"track": track.name, "ruled": track.ruled, **track.rules, "sigma": sigma,
            "val_sha256": found.pinned.val_sha256, "hardware": track.hardware(), "entries": entries}  # fmt: skip


class EntryKey(NamedTuple):
    """What the runs of one entry have in common."""

    recipe: str
    recipe_hash: str
    target_loss: float
    devices: tuple[str, int, int] | None  # kind, count and processes where seconds are ranked
    data: int  # identity of their DataSet
    of_unknown_data: bool
    asked_for_less: int | None
    planned: bool
    clean: bool


def entry_key(row: Row, data: DataSet, track: Track) -> EntryKey:
    """Return what the runs of one entry have in common.

    Runs that cannot count (other or unknown data, cut short, unplanned, dirty tree) form separate entries and do not
    affect valid ones. Where seconds are ranked, so do runs on other devices.
    """
    run, device = row.run, row.run["devices"]
    timed = None if track.rules["rank"] == "steps" else (device["kind"], device["count"], device["processes"])
    planned, clean = run.get("plan") is not None, run["git"]["dirty"] is False
    unknown, less = of_unknown_data(run), asked_for_less(run)
    return EntryKey(
        run["recipe"], run["recipe_hash"], run["target_loss"], timed, id(data), unknown, less, planned, clean
    )


def asked_for_less(run: Run) -> int | None:
    """Return the number of steps after which ``run`` was to stop, if that is before the end of its schedule."""
    asked = run.get("asked_steps")
    return None if asked is None or asked >= run["planned_steps"] else asked


def data_of(found: TrackRuns, row: Row) -> EntryData:
    """Return an entry's ``data``: hashes that name them, their number on the track, and whether they are its data."""
    mine = found.sets[row.path]
    order = list({id(each): None for each in found.sets.values()})
    return {
        "val_sha256": mine.val_sha256,
        "train_sha256": mine.shards[0] if mine.shards else None,
        "number": order.index(id(mine)) + 1,
        "of_track": found.difference(row) is None,
    }


def converged(run: Run) -> bool:
    """Whether a run ended with a finite loss."""
    return run["val_loss"] is not None


def of_unknown_data(run: Run) -> bool:
    """Whether a run has a loss, and no hashes that say on what data, although its schema has them."""
    return converged(run) and run["schema"] >= 2 and shards_of(run) is None


def entry_of(records: Records, found: TrackRuns, rows: Sequence[Row]) -> Entry:
    """Return the entry of ``rows`` with what their files say; from ``planned`` on it is not judged yet."""
    rows = sorted(rows, key=lambda row: row.run["started"])
    run = rows[-1].run
    source = records.sources.get(run.get("recipe_sha256", ""))
    ended = [row for row in rows if converged(row.run)]
    example = (ended or rows)[0].run
    return {
        "recipe": run["recipe"], "recipe_hash": run["recipe_hash"], "overrides": run["overrides"],
        "parent": run["parent"], "recipe_sha256": run.get("recipe_sha256"),
        "card": card(source) if source else {},
        "devices": run["devices"], "mesh": run["mesh"], "layout": run["layout"],
        "date": max(row.run.get("ended", row.run["started"]) for row in rows)[:10],
        "git": run["git"], "versions": run["versions"], "steps": run["steps"], "tokens": run["tokens"],
        "parameters": run["parameters"], "active_parameters": run.get("active_parameters"),
        "flops_per_token": run["flops_per_token"], "target_loss": run["target_loss"],
        "seconds": spread([row.run["timed_seconds"] for row in ended]),
        "compile_seconds": fmean(row.run["compile_seconds"] for row in rows),
        "wall_seconds": fmean(row.run["wall_seconds"] for row in rows),
        "curve": [(p["step"], round(p["timed_seconds"], 3), p["val_loss"]) for p in example["curve"]],
        "runs": [run_line(records, row) for row in rows], "data": data_of(found, rows[0]),
        "planned": 0, "missing": 0, "extra": 0, "loss": None, "holdout": None, "why_not": [], "cut_short": False,
        "counted": False,
        "tests": {"t": None, "z": None}, "more_runs": None, "valid": False, "rank": None,
        "better": None, "anchored": None, "id": "",
    }  # fmt: skip


def spread(values: Sequence[float]) -> Spread | None:
    """Return number, mean, standard deviation (None for one), least and most of ``values``; None for none."""
    if not values:
        return None
    return {
        "n": len(values),
        "mean": fmean(values),
        "sd": stdev(values) if len(values) > 1 else None,
        "least": min(values),
        "most": max(values),
    }


def run_line(records: Records, row: Row) -> RunLine:
    """Return one run as a line of its entry."""
    run = row.run
    return {
        "seed": run["seed"], "status": run["status"], "val_loss": run["val_loss"],
        "holdout": run["holdout"]["val_loss"] if "holdout" in run else None,
        "timed_seconds": run["timed_seconds"], "wall_seconds": run["wall_seconds"], "steps": run["steps"],
        "started": run["started"], "file": row.path.relative_to(records.folder).as_posix(),
        "commit": run["git"]["commit"], "plan": row.plan and row.plan["sha256"][:8], "machine": run.get("machine"),
        "weights": next((kept for kept in records.weights.values() if kept["run"] == run.get("sha256")), None),
    }  # fmt: skip


def add_plans(entry: Entry, rows: Sequence[Row], records: Records) -> None:
    """Add ``planned``, ``missing`` and ``extra`` to ``entry``: numbers of runs over all plans it has runs of.

    A planned run is missing too when it is there but no run of this entry: on other data, or on other devices.
    """
    mine = {(plan["sha256"], plan["folder"]) for row in rows if (plan := row.plan)}
    digests = {digest for digest, _ in mine}
    plans = [records.plans[digest][1] for digest in digests if digest in records.plans]
    planned = [
        (plan["sha256"], run["folder"])
        for plan in plans
        for run in plan["runs"]
        if run["recipe_hash"] == entry["recipe_hash"]
    ]
    entry["planned"] = len(planned)
    entry["missing"] = sum(place not in mine for place in planned)
    entry["extra"] = sum(len(extra(plan, records)) for plan in plans) + sum(d not in records.plans for d in digests)


def count(entry: Entry, rows: Sequence[Row], track: Track, other_data: str | None) -> None:
    """Add to ``entry``: ``loss``, ``holdout``, ``why_not`` apart from the mean loss, ``cut_short``, and ``counted``.

    A counted entry contributes to sigma and to the price of a step: all rules hold except, possibly, significance, and
    it either ran its whole schedule or reached the target.
    """
    entry["loss"], entry["holdout"] = spread(losses(entry)), spread(losses(entry, "holdout"))
    entry["why_not"] = list(reasons(entry, [row.run for row in rows], track, other_data))
    missed = entry["loss"] is None or entry["loss"]["mean"] > track.rules["target_loss"]
    entry["cut_short"] = asked_for_less(rows[0].run) is not None and missed
    entry["counted"] = not entry["why_not"] and not entry["cut_short"]
    if not track.ruled:
        entry["why_not"].insert(0, "the track has no rules")


def judge(entry: Entry, track: Track, sigma: float | None) -> None:
    """Add the tests and the verdict ``valid`` to a counted ``entry``, and the rest of its reasons."""
    target, tests, loss = track.rules["target_loss"], entry["tests"], entry["loss"]
    if loss and loss["sd"] is not None:
        tests["t"] = result(stats.t_below(loss["mean"], loss["sd"], loss["n"], target))
    if loss and sigma is not None:
        tests["z"] = result(stats.z_below(loss["mean"], loss["n"], target, sigma))
    if track.ruled:
        kind, p = track.rules["significance.test"], track.rules["significance.p"]
        decisive = tests[kind]
        if decisive is None or decisive["p"] > p:
            sd = sigma if kind == "z" else loss and (loss["sd"] or sigma)
            if loss and sd:
                entry["more_runs"] = stats.more_runs(loss["mean"], sd, loss["n"], target, p, kind == "z")
            entry["why_not"].append(insignificance(entry, decisive, track))
    entry["valid"] = not entry["why_not"]


def reasons(entry: Entry, runs: Sequence[Run], track: Track, other_data: str | None) -> Iterable[str]:
    """Yield why ``runs`` do not count on ``track``, apart from their mean loss; ``other_data`` is one, if any."""
    if any(run["schema"] < 2 for run in runs):
        yield "schema 1: no data hashes or environment"
    elif any(run["plan"] is None for run in runs):
        yield "not all runs were planned"
    if entry["missing"] or entry["extra"]:
        yield f"of {entry['planned']} planned runs {entry['missing']} are missing, {entry['extra']} are extra"
    if not track.fits(entry["devices"]):
        yield f"the track asks for {track.hardware()}"
    if large := next(filter(None, map(track.too_large, runs)), None):
        yield large
    if missing := next(filter(None, map(track.no_holdout, runs)), None):
        yield missing
    if other_data:
        yield other_data
    if any(of_unknown_data(run) for run in runs):
        yield "its data are not identified by hashes"
    tokens, step = track.rules.get("data.val_tokens"), track.rules.get("tokens_per_step")
    if tokens and any(run["data"]["val_tokens"] != tokens for run in runs):
        yield f"not validated on {tokens:,} tokens"
    if entry["target_loss"] != track.rules["target_loss"]:
        yield f"had a different target loss, {entry['target_loss']:g}"
    if step and any(run["tokens"] != run["steps"] * step for run in runs):
        yield f"a step is not {step:,} tokens"
    if not track.rules.get("timing.resumed") and any(run.get("resumed") for run in runs):
        yield "a run was resumed; its time is incomplete"
    if any(run["git"]["dirty"] is not False for run in runs):
        yield "the code was not a clean commit"
    failed = sum(not converged(run) for run in runs)
    if failed > (track.rules.get("significance.failures") or 0):
        yield f"{failed} runs did not converge"


def insignificance(entry: Entry, test: TestResult | None, track: Track) -> str:
    """Return in words that the mean loss is not shown to be below the target, and how many runs would show it."""
    if entry["loss"] is None:
        return "no run converged"
    if entry["loss"]["mean"] > track.rules["target_loss"]:
        return f"missed the target: mean loss {entry['loss']['mean']:.4f}"
    more = entry["more_runs"]
    need = f", needs about {more} more run{'s' if more > 1 else ''}" if more else ""
    chance = formatting.chance(test["p"]) if test else f"n = {entry['loss']['n']}"
    return f"not yet significant ({chance}{need})"


def rank_value(entry: Entry, track: Track) -> float | None:
    """Return what the track ranks: mean timed seconds (None where no run converged), or steps."""
    if track.rules["rank"] == "steps":
        return entry["steps"]
    return entry["seconds"]["mean"] if entry["seconds"] else None
