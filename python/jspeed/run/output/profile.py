"""A profiler trace of a few steps, for TensorBoard or Perfetto."""

from pathlib import Path

import jax

from jspeed.run.clock import Clock
from jspeed.run.compute.step import State

SETTLED = 5  # steps before the trace begins


class Profile:
    """Traces ``steps`` steps into ``folder`` after the first ``SETTLED``, or the first ones of a run that is shorter.

    Starting and stopping pause the clock; what tracing itself costs is in the steps' time.
    """

    def __init__(self, folder: Path, steps: int, clock: Clock, first: int, asked: int) -> None:
        self._folder, self._clock = folder, clock
        self._begin = max(first, min(first + SETTLED, asked - steps)) if steps else None
        self._end = (self._begin or 0) + steps
        self._running = False

    def before(self, step: int, state: State) -> None:
        """Call before each step with the number of steps done and the state they left."""
        if step == self._begin:
            with self._clock.section("profile", wait_for=state), jax.transfer_guard("allow"):
                jax.profiler.start_trace(self._folder)
            self._running = True
        elif step == self._end:
            self.close(state)

    def close(self, state: State) -> None:
        """Write the trace if one is running."""
        if self._running:
            with self._clock.section("profile", wait_for=state), jax.transfer_guard("allow"):
                jax.profiler.stop_trace()
            self._running = False
