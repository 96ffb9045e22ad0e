"""Lock a run directory, and take up what an earlier run left in it."""

import errno
import fcntl
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from jspeed.cluster.distributed import broadcast, gather, process_index
from jspeed.corpus.tokenizers import TOKENIZER_FILE
from jspeed.errors import BadInput, writable_folder
from jspeed.files import Lines
from jspeed.record.run_json import read_run
from jspeed.run.checkpoint import check_same, newest, read_record
from jspeed.run.clock import utc_now
from jspeed.run.export import FILE

RUN_FILES = ("run.json", "config.json", "recipe.py", "loss.svg", TOKENIZER_FILE)
METRICS = "metrics.jsonl"
BEST = "best"  # the folder of the parameters with the lowest loss


class Claim:
    """A run directory that this run has for itself: process 0 keeps ``metrics.jsonl`` open and locked until the context
    manager ends.

    ``step`` is that of the checkpoint to go on from, or None; ``shared`` says whether all processes see the directory.
    """

    def __init__(self, run_dir: Path, started: str, step: int | None, shared: bool, metrics: Lines | None) -> None:
        self.run_dir, self.started, self.step, self.shared, self.metrics = run_dir, started, step, shared, metrics
        self._fresh = not held(run_dir)

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *_: object) -> None:
        if self.metrics:
            self.metrics.file.close()

    def begin(self) -> None:
        """Drop what an earlier part of this run wrote and this one will write again, or leave to its checkpoints."""
        if self.metrics:
            for name in ("run.json", "loss.svg", FILE, "samples.txt"):
                (self.run_dir / name).unlink(missing_ok=True)
            self.metrics.clear()
            if self.step is None:
                shutil.rmtree(self.run_dir / BEST, ignore_errors=True)

    def abandon(self) -> None:
        """Take back what this run has put into its directory, and the directory when nothing else is in it."""
        if self.metrics and self._fresh:
            for name in (*RUN_FILES, METRICS):
                (self.run_dir / name).unlink(missing_ok=True)
            self.metrics.file.close()
            shutil.rmtree(self.run_dir / BEST, ignore_errors=True)
            with suppress(OSError):  # not empty
                self.run_dir.rmdir()


def claim(
    given: Path | None,
    name: str,
    resume: bool,
    checkpoints: bool,
    same: dict[str, Any],
    say: Console,
    steps: int | None = None,
) -> Claim:
    """Claim the run directory ``given``, or one called ``name`` with the time in its braces; the same on all processes.

    With ``resume`` the newest whole checkpoint in it is looked for; it must be of a run with this identity, ``same``,
    and of no more than ``steps``.

    Raises :class:`BadInput` if the directory cannot be written, already holds a run, is being written by one, or if
    ``checkpoints`` will be written and not all processes see it.
    """
    step, metrics, started = None, None, utc_now()
    run_dir = given or Path("runs") / name.format(started.replace(":", "").replace("-", ""))
    if resume and given is None:
        raise BadInput("--resume needs --run-dir, the folder of the run to go on with")
    if process_index() == 0:
        metrics = claim_here(run_dir, resume)
        if resume:
            step = find_checkpoint(run_dir, same, say, steps)
    path, started, step = json.loads(broadcast("run", json.dumps([str(run_dir.absolute()), started, step])))
    if process_index():
        run_dir = Path(path)
    shared = all(gather("sees-run-dir", (run_dir / METRICS).exists()))
    if not shared:
        say.print(f"not all processes see {path}: SIGTERM will end this run without a checkpoint", soft_wrap=True)
    if (checkpoints or resume) and not shared:
        raise BadInput(
            f"not all processes see {path}, and each writes its part of a checkpoint; give a --run-dir that all nodes "
            "share, or leave out --checkpoint-every and --resume"
        )
    return Claim(run_dir, started, step, shared, metrics)


def claim_here(run_dir: Path, resume: bool) -> Lines:
    """Create the run directory, or take it as it is with ``resume``; returns its ``metrics.jsonl``, locked."""
    writable_folder(run_dir, "run directory")
    path = run_dir / METRICS
    new = not path.exists()
    metrics = Lines(path)
    try:
        try:
            fcntl.flock(metrics.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):  # else the file system has no locks
                raise BadInput(
                    f"another run is writing to {run_dir} now; wait for its end, or choose another --run-dir"
                ) from None
        if not resume and (names := held(run_dir)):
            raise BadInput(
                f"--run-dir {run_dir} already holds a run ({names[0]}); go on with it by --resume, choose another "
                "folder, or move it away"
            )
        if resume and (run_dir / "run.json").exists() and read_run(run_dir)["status"] in ("finished", "diverged"):
            raise BadInput(f"--resume: {run_dir} holds a run that has ended; choose another --run-dir, or leave it")
    except BaseException:
        if new:
            path.unlink(missing_ok=True)
        metrics.file.close()
        raise
    return metrics


def held(run_dir: Path) -> list[str]:
    """Names of what a run has left in ``run_dir``."""
    names = [name for name in (*RUN_FILES, "checkpoints") if (run_dir / name).exists()]
    metrics = run_dir / METRICS
    return names + [METRICS] * (metrics.exists() and metrics.stat().st_size > 0)


def find_checkpoint(run_dir: Path, same: dict[str, Any], say: Console, steps: int | None) -> int | None:
    """Return the step of the newest whole checkpoint in ``run_dir``, or None; says which it is.

    Raises :class:`BadInput` for one of another run, or of more than ``steps``.
    """
    folder = run_dir / "checkpoints"
    step, said = newest(folder)
    if step is not None:
        check_same(read_record(folder, step), same, run_dir)
        if steps is not None and step > steps:
            raise BadInput(f"--steps {steps}: the run in {run_dir} has made {step} already; give more, or no --steps")
        said.append(f"resuming {run_dir} after step {step}")
    else:
        said.append(f"{run_dir} has no checkpoint to resume from; starting at step 0")
    for line in said:
        say.print(line, markup=False, soft_wrap=True)
    return step
