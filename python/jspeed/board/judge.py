"""Compute the board from the records: group runs into entries and judge each by its track's rules.

An entry is the runs of one recipe hash on the same data and devices. It is *valid* when its track's
rules hold, and, independently, *better* when it is faster than its parent. The result is plain
data, the content of leaderboard.json, from which table, page and README's block are made. An entry
grows by steps, each a new dict: the facts of its runs, the verdict, which needs sigma and so the
facts of all, and its place, which needs all verdicts.
"""

import ast
import inspect
import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from jspeed.board import formatting, stats
from jspeed.board.board import (
    BoardTrack,
    Entry,
    Facts,
    Judged,
    RunLine,
    Tests,
    kind_of,
    losses,
    result,
    spread,
)
from jspeed.board.parents import Rounds, compare_with_parent, rounds
from jspeed.board.records.landing import landed
from jspeed.board.records.prices import dollars
from jspeed.board.records.same_data import DataSet, data_of_track, data_sets
from jspeed.board.records.store import Records, Row
from jspeed.board.records.track import Track, track_without_rules
from jspeed.board.records.trust import FEWEST_RUNS, level_of, on_other_machines, unfair
from jspeed.record.schema import Run, shards_of
from jspeed.run.evidence.source import beyond


class TrackRuns(NamedTuple):
    """A track with its runs, their data by path, and the track's data."""

    track: Track
    rows: list[Row]
    sets: Mapping[Path, DataSet]
    pinned: DataSet

    def difference(self, row: Row) -> str | None:
        """Return how the data of ``row`` differ from the track's, as a phrase; None where they do
        not."""
        return self.pinned.difference(self.sets[row.path])


def board(records: Records) -> list[BoardTrack]:
    """Return the tracks in their order, those without runs last, each with its rules and its
    ``entries``: valid ones first, by rank."""
    return board_and_rounds(records)[0]


def board_and_rounds(records: Records) -> tuple[list[BoardTrack], Rounds]:
    """Return :func:`board` and :func:`counted_rounds`, which it needs."""
    tracks = tracks_of(records)
    raced = counted_rounds(records, tracks)
    judged = [judged_track(records, runs, raced) for runs in tracks.values()]
    judged.sort(
        key=lambda track: (not track["entries"], track.get("order", math.inf), track["track"])
    )
    return judged, raced


def tracks_of(records: Records) -> dict[str, TrackRuns]:
    """Return every track by name with its runs and their data."""
    by_track: dict[str, list[Row]] = defaultdict(list)
    for row in records.rows:
        by_track[row.track].append(row)
    tracks = {}
    for name in sorted(records.tracks.keys() | by_track.keys()):
        rows = by_track[name]
        track = records.tracks.get(name) or track_without_rules(name, rows[0].run)
        sets = data_sets(rows)
        tracks[name] = TrackRuns(track, rows, sets, data_of_track(track, rows, sets, records))
    return tracks


def counted_rounds(records: Records, tracks: Mapping[str, TrackRuns]) -> Rounds:
    """Return the rounds of races on the tracks' data and from clean commits, on any hardware."""

    def counted(row: Row) -> bool:
        known = row.planned_and_clean and not of_unknown_data(row.run)
        return known and tracks[row.track].difference(row) is None

    return rounds(records, counted)


def judged_track(records: Records, runs: TrackRuns, raced: Rounds) -> BoardTrack:
    """Return one track with its judged entries."""
    track = runs.track
    groups: dict[tuple[Hashable, ...], list[Row]] = defaultdict(list)
    for row in runs.rows:
        groups[entry_key(row, runs.sets[row.path], track)].append(row)
    facts = [official(records, runs, rows) for rows in groups.values()]
    counted = [losses(each["runs"]) for each in facts if each["counted"]]
    sigma = track.rules.get("significance.sigma") or stats.pooled_sigma(counted)
    return {
        "track": track.name,
        "ruled": track.ruled,
        **track.rules,
        "sigma": sigma,
        "val_sha256": runs.pinned.val_sha256,
        "hardware": track.hardware(),
        "entries": ranked([judge(each, track, sigma) for each in facts], track, raced, sigma),
    }


def official(records: Records, runs: TrackRuns, rows: Sequence[Row]) -> Facts:
    """Return the facts of an entry: of its plans in the order in which they landed, until it is
    valid.

    Whoever runs a recipe again afterwards, on a slow or a fast machine, reproduces it and moves
    nothing.
    """
    plans = plans_in_order(records, rows)
    chosen: list[Row] = []
    for of_plan in plans:
        chosen += of_plan
        facts = facts_of(records, runs, chosen)
        if judge(facts, runs.track, runs.track.rules.get("significance.sigma"))["valid"]:
            break
    again = [row for of_plan in plans for row in of_plan if row not in chosen]
    return {**facts, "again": [run_line(records, row) for row in again]}


