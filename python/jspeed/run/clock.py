"""The training clock: the only module that reads the time, and the rule of what is timed.

The rule. Everything up to the clock's start is untimed: imports, data preparation, compilation,
warm-up on dummy tokens, and the rebuilding of the initial state. The clock starts when that state
is ready on the devices. From then on every second is timed, data loading and host work included,
except pauses that carry a name (evaluation, checkpoint). A resumed run continues the ledger that
its checkpoint holds; steps made again are missing from it, so that a track which ranks seconds
takes no resumed run. Before a pause, and before the clock stops after the last step, the host waits
until the training state is ready, so that no queued step escapes; in a canonical recipe it also
waits for the table of impossible tokens, which a thread makes from the first dispatched step on.
The final evaluation and the probes come after the stop. The ledger lists every section in order
with its name, its seconds and whether it was timed; its entries add up to the wall time. All of it
is read from a clock that nobody sets: where the machine's own was set, or it slept, the record says
so (``clock_stepped``).
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import jax

from jspeed.record.schema import Interval


def _process_start() -> float:
    """When this process was started, on the clock of :func:`now`: by the kernel's account, field 22
    of Linux' ``/proc/self/stat``; elsewhere the processor time used so far ago, for nothing has
    waited yet."""
    used = time.process_time()
    with suppress(OSError, AttributeError, ValueError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        used = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    return time.perf_counter() - used


_PROCESS_START = _process_start()


def now() -> float:
    """Seconds on a monotonic clock, for differences within one process."""
    return time.perf_counter()


def utc_now() -> str:
    """The current time in UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def after(moment: str, seconds: float) -> str:
    """Return the time ``seconds`` after a ``moment`` of :func:`utc_now`, as that writes it."""
    later = datetime.fromisoformat(moment) + timedelta(seconds=seconds)
    return later.isoformat(timespec="seconds").replace("+00:00", "Z")


def between(earlier: str, later: str) -> float:
    """Return the seconds from one time of :func:`utc_now` to another."""
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def timed(ledger: list[Interval]) -> float:
    """Return the timed seconds of a ``ledger``."""
    return sum(section["seconds"] for section in ledger if section["timed"])


class Clock:
    """A ledger of sections of wall time, exactly one of which is open at any moment."""

    def __init__(self) -> None:
        self._done: list[Interval] = []
        self._name, self._timed, self._since = "start-up", False, _PROCESS_START
        self._earlier = 0.0

    def resume(self, ledger: list[Interval]) -> None:
        """Put ``ledger``, of the process that this one resumes, before everything here."""
        self._done[:0] = ledger
        self._earlier += sum(section["seconds"] for section in ledger)

    def _enter(self, name: str, timed: bool) -> None:
        moment = now()
        self._done.append(
            {"name": self._name, "seconds": moment - self._since, "timed": self._timed}
        )
        self._name, self._timed, self._since = name, timed, moment

    @contextmanager
    def section(self, name: str, wait_for: Any = ()) -> Iterator[None]:
        """Count what happens inside as untimed ``name``, once ``wait_for`` (any pytree) is ready.

        Inside timed training this is a pause; before and after it only names the work. A section
        splits the one around it into two entries of the ledger.
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
    def ledger(self) -> list[Interval]:
        """Sections so far, the open one included: ``name``, ``seconds``, ``timed``."""
        return [
            *self._done,
            {"name": self._name, "seconds": now() - self._since, "timed": self._timed},
        ]

    @property
    def timed_seconds(self) -> float:
        """Timed seconds so far."""
        return timed(self.ledger)

    def seconds(self, name: str) -> float:
        """Seconds so far of all sections called ``name``."""
        return sum(section["seconds"] for section in self.ledger if section["name"] == name)

    @property
    def wall_seconds(self) -> float:
        """Seconds since this process was started, and all of the run's before it was resumed."""
        return self._earlier + now() - _PROCESS_START


@contextmanager
def watched(
    seconds: float, progress: Callable[[], object], hung: Callable[[], object]
) -> Iterator[None]:
    """Call ``hung`` in a thread of its own once ``progress()`` has not changed for ``seconds``; 0:
    never. Where it was called, the end of what is watched waits for it: only one of them finishes.

    It is looked at ten times in that time, so that a machine that slept, or a process that was
    stopped, is no hang.
    """
    ended = Event()

    def watch() -> None:
        last, same = progress(), 0
        while same < 10 and not ended.wait(seconds / 10):
            now = progress()
            last, same = now, same + 1 if now == last else 0
        if same == 10 and not ended.is_set():
            hung()

    watching = Thread(target=watch, daemon=True, name="hang")
    if seconds:
        watching.start()
    try:
        yield
    finally:
        ended.set()
        if seconds:
            watching.join()
