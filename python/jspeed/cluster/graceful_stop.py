"""A graceful stop: all processes end after the same step, whichever of them was asked to stop."""

import threading

from jspeed.base.processes import Stop
from jspeed.cluster.distributed import client, process_count, process_index
from jspeed.cluster.failure import on_message, publish, sleep_unless_over

_REQUEST, _STEPS = "stop", "jspeed/steps/"


class GracefulStop(Stop):
    """Lets any process request a stop at any time; all processes end the loop after the same step.

    Every process calls :meth:`reached` once a step. Processes that share collectives are at most a
    few steps apart: on a request each one pauses and publishes the step that it has begun, and all
    stop after the furthest of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._step = -1
        self._stop: tuple[int, str] | None = None
        self._sent = False
        on_message(_REQUEST, self._agree)

    def reached(self, step: int) -> str | None:
        """:meth:`Stop.reached`."""
        if process_count() == 1:
            return self._why
        if self._why and not self._sent:
            self._sent = True
            publish(_REQUEST, self._why)
        with self._lock:
            if self._stop and step >= self._stop[0]:
                return self._stop[1]
            self._step = step
        return None

    def _agree(self, why: str) -> None:
        store = client()
        assert store
        with self._lock:
            store.key_value_set(f"{_STEPS}{process_index()}", str(self._step))
            steps: list[str] = []
            while len(steps) < process_count() and not sleep_unless_over(0.05):
                steps = [value for _, value in store.key_value_dir_get(_STEPS)]
            self._stop = max(map(int, steps), default=self._step) + 1, why