def ranked(
    judged: Sequence[Judged], track: Track, raced: Rounds, sigma: float | None
) -> list[Entry]:
    """Return the entries of ``track``, valid ones first, with their ranks, their names, and what
    their parents say."""
    places: Counter[tuple[str, int] | None] = Counter()
    names: Counter[str] = Counter()
    entries: list[Entry] = []
    order = lambda e: (
        not e["valid"],
        rank_value(e, track) or math.inf,
        e["recipe"],
        e["recipe_hash"],
    )
    for each in sorted(judged, key=order):
        # Seconds are ranked among runs on one kind and number of devices.
        kind = None if track.rules["rank"] == "steps" else kind_of(each["devices"])
        places[kind] += each["valid"]
        base = f"{track.name}/{each['recipe']}-{each['recipe_hash'][:8]}".replace("/", "-")
        names[base] += 1
        parents = [
            other for other in judged if other["recipe"] == each["parent"] and other is not each
        ]
        better, anchored = compare_with_parent(each, parents, raced, track, sigma)
        entries.append({
            **each, "rank": places[kind] if each["valid"] else None, "better": better, "anchored":
            anchored,
            "id": base if names[base] == 1 else f"{base}-{names[base]}",
        })  # fmt: skip
    return entries


def entry_key(row: Row, data: DataSet, track: Track) -> tuple[Hashable, ...]:
    """Return what the runs of one entry have in common.

    Runs that cannot count (other or unknown data, cut short, unplanned, dirty tree) form separate
    entries and do not affect valid ones. Where seconds are ranked, so do runs on other devices.
    """
    run, device = row.run, row.run["devices"]
    timed = (
        None
        if track.rules["rank"] == "steps"
        else (device["kind"], device["count"], device["processes"])
    )
    planned, clean = run["plan"] is not None, run["git"]["dirty"] is False
    counts = of_unknown_data(run), asked_for_less(run), planned, clean
    return run["recipe"], run["recipe_hash"], run["target_loss"], timed, id(data), *counts


def asked_for_less(run: Run) -> int | None:
    """Return the number of steps after which ``run`` was to stop, if that is before the end of its
    schedule."""
    asked = run["asked_steps"]
    return None if asked is None or asked >= run["planned_steps"] else asked


def converged(run: Run) -> bool:
    """Whether a run ended with a finite loss."""
    return run["val_loss"] is not None


def failed_runs(runs: Sequence[Run]) -> int:
    """Return how many of ``runs`` did not converge."""
    return sum(not converged(run) for run in runs)


def of_unknown_data(run: Run) -> bool:
    """Whether a run has a loss, and no hashes that say on what data."""
    return converged(run) and shards_of(run) is None


def facts_of(records: Records, of_track: TrackRuns, rows: Sequence[Row]) -> Facts:
    """Return what the files of ``rows``, the runs of one entry, say, and whether they count on
    their track.

    A counted entry contributes to sigma and to the price of a step: all rules hold except,
    possibly, significance, and it either ran its whole schedule or reached the target.
    """
    rows, track = sorted(rows, key=lambda row: row.run["started"]), of_track.track
    runs, lines = [row.run for row in rows], [run_line(records, row) for row in rows]
    ended = [run for run in runs if converged(run)]
    last, example = runs[-1], (ended or runs)[0]
    source = records.sources.get(last["recipe_sha256"])
    planned, data = plans_of(records, rows), of_track.sets[rows[0].path]
    numbers = list({id(each): None for each in of_track.sets.values()})
    loss = spread(losses(lines))
    why_not = list(reasons(runs, planned, track, of_track.difference(rows[0])))
    if track.ruled and "carried" in last:
        why_not += [f"its recipe {what}" for what in beyond(source or "")]
    missed = loss is None or loss["mean"] > track.rules["target_loss"]
    cut_short = asked_for_less(last) is not None and missed
    wall_seconds = fmean(run["wall_seconds"] for run in runs)
    return {
        "recipe": last["recipe"], "recipe_hash": last["recipe_hash"], "overrides":
        last["overrides"],
        "parent": last["parent"], "recipe_sha256": last["recipe_sha256"],
        "card": card(source) if source else {},
        "devices": last["devices"], "mesh": last["mesh"], "layout": last["layout"],
        "date": max(run["ended"] for run in runs)[:10],
        "git": last["git"], "versions": last["versions"], "steps": last["steps"], "tokens":
        last["tokens"],
        "parameters": last["parameters"], "active_parameters": last.get("active_parameters"),
        "flops_per_token": last["flops_per_token"], "target_loss": last["target_loss"],
        "seconds": spread([run["timed_seconds"] for run in ended]),
        "compile_seconds": fmean(run["compile_seconds"] for run in runs),
        "wall_seconds": wall_seconds,
        "dollars": dollars(last["devices"], wall_seconds, records.prices),
        "curve": [(p["step"], round(p["timed_seconds"], 3), p["val_loss"]) for p in
        example["curve"]],
        "curve_seed": example["seed"],
        "runs": lines, "again": [],
        "data": {
            "val_sha256": data.val_sha256, "train_sha256": data.shards[0] if data.shards else None,
            "number": numbers.index(id(data)) + 1, "of_track": of_track.difference(rows[0]) is None,
        },
        "planned": planned.planned, "missing": planned.missing, "extra": planned.extra,
        "loss": loss, "holdout": spread(losses(lines, "holdout")),
        "why_not": why_not if track.ruled else ["the track has no rules", *why_not],
        "cut_short": cut_short, "counted": not why_not and not cut_short,
    }  # fmt: skip


