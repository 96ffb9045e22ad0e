"""The records folder: its layout, reading it, and adding runs.

    TRACK/track.toml                          the rules of a track, such as stdlib/cpu
    TRACK/RECIPE/TIME-sSEED-HASH.json         a run.json, byte for byte
    TRACK/RECIPE/recipe-HASH.py               the source that runs name by its SHA-256
    TRACK/RECIPE/plan-HASH.json               a plan.json that runs name by its hash
    TRACK/RECIPE/audit-HASH.json              what jspeed audit found of a run
    TRACK/RECIPE/weights-HASH.json            where the parameters that a run ended with are kept
    history/  ideas/                          what others measured; recipes that did not improve on
              their parent

A file's name holds the start of its content's hash, so an edited file no longer matches its name.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from jspeed.base.files import read_input, read_regular, write_whole
from jspeed.board.records import preregistration
from jspeed.board.records.prices import Price, read_prices
from jspeed.board.records.track import NAME as TRACK_NAME
from jspeed.board.records.track import Track, read_track, track_of
from jspeed.board.records.weights import NAME as WEIGHTS
from jspeed.board.records.weights import Weights, parse_weights, weights_name, weights_of
from jspeed.errors import BadInput, writable_folder
from jspeed.record.audits import NAME as AUDIT
from jspeed.record.audits import Audit, audit_name, parse_audit
from jspeed.record.consistent import PROBES
from jspeed.record.run_json import parse_run, read_content, read_run
from jspeed.record.schema import Announced, Run, shards_of

RUN = re.compile(r"\d{8}T\d{6}Z-s\d+-[0-9a-f]{8}\.json")
PLAN = re.compile(r"plan-[0-9a-f]{8}\.json")
SOURCE = re.compile(r"recipe-[0-9a-f]{8}\.py")
ASIDE = ("history", "ideas")
ENDINGS = {"stopped": "was stopped early", "interrupted": "was interrupted", "diverged": "diverged"}


class Problem(NamedTuple):
    """What is wrong with a file: its path, and the error message, which names it too."""

    path: Path
    text: str


class PlanFile(NamedTuple):
    """A plan.json among the records."""

    path: Path
    plan: preregistration.Preregistration


@dataclass(frozen=True)
class Row:
    """One run: the path of its record, the track it is on, and the content of its run.json."""

    path: Path
    track: str
    run: Run

    @property
    def plan(self) -> Announced | None:
        """The plan in which the run was preregistered, and which of its runs it is."""
        return self.run["plan"]

    @property
    def planned_and_clean(self) -> bool:
        """Whether the run was preregistered and ran a clean commit: the least that a rule asks
        for."""
        return self.plan is not None and self.run["git"]["dirty"] is False


@dataclass(frozen=True)
class Records:
    """A records folder as read: plans and sources by hash, weights by path, and problems with
    unreadable files."""

    folder: Path
    rows: list[Row] = field(default_factory=list)
    plans: dict[str, PlanFile] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    weights: dict[Path, Weights] = field(default_factory=dict)
    audits: dict[Path, Audit] = field(default_factory=dict)
    tracks: dict[str, Track] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @cached_property
    def prices(self) -> list[Price]:
        """What an hour of devices costs."""
        return read_prices(self.folder)

    @cached_property
    def preregistered(self) -> Mapping[str, Mapping[str, list[Row]]]:
        """The preregistered runs by their plan's hash and folder; more than one in a folder is one
        too many."""
        by_plan: dict[str, dict[str, list[Row]]] = {}
        for row in self.rows:
            if plan := row.plan:
                by_plan.setdefault(plan["sha256"], {}).setdefault(plan["folder"], []).append(row)
        return by_plan

    def missing(self, plan: preregistration.Preregistration) -> list[int]:
        """Return the indices of the missing runs of ``plan``."""
        present = self.preregistered.get(plan["sha256"], {})
        return [index for index, run in enumerate(plan["runs"]) if run["folder"] not in present]

    def extra(self, plan: preregistration.Preregistration) -> list[Row]:
        """Return runs that name ``plan`` but that it does not list, or that are the second in their
        folder."""
        listed = {run["folder"] for run in plan["runs"]}
        present = self.preregistered.get(plan["sha256"], {})
        return [
            row
            for folder, rows in present.items()
            for row in (rows[1:] if folder in listed else rows)
        ]

    def complete(self, plan: preregistration.Preregistration) -> bool:
        """Whether every run of ``plan`` is there, and no other."""
        return not self.missing(plan) and not self.extra(plan)


def read(folder: Path) -> Records:
    """Return everything under ``folder``, in order of path; what is wrong with a file is among the
    ``problems``.

    Raises BadInput when there is no such folder.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise BadInput(
            f"the records folder {folder} {what}; give the folder that holds the records:"
            " --records DIR"
        )
    records = Records(folder)
    paths = []

    def unreadable(error: OSError) -> None:
        path = Path(error.filename)
        records.problems.append(
            Problem(path, f"{path} cannot be read ({error.strerror}); restore it")
        )

    for parent, folders, names in os.walk(folder, onerror=unreadable):
        if Path(parent) == folder:
            folders[:] = [name for name in folders if name not in ASIDE]
        folders.sort()
        paths += [Path(parent, name) for name in sorted(names)]
    # Tracks first: they decide where a run belongs.
    for path in sorted(paths, key=lambda path: path.name != TRACK_NAME):
        try:
            _read_file(records, path)
        except BadInput as error:
            records.problems.append(Problem(path, str(error)))
        except OSError as error:
            records.problems.append(
                Problem(path, f"{path} cannot be read ({error.strerror}); restore it")
            )
    return records


