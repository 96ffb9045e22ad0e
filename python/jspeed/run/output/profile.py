"""A profiler trace of a few steps, for TensorBoard or Perfetto."""

import shutil
from pathlib import Path

import jax
from jax.errors import JaxRuntimeError

from jspeed.errors import first_line
from jspeed.run.clock import Clock
from jspeed.run.compute.step import State

SETTLED = 5  # steps before the trace begins: the first ones fill queues and caches


class Profile:
    """Traces ``steps`` steps into ``folder`` after the first ``SETTLED``, or the first ones of a run that is shorter.

    Starting and stopping pause the clock; what tracing itself costs is in the steps' time. A message on a
    trace that cannot be written is appended to ``failed``, and the run continues.
    """

    def __init__(self, folder: Path, steps: int, clock: Clock, first: int, asked: int, failed: list[str]) -> None:
        self._folder, self._clock, self._failed = folder, clock, failed
        self._begin = max(first, min(first + SETTLED, asked - steps)) if steps else None
        self._end = (self._begin or 0) + steps
        self._running = False

    def before(self, step: int, state: State) -> None:
        """Call before each step with the number of steps done and the state they left."""
        if step == self._begin:
            options = jax.profiler.ProfileOptions()
            # The hook for Python calls visits the states of all threads; on CPython 3.11 it may meet one that a thread
            # of the checkpoint writer is just making, whose frame is still NULL: a segmentation fault.
            options.python_tracer_level = 0
            with self._clock.section("profile", wait_for=state), jax.transfer_guard("allow"):
                jax.profiler.start_trace(self._folder, profiler_options=options)
            self._running = True
        elif step == self._end:
            self.close(state)

    def close(self, state: State) -> None:
        """Write the trace if one is running."""
        if self._running:
            self._running = False
            with self._clock.section("profile", wait_for=state), jax.transfer_guard("allow"):
                try:
                    jax.profiler.stop_trace()
                except (OSError, JaxRuntimeError) as error:
                    shutil.rmtree(self._folder, ignore_errors=True)  # a partial trace is useless
                    self._failed.append(f"the trace could not be written ({first_line(error)}); make room there")
