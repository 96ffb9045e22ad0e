"""The training loop: batch, dispatch, read the previous step's loss; with pauses for evaluation and
checkpoints."""

import gc
import logging
import math
import os
import shutil
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from itertools import count, islice
from pathlib import Path

import jax
from jax.errors import JaxRuntimeError
from rich.console import Console

from jspeed.base import processes
from jspeed.base.beside import Knowing
from jspeed.base.processes import Stop
from jspeed.base.signals import ENDINGS, WARNINGS, handled
from jspeed.errors import PEER_LOST, BadInput, Terminated, first_line, say
from jspeed.parallel.mesh import batch_lanes, put_lanes
from jspeed.recipe import Recipe, Stage
from jspeed.run.checkpoint import Checkpoints
from jspeed.run.clock import Clock, now, watched
from jspeed.run.compute.device import give_back_memory
from jspeed.run.compute.program import StepProgram
from jspeed.run.compute.step import Metrics, State, without_jit
from jspeed.run.console import Display
from jspeed.run.evaluate import look_up, tokenizer_mask, validation_accuracy, validation_loss
from jspeed.run.export import FILE
from jspeed.run.finish import finish, keep_best
from jspeed.run.hooks import NO_HOOKS, Hooks
from jspeed.run.metrics_log import History, sinks
from jspeed.run.options import Options
from jspeed.run.setup import Setup, set_up

Pause = Callable[[str], AbstractContextManager[None]]  # the clock stands, for a reason of this name
HANG = 900  # seconds: a step takes milliseconds, an evaluation or a checkpoint at most some minutes
KEPT_WITHIN = 60  # seconds in which a run that hangs writes its record
SETTLED = 5  # steps before the trace begins: the first ones fill queues and caches


def train(options: Options, hooks: Hooks = NO_HOOKS, saves: bool = False) -> int:
    """Make one run and return the exit code: 0 reached the target or ran what was asked, 1 did not,
    130 Ctrl-C, 143 SIGTERM. With several processes each calls this; process 0 prints and writes, an
    error on any ends all. ``saves``: compiled programs are saved and loaded
    (:mod:`jspeed.saved`), for a process that is nothing but this run."""
    with as_found():
        with sigterm_is(_terminate), hooks.joined(options):
            code, run_dir = run(options, hooks, saves)
        if processes.index() == 0 and code in (0, 1) and (run_dir / FILE).exists():
            hooks.afterwards(options, run_dir)
    return code


@contextmanager
def as_found() -> Iterator[None]:
    """Leave somebody's process as it was: how warnings are shown and logged, and free memory."""
    shown, filters, absl = warnings.showwarning, list(warnings.filters), logging.getLogger("absl")
    level = absl.level
    try:
        yield
    finally:
        warnings.showwarning, warnings.filters = shown, filters
        absl.setLevel(level)
        give_back_memory()


def run(options: Options, hooks: Hooks = NO_HOOKS, saves: bool = False) -> tuple[int, Path]:
    """Make one run in this process, once jax.distributed is initialised; returns exit code and run
    directory."""
    first = processes.index() == 0
    console, clock = Console(highlight=False, quiet=not first), Clock()
    setup = set_up(options, clock, console, hooks, saves)
    last_step = min(options.steps or setup.recipe.steps, setup.recipe.steps)
    stop = processes.group().stop()
    logs = sinks(
        options.sinks if first else (), setup.run_dir, setup.loaded.fields, setup.directory.started
    )
    with (
        setup.directory,
        logs as opened,
        setup.data.loader,
        sigterm_is(lambda: stop.request("terminated")),
    ):
        with Display(console, last_step, options.progress, setup.recipe.target_loss) as display:
            history = History(clock, setup.directory.metrics, display, sinks=opened)
            try:
                setup.directory.begin()
                if setup.directory.checkpoint:
                    history.resume(setup.directory.checkpoint)
                folder = setup.run_dir / "checkpoints"
                # Without jit every constant of the program is a copy.
                with (
                    ctrl_c_ends(stop),
                    jax.transfer_guard("allow" if without_jit() else "disallow"),
                ):
                    with (
                        no_garbage_collection(),
                        Checkpoints(folder, options.keep_checkpoints, history.steps) as checkpoints,
                        unless_it_hangs(setup, history, console, hooks, alone=saves),
                    ):
                        state = loop(setup, history, stop, checkpoints, last_step)
            # a shard that went bad, a full disk: before the first step nothing is worth keeping
            except BadInput:
                if not history.steps:
                    setup.directory.abandon()
                    raise
                history.status = "interrupted"
                # there may be no room for this either, and no data
                with suppress(BadInput, OSError):
                    finish(setup, history, None, console, hooks)
                raise
        return finish(setup, history, state, console, hooks), setup.run_dir