def run_line(records: Records, row: Row) -> RunLine:
    """Return one run as a line of its entry."""
    run = row.run
    return {
        "seed": run["seed"], "status": run["status"], "val_loss": run["val_loss"],
        "holdout": run["holdout"]["val_loss"] if "holdout" in run else None,
        "timed_seconds": run["timed_seconds"], "wall_seconds": run["wall_seconds"], "steps":
        run["steps"],
        "started": run["started"], "file": row.path.relative_to(records.folder).as_posix(),
        "commit": run["git"]["commit"], "plan": row.plan and row.plan["sha256"][:8], "machine":
        run["machine"],
        "weights": next((kept for kept in records.weights.values() if kept["run"] ==
        run["sha256"]), None),
        "carried": "carried" in run,
        "audited": any(audit["run"] == run["sha256"] for audit in records.audits.values()),
    }  # fmt: skip


def plans_in_order(records: Records, rows: Sequence[Row]) -> list[list[Row]]:
    """Return ``rows``, the runs of one entry, plan by plan in the order in which these landed, or
    were made where git does not say.

    A race is of its challenger: its other side's runs are left out where they are of a recipe with
    a plan of its own.
    """
    by_plan: dict[str | None, list[Row]] = defaultdict(list)
    for row in rows:
        by_plan[row.plan and row.plan["sha256"]].append(row)
    own: dict[tuple[Any, ...], list[Row]] = {}
    lent: dict[tuple[Any, ...], list[Row]] = {}
    for digest, of_plan in by_plan.items():
        known = records.plans.get(digest or "")
        first = known and known.plan["runs"][0]["recipe_hash"]
        aside = known and known.plan["kind"] == "race" and first == of_plan[0].run["recipe_hash"]
        moment = landed(records.folder, known.path) if known else math.inf
        order = moment, known.plan["made"] if known else of_plan[0].run["started"]
        (lent if aside else own)[order, digest] = of_plan
    plans = own or lent
    return [plans[key] for key in sorted(plans, key=lambda key: key[0])]


class Planned(NamedTuple):
    """Numbers of runs over all plans that an entry has runs of: planned ones, and those missing and
    extra."""

    planned: int
    missing: int
    extra: int


def plans_of(records: Records, rows: Sequence[Row]) -> Planned:
    """Return how the plans of ``rows``, the runs of one entry, are kept.

    A planned run is missing too when it is there but no run of this entry: on other data, or on
    other devices.
    """
    mine = {(plan["sha256"], plan["folder"]) for row in rows if (plan := row.plan)}
    digests = {digest for digest, _ in mine}
    plans = [records.plans[digest].plan for digest in digests if digest in records.plans]
    recipe = rows[0].run["recipe_hash"]
    planned = [
        (plan["sha256"], run["folder"])
        for plan in plans
        for run in plan["runs"]
        if run["recipe_hash"] == recipe
    ]
    extra = sum(len(records.extra(plan)) for plan in plans) + len(digests - records.plans.keys())
    return Planned(len(planned), sum(place not in mine for place in planned), extra)


