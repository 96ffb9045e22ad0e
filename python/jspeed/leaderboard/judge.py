"""The board: runs gathered into entries, and what the track's rules make of each. All of it follows from the files.

An entry is one recipe by hash on one kind of devices. It is *valid* when its track's rules hold, and apart from that
it is *better* than its parent or not: a recipe can be a good result and not yet a record. Everything here is plain
data, which leaderboard.json is and from which table, page and README are made.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from jspeed.leaderboard import as_text, stats
from jspeed.leaderboard.parents import compare_with_parent
from jspeed.leaderboard.recipe_card import card
from jspeed.record.plan_status import ByFolder, Rounds, by_folder, extra, missing, rounds
from jspeed.record.store import Records, Row
from jspeed.record.track import Track, unruled

Entry = dict[str, Any]


def board(records: Records) -> list[dict[str, Any]]:
    """Return the tracks in their order, each with its rules and its ``entries``: valid ones first, by rank."""
    by_track: dict[str, list[Row]] = defaultdict(list)
    for row in records.rows:
        by_track[row.track].append(row)
    there = by_folder(records)
    raced = rounds(records, there)
    tracks = []
    for name in sorted(records.tracks.keys() | by_track.keys()):
        track = records.tracks.get(name) or unruled(name, by_track[name][0].run)
        tracks.append(judged_track(records, track, by_track[name], there, raced))
    return sorted(tracks, key=lambda track: (track.get("order", math.inf), track["track"]))


def judged_track(
    records: Records, track: Track, rows: Sequence[Row], there: ByFolder, raced: Mapping[tuple[str, str], Rounds]
) -> dict[str, Any]:
    """Return one track with its judged entries."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[entry_key(row)].append(row)
    losses = [counted_losses(group) for group in groups.values()]
    sigma = track["significance.sigma"] or stats.pooled_sigma(losses)
    pinned = track["data.val_sha256"] or first_tokens(rows)
    entries = [gathered(records, group) for group in groups.values()]
    for entry, group, found in zip(entries, groups.values(), losses, strict=True):
        add_plans(entry, group, records, there)
        judge(entry, group, found, track, sigma, pinned)
    by_recipe: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_recipe[entry["recipe"]].append(entry)
    for entry in entries:
        compare_with_parent(entry, by_recipe[entry["parent"]], raced, track, sigma)
    entries.sort(key=lambda e: (not e["valid"], rank_value(e, track) or math.inf, e["recipe"], e["recipe_hash"]))
    for place, entry in enumerate((entry for entry in entries if entry["valid"]), 1):
        entry["rank"] = place
    names: dict[str, int] = defaultdict(int)
    for entry in entries:
        base = f"{track.name}/{entry['recipe']}-{entry['recipe_hash'][:8]}".replace("/", "-")
        names[base] += 1
        entry["id"] = base if names[base] == 1 else f"{base}-{names[base]}"
    return {"track": track.name, "ruled": track.ruled, **track.values, "sigma": sigma, "val_sha256": pinned,
            "hardware": track.hardware(), "entries": entries}  # fmt: skip


def entry_key(row: Row) -> tuple[Any, ...]:
    """Return what the runs of one entry have in common."""
    run = row.run
    device = run["devices"]
    return run["recipe"], run["recipe_hash"], device["kind"], device["count"], device["processes"], run["target_loss"]


def first_tokens(rows: Iterable[Row]) -> str | None:
    """Return the hash of the validation tokens of the earliest run, which stand for a track that pins none."""
    known = [row.run for row in rows if row.run["schema"] >= 2 and row.run["data"]["val_sha256"]]
    return min(known, key=lambda run: run["started"])["data"]["val_sha256"] if known else None


def converged(run: dict[str, Any]) -> bool:
    """Whether a run came to an end of which there is a loss."""
    return run["val_loss"] is not None


def counted_losses(rows: Iterable[Row]) -> list[float]:
    """Return the final losses, one for each seed: the same seed twice is no second sample."""
    by_seed: dict[int, float] = {}
    for row in sorted(rows, key=lambda row: row.run["started"]):
        if converged(row.run):
            by_seed.setdefault(row.run["seed"], row.run["val_loss"])
    return list(by_seed.values())


def gathered(records: Records, rows: Sequence[Row]) -> Entry:
    """Return what the runs of one entry say, before any judgement."""
    rows = sorted(rows, key=lambda row: row.run["started"])
    run = rows[-1].run
    source = records.sources.get(run.get("recipe_sha256", ""))
    ended = [row for row in rows if converged(row.run)]
    example = (ended or rows)[0].run
    return {
        "recipe": run["recipe"], "recipe_hash": run["recipe_hash"], "overrides": run["overrides"],
        "parent": run["parent"], "recipe_sha256": run.get("recipe_sha256"),
        "card": card(source[1]) if source else {},
        "devices": run["devices"], "mesh": run["mesh"], "layout": run["layout"],
        "date": max(row.run.get("ended", row.run["started"]) for row in rows)[:10],
        "git": run["git"], "versions": run["versions"], "steps": run["steps"], "tokens": run["tokens"],
        "parameters": run["parameters"], "flops_per_token": run["flops_per_token"],
        "target_loss": run["target_loss"], "seconds": spread([row.run["timed_seconds"] for row in ended]),
        "compile_seconds": fmean(row.run["compile_seconds"] for row in rows),
        "wall_seconds": fmean(row.run["wall_seconds"] for row in rows),
        "curve": [[p["step"], round(p["timed_seconds"], 3), p["val_loss"]] for p in example["curve"]],
        "runs": [listed(records, row) for row in rows],
    }  # fmt: skip


