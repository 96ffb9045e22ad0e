"""One step at which all processes stop, whichever of them was asked to."""

import threading

from jspeed.cluster.distributed import client, process_count, process_index
from jspeed.cluster.failure import pause, tell, when_told

_WISH, _STEPS = "stop", "jspeed/steps/"


class GracefulStop:
    """Lets any process ask for the end of the loop at any time, and all end after the same step.

    Every process calls :meth:`reached` once a step. Processes that share collectives are at most a few steps apart;
    when one has a wish, each holds still, says which step it has begun, and all go on up to the furthest of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = -1
        self._stop: tuple[int, str] | None = None
        self._wish: str | None = None
        self._told = False
        when_told(_WISH, self._agree)

    def wish(self, why: str) -> None:
        """Ask for the end, for example with the status to write down. Safe in a signal handler; the first wish wins."""
        self._wish = self._wish or why

    def reached(self, step: int) -> str | None:
        """Say that ``step`` is about to begin; returns why to stop instead, on all processes at the same step."""
        if process_count() == 1:
            return self._wish
        if self._wish and not self._told:
            self._told = True
            tell(_WISH, self._wish)
        with self._lock:
            if self._stop and step >= self._stop[0]:
                return self._stop[1]
            self._step = step
        return None

    def _agree(self, why: str) -> None:
        store = client()
        with self._lock:
            store.key_value_set(f"{_STEPS}{process_index()}", str(self._step))
            steps: list[str] = []
            while len(steps) < process_count() and not pause(0.05):
                steps = [value for _, value in store.key_value_dir_get(_STEPS)]
            self._stop = max(map(int, steps), default=self._step) + 1, why
