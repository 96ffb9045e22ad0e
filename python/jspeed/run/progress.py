"""What a run has done since its clock started, written down as it happens."""

import json
import math
from dataclasses import dataclass, field
from typing import Any, TextIO

from jspeed.run.clock import Clock
from jspeed.run.console import Display


@dataclass
class Progress:
    """What has happened since the clock started. ``status`` is a word of run.json's table."""

    clock: Clock
    metrics: TextIO
    display: Display
    steps: int = 0
    tokens: int = 0
    status: str = "finished"
    data_wait_seconds: float = 0.0
    dispatch_seconds: float = 0.0
    train: list[tuple[float, float]] = field(default_factory=list)
    curve: list[dict[str, Any]] = field(default_factory=list)

    def stop(self) -> None:
        """End the run early because that was asked for, unless it is ending for another reason."""
        if self.status == "finished":
            self.status = "stopped"

    def trained(self, step: int, tokens: int, loss: float) -> None:
        """Note the training loss of ``step``; a loss that is not a number ends the run."""
        seconds = self.clock.timed_seconds
        if not math.isfinite(loss):
            self.status = "diverged"
            return
        self._write({"step": step, "tokens": tokens, "timed_seconds": seconds, "train_loss": loss})
        self.train.append((seconds, loss))
        self.display.step(step, loss, tokens)

    def validated(self, loss: float) -> None:
        """Note the validation loss after the steps done so far."""
        seconds = self.clock.timed_seconds
        if not math.isfinite(loss):
            self.status = "diverged"
            return
        self._write({"step": self.steps, "tokens": self.tokens, "timed_seconds": seconds, "val_loss": loss})
        self.curve.append({"step": self.steps, "timed_seconds": seconds, "val_loss": loss})
        self.display.validation(self.steps, loss, seconds)

    def _write(self, line: dict[str, Any]) -> None:
        self.metrics.write(json.dumps(line) + "\n")