def unless_it_hangs(
    setup: Setup, history: History, console: Console, hooks: Hooks, alone: bool
) -> AbstractContextManager[None]:
    """End this process with its record and exit code 75 where steps, evaluations and checkpoints
    stand still: a collective that waits for a device which has failed waits for ever. A process
    that is not this run ``alone`` is ended only if that was asked for."""
    seconds, waits = setup.options.hang_after, threading.get_ident()
    if seconds is None:
        seconds = HANG if alone and setup.placement.device.platform != "cpu" else 0

    def progress() -> tuple[int, int, int]:
        return history.steps, len(history.lines), len(history.clock.ledger)

    def end() -> None:
        # the thread that waits in a library cannot be interrupted, so this one does all
        stack = traceback.extract_stack(sys._current_frames()[waits])
        ours = [at for at in stack if "jspeed" in at.filename][-1]
        say(
            f"error: nothing has moved for {seconds} s: {history.clock.ledger[-1]['name']} after"
            f" {history.steps} of {setup.recipe.steps} steps, waiting in {ours.name}"
            f" ({Path(ours.filename).name}:{ours.lineno}); look at the devices (nvidia-smi, dmesg),"
            " then go on with --resume where there is a checkpoint, or give a longer --hang-after"
        )
        history.end("interrupted")
        keep = partial(finish, setup, history, None, console, hooks)
        keeper = threading.Thread(target=keep, daemon=True)
        keeper.start()
        keeper.join(KEPT_WITHIN)
        os._exit(PEER_LOST)

    return watched(seconds, progress, end)


def loop(
    setup: Setup, history: History, stop: Stop, checkpoints: Checkpoints, last_step: int
) -> State:
    """Run up to ``last_step`` steps under the clock and return the last state.

    The host reads one number a step, the loss of the step before, while the device works on the
    current one; so at most two steps are in flight. The transfer guard makes any other copy an
    error.
    """
    recipe = setup.recipe
    options = setup.options
    clock = history.clock
    state = setup.state
    begun, period = history.steps, recipe.period
    limit = 60 * (options.max_minutes or math.inf)
    mask = cache(lambda: begin_mask(setup))

    @contextmanager
    def pause(name: str) -> Iterator[None]:
        settle(setup, history, mask)
        with clock.section(name, wait_for=state):
            yield

    profile = Profile(
        setup.run_dir / "profile", options.profile, pause, begun, last_step, history.failed
    )
    clock.start(state)
    if begun >= last_step < recipe.steps:
        history.end("stopped")
    for stage, execute in islice(
        every_step(recipe.stages, setup.program.calls or setup.program.steps),
        begun,
        max(last_step, begun),
    ):
        if history.steps % recipe.eval_every == 0 and not history.at_validation:
            evaluate(setup, history, state, pause)
        if options.stop_at_target and history.steps % period == 0 and reached(setup, history):
            history.end("stopped")
            break
        if (every := options.checkpoint_every) and history.steps % math.lcm(every, period) == 0:
            save(setup, history, state, checkpoints, pause)
        profile.before(history.steps)
        state, metrics = feed(setup, history, execute, state)
        mask()  # is begun: not before the pause of the first evaluation
        history.stepped(recipe.tokens_per_step(stage), metrics["loss"])
        end_if_due(history, stop, recipe, last_step, limit)
        if history.status != "finished":
            break
    history.read()
    profile.close()
    if begun < history.steps == recipe.steps:
        state = setup.program.at_end(state)
    settle(setup, history, mask)
    clock.stop(state)
    save_last(setup, history, state, checkpoints, pause)
    return state


