"""The log of a run: steps and evaluations appended to metrics.jsonl as they happen."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from jspeed.files import Lines
from jspeed.record.schema import Status, Validation
from jspeed.run.clock import Clock
from jspeed.run.output.console import Display
from jspeed.run.output.sinks import Sink, reason


@dataclass
class Progress:
    """What has happened since the clock started. ``status`` is one of record.schema's; ``sinks`` get each line.

    ``failed`` says what could not be written so far and did not end the run. Process 0 has metrics.
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
    train: list[tuple[float, float]] = field(default_factory=list)
    curve: list[Validation] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    sinks: list[Sink] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def at_validation(self) -> bool:
        """Whether the current parameters have been evaluated."""
        return bool(self.curve) and self.curve[-1]["step"] == self.steps

    @property
    def losses(self) -> list[float]:
        """The validation losses so far, in order."""
        return [loss for point in self.curve if (loss := point["val_loss"]) is not None]

    def end(self, why: str) -> None:
        """End the run for an agreed reason: ``stopped``, ``interrupted`` or ``terminated``, an interruption too."""
        if self.status == "finished":
            self.status = "stopped" if why == "stopped" else "interrupted"
            self.interrupted_by = 143 if why == "terminated" else 130

    def trained(self, step: int, tokens: int, loss: float) -> None:
        """Record the training loss of ``step``; a loss that is not a number ends the run."""
        seconds = self.clock.timed_seconds
        if not math.isfinite(loss):
            self.status = "diverged"
            return
        self._write({"step": step, "tokens": tokens, "timed_seconds": seconds, "train_loss": loss})
        self.train.append((seconds, loss))
        self.display.step(step, loss, tokens)

    def validated(self, loss: float, accuracy: float | None = None) -> None:
        """Record the validation loss, and the accuracy where it was measured, after the steps done so far."""
        seconds = self.clock.timed_seconds
        if not math.isfinite(loss):
            self.status = "diverged"
            return
        self.curve.append({"step": self.steps, "timed_seconds": seconds, "val_loss": loss})
        line = {"step": self.steps, "tokens": self.tokens, "timed_seconds": seconds, "val_loss": loss}
        self._write(line if accuracy is None else line | {"val_accuracy": accuracy})
        self.display.validation(self.curve, accuracy)

    def _write(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if self.metrics:
            self.metrics.write(json.dumps(line))
        for sink in [*self.sinks]:
            try:
                sink(line)
            except Exception as error:  # whatever a library raises: the run does not need it
                self.sinks.remove(sink)
                self.failed.append(f"--log stopped at step {line['step']} ({reason(error)})")

    def record(self) -> dict[str, Any]:
        """All of this that a checkpoint keeps; :meth:`resume` takes it."""
        names = ("steps", "tokens", "data_wait_seconds", "dispatch_seconds", "lines", "resumed")
        return {name: getattr(self, name) for name in names} | {"ledger": self.clock.ledger}

    def resume(self, record: dict[str, Any]) -> None:
        """Resume from what :meth:`record` returned; metrics are rewritten up to that step."""
        self.clock.resume(record["ledger"])
        self.steps, self.tokens = record["steps"], record["tokens"]
        self.data_wait_seconds, self.dispatch_seconds = record["data_wait_seconds"], record["dispatch_seconds"]
        self.resumed = [*record["resumed"], self.steps]
        for line in record["lines"]:
            self._write(line)
            if "val_loss" in line:
                step, seconds = line["step"], line["timed_seconds"]
                self.curve.append({"step": step, "timed_seconds": seconds, "val_loss": line["val_loss"]})
            else:
                self.train.append((line["timed_seconds"], line["train_loss"]))