def load(folder: Path) -> Records:
    """Return :func:`read` of ``folder``; raises BadInput with the first of its problems."""
    records = read(folder)
    if records.problems:
        raise BadInput(records.problems[0].text)
    return records


def _read_file(records: Records, path: Path) -> None:
    """Read one file into ``records``, or raise BadInput."""
    within = path.relative_to(records.folder)
    if path.name == TRACK_NAME:
        name = within.parent.as_posix()
        records.tracks[name] = read_track(path, name)
        return
    content = read_regular(path)
    if RUN.fullmatch(path.name):
        run = parse_run(content, path)
        track = track_of(run, records.tracks)
        _check_path(path, within, run_path(run, content, track), records.folder)
        records.rows.append(Row(path, track, run))
    elif PLAN.fullmatch(path.name):
        plan = preregistration.parse_preregistration(content, path)
        wanted = within.parent.parent / planned_recipe(plan) / plan_name(plan["sha256"])
        _check_path(path, within, wanted, records.folder)
        records.plans[plan["sha256"]] = PlanFile(path, plan)
    elif SOURCE.fullmatch(path.name):
        digest = hashlib.sha256(content).hexdigest()
        _check_path(path, within, within.with_name(source_name(digest)), records.folder)
        records.sources[digest] = content.decode(errors="replace")
    elif AUDIT.fullmatch(path.name):
        _check_path(path, within, within.with_name(audit_name(content)), records.folder)
        records.audits[path] = parse_audit(content, path)
    elif WEIGHTS.fullmatch(path.name):
        _check_path(path, within, within.with_name(weights_name(content)), records.folder)
        records.weights[path] = parse_weights(content, path)
    else:
        raise BadInput(
            f"{path} is not a record: expected the name of a run, a plan, a recipe's source or"
            f" {TRACK_NAME}; move it elsewhere"
        )


def _check_path(path: Path, within: Path, wanted: Path, folder: Path) -> None:
    if within != wanted:
        raise BadInput(
            f"{path} was changed, moved or renamed after it was added: by its content it should be "
            f"{folder / wanted}; restore it, or remove it and add the run again"
        )


def newest(folder: Path, track: str, recipe: str) -> Run | None:
    """Return the newest finished run of ``recipe`` on ``track`` in the records ``folder``, or None
    where there is none.

    It reads no other file, and passes over one that is broken: that is for :func:`read` to say.
    """
    for path in sorted(Path(folder, track, recipe).glob("*.json"), reverse=True):
        if RUN.fullmatch(path.name):
            with suppress(BadInput):
                if (run := read_run(path))["status"] == "finished":
                    return run
    return None


def source_name(sha256: str) -> str:
    """Return the file name of the recipe source with that SHA-256."""
    return f"recipe-{sha256[:8]}.py"


def plan_name(sha256: str) -> str:
    """Return the file name of the plan with that hash of its own."""
    return f"plan-{sha256[:8]}.json"


def run_path(run: Run, content: bytes, track: str) -> Path:
    """Return the path of a run in the records folder; its HASH is of ``content``, the bytes of its
    run.json."""
    moment = datetime.fromisoformat(run["started"])
    identity = f"{moment:%Y%m%dT%H%M%SZ}-s{run['seed']}-{hashlib.sha256(content).hexdigest()[:8]}"
    return Path(track, run["recipe"], f"{identity}.json")


def planned_recipe(plan: preregistration.Preregistration) -> str:
    """Return the recipe whose folder keeps ``plan``: the one it is about, in a race the challenger,
    who runs second."""
    return plan["runs"][1 if plan["kind"] == "race" else 0]["recipe"]


class Addition(NamedTuple):
    """Checked runs by their paths among the records, all the files to write, and the records as
    they will be then."""

    runs: dict[Path, Run]
    files: dict[Path, bytes]
    records: Records


