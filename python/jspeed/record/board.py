"""The records folder, ``<track>/<recipe>/<run-id>.json``, and the table that ranks what is in it.

A record is a byte-for-byte copy of a run.json, and its name holds the start of the hash of its content. So
nothing in the table is a number that somebody typed. Times are seconds, losses nats per token.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from jspeed.errors import BadInput, nearest, writable_folder
from jspeed.files import write_whole
from jspeed.record.runfile import parse_run, read_content

# What may become a folder's name: never hidden, never "..", the same on every file system.
FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")
ENDINGS = {"stopped": "was stopped early", "interrupted": "was interrupted", "diverged": "diverged"}
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Row:
    """One record: where it lies and what its run.json says."""

    path: Path
    run: dict[str, Any]


def admit(run_dir: Path, records: Path) -> tuple[Path, bytes]:
    """Return where the run in ``run_dir`` belongs under ``records`` and the bytes to put there; write none.

    Raises BadInput when its run.json is not valid, when the run did not finish, missed its target or failed
    a validity probe, when its track or recipe cannot name a folder, and when it is there already.
    """
    content, source = read_content(run_dir)
    run = parse_run(content, source)
    _refuse_what_is_no_result(run, source)
    destination = records / _place(run, content)
    if destination.exists():
        raise BadInput(f"{source}: the run is on the leaderboard already, as {destination}; a run counts once")
    return destination, content


def add(run_dir: Path, records: Path) -> Path:
    """Copy the run.json of ``run_dir``, byte for byte, to its place under ``records`` and return that path.

    Raises BadInput as :func:`admit` does, and when the folder cannot be written.
    """
    destination, content = admit(run_dir, records)
    writable_folder(destination.parent, "the records folder")
    write_whole(destination, content)
    return destination


def load(records: Path) -> list[Row]:
    """Return every record under ``records``, checked, in order of path; an absent folder holds none.

    Raises BadInput for a file that is not a run.json that :func:`admit` would take, and for one that was
    changed or moved since it was added: its path no longer follows from its content.
    """
    if records.exists() and not records.is_dir():
        raise BadInput(f"{records} is a file; give the folder that holds the records")
    rows = []
    for path in sorted(records.rglob("*.json")):
        content, path = read_content(path)
        run = parse_run(content, path)
        _refuse_what_is_no_result(run, path)
        place = _place(run, content)
        if path.relative_to(records) != place:
            raise BadInput(
                f"{path} was changed, moved or renamed after it was added: its content belongs at "
                f"{records / place}; restore it, or remove it and add the run again"
            )
        rows.append(Row(path, run))
    return rows


def of_track(rows: Iterable[Row], track: str) -> list[Row]:
    """Return the rows of ``track`` and of tracks under it (stdlib holds stdlib/cpu); BadInput when none."""
    rows = list(rows)
    chosen = [row for row in rows if f"{row.run['track']}/".startswith(f"{track}/")]
    if rows and not chosen:
        known = sorted({row.run["track"] for row in rows})
        hint = nearest(track, known)
        raise BadInput(f"no record is of track '{track}', only of {', '.join(known)}{hint}")
    return chosen


def table(rows: Iterable[Row]) -> Table:
    """Return the leaderboard: for every track, one row per recipe and hash, fastest mean time first.

    Runs are ranked together only when their losses and targets mean the same, that is within one track,
    target and validation set, and averaged only when recipe, hash and devices are also the same. The table
    fits 80 columns.
    """
    heats: dict[Key, dict[Key, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        run = row.run
        heat = (run["track"], run["target_loss"], run["data"]["val_fingerprint"], run["data"]["val_tokens"])
        heats[heat][(run["recipe"], run["recipe_hash"], _devices(run))].append(run)
    page = Table.grid(padding=0)
    if not heats:
        page.add_row(Text("No records yet; add a finished run with: scripts/leaderboard.py add RUN_DIR"))
    for position, heat in enumerate(sorted(heats)):
        track, target, fingerprint, val_tokens = heat
        entries = sorted(heats[heat].values(), key=lambda runs: _mean(runs, "timed_seconds"))
        data = entries[0][0]["data"]["name"]
        if position:
            page.add_row()
        page.add_row(Text(track, style="bold"))
        page.add_row(Text(f"target {target:g} nats per token, on {val_tokens:,} tokens of {data} {fingerprint[:8]}"))
        page.add_row(_heat(entries))
    return page


def _heat(entries: list[list[dict[str, Any]]]) -> Table:
    """Return the rows that compete with each other. Two lines each, because one does not fit 80 columns."""
    heat = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), leading=1)
    heat.add_column("recipe\nhash", min_width=18, overflow="fold")
    heat.add_column("runs", justify="right", no_wrap=True)
    heat.add_column("mean s\nbest s", justify="right", no_wrap=True, min_width=7)
    heat.add_column("mean\nloss", justify="right", no_wrap=True, min_width=6)
    heat.add_column("steps\ntokens", justify="right", no_wrap=True, min_width=6)
    heat.add_column("para-\nmeters", justify="right", no_wrap=True, min_width=6)
    heat.add_column("devices\nnewest run", min_width=20, overflow="fold")
    for runs in entries:
        newest = max(runs, key=lambda run: datetime.fromisoformat(run["started"]))
        overrides = "".join(f"\n{name}={value}" for name, value in sorted(newest["overrides"].items()))
        best = min(run["timed_seconds"] for run in runs)
        heat.add_row(  # Text objects, because a name with square brackets would be taken for markup
            Text(f"{newest['recipe']}\n{newest['recipe_hash'][:8]}{overrides}"),
            Text(str(len(runs))),
            Text(f"{_seconds(_mean(runs, 'timed_seconds'))}\n{_seconds(best)}"),
            Text(_loss(_mean(runs, "val_loss"))),
            Text(f"{newest['steps']}\n{_short(newest['tokens'])}"),
            Text(_short(newest["parameters"])),
            Text(f"{_devices(newest)}\n{newest['started'][:10]} {_commit(newest['git'])}"),
        )
    return heat


def _refuse_what_is_no_result(run: dict[str, Any], source: Path) -> None:
    if run["status"] != "finished":
        raise BadInput(
            f"{source}: the run {ENDINGS[run['status']]}, and the leaderboard takes finished runs; "
            f"run its whole schedule"
        )
    if not run["reached"]:
        raise BadInput(
            f"{source}: the run ended at validation loss {_loss(run['val_loss'])}, and the leaderboard "
            f"takes runs that reached their target, here {run['target_loss']:g}"
        )
    failed = sorted(name for name, probe in run["probes"].items() if not probe["passed"])
    if failed:
        raise BadInput(
            f"{source}: the run failed the validity probe {', '.join(failed)}, so that its loss means "
            f"nothing; see 'probes' in that file"
        )
    for field, parts in (("track", run["track"].split("/")), ("recipe", [run["recipe"]])):
        if not all(FOLDER.fullmatch(part) for part in parts):
            raise BadInput(
                f"{source}: field '{field}': expected letters, digits and . _ + - because it "
                f"names a folder of records, found {run[field]!r}; rename it in the recipe"
            )


def _place(run: dict[str, Any], content: bytes) -> Path:
    moment = datetime.fromisoformat(run["started"])
    identity = f"{moment:%Y%m%dT%H%M%SZ}-s{run['seed']}-{hashlib.sha256(content).hexdigest()[:8]}"
    return Path(run["track"], run["recipe"], f"{identity}.json")


def _mean(runs: list[dict[str, Any]], field: str) -> float:
    return fmean(run[field] for run in runs)


def _devices(run: dict[str, Any]) -> str:
    count, processes = run["devices"]["count"], run["devices"]["processes"]
    among = f" in {processes} processes" if processes > 1 else ""
    return f"{count} x {run['devices']['kind']}{among}"


def _commit(git: dict[str, Any]) -> str:
    """Return the short commit, with "+" when files differed from it, or "no commit"."""
    return f"{git['commit'][:8]}{'+' if git['dirty'] else ''}" if git["commit"] else "no commit"


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 1000 else f"{seconds:.1f}"


def _short(count: int) -> str:
    """Return ``count`` with three digits and a unit: 13.1M."""
    for size, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            value = count / size
            return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}{unit}"
    return str(count)
