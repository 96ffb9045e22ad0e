"""The only reader of time in jspeed, and the rule of what is timed.

The rule. Everything up to the clock's start is untimed: imports, data preparation, compilation, warm-up on dummy
tokens, and the rebuilding of the initial state. The clock starts when that state is ready on the devices. From
then on every second is timed, data loading and host work included, except pauses that carry a name (evaluation).
Before a pause, and before the clock stops after the last step, the host waits until the training state is ready,
so that no queued step escapes. The final evaluation and the probes come after the stop. The ledger lists every
section in order with its name, its seconds and whether it was timed; its entries add up to the wall time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import jax

_PROCESS_START = time.perf_counter()


def now() -> float:
    """Seconds on a monotonic clock, for differences within one process."""
    return time.perf_counter()


def utc_now() -> str:
    """The current time in UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class Clock:
    """A ledger of sections of wall time, exactly one of which is open at any moment."""

    def __init__(self) -> None:
        self._done: list[dict[str, Any]] = []
        self._name, self._timed, self._since = "start-up", False, _PROCESS_START

    def _enter(self, name: str, timed: bool) -> None:
        moment = now()
        self._done.append({"name": self._name, "seconds": moment - self._since, "timed": self._timed})
        self._name, self._timed, self._since = name, timed, moment

    @contextmanager
    def section(self, name: str, wait_for: Any = ()) -> Iterator[None]:
        """Count what happens inside as untimed ``name``, once ``wait_for`` (any pytree) is ready.

        Inside timed training this is a pause; before and after it simply names what goes on.
        """
        jax.block_until_ready(wait_for)
        outer = self._name, self._timed
        self._enter(name, timed=False)
        try:
            yield
        finally:
            self._enter(*outer)

    def start(self, wait_for: Any) -> None:
        """Start the timed part once ``wait_for`` is ready."""
        jax.block_until_ready(wait_for)
        self._enter("training", timed=True)

    def stop(self, wait_for: Any) -> None:
        """End the timed part once ``wait_for`` is ready."""
        jax.block_until_ready(wait_for)
        self._enter("finish", timed=False)

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """Sections so far, the open one included: ``name``, ``seconds``, ``timed``."""
        return [*self._done, {"name": self._name, "seconds": now() - self._since, "timed": self._timed}]

    @property
    def timed_seconds(self) -> float:
        """Timed seconds so far."""
        return sum(section["seconds"] for section in self.ledger if section["timed"])

    def seconds(self, name: str) -> float:
        """Seconds so far of all sections called ``name``."""
        return sum(section["seconds"] for section in self.ledger if section["name"] == name)

    @property
    def wall_seconds(self) -> float:
        """Seconds since this process first read the clock."""
        return now() - _PROCESS_START