def spread(values: Sequence[float]) -> dict[str, Any] | None:
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


def listed(records: Records, row: Row) -> dict[str, Any]:
    """Return one run as a line of its entry."""
    run = row.run
    names = ("seed", "status", "val_loss", "timed_seconds", "wall_seconds", "steps", "started")
    plan = run.get("plan")
    return {name: run[name] for name in names} | {
        "file": row.path.relative_to(records.folder).as_posix(),
        "commit": run["git"]["commit"],
        "plan": plan and plan["sha256"][:8],
        "machine": run.get("machine"),
    }


def add_plans(entry: Entry, rows: Sequence[Row], records: Records, there: ByFolder) -> None:
    """Add ``planned``, ``missing`` and ``extra`` to ``entry``: numbers of runs over all plans it has runs of."""
    digests = {row.run["plan"]["sha256"] for row in rows if row.run.get("plan")}
    plans = [records.plans[digest][1] for digest in digests if digest in records.plans]
    mine = [run["recipe_hash"] == entry["recipe_hash"] for plan in plans for run in plan["runs"]]
    entry["planned"] = sum(mine)
    entry["missing"] = sum(
        plan["runs"][index]["recipe_hash"] == entry["recipe_hash"] for plan in plans for index in missing(plan, there)
    )
    entry["extra"] = sum(len(extra(plan, there)) for plan in plans) + sum(d not in records.plans for d in digests)


def judge(
    entry: Entry, rows: Sequence[Row], losses: list[float], track: Track, sigma: float | None, pinned: str | None
) -> None:
    """Add ``loss``, the tests and the verdict ``valid`` with its reasons to ``entry``."""
    entry["loss"] = spread(losses)
    target, p = track["target_loss"], track["significance.p"]
    tests: dict[str, Any] = {"t": None, "z": None}
    if entry["loss"]:
        n, mean, sd = (entry["loss"][name] for name in ("n", "mean", "sd"))
        if n > 1:
            tests["t"] = stats.t_below(mean, sd, n, target)._asdict()
        if sigma is not None:
            tests["z"] = stats.z_below(mean, n, target, sigma)._asdict()
    entry["tests"], entry["more_runs"] = tests, None
    entry["why_not"] = list(reasons(entry, [row.run for row in rows], track, pinned))
    decisive = tests[track["significance.test"]] if track.ruled else None
    if track.ruled and (decisive is None or decisive["p"] > p):
        known = track["significance.test"] == "z"
        sd = sigma if known else entry["loss"] and (entry["loss"]["sd"] or sigma)
        if entry["loss"] and sd:
            entry["more_runs"] = stats.more_runs(entry["loss"]["mean"], sd, entry["loss"]["n"], target, p, known)
        entry["why_not"].append(not_below(entry, decisive, track))
    entry["valid"] = not entry["why_not"]
    entry["rank"] = None


def reasons(entry: Entry, runs: Sequence[dict[str, Any]], track: Track, pinned: str | None) -> Iterable[str]:
    """Yield why ``runs`` do not count on ``track``, apart from their mean loss."""
    if not track.ruled:
        yield "the track has no rules"
        return
    if any(run["schema"] < 2 for run in runs):
        yield "from before the evidence of schema 2"
    elif any(run["plan"] is None for run in runs):
        yield "not all runs were planned"
    if entry["missing"] or entry["extra"]:
        yield f"of {entry['planned']} planned runs {entry['missing']} are missing, {entry['extra']} are extra"
    if not track.fits(entry["devices"]):
        yield f"the track asks for {track.hardware()}"
    if any(run["data"].get("val_sha256") not in (pinned, None) for run in runs if run["schema"] >= 2):
        yield "validated on other tokens than the track's"
    if track["data.val_tokens"] and any(run["data"]["val_tokens"] != track["data.val_tokens"] for run in runs):
        yield f"not validated on {track['data.val_tokens']:,} tokens"
    if entry["target_loss"] != track["target_loss"]:
        yield f"ran for another target, {entry['target_loss']:g}"
    if track["tokens_per_step"] and any(run["tokens"] != run["steps"] * track["tokens_per_step"] for run in runs):
        yield f"a step is not {track['tokens_per_step']:,} tokens"
    if not track["timing.resumed"] and any(run.get("resumed") for run in runs):
        yield "a run was resumed, and its time is not known"
    if any(run["git"]["dirty"] is not False for run in runs):
        yield "the code was not a clean commit"
    failed = sum(not converged(run) for run in runs)
    if failed > track["significance.failures"]:
        yield f"{failed} runs did not converge"


def not_below(entry: Entry, test: dict[str, Any] | None, track: Track) -> str:
    """Return in words that the mean loss is not shown to be below the target, and how many runs would show it."""
    if entry["loss"] is None:
        return "no run converged"
    if entry["loss"]["mean"] > track["target_loss"]:
        return f"missed the target: mean loss {entry['loss']['mean']:.4f}"
    more = entry["more_runs"]
    need = f", needs about {more} more run{'s' if more > 1 else ''}" if more else ""
    chance = as_text.chance(test["p"]) if test else f"n = {entry['loss']['n']}"
    return f"not yet significant ({chance}{need})"


def rank_value(entry: Entry, track: Track) -> float | None:
    """Return what the track ranks: mean timed seconds, or steps."""
    if track["rank"] == "steps":
        return entry["steps"]
    return entry["seconds"] and entry["seconds"]["mean"]
