"""How far the numbers of a run can be trusted, and what a track asks of it for that.

*Reported*: the files agree with each other. *Audited*: its parameters were scored again, by
``jspeed audit``. *Reproduced*: somebody else ran it again. No level excludes a patched trainer.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from jspeed.board import stats
from jspeed.board.board import Level, Others, RunLine, by_seed, losses, times
from jspeed.board.records.landing import changed_since, commit_times, files_at
from jspeed.board.records.store import Problem, Records, Row
from jspeed.board.records.track import Track
from jspeed.record.audits import MOST_NUMBERS, MOST_PLACES
from jspeed.record.schema import Unsealed

FASTEST = {"gpu": 2e16, "tpu": 2e16, "cpu": 1e14}
"""FLOP/s that no device of today reaches: a B200 has 4.5e15 in FP8, 128 CPU cores some 1e13."""
FEWEST_RUNS = 3  # that converged: two may agree by chance
LONGEST = 1.25
"""Times an entry's seconds that its reproduction may take: machines of one kind differ in clock
rates and in what else they do."""


def unfair(run: Unsealed, track: Track) -> Iterator[str]:
    """Yield why ``run`` does not count on ``track`` with rules: what it knew before its clock
    started, or how it was scored.

    Runs from before ``carried`` was written are judged by their losses alone.
    """
    if "init_from" in run["fields"]:
        yield "it began with parameters that were learned before its clock started"
    if stepped := run.get("clock_stepped"):
        if track.rules["rank"] != "steps":
            yield f"its machine's clock was set, or it slept, during the run: {stepped:+.0f} s"
    shard = track.rules.get("data.val_shard_sha256")
    if shard not in (None, run["data"].get("val_shard_sha256")) and run["val_loss"] is not None:
        yield "validated on another shard than the track's"
    yield from above_bound(run, track)
    found = run.get("carried")
    if found is None:
        return
    for program, most in MOST_NUMBERS.items():
        numbers = found["numbers"].get(program, 0)
        if numbers > most:
            yield f"its {program} holds {numbers:,} numbers as constants, more than {most:,}"
    for program, most in MOST_PLACES.items():
        places = found.get("places", {}).get(program)
        if places is None:
            yield f"its run.json does not say in how many places its {program} holds numbers"
        elif places > most:
            yield f"its {program} holds numbers in {places:,} places, more than {most:,}"
    if found["calls"]:
        yield f"its programs call the host ({', '.join(found['calls'])})"
    told_by = run.get("told_by", "")  # whose loader sees validation rows, targets too
    if told_by != "" and not (told_by or "").startswith("jspeed."):
        yield f"its rows carry what {told_by or 'code of its own'} knows of them"
    if run.get("weighted"):
        yield "its loss is a mean with weights of its own"
    rules = track.rules
    if rules.get("holdout.unread") and run["val_loss"] is not None and "unread" not in run:
        yield "it left no text of its shards unread to be measured by"
    kind = rules.get("hardware.kind")
    seen = run["gpus"]["before"] if run["gpus"] else []
    if kind and not any(kind in str(gpu.get("name")) for gpu in seen):
        yield f"nvidia-smi showed no {kind}"


def above_bound(run: Unsealed, track: Track) -> Iterator[str]:
    """Yield that the loss on a second text is further above the validation loss than the track
    allows."""
    most = track.rules.get("holdout.most_above")
    second = run.get("holdout") or run.get("unread")
    if most is None or second is None or run["val_loss"] is None:
        return
    loss = second["val_loss"]
    if loss is None or loss - run["val_loss"] > most:
        above = "not finite" if loss is None else f"{loss - run['val_loss']:.3f} above the first"
        yield f"its loss on the second text is {above}, and the track allows {most:g}"


def problems(records: Records) -> Iterator[Problem]:
    """Yield what no honest run can show: copied losses, plans out of order, commits that are not
    there, and more work than devices do."""
    yield from copies(records)
    yield from order(records)
    yield from commits(records)
    for row in records.rows:
        run = row.run
        devices = run["devices"]
        work = run["flops_per_token"] * run["tokens"]
        least = work / devices["count"] / FASTEST.get(devices["platform"], 2e16)
        if run["timed_seconds"] < least:
            wanted = f"at least {least:.3f} s for {work:.2g} FLOPs on {devices['count']} devices"
            yield wrong(row, "timed_seconds", wanted, f"{run['timed_seconds']:.3f}")


def wrong(row: Row, field: str, expected: str, found: Any) -> Problem:
    """Return one problem with its error message."""
    return Problem(row.path, f"{row.path}: field '{field}': expected {expected}, found {found}")


def copies(records: Records) -> Iterator[Problem]:
    """No two recipes, and no two seeds of one, have equal losses all along."""
    first: dict[tuple[Any, ...], Row] = {}
    for row in sorted(records.rows, key=lambda row: row.run["started"]):
        losses = tuple(point["val_loss"] for point in row.run["curve"][1:])
        if row.run["val_loss"] is None or not losses:
            continue
        other = first.setdefault((row.run["data"]["val_sha256"], losses), row)
        mine, theirs = ((each.run["recipe"], each.run["seed"]) for each in (row, other))
        if mine != theirs and ("carried" in row.run or "carried" in other.run):
            wanted = f"other losses than those of {other.path.name}, another recipe or seed"
            yield wrong(row, "curve", wanted, f"the same {len(losses)}")


def order(records: Records) -> Iterator[Problem]:
    """The runs of a plan were made in its order: one that was made again stands out."""
    for digest, (path, plan) in records.plans.items():
        present = records.preregistered.get(digest, {})
        rows = [present[run["folder"]][0] for run in plan["runs"] if run["folder"] in present]
        newer = [row for row in rows if "carried" in row.run and not row.run["resumed"]]
        for before, after in pairwise(newer):
            if after.run["started"] < before.run["started"]:
                wanted = f"a time after {before.run['started']}, that of {before.path.name}"
                yield wrong(
                    after, "started", f"{wanted} before it in {path.name}", "an earlier one"
                )


def commits(records: Records) -> Iterator[Problem]:
    """The commit of a clean run is one of this repository, from before the run."""
    rows = [row for row in records.rows if row.run["git"]["commit"] and "carried" in row.run]
    known = commit_times(records.folder, [row.run["git"]["commit"] or "" for row in rows])
    for row in rows:
        commit = row.run["git"]["commit"] or ""
        made = known.get(commit, 0)
        if made is None:
            yield wrong(row, "git.commit", "a commit of this repository", commit[:12])
        elif made > datetime.fromisoformat(row.run["started"]).timestamp():
            yield wrong(
                row, "started", f"a time after its commit {commit[:12]}", row.run["started"]
            )


def append_only(records: Records, base: str) -> Iterator[Problem]:
    """Yield every file of ``records`` that is not as it was at the commit ``base``, and every run
    since then that older code scored."""
    folder = records.folder
    before = files_at(folder, base)
    for row in records.rows:
        if "carried" not in row.run and row.path.relative_to(folder).as_posix() not in before:
            wanted = "what the programs held, as jspeed writes it"
            yield wrong(row, "carried", wanted, "no such field; make the run again")
    for name, what in changed_since(folder, base):
        path = folder / name
        home = f"{Path(name).parent.as_posix()}/"
        if path.name == "track.toml" and not any(
            each.startswith(home) and each != name for each in before
        ):
            continue  # nobody had run on that track
        remedy = "restore it; a rule that changes is another track"
        if path.name != "track.toml":
            remedy = "restore it; records are only added"
        yield Problem(path, f"{path} was {what} since {base}; {remedy}")


def level_of(runs: Sequence[RunLine], others: Others) -> Level:
    """Return the level of an entry, which all of its ``runs`` that converged have.

    Runs from before ``carried`` were scored by their recipes and stay *reported*.
    """
    ended = [run for run in runs if run["val_loss"] is not None]
    if not ended or not all(run["carried"] for run in ended):
        return "reported"
    if others["agree"]:
        return "reproduced"
    return "audited" if all(run["audited"] for run in ended) else "reported"


def on_other_machines(
    runs: Sequence[RunLine], again: Sequence[RunLine], sigma: float | None, timed: bool
) -> Others:
    """Return on how many other machines the runs ``again`` agree with ``runs``, of one recipe, data
    and kind of devices.

    Their losses agree as ``jspeed leaderboard reproduce`` says; where seconds are ranked
    (``timed``), they took at most :data:`LONGEST` times as long.
    """
    found: Others = {"agree": 0, "differ": 0}
    here = {run["machine"] for run in runs}
    if not losses(runs) or None in here:
        return found
    by_machine: dict[str | None, list[RunLine]] = defaultdict(list)
    for run in again:
        if run["machine"] not in {None, *here} and run["carried"]:
            by_machine[run["machine"]].append(run)
    for theirs in by_machine.values():
        same = bool(losses(theirs)) and same_losses(runs, theirs, sigma)
        if same and timed:
            same = fmean(times(theirs)) <= LONGEST * fmean(times(runs))
        found["agree" if same else "differ"] += 1
    return found


def same_losses(runs: Sequence[RunLine], theirs: Sequence[RunLine], sigma: float | None) -> bool:
    """Whether two series differ by no more than chance lets them; without ``sigma``, whether the
    losses of seeds in common are equal."""
    if sigma:
        return stats.differ(losses(theirs), losses(runs), sigma) > stats.AGAIN
    mine, others = by_seed(runs), by_seed(theirs)
    common = mine.keys() & others.keys()
    return bool(common) and all(mine[s]["val_loss"] == others[s]["val_loss"] for s in common)
