"""The training loop: batch, dispatch, read the previous step's loss; with pauses for evaluation and checkpoints."""

import gc
import math
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jspeed.cluster import distributed
from jspeed.cluster.graceful_stop import GracefulStop
from jspeed.cluster.join import joined
from jspeed.data.batches import to_global
from jspeed.errors import BadInput, Terminated
from jspeed.parallel.mesh import batch_rows
from jspeed.recipe import Stage
from jspeed.run.best import keep_best
from jspeed.run.checkpoint import Checkpoints
from jspeed.run.clock import Clock, now
from jspeed.run.compute.program import StepProgram
from jspeed.run.compute.step import State, without_jit
from jspeed.run.evaluate import impossible, validation_accuracy, validation_loss
from jspeed.run.export import FILE
from jspeed.run.finish import finish
from jspeed.run.options import Options
from jspeed.run.output.console import Display
from jspeed.run.output.metrics_log import Progress
from jspeed.run.output.profile import Profile
from jspeed.run.output.sinks import sinks
from jspeed.run.setup import Setup, set_up


def train(options: Options, afterwards: Callable[[Path], None] | None = None) -> int:
    """Make one run and return the exit code: 0 reached the target or ran what was asked, 1 did not, 130 Ctrl-C,
    143 SIGTERM. With several processes each calls this; process 0 prints and writes, an error on any ends all.

    When the run has kept its parameters, process 0 calls ``afterwards`` with its directory."""
    with sigterm_is(_terminate), joined(options.coordinator, options.processes, options.process_id):
        code, run_dir = run(options)
    if afterwards and distributed.process_index() == 0 and code in (0, 1) and (run_dir / FILE).exists():
        afterwards(run_dir)
    return code


def run(options: Options) -> tuple[int, Path]:
    """Make one run in this process, once jax.distributed is initialised; returns exit code and run directory."""
    first = distributed.process_index() == 0
    console, clock = Console(highlight=False, quiet=not first), Clock()
    setup = set_up(options, clock, console)
    last_step = min(options.steps or setup.recipe.steps, setup.recipe.steps)
    stop = GracefulStop()
    logs = sinks(options.sinks if first else (), setup.run_dir, setup.found.fields, setup.started)
    with setup.directory, logs as opened, setup.loader, sigterm_is(lambda: stop.request("terminated")):
        with Display(console, last_step, options.progress, setup.recipe.target_loss) as display:
            progress = Progress(clock, setup.directory.metrics, display, sinks=opened)
            try:
                setup.directory.begin()
                if setup.record:
                    progress.resume(setup.record)
                # Without jit every constant of the program is a copy.
                with ctrl_c_ends(stop), jax.transfer_guard("allow" if without_jit() else "disallow"):
                    with (
                        no_garbage_collection(),
                        Checkpoints(setup.run_dir / "checkpoints", options.keep_checkpoints) as checkpoints,
                    ):
                        state = loop(setup, progress, stop, checkpoints, last_step)
            except BadInput:  # a shard that went bad, a full disk: before the first step nothing is worth keeping
                if not progress.steps:
                    setup.directory.abandon()
                    raise
                progress.status = "interrupted"
                with suppress(BadInput, OSError):  # there may be no room for this either, and no data
                    finish(setup, progress, None, console)
                raise
        return finish(setup, progress, state, console), setup.run_dir


