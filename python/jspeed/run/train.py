"""The training loop: batch, dispatch, read the previous step's loss; now and then a pause to evaluate."""

import math
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import jax
from rich.console import Console

from jspeed.data.batches import to_global
from jspeed.errors import BadInput
from jspeed.parallel.mesh import batch_rows
from jspeed.recipe import Stage
from jspeed.run.clock import Clock, now
from jspeed.run.console import Display
from jspeed.run.evaluate import validation_loss
from jspeed.run.finish import finish
from jspeed.run.prepare import Options, Setup, abandon, prepare
from jspeed.run.program import StepProgram
from jspeed.run.progress import Progress
from jspeed.run.step import State


def train(options: Options) -> int:
    """Make one run and return the exit code: 0 reached the target or ran what was asked, 1 did not, 130 Ctrl-C."""
    console, clock = Console(highlight=False), Clock()
    setup = prepare(options, clock, console)
    asked = min(options.steps or setup.recipe.steps, setup.recipe.steps)
    with open(setup.run_dir / "metrics.jsonl", "w", buffering=1) as metrics, setup.loader:
        with Display(console, asked, options.progress) as display:
            progress = Progress(clock, metrics, display)
            try:
                with ctrl_c_ends(progress), jax.transfer_guard("disallow"):
                    state = loop(setup, progress, asked)
            except BadInput:  # a shard that went bad: before the first step nothing is worth keeping
                if not progress.steps:
                    abandon(setup.run_dir)
                    raise
                progress.status = "interrupted"
                finish(setup, progress, None, console)
                raise
        return finish(setup, progress, state, console)


def loop(setup: Setup, progress: Progress, asked: int) -> State:
    """Run up to ``asked`` steps under the clock and return the last state.

    The host reads one number a step, the loss of the step before, while the device works on the current one; so
    at most two steps are in flight. The transfer guard makes any other copy an error.
    """
    recipe, program, clock, state = setup.recipe, setup.program, progress.clock, setup.state
    rows = batch_rows(setup.mesh)
    limit = 60 * (setup.options.max_minutes or math.inf)
    unread: tuple[int, int, jax.Array] | None = None

    def read() -> None:
        nonlocal unread
        if unread:
            step, tokens, loss = unread
            progress.trained(step, tokens, float(jax.device_get(loss)))
            unread = None

    clock.start(state)
    for stage, execute in every_step(recipe.stages, program.steps):
        if progress.steps % recipe.eval_every == 0:
            read()
            with clock.section("evaluation", wait_for=state):
                progress.validated(validation_loss(program.evaluate, state["params"], setup.validation))
        before = now()
        batch = next(setup.loader)
        loaded = now()
        state, metrics = execute(state, to_global(batch, rows).tokens)
        progress.data_wait_seconds += loaded - before
        progress.dispatch_seconds += now() - loaded
        read()
        progress.steps += 1
        progress.tokens += recipe.tokens_per_step(stage)
        unread = progress.steps, progress.tokens, metrics["loss"]
        if progress.steps == asked < recipe.steps or clock.timed_seconds > limit:
            progress.stop()
        if progress.status != "finished":
            break
    read()
    clock.stop(state)
    return state


def every_step(stages: Iterable[Stage], executables: Iterable[StepProgram]) -> Iterator[tuple[Stage, StepProgram]]:
    """Yield each step's stage and executable, from the first step of the run to the last."""
    for stage, executable in zip(stages, executables, strict=True):
        yield from repeat((stage, executable), stage.steps)


@contextmanager
def ctrl_c_ends(progress: Progress) -> Iterator[None]:
    """Let the first Ctrl-C end the run after the current step, with its record; a second one ends it at once."""

    def handler(signum: int, frame: Any) -> None:
        progress.status = "interrupted"
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
