"""The log of a run: steps and evaluations appended to metrics.jsonl as they happen, and sent to
TensorBoard and Weights & Biases, for ``--log``."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jspeed.base.files import Lines
from jspeed.errors import NoRoom, say
from jspeed.record.schema import Status, Validation
from jspeed.run.checkpoint import Checkpoint, MetricsLine, SameRun
from jspeed.run.clock import Clock
from jspeed.run.console import Display
from jspeed.run.evidence.stream import BEGIN, chained

CURVES = ("train_loss", "val_loss", "val_accuracy")
Sink = Callable[[Mapping[str, Any]], None]
"""Takes each line of metrics.jsonl as it is written."""


@contextmanager
def sinks(
    names: Sequence[str], run_dir: Path, config: Mapping[str, Any], started: str
) -> Iterator[list[Sink]]:
    """Open the sinks called ``names``; one that cannot be opened, or closed in the end, is a
    warning."""
    with ExitStack() as stack:
        opened = []
        for name in names:
            try:
                sink = SINKS[name](run_dir, config, started)
                opened.append(sink.__enter__())
                stack.callback(_close, name, sink)
            except ImportError as error:
                print(
                    f"warning: --log {name} does nothing ({reason(error)}); pip install"
                    " 'jspeed[log]'",
                    file=sys.stderr,
                )
            except Exception as error:  # no room, no network, no key
                print(f"warning: --log {name} does nothing ({reason(error)})", file=sys.stderr)
        yield opened


def _close(name: str, sink: AbstractContextManager[Sink]) -> None:
    try:
        sink.__exit__(None, None, None)
    except Exception as error:
        print(
            f"warning: --log {name} could not be closed ({reason(error)}); look at its files",
            file=sys.stderr,
        )


def reason(error: Exception) -> str:
    """Return the system's words of an OSError, of another exception all that it says, in one
    line."""
    said = error.strerror if isinstance(error, OSError) else None
    return said or " ".join(str(error).split()) or type(error).__name__


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return what a line measures, by the names that curves get."""
    return {name.replace("_", "/"): line[name] for name in CURVES if name in line}