def loop(setup: Setup, progress: Progress, stop: GracefulStop, checkpoints: Checkpoints, last_step: int) -> State:
    """Run up to ``last_step`` steps under the clock and return the last state.

    The host reads one number a step, the loss of the step before, while the device works on the current one; so
    at most two steps are in flight. The transfer guard makes any other copy an error.
    """
    recipe, program, clock, state = setup.recipe, setup.program, progress.clock, setup.state
    rows = batch_rows(setup.mesh)
    limit = 60 * (setup.options.max_minutes or math.inf)
    unread: tuple[int, int, jax.Array] | None = None

    pool = ThreadPoolExecutor(1)
    building: Future[jax.Array] | None = None

    def build() -> Future[jax.Array] | None:
        """Start to build what is impossible, in a canonical recipe, in a thread."""
        pairs = setup.byte_pairs
        return pool.submit(impossible, recipe, pairs, setup.mesh) if pairs else None

    def built() -> None:
        """Wait for it, on the clock: none of it is built in a pause."""
        if building:
            setup.validation.impossible = building.result()

    def read() -> None:
        nonlocal unread
        if unread:
            step, tokens, loss = unread
            progress.trained(step, tokens, float(jax.device_get(loss)))
            unread = None

    profile = Profile(
        setup.run_dir / "profile", setup.options.profile, clock, progress.steps, last_step, progress.failed
    )
    saved = begun = progress.steps
    every = setup.options.checkpoint_every

    def save() -> None:
        nonlocal saved
        read()
        if progress.status == "diverged":  # a good checkpoint would make room for this one
            return
        built()
        with clock.section("checkpoint", wait_for=state):
            record = progress.record() | {"loader": setup.loader.state_dict(), "identity": setup.identity}
            checkpoints.save(progress.steps, state, record)
        saved = progress.steps

    clock.start(state)
    if begun:
        building = build()
    if progress.steps >= last_step < recipe.steps:
        progress.end("stopped")
    for stage, execute in islice(
        every_step(recipe.stages, program.steps), progress.steps, max(last_step, progress.steps)
    ):
        if progress.steps % recipe.eval_every == 0 and not progress.at_validation:
            read()
            built()
            with clock.section("evaluation", wait_for=state):
                loss = validation_loss(program.evaluate, state["params"], setup.validation)
                progress.validated(loss, validation_accuracy(program, state["params"], setup.validation))
                gc.collect()
            if setup.options.keep_best and progress.at_validation:
                with clock.section("checkpoint"), jax.transfer_guard("allow"):
                    keep_best(setup, progress, state["params"])
        # The same on every process, which all have this loss; between two updates of slow parameters not yet.
        if setup.options.stop_at_target and progress.at_validation and progress.steps % recipe.period == 0:
            if progress.losses[-1] <= recipe.target_loss:
                progress.end("stopped")
                break
        if every and progress.steps % math.lcm(every, recipe.period) == 0 and progress.steps > saved:
            save()
        if setup.options.profile:
            built()
        profile.before(progress.steps, state)
        before = now()
        batch = next(setup.loader)
        loaded = now()
        state, metrics = execute(state, to_global(batch, rows, recipe.data.dtype))
        progress.data_wait_seconds += loaded - before
        progress.dispatch_seconds += now() - loaded
        building = building or build()  # not before the pause of the first evaluation
        read()
        progress.steps += 1
        progress.tokens += recipe.tokens_per_step(stage)
        unread = progress.steps, progress.tokens, metrics["loss"]
        if progress.steps == last_step < recipe.steps:
            progress.end("stopped")
        if clock.timed_seconds > limit:
            stop.request("stopped")
        # Between two updates of slow parameters the state holds more than a checkpoint does.
        if progress.steps % recipe.period == 0 and (why := stop.reached(progress.steps)):
            progress.end(why)
        if progress.status != "finished":
            break
    read()
    profile.close(state)
    if begun < progress.steps == recipe.steps:
        state = program.at_end(state)
    built()
    clock.stop(state)
    wanted = (every or progress.interrupted_by == 143) and progress.steps % recipe.period == 0
    try:
        if wanted and setup.directory.shared and progress.steps > saved:
            save()
        checkpoints.wait()
    except BadInput as error:  # all steps are made: their record needs no checkpoint
        progress.failed.append(str(error))
    return state


def every_step(
    stages: Iterable[Stage], executables: Iterable[Sequence[StepProgram]]
) -> Iterator[tuple[Stage, StepProgram]]:
    """Yield each step's stage and executable, from the first step of the run to the last."""
    number = count()
    for stage, phases in zip(stages, executables, strict=True):
        for step in islice(number, stage.steps):
            yield stage, phases[step % len(phases)]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python from looking for reference cycles while the clock runs; evaluations, which are pauses, do (record 92
    does so too). What is here already, tracing's millions of objects, is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@contextmanager
def ctrl_c_ends(stop: GracefulStop) -> Iterator[None]:
    """Let the first Ctrl-C end the run after the current step, with its record; a second one ends it at once."""

    def handler(signum: int, frame: Any) -> None:
        stop.request("interrupted")
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _terminate() -> None:
    raise Terminated(143)


@contextmanager
def sigterm_is(call: Callable[[], object]) -> Iterator[None]:
    """Let SIGTERM, or the SIGUSR1 that Slurm can send before it, ``call`` instead of killing."""
    numbers = signal.SIGTERM, signal.SIGUSR1
    previous = [signal.signal(number, lambda signum, frame: call()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
