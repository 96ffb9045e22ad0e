"""Save, verify and restore checkpoints with Orbax; writing runs in the background.

A run directory's ``checkpoints/STEP/`` holds the arrays with their shardings; tables in the host's
memory; ``record``, a JSON object with all else that is not on the devices; and ``sha256.json``, the
hash of every file, because Orbax does not detect corrupted bytes. Orbax makes the folder under
another name and renames it when it is whole, hashes included.
"""

import copy
import errno
import json
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError

from jspeed.base import processes
from jspeed.base.file_system import failed_call
from jspeed.base.files import read_json, sha256_of, write_whole
from jspeed.base.processes import on_failure, with_timeout
from jspeed.errors import BadInput, first_line
from jspeed.fields import as_json
from jspeed.record.schema import Interval
from jspeed.run.compute import accumulators
from jspeed.run.compute.host_tables import HostTables
from jspeed.run.compute.step import State

HASHES = "sha256.json"
UNFINISHED = ".orbax-checkpoint-tmp"  # Orbax's suffix of a folder that is being written
NOTES = ("_CHECKPOINT_METADATA", "commit_success.txt")
SET_ASIDE = ".set-aside"  # suffix of a checkpoint that is not whole: Orbax's names are numbers
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL)  # no file there, or a thing that is none
HASH = "recipe hash"
SameRun = dict[str, Any]  # what makes two runs the same: values by names that a user knows
MOST_NAMED = 6  # differences; those of another recipe are many


class MetricsLine(TypedDict):
    """A line of metrics.jsonl: of a step its training loss, of an evaluation the validation
    loss."""

    step: int
    tokens: int
    timed_seconds: float
    train_loss: NotRequired[float]
    val_loss: NotRequired[float]
    val_accuracy: NotRequired[float]


class Checkpoint(TypedDict):
    """The record of a checkpoint: how far the run was, and what another must share to be this run
    (``identity``)."""

    steps: int
    tokens: int
    data_wait_seconds: float
    dispatch_seconds: float
    lines: list[MetricsLine]
    resumed: list[int]
    ledger: list[Interval]
    loader: dict[str, Any]  # where its stream stands
    identity: SameRun
    stream: NotRequired[str | None]  # hash of all batches so far, of one process alone


class Checkpoints:
    """Writes the checkpoints of one run; use as a context manager, so that the last one is whole at
    the end.

    ``step`` is that of the last one, or of the one that the run was resumed from."""

    def __init__(self, folder: Path, keep: int, step: int = 0) -> None:
        self._folder, self._keep = folder.absolute(), keep
        self._manager: Any = None
        # where each process writes its tables, whose files process 0 then moves to the others
        self._tables = self._folder / f"tables{UNFINISHED}"
        self.step = step

    def __enter__(self) -> "Checkpoints":
        # of another process, which may end this one during a save
        on_failure(lambda: remove_unfinished(self._folder))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        if self._manager is None:
            return
        if kind is None:
            self._manager.close()
            return
        # the one that is being written may be the last; what went wrong is known already
        with suppress(Exception):
            with_timeout(20, self._manager.wait_until_finished)
        remove_unfinished(self._folder)

    def save(
        self, step: int, state: State, record: Checkpoint, tables: HostTables | None = None
    ) -> None:
        """Copy ``state`` to the host and write it in the background, with ``record``; waits for the
        save before, and for ``tables``, which are written at once. Several processes call this
        together.

        Raises :class:`BadInput` if that one, or this one's beginning, could not be written.
        """
        import orbax.checkpoint as ocp  # half a second that only runs with checkpoints spend

        if self._manager is None:
            _silence_orbax()
            told = ocp.AsyncOptions(
                post_finalization_callback=self._write_hashes, barrier_sync_fn=_barrier()
            )
            options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, async_options=told)
            with self._guarded():
                self._manager = ocp.CheckpointManager(self._folder, options=options)
        frozen = copy.deepcopy(record)  # it is written later, while the run goes on
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(_named(accumulators.without_accumulators(state))),
            record=ocp.args.JsonSave(frozen),
        )
        with jax.transfer_guard("allow"), self._guarded():
            self._manager.wait_until_finished()
            self.step = step
            if tables:
                self._tables.mkdir(exist_ok=True)
                tables.save(self._tables)
            self._manager.save(step, args=args, force=True)

    def wait(self) -> None:
        """Wait until the last checkpoint is whole. Raises :class:`BadInput` as :meth:`save`."""
        if self._manager is not None:
            with self._guarded():
                self._manager.wait_until_finished()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn Orbax's errors into BadInput, and stop using Orbax after one."""
        try:
            yield
        except (BadInput, OSError, ValueError, RuntimeError) as error:
            if isinstance(error, JaxRuntimeError):
                raise
            # Orbax calls what another process's end did a time-out
            if isinstance(error.__cause__, JaxRuntimeError):
                raise error.__cause__ from None
            self._manager = None
            # Orbax's futures tell of it with a traceback
            logging.getLogger("asyncio").setLevel(logging.CRITICAL)
            remove_unfinished(self._folder)
            raise BadInput(
                f"a checkpoint could not be written to {self._folder} ({_reason(error)}); make"
                " room, or choose another --run-dir, on a file system that can do this, then resume"
                " from the one before with --resume"
            ) from error

    def _write_hashes(self) -> None:
        """Move tables to the rest, and write hashes; Orbax calls this on process 0 when all is
        written and before it renames the folder."""
        for folder in self._folder.glob(f"{self.step}{UNFINISHED}*"):
            if self._tables.is_dir():
                for file in self._tables.iterdir():
                    file.rename(folder / file.name)
                self._tables.rmdir()
            hashes = {name: sha256_of(path) for name, path in _files(folder).items()}
            write_whole(folder / HASHES, json.dumps(hashes, indent=1) + "\n")