@contextmanager
def tensorboard(run_dir: Path, config: Mapping[str, Any], started: str) -> Iterator[Sink]:
    """Write an event file below the run directory; its time axis shows timed seconds from the start
    of the run."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(run_dir / "tensorboard"))
    start = datetime.fromisoformat(started).timestamp()

    def sink(line: Mapping[str, Any]) -> None:
        values = [
            Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(line).items()
        ]
        moment = start + line["timed_seconds"]
        writer.add_event(Event(wall_time=moment, step=line["step"], summary=Summary(value=values)))

    try:
        yield sink
    finally:
        writer.close()


@contextmanager
def wandb(run_dir: Path, config: Mapping[str, Any], started: str) -> Iterator[Sink]:
    """Log to Weights & Biases: to disk unless WANDB_MODE says otherwise; its key comes from its own
    environment."""
    import wandb

    for name, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true")):
        if not os.environ.get(name, "").strip():  # set to nothing is not set
            os.environ[name] = value
    run = wandb.init(project="jspeed", name=run_dir.name, dir=str(run_dir), config=dict(config))

    def sink(line: Mapping[str, Any]) -> None:
        more = {name: line[name] for name in ("tokens", "timed_seconds")}
        run.log(scalars(line) | more, step=line["step"])

    try:
        yield sink
    finally:
        run.finish()


SINKS = {"tensorboard": tensorboard, "wandb": wandb}


@dataclass
class History:
    """What has happened since the clock started. ``status`` is one of record.schema's; ``sinks``
    get each line. ``stream`` is the hash of all batches of this process
    (:mod:`jspeed.run.evidence.stream`), None where those before a resume are not known.

    ``unread`` is the loss of the last step, on the devices, until it is read. ``failed`` says what
    could not be written so far and did not end the run. Process 0 has metrics.
    """

    clock: Clock
    metrics: Lines | None
    display: Display
    steps: int = 0
    tokens: int = 0
    status: Status = "finished"
    interrupted_by: int = 130
    data_wait_seconds: float = 0.0
    dispatch_seconds: float = 0.0
    lines: list[MetricsLine] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    sinks: list[Sink] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    unread: jax.Array | None = None
    written: int = 0  # lines that metrics.jsonl has
    behind: bool = False  # whether one did not fit
    stream: str | None = BEGIN

    @property
    def at_validation(self) -> bool:
        """Whether the current parameters have been evaluated."""
        return (
            bool(self.lines)
            and self.lines[-1]["step"] == self.steps
            and "val_loss" in self.lines[-1]
        )

    @property
    def train(self) -> list[tuple[float, float]]:
        """Timed seconds and training loss of each step so far."""
        return [
            (line["timed_seconds"], line["train_loss"])
            for line in self.lines
            if "train_loss" in line
        ]

    @property
    def curve(self) -> list[Validation]:
        """The evaluations so far, in order."""
        evaluated = [line for line in self.lines if "val_loss" in line]
        return [
            Validation(step=n["step"], timed_seconds=n["timed_seconds"], val_loss=n["val_loss"])
            for n in evaluated
        ]

    @property
    def losses(self) -> list[float]:
        """The validation losses so far, in order."""
        return [line["val_loss"] for line in self.lines if "val_loss" in line]

    def end(self, why: str) -> None:
        """End the run for an agreed reason: ``stopped``, ``interrupted`` or ``terminated``, an
        interruption too."""
        if self.status == "finished":
            self.status = "stopped" if why == "stopped" else "interrupted"
            self.interrupted_by = 143 if why == "terminated" else 130

    def stepped(self, tokens: int, loss: jax.Array) -> None:
        """Count a step on ``tokens`` that was dispatched with this ``loss``; read the loss of the
        step before."""
        self.read()
        self.steps += 1
        self.tokens += tokens
        self.unread = loss

    def fed(self, tokens: np.ndarray) -> None:
        """Add a batch of ``tokens`` to the hash of all."""
        self.stream = self.stream and chained(self.stream, tokens)

    def read(self) -> None:
        """Wait for the last step and record its loss."""
        if self.unread is not None:
            loss, self.unread = self.unread, None
            self.trained(float(jax.device_get(loss)))

    def trained(self, loss: float) -> None:
        """Record the training loss of the last step; a loss that is not a number ends the run."""
        seconds = self.clock.timed_seconds
        if not math.isfinite(loss):
            self.status = "diverged"
            return
        self._write(
            {
                "step": self.steps,
                "tokens": self.tokens,
                "timed_seconds": seconds,
                "train_loss": loss,
            }
        )
        self.display.step(self.steps, loss, self.tokens)

    def validated(self, loss: float, accuracy: float | None = None) -> None:
        """Record the validation loss, and the accuracy where it was measured, after the steps done
        so far."""
        seconds = self.clock.timed_seconds
        if not math.isfinite(loss):
            self.status = "diverged"
            return
        line: MetricsLine = {
            "step": self.steps,
            "tokens": self.tokens,
            "timed_seconds": seconds,
            "val_loss": loss,
        }
        self._write(line if accuracy is None else line | {"val_accuracy": accuracy})
        self.display.validation(self.curve, accuracy)

    def _write(self, line: MetricsLine) -> None:
        self.lines.append(line)
        try:
            self.catch_up()
        except NoRoom as error:
            if not self.steps:
                raise
            if not self.behind:
                say(f"note: {error}; the run goes on, and writes its lines when there is room")
            self.behind = True
        for sink in [*self.sinks]:
            try:
                sink(line)
            except Exception as error:  # whatever a library raises: the run does not need it
                self.sinks.remove(sink)
                self.failed.append(f"--log stopped at step {line['step']} ({reason(error)})")

    def catch_up(self) -> None:
        """Write the lines that are not in ``metrics.jsonl`` yet. Raises :class:`NoRoom` where one
        does not fit."""
        while self.metrics and self.written < len(self.lines):
            self.metrics.write(json.dumps(self.lines[self.written]))
            self.written += 1

    def for_checkpoint(self, loader: dict[str, Any], identity: SameRun) -> Checkpoint:
        """What a checkpoint keeps of this, with the state of the ``loader`` and the run's
        ``identity``."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "data_wait_seconds": self.data_wait_seconds,
            "dispatch_seconds": self.dispatch_seconds,
            "lines": self.lines,
            "resumed": self.resumed,
            "ledger": self.clock.ledger,
            "loader": loader,
            "identity": identity,
            "stream": self.stream if jax.process_count() == 1 else None,
        }

    def resume(self, record: Checkpoint) -> None:
        """Resume from what :meth:`for_checkpoint` returned; metrics are rewritten up to that
        step."""
        self.clock.resume(record["ledger"])
        self.stream = record.get("stream")
        self.steps, self.tokens = record["steps"], record["tokens"]
        self.data_wait_seconds, self.dispatch_seconds = (
            record["data_wait_seconds"],
            record["dispatch_seconds"],
        )
        self.resumed = [*record["resumed"], self.steps]
        for line in record["lines"]:
            self._write(line)