def feed(
    setup: Setup, history: History, execute: StepProgram, state: State
) -> tuple[State, Metrics]:
    """Take the next batch and dispatch a step of it: the next state and the step's metrics."""
    before = now()
    batch = setup.data.loader.__next__()  # next() would forget its type
    loaded = now()
    # Tokens as stored, and what is beside them: the device derives inputs, targets and documents
    # from them.
    tokens = batch.tokens.astype(setup.recipe.data.dtype, copy=False)
    if not setup.program.calls:  # which take the lanes of all processes
        tokens = put_lanes(tokens, batch_lanes(setup.placement.mesh))
    found = execute(state, tokens)
    history.data_wait_seconds += loaded - before
    history.dispatch_seconds += now() - loaded
    history.fed(batch.tokens)
    return found


def settle(setup: Setup, history: History, mask: Callable[[], Future[jax.Array] | None]) -> None:
    """Read the last loss and wait, on the clock, for the ``mask``, for tables and for what the
    loader knows: none of it happens in a pause."""
    history.read()
    if setup.program.tables:
        setup.program.tables.wait()
    if isinstance(setup.data.loader, Knowing):
        setup.data.loader.wait()
    if history.steps and (built := mask()):
        setup.validation.tokenizer_mask = built.result()


def begin_mask(setup: Setup) -> Future[jax.Array] | None:
    """Begin to build what is impossible, in a canonical recipe, in a thread."""
    pairs, mesh = setup.data.byte_pairs, setup.placement.mesh
    return (
        ThreadPoolExecutor(1).submit(tokenizer_mask, setup.recipe, pairs, mesh) if pairs else None
    )


def evaluate(setup: Setup, history: History, state: State, pause: Pause) -> None:
    """Evaluate, off the clock, and keep the best parameters where that is asked for."""
    with pause("evaluation"):
        look_up(setup.validation, setup.data.lanes, setup.data.loader, setup.placement.mesh)
        loss = validation_loss(setup.program.evaluate, state["params"], setup.validation)
        history.validated(
            loss, validation_accuracy(setup.program, state["params"], setup.validation)
        )
        gc.collect()
    if setup.options.keep_best and history.at_validation:
        with pause("checkpoint"), jax.transfer_guard("allow"):
            keep_best(setup, history, state["params"])


def reached(setup: Setup, history: History) -> bool:
    """Whether the last step's evaluation has reached the target; the same on every process, which
    all have its loss."""
    return history.at_validation and history.losses[-1] <= setup.recipe.target_loss


def save(
    setup: Setup,
    history: History,
    state: State,
    checkpoints: Checkpoints,
    pause: Pause,
    last: bool = False,
) -> None:
    """Save a checkpoint, off the clock, where all processes see the folder and none is there of
    this step.

    A state that has diverged is not saved: a good one would make room for it. A full disk ends no
    healthy run: it tries again next time. The last time raises :class:`BadInput`, and so do several
    processes, which would wait for each other."""
    if history.steps > checkpoints.step and setup.directory.shared:
        history.read()
        if history.status != "diverged":
            with pause("checkpoint"):
                record = history.for_checkpoint(setup.data.loader.state_dict(), setup.identity)
                try:
                    checkpoints.save(history.steps, state, record, setup.program.tables)
                except BadInput as error:
                    if last or processes.count() > 1:
                        raise
                    say(f"note: {error}; the run goes on")