def judge(facts: Facts, track: Track, sigma: float | None) -> Judged:
    """Return an entry with its tests and its verdict ``valid``, and with the last of its
    reasons."""
    target, loss = track.rules["target_loss"], facts["loss"]
    tests: Tests = {"t": None, "z": None}
    if loss and loss["sd"] is not None:
        tests["t"] = result(stats.t_below(loss["mean"], loss["sd"], loss["n"], target))
    if loss and sigma is not None:
        tests["z"] = result(stats.z_below(loss["mean"], loss["n"], target, sigma))
    why_not, more = facts["why_not"], None
    if track.ruled:
        kind, p = track.rules["significance.test"], track.rules["significance.p"]
        decisive = tests[kind]
        if decisive is None or decisive["p"] > p:
            sd = sigma if kind == "z" else loss and (loss["sd"] or sigma)
            if loss and sd:
                more = stats.more_runs(loss["mean"], sd, loss["n"], target, p, kind == "z")
            why_not = [*why_not, insignificance(facts, decisive and decisive["p"], more, target)]
    timed = track.rules["rank"] != "steps"
    others = on_other_machines(facts["runs"], facts["again"], sigma, timed)
    return {
        **facts, "why_not": why_not, "tests": tests, "more_runs": more, "valid": not why_not,
        "level": level_of(facts["runs"], others), "others": others,
    }  # fmt: skip


def reasons(
    runs: Sequence[Run], planned: Planned, track: Track, other_data: str | None
) -> Iterable[str]:
    """Yield why ``runs`` do not count on ``track``, apart from their mean loss; ``other_data`` is
    one, if any."""
    if any(run["plan"] is None for run in runs):
        yield "not all runs were planned"
    if planned.missing or planned.extra:
        yield (
            f"of {planned.planned} planned runs {planned.missing} are missing, {planned.extra} are"
            " extra"
        )
    if not track.admits(runs[-1]["devices"]):
        yield f"the track asks for {track.hardware()}"
    if track.ruled:
        yield from dict.fromkeys(why for run in runs for why in unfair(run, track))
        if all("carried" in run for run in runs) and len(runs) - failed_runs(runs) < FEWEST_RUNS:
            yield f"{len(runs) - failed_runs(runs)} runs converged, fewer than {FEWEST_RUNS}"
        if any("carried" in run and run["status"] == "interrupted" for run in runs):
            yield "a planned run was interrupted; resume it"
    for rule in (track.too_large, track.retrieves, track.no_holdout):
        if broken := next(filter(None, map(rule, runs)), None):
            yield broken
    if other_data:
        yield other_data
    if any(of_unknown_data(run) for run in runs):
        yield "its data are not identified by hashes"
    tokens, step = track.rules.get("data.val_tokens"), track.rules.get("tokens_per_step")
    if tokens and any(run["data"]["val_tokens"] != tokens for run in runs):
        yield f"not validated on {tokens:,} tokens"
    if runs[-1]["target_loss"] != track.rules["target_loss"]:
        yield f"had a different target loss, {runs[-1]['target_loss']:g}"
    if step and any(run["tokens"] != run["steps"] * step for run in runs):
        yield f"a step is not {step:,} tokens"
    if not track.rules.get("timing.resumed") and any(run["resumed"] for run in runs):
        yield "a run was resumed; its time is incomplete"
    if any(run["git"]["dirty"] is not False for run in runs):
        yield "the code was not a clean commit"
    failed = failed_runs(runs)
    if failed > (track.rules.get("significance.failures") or 0):
        yield f"{failed} runs did not converge"


def insignificance(facts: Facts, p: float | None, more: int | None, target: float) -> str:
    """Return in words that the mean loss is not shown to be below the target, and how many runs
    would show it."""
    loss = facts["loss"]
    if loss is None:
        return "no run converged"
    if loss["mean"] > target:
        return f"missed the target: mean loss {loss['mean']:.4f}"
    need = f", needs about {more} more run{'s' if more > 1 else ''}" if more else ""
    chance = f"n = {loss['n']}" if p is None else formatting.chance(p)
    return f"not yet significant ({chance}{need})"


def rank_value(entry: Facts, track: Track) -> float | None:
    """Return what the track ranks: mean timed seconds (None where no run converged), or steps."""
    if track.rules["rank"] == "steps":
        return entry["steps"]
    return entry["seconds"]["mean"] if entry["seconds"] else None


def card(source: str) -> dict[str, str]:
    """Return ``title`` and the paragraphs (What, Source, ...) of the docstring of a recipe's
    ``source`` by name."""
    # what nearly all begin with; a hundred times as quick as parsing
    plain = re.match(r'"""([^"\\]*)"""\n', source)
    try:
        text = inspect.cleandoc(plain[1]) if plain else ast.get_docstring(ast.parse(source)) or ""
    except (SyntaxError, ValueError):
        return {}
    first, _, rest = text.partition("\n")
    paragraphs, name = {"title": first.strip()}, ""
    for line in rest.splitlines():
        word, _, more = line.partition(" ")
        if line[:1].isalpha():
            name = word.lower()
            paragraphs[name] = more.strip()
        elif name and line.strip():
            paragraphs[name] = f"{paragraphs[name]} {line.strip()}"
    return paragraphs