def _barrier() -> Callable[..., None]:
    """Orbax's barrier between processes, for its threads.

    After a failed save a process would wait at a later barrier than the others until all time out
    (10 min); raise its error instead.
    """
    from orbax.checkpoint import multihost

    wait = multihost.get_barrier_sync_fn()

    def barrier(*, key: str, timeout_ms: int) -> None:
        if error := sys.exception():
            raise error
        wait(key=key, timeout_ms=timeout_ms)

    return barrier


def _reason(error: Exception) -> str:
    """Shorten a multi-line error of Orbax or TensorStore."""
    if match := re.search(
        r"No space left on device|Disk quota exceeded|Read-only file system", str(error)
    ):
        return match.group()
    return failed_call(error) or first_line(error, 300)


def remove_unfinished(folder: Path) -> None:
    """Remove what failed or killed saves have left in ``folder``. For process 0."""
    if processes.index() == 0:
        for path in folder.glob(f"*{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints in ``folder`` that Orbax calls whole, ascending. Raises
    :class:`BadInput` where the folder cannot be read."""
    try:
        with os.scandir(folder) as entries:
            # a link may lead to what is not mounted now
            names = [each.name for each in entries if each.is_symlink() or each.is_dir()]
    except OSError as error:
        if error.errno == errno.ENOENT and not folder.is_symlink():
            return []
        raise _unreadable(folder, error) from None
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def _files(folder: Path) -> dict[str, Path]:
    """Every file but Orbax's own notes, which it writes again after the hashes, and the hashes."""
    files = {
        str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    return {name: path for name, path in files.items() if name not in (HASHES, *NOTES)}


def damage(folder: Path, step: int) -> str | None:
    """Return a message on what is wrong with the checkpoint of ``step``, or None. Raises
    :class:`BadInput` where it cannot be read now: that is no damage."""
    place, name = folder / str(step), HASHES
    try:
        hashes = read_json(place / HASHES)
        if not hashes:
            return f"{HASHES} names no files"
        for name, digest in hashes.items():
            if sha256_of(place / name) != digest:
                return f"the SHA-256 of {name} differs"
    except OSError as error:
        if error.errno not in ABSENT:
            raise _unreadable(place / name, error) from None
        return f"{name}: {'it is missing' if error.errno == errno.ENOENT else error.strerror}"
    except (ValueError, AttributeError) as error:
        return f"{HASHES} cannot be understood: {error}"
    return None


def _unreadable(path: Path, error: OSError) -> BadInput:
    return BadInput(
        f"{path} cannot be read ({error.strerror}), so whether a checkpoint is whole is not known;"
        " make it readable, or move its folder away"
    )


def newest(
    folder: Path, check: Callable[[Checkpoint], None] = lambda record: None
) -> tuple[int | None, dict[int, str]]:
    """Return the step of the newest whole checkpoint, None where there is none at all, and what is
    wrong with each newer one. Changes nothing.

    ``check`` is called with the record of each, before its files are looked at, and raises for one
    of another run. Raises :class:`BadInput` where one cannot be read, or none of them is whole.
    """
    wrong: dict[int, str] = {}
    for step in reversed(steps_in(folder)):
        try:
            record = read_checkpoint(folder, step)
        except OSError as error:
            if error.errno not in ABSENT:
                raise _unreadable(folder / str(step) / "record", error) from None
        except ValueError:
            pass  # the hashes tell of it
        else:
            if isinstance(record, dict) and "identity" in record:
                check(record)
        fault = damage(folder, step)
        if fault is None:
            return step, wrong
        wrong[step] = fault
    if wrong:
        faults = "; ".join(f"step {step}: {fault}" for step, fault in wrong.items())
        raise BadInput(
            f"no checkpoint in {folder} is known to be whole ({faults}); copy them again, each with"
            f" its {HASHES}, or move {folder} away to start at step 0"
        )
    return None, wrong


def set_aside(folder: Path, step: int) -> Path:
    """Give the checkpoint of ``step`` another name, which is returned, so that the run can write it
    again. Raises :class:`BadInput`."""
    names = (f"{step}{SET_ASIDE}{f'-{number}' if number else ''}" for number in count())
    place = next(path for name in names if not os.path.lexists(path := folder / name))
    try:
        os.rename(folder / str(step), place)
    except OSError as error:
        raise BadInput(
            f"{folder / str(step)} is not whole and cannot be renamed to {place.name}"
            f" ({error.strerror}); move it away"
        ) from None
    return place


def restore(folder: Path, step: int, shapes: State, tables: HostTables | None = None) -> State:
    """Read the arrays of the checkpoint of ``step``, with the shapes and shardings of ``shapes``,
    and ``tables``.

    The mesh may be another than the one it was saved on. What is carried between slow updates is
    zeros.
    """
    import orbax.checkpoint as ocp

    _silence_orbax()
    saved = accumulators.without_accumulators(shapes)
    names = _named(saved)
    args = ocp.args.Composite(state=ocp.args.StandardRestore(names))
    with ocp.CheckpointManager(
        folder.absolute(), options=ocp.CheckpointManagerOptions(read_only=True)
    ) as manager:
        arrays = manager.restore(step, args=args)["state"]
    if tables:
        tables.load(folder / str(step))
    leaves = [arrays[name] for name in names]
    zeros = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), shapes["accumulators"]
    )
    return jax.tree.unflatten(jax.tree.structure(saved), leaves) | {"accumulators": zeros}