def save_last(
    setup: Setup, history: History, state: State, checkpoints: Checkpoints, pause: Pause
) -> None:
    """Save the state that the run ends in, with --checkpoint-every or on SIGTERM, and wait until it
    is written."""
    wanted = setup.options.checkpoint_every or history.interrupted_by == 143
    try:
        if wanted and history.steps % setup.recipe.period == 0:
            save(setup, history, state, checkpoints, pause, last=True)
        checkpoints.wait()
    except BadInput as error:  # all steps are made: their record needs no checkpoint
        history.failed.append(str(error))


def end_if_due(history: History, stop: Stop, recipe: Recipe, last_step: int, limit: float) -> None:
    """End after the last step that was asked for, after ``limit`` timed seconds, or where another
    process or a signal asks for it; between two updates of slow parameters, where the state holds
    more than a checkpoint does, not yet."""
    if history.steps == last_step < recipe.steps:
        history.end("stopped")
    if history.clock.timed_seconds > limit:
        stop.request("stopped")
    if history.steps % recipe.period == 0 and (why := stop.reached(history.steps)):
        history.end(why)


def every_step(
    stages: Iterable[Stage], executables: Iterable[Sequence[StepProgram]]
) -> Iterator[tuple[Stage, StepProgram]]:
    """Yield each step's stage and executable, from the first step of the run to the last."""
    number = count()
    for stage, phases in zip(stages, executables, strict=True):
        for step in islice(number, stage.steps):
            yield stage, phases[step % len(phases)]


class Profile:
    """Traces ``steps`` steps into ``folder`` after the first ``SETTLED``, or the first ones of a
    run that is shorter.

    Starting and stopping ``pause`` the clock; what tracing itself costs is in the steps' time. A
    message on a trace that cannot be written is appended to ``failed``, and the run continues.
    """

    def __init__(
        self, folder: Path, steps: int, pause: Pause, first: int, asked: int, failed: list[str]
    ) -> None:
        self._folder, self._pause, self._failed = folder, pause, failed
        self._begin = max(first, min(first + SETTLED, asked - steps)) if steps else None
        self._end = (self._begin or 0) + steps
        self._running = False
        self._before = folder.exists()  # with what another part of the run has traced

    def before(self, step: int) -> None:
        """Call before each step with the number of steps done."""
        if step == self._begin:
            options = jax.profiler.ProfileOptions()
            # The hook for Python calls visits the states of all threads; on CPython 3.11 it may
            # meet one that a thread of the checkpoint writer is just making, whose frame is still
            # NULL: a segmentation fault.
            options.python_tracer_level = 0
            with self._pause("profile"), jax.transfer_guard("allow"):
                jax.profiler.start_trace(self._folder, profiler_options=options)
            self._running = True
        elif step == self._end:
            self.close()

    def close(self) -> None:
        """Write the trace if one is running."""
        if self._running:
            self._running = False
            with self._pause("profile"), jax.transfer_guard("allow"):
                try:
                    jax.profiler.stop_trace()
                except (OSError, JaxRuntimeError) as error:
                    if not self._before:  # a partial trace is useless
                        shutil.rmtree(self._folder, ignore_errors=True)
                    self._failed.append(
                        f"the trace could not be written ({first_line(error)}); make room there"
                    )


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python from looking for reference cycles while the clock runs; evaluations, which are
    pauses, do (record 92 does so too). What is here already, tracing's millions of objects, is not
    looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@contextmanager
def ctrl_c_ends(stop: Stop) -> Iterator[None]:
    """Let the first Ctrl-C end the run after the current step, with its record; a second one ends
    it at once."""
    usual = signal.getsignal(signal.SIGINT)

    def first() -> None:
        stop.request("interrupted")
        signal.signal(signal.SIGINT, usual)

    with handled((signal.SIGINT,), lambda *_: first()):
        yield


def _terminate() -> None:
    raise Terminated(143)


def sigterm_is(call: Callable[[], object]) -> AbstractContextManager[None]:
    """Let SIGTERM, and what schedulers and terminals send before they kill, ``call`` instead of
    killing."""
    return handled((*ENDINGS, *WARNINGS), lambda *_: call())
