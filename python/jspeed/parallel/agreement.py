"""One step at which all processes stop, whichever of them was asked to."""

import threading
from contextlib import suppress

import jax

from jspeed.parallel import distributed

_WISH = "jspeed/stop"


class Agreement:
    """Lets any process ask for the end of the loop at any time, and all end after the same step.

    Every process calls :meth:`reached` once a step. Processes that share collectives are at most a few steps apart;
    when one has a wish, each holds still, says which step it has begun, and all go on up to the furthest of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = -1
        self._stop: tuple[int, str] | None = None
        self._wished = False
        if distributed.process_count() > 1:
            distributed.when_told(_WISH, self._agree)

    def wish(self, why: str) -> None:
        """Ask for the end, for example with the status to write down. Safe in a signal handler; the first wish wins."""
        if self._wished:
            return
        self._wished = True
        if distributed.process_count() == 1:
            self._stop = 0, why
        else:
            threading.Thread(target=self._tell, args=(why,), daemon=True).start()

    def reached(self, step: int) -> str | None:
        """Say that ``step`` is about to begin; returns why to stop instead, on all processes at the same step."""
        with self._lock:
            if self._stop and step >= self._stop[0]:
                return self._stop[1]
            self._step = step
        return None

    def _tell(self, why: str) -> None:
        with suppress(jax.errors.JaxRuntimeError):  # another process was first
            distributed.client().key_value_set(_WISH, why)

    def _agree(self, why: str) -> None:
        store = distributed.client()
        with self._lock, suppress(jax.errors.JaxRuntimeError):
            store.key_value_set(f"{_WISH}-{distributed.process_index()}", str(self._step))
            everyone = range(distributed.process_count())
            steps = [int(store.blocking_key_value_get(f"{_WISH}-{index}", 60_000)) for index in everyone]
            self._stop = max(steps) + 1, why
