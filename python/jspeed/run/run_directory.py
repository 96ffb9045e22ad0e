"""Create and lock a run directory; find the checkpoint to resume from, and read its record."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from jspeed.base import processes
from jspeed.base.file_system import refused_call
from jspeed.base.files import Lines, as_text, read_json, try_lock
from jspeed.base.processes import broadcast, gather, on_failure
from jspeed.data.tokens import TOKENIZER_FILE
from jspeed.errors import BadInput, writable_folder
from jspeed.record.run_json import read_run
from jspeed.run.checkpoint import (
    HASH,
    Checkpoint,
    SameRun,
    check_same,
    newest,
    read_checkpoint,
    remove_unfinished,
    set_aside,
)
from jspeed.run.clock import now, utc_now
from jspeed.run.export import FILE
from jspeed.run.metrics_log import SINKS
from jspeed.run.options import Options

AT_END = ("run.json", "loss.svg", FILE, "samples.txt")
RUN_FILES = (*AT_END, "config.json", "recipe.py", TOKENIZER_FILE)
METRICS = "metrics.jsonl"
BEST = "best"  # the folder of the parameters with the lowest loss
EARLIER = "interrupted"  # the folder of what an earlier part of the run wrote at its end


class RunDirectory:
    """A run directory that this run alone writes: process 0 keeps ``metrics.jsonl`` open and locked
    until the context manager ends.

    ``checkpoint`` is the record of the one to resume from, or None; ``shared`` says whether all
    processes see the directory. ``keep`` ends its removal when another process fails.
    """

    checkpoint: Checkpoint | None = None
    shared = True
    keep: Callable[[], None]

    def __init__(self, path: Path, started: str, metrics: Lines | None) -> None:
        self.path, self.started, self.metrics = path, started, metrics
        self.opened = now()
        self._fresh = not existing_files(path)
        self._before = {name for name in (BEST, "profile", *SINKS) if (path / name).exists()}

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        if self.metrics:
            self.metrics.file.close()

    def begin(self) -> None:
        """Move what an earlier part of this run wrote at its end into ``interrupted/``, until
        :meth:`end`; clear what this part will write again."""
        if not self.metrics:
            return
        fresh = self.checkpoint is None
        names = [name for name in (*AT_END, *[BEST] * fresh) if (self.path / name).exists()]
        had = (self.path / METRICS).stat().st_size > 0
        if names or (had and fresh):
            earlier = self.path / EARLIER
            writable_folder(earlier, "the folder of what an earlier part of this run wrote")
            shutil.copyfile(self.path / METRICS, earlier / METRICS)
            for name in names:
                if name == BEST:
                    shutil.rmtree(earlier / BEST, ignore_errors=True)
                os.replace(self.path / name, earlier / name)
        self.metrics.clear()

    def end(self) -> None:
        """Remove what :meth:`begin` has moved: this part has written its own."""
        if self.metrics:
            earlier = self.path / EARLIER
            for name in (*AT_END, METRICS):
                (earlier / name).unlink(missing_ok=True)
            shutil.rmtree(earlier / BEST, ignore_errors=True)
            with suppress(OSError):  # there is none, or something else in it
                earlier.rmdir()

    def abandon(self) -> None:
        """Remove what this run has written, and the directory when nothing else is in it."""
        if self.metrics and self._fresh:
            for name in (*RUN_FILES, METRICS):
                (self.path / name).unlink(missing_ok=True)
            for name in {BEST, "profile", *SINKS} - self._before:
                shutil.rmtree(self.path / name, ignore_errors=True)
            with suppress(OSError):  # not empty
                self.path.rmdir()
        elif self.metrics and not os.fstat(self.metrics.file.fileno()).st_size:
            (self.path / METRICS).unlink(missing_ok=True)
        self.__exit__()


def open_run_directory(
    options: Options, recipe: str, identity: SameRun, console: Console
) -> RunDirectory:
    """Open the run directory of ``options``, by default one called after recipe, time and seed; the
    same on all processes.

    With ``--resume`` the newest whole checkpoint in it is looked for; it must be of a run with this
    ``identity``, and of no more steps than are asked for. Newer ones get another name.

    Raises :class:`BadInput`, leaving no new directory, if its name is not UTF-8, it cannot be
    written, holds a run, or is being written. So it does if checkpoints will be written and not all
    processes see it.
    """
    started = utc_now()
    moment = started.replace(":", "").replace("-", "")
    path = options.run_dir or Path("runs") / f"{recipe}-{moment}-seed{options.seed}"
    if as_text(path.absolute()) != str(path.absolute()):
        raise BadInput(
            f"run directory {path.absolute()}: its name is not UTF-8, which Orbax needs to write"
            " checkpoints there (on SIGTERM too); give another --run-dir"
        )
    metrics = create_and_lock(path, options.resume) if processes.index() == 0 else None
    directory = RunDirectory(path, started, metrics)
    directory.keep = on_failure(directory.abandon)
    step: int | None = None
    damaged: dict[int, str] = {}
    checkpoints = path / "checkpoints"
    try:
        if options.checkpoint_every and processes.index() == 0 and (call := refused_call(path)):
            raise BadInput(
                f"--run-dir {path} cannot hold checkpoints: its file system refuses a call that"
                f" writes them ({call}); choose another, or leave out --checkpoint-every"
            )
        if options.resume and processes.index() == 0:
            step, damaged = newest(checkpoints, lambda record: check_same(record, identity, path))
            if step is None:
                check_same_without_checkpoint(path, identity)
        of_first, directory.started, step = broadcast("run", [str(path.absolute()), started, step])
        if processes.index():
            directory.path = Path(of_first)
        directory.shared = all(gather("sees-run-dir", (directory.path / METRICS).exists()))
        if not directory.shared:
            tell_unshared(of_first, options, console)
        outcome = f"{path} has no checkpoint to resume from; starting at step 0"
        if step is not None:
            directory.checkpoint = checkpoint_to_resume(
                directory.path, step, identity, options.steps
            )
            outcome = f"resuming {path} after step {step}"
        if options.resume and processes.index() == 0:
            remove_unfinished(checkpoints)
            for each, fault in damaged.items():
                line = f"the checkpoint of step {each} in {checkpoints} is not whole ({fault}); it"
                now_called = f"{line} is now {set_aside(checkpoints, each).name}"
                console.print(now_called, markup=False, soft_wrap=True)
            console.print(outcome, markup=False, soft_wrap=True)
    except BaseException:
        directory.abandon()
        raise
    return directory


def tell_unshared(run_dir: str, options: Options, console: Console) -> None:
    """Say that not all processes see the run directory; raise :class:`BadInput` where ``options``
    need it."""
    console.print(
        f"not all processes see {run_dir}: SIGTERM will end this run without a checkpoint",
        soft_wrap=True,
    )
    if options.checkpoint_every or options.resume:
        raise BadInput(
            f"not all processes see {run_dir}, and each writes its part of a checkpoint;"
            " give a --run-dir that all nodes share, or leave out --checkpoint-every and"
            " --resume"
        )


def create_and_lock(run_dir: Path, resume: bool) -> Lines:
    """Create the run directory, or take it as it is with ``resume``; returns its ``metrics.jsonl``,
    locked."""
    writable_folder(run_dir, "run directory")
    path = run_dir / METRICS
    new = not path.exists()
    metrics = Lines(path)
    try:
        if try_lock(metrics.file) is False:
            raise BadInput(
                f"another run is writing to {run_dir} now; wait for its end, or choose another"
                " --run-dir"
            )
        if not resume and (names := existing_files(run_dir)):
            raise BadInput(
                f"--run-dir {run_dir} already holds a run ({names[0]}); resume it with --resume,"
                " choose another folder, or move it away"
            )
        if (
            resume
            and (run_dir / "run.json").exists()
            and read_run(run_dir)["status"] in ("finished", "diverged")
        ):
            raise BadInput(
                f"--resume: {run_dir} holds a run that has ended; choose another --run-dir, or"
                " leave it"
            )
    except BaseException:
        if new:
            path.unlink(missing_ok=True)
        metrics.file.close()
        raise
    return metrics


def check_same_without_checkpoint(run_dir: Path, identity: SameRun) -> None:
    """Raise :class:`BadInput` where ``run_dir`` holds files that this run would write anew from
    step 0, and that may be of another one than ``identity``."""
    if not (names := existing_files(run_dir)):
        return
    path = run_dir / "config.json"
    try:
        config = read_json(path)
        its = {HASH: config["recipe_hash"], "seed": config["options"]["seed"]}
    except FileNotFoundError:
        why = f"there is no {path.name}"
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = f"{path.name} does not tell: {error!r}"
    else:
        own = {name: identity.get(name) for name in its}
        if its == own:
            return
        why = f"{path.name} has {its} but this run has {own}"
    raise BadInput(
        f"--resume: {run_dir} holds {names[0]} but no checkpoint, and is not known to be of this"
        f" run ({why}); choose another --run-dir"
    )


def existing_files(run_dir: Path) -> list[str]:
    """Names of what a run has left in ``run_dir``, or would write over."""
    names = [name for name in (*RUN_FILES, BEST, "checkpoints") if os.path.lexists(run_dir / name)]
    metrics = run_dir / METRICS
    return names + [METRICS] * (metrics.exists() and metrics.stat().st_size > 0)


def checkpoint_to_resume(
    run_dir: Path, step: int, identity: SameRun, steps: int | None
) -> Checkpoint:
    """Return the record of the checkpoint of ``step``.

    Raises :class:`BadInput` for one of another run, or of more than ``steps``.
    """
    record = read_checkpoint(run_dir / "checkpoints", step)
    check_same(record, identity, run_dir)
    if steps is not None and step > steps:
        raise BadInput(
            f"--steps {steps}: the run in {run_dir} has made {step} already; give more, or no"
            " --steps"
        )
    return record