def check_same(record: Checkpoint, identity: Mapping[str, Any], folder: Path) -> None:
    """Raise :class:`BadInput`, which names what differs, when the checkpoint with ``record``
    belongs to another run.

    What is a flag of its own (``--steps``) may differ.
    """
    saved, own = record["identity"], as_json(identity)
    differs = [name for name in saved if not name.startswith("--") and saved[name] != own.get(name)]
    if not differs:
        return
    if differs != [HASH]:  # that of what is named besides
        differs = [name for name in differs if name != HASH]
    more = f", and {len(differs) - MOST_NAMED} more," if len(differs) > MOST_NAMED else ""
    had, has = (
        ", ".join(f"{name} {its.get(name)}" for name in differs[:MOST_NAMED])
        for its in (saved, own)
    )
    raise BadInput(
        f"--resume: {folder} was made with {had}{more} but this run has {has}; give the same recipe"
        f" ({folder}/recipe.py), --set, --seed and --data, or another --run-dir"
    )


def read_checkpoint(folder: Path, step: int) -> Checkpoint:
    """Read the record of the checkpoint of ``step``, where Orbax writes it."""
    return read_json(folder / str(step) / "record" / "metadata")


def _named(tree: Any) -> dict[str, Any]:
    """The leaves of ``tree`` by plain names, in order."""
    paths, _ = jax.tree.flatten_with_path(tree)
    named = {
        re.sub(r"\W+", "-", jax.tree_util.keystr(path)).strip("-"): leaf for path, leaf in paths
    }
    assert len(named) == len(paths), "two arrays of the state have one name"
    return named


def _silence_orbax() -> None:
    """Silence Orbax's warnings about intended behaviour (read-only folders, waits that the ledger
    has by name) and its tracebacks of a failed save, which has an error message; those of
    TensorStore's threads come as unraisable, and writes that another one's failure has kept from
    beginning as a warning."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    usual = sys.unraisablehook
    if getattr(usual, "__module__", None) == __name__:
        return

    def hook(what: "sys.UnraisableHookArgs") -> None:
        # writes that end when another one has failed
        if str(what.exc_value) != "Event loop is closed":
            usual(what)

    sys.unraisablehook = hook