def check_runs(run_dirs: Sequence[Path], folder: Path, weights: str | None = None) -> Addition:
    """Check the runs in ``run_dirs`` for the records ``folder``, and return what to write there;
    write nothing.

    A directory with a plan.json stands for the runs of that plan that are in it. The records folder
    need not exist. ``weights``: where the runs' folders are kept for others, to be said beside
    their records. Raises BadInput for a run that is malformed, not a result, failed a probe, or
    has no source beside it. So it does where the run, or another in its place of the plan, is there
    already.
    """
    records = load(folder) if folder.exists() else Records(folder)
    in_plans = {
        (place["sha256"], place["folder"]): row.path for row in records.rows if (place := row.plan)
    }
    addition = Addition({}, {}, records)
    for run_dir in _expand_plans(run_dirs):
        content, source = read_content(run_dir)
        run = parse_run(content, source)
        plan = _plan_beside(run, source)
        _check_result(run, plan, source)
        track = track_of(run, records.tracks)
        path = folder / run_path(run, content, track)
        if path.exists() or path in addition.runs:
            raise BadInput(
                f"{source}: the run is on the leaderboard already, as {path}; a run counts once"
            )
        if place := run["plan"]:
            other = in_plans.setdefault((place["sha256"], place["folder"]), source)
            if other is not source:
                raise BadInput(
                    f"{source}: {other} is another run of {place['folder']} of this plan; each"
                    " planned run counts once: make another plan for new runs"
                )
        addition.runs[path], addition.files[path] = run, content
        records.rows.append(Row(path, track, run))
        recipe = addition.files[path.with_name(source_name(run["recipe_sha256"]))] = _source_beside(
            run, source
        )
        records.sources[run["recipe_sha256"]] = recipe.decode(errors="replace")
        if weights is not None:
            kept_path, kept = weights_of(run, source.parent, weights, path.parent)
            addition.files[kept_path], records.weights[kept_path] = (
                kept,
                parse_weights(kept, kept_path),
            )
        if plan:
            plan_path = path.parent.parent / planned_recipe(plan) / plan_name(plan["sha256"])
            addition.files[plan_path] = (json.dumps(plan, indent=2) + "\n").encode()
            records.plans.setdefault(plan["sha256"], PlanFile(plan_path, plan))
    records.rows.sort(key=lambda row: row.path)
    return addition


def add(run_dirs: Sequence[Path], folder: Path, weights: str | None = None) -> list[Path]:
    """Check the runs in ``run_dirs`` and write them into the records ``folder``, all of them or
    none."""
    addition = check_runs(run_dirs, folder, weights)
    write_files(addition.files)
    return list(addition.runs)


def write_files(files: Mapping[Path, bytes]) -> None:
    """Write those of ``files`` that are missing, all of them or none. Raises BadInput where one
    cannot be written."""
    written: list[Path] = []
    try:
        for path, content in files.items():
            writable_folder(path.parent, "the records folder")
            if not path.exists():
                write_whole(path, content)
                written.append(path)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise


def _expand_plans(run_dirs: Sequence[Path]) -> list[Path]:
    """Return the run directories, those of a plan for its folder, none twice."""
    by_path: dict[Path, Path] = {}
    for run_dir in run_dirs:
        inside = [run_dir]
        if (run_dir / preregistration.NAME).is_file() and not (run_dir / "run.json").exists():
            plan = preregistration.read_preregistration(run_dir / preregistration.NAME)
            inside = [
                run_dir / run["folder"]
                for run in plan["runs"]
                if (run_dir / run["folder"] / "run.json").exists()
            ]
            if not inside:
                raise BadInput(f"{run_dir} holds a plan but no run of it; make the runs first")
        by_path |= {path.resolve(): path for path in inside}
    return list(by_path.values())


def _plan_beside(run: Run, source: Path) -> preregistration.Preregistration | None:
    if (place := run["plan"]) is None:
        return None
    path = Path(os.path.abspath(source)).parent.parent / preregistration.NAME
    plan = preregistration.read_preregistration(path)
    if plan["sha256"] != place["sha256"]:
        raise BadInput(f"{source}: the run belongs to another plan than {path}; restore it")
    return plan


def _source_beside(run: Run, source: Path) -> bytes:
    path = source.parent / "recipe.py"
    content = read_input(path, "the trainer put the recipe's source there")
    if hashlib.sha256(content).hexdigest() != run["recipe_sha256"]:
        raise BadInput(
            f"{path} was edited after the run: its SHA-256 is not the recipe_sha256 of {source};"
            " restore it"
        )
    return content


def _check_result(run: Run, plan: preregistration.Preregistration | None, source: Path) -> None:
    if run["track"].split("/")[0] in ASIDE:
        raise BadInput(
            f"{source}: field 'track': {run['track']} holds no runs of records; rename it in the"
            " recipe"
        )
    as_planned = plan is not None and (run["status"] != "stopped" or run["steps"] == plan["steps"])
    if run["status"] != "finished" and not as_planned:
        raise BadInput(
            f"{source}: the run {ENDINGS[run['status']]}; only finished runs are accepted, or"
            " planned runs whatever their end; run the whole schedule"
        )
    if run["val_loss"] is not None and shards_of(run) is None:
        raise BadInput(
            f"{source}: field 'data': expected the SHA-256 of its validation tokens and training"
            " shards, found null: the shards could not be read at the end of the run; make the run"
            " again and leave them there"
        )
    failed = [
        f"{name} ({PROBES[name]})" if name in PROBES else name
        for name, probe in sorted(run["probes"].items())
        if not probe["passed"]
    ]
    if failed:
        raise BadInput(
            f"{source}: the trained model failed the validity check {', '.join(failed)}: its loss"
            " is not a valid result; see 'probes' in that file"
        )
