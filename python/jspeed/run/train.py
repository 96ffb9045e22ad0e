"""The training loop: batch, dispatch, read the previous step's loss; now and then a pause to evaluate."""

import json
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

import jax
from rich.console import Console

from jspeed.data import Shuffle, TokenLoader
from jspeed.data.batches import to_global
from jspeed.parallel.mesh import batch_rows
from jspeed.run.clock import Clock, now
from jspeed.run.console import Display
from jspeed.run.evaluate import validation_loss
from jspeed.run.finish import finish
from jspeed.run.prepare import Options, Setup, prepare
from jspeed.run.step import State


@dataclass
class Progress:
    """What has happened since the clock started. ``status`` is a word of run.json's table."""

    clock: Clock
    metrics: TextIO
    display: Display
    steps: int = 0
    tokens: int = 0
    status: str = "finished"
    data_wait_seconds: float = 0.0
    dispatch_seconds: float = 0.0
    train: list[tuple[float, float]] = field(default_factory=list)
    curve: list[dict[str, Any]] = field(default_factory=list)

    def trained(self, step: int, tokens: int, loss: float) -> None:
        """Note the training loss of ``step``; a loss that is not a number ends the run."""
        seconds = self.clock.timed_seconds
        if not math.isfinite(loss):
            self.status = "diverged"
            return
        self._write({"step": step, "tokens": tokens, "timed_seconds": seconds, "train_loss": loss})
        self.train.append((seconds, loss))
        self.display.step(step, loss, tokens)

    def validated(self, loss: float) -> None:
        """Note the validation loss after the steps done so far."""
        seconds = self.clock.timed_seconds
        if not math.isfinite(loss):
            self.status = "diverged"
            return
        self._write({"step": self.steps, "tokens": self.tokens, "timed_seconds": seconds, "val_loss": loss})
        self.curve.append({"step": self.steps, "timed_seconds": seconds, "val_loss": loss})
        self.display.validation(self.steps, loss, seconds)

    def _write(self, line: dict[str, Any]) -> None:
        self.metrics.write(json.dumps(line) + "\n")


def train(options: Options) -> int:
    """Make one run and return the exit code: 0 reached the target or ran what was asked, 1 did not, 130 Ctrl-C."""
    console, clock = Console(highlight=False), Clock()
    setup = prepare(options, clock, console)
    recipe = setup.recipe
    loader = TokenLoader(
        setup.shards,
        lanes=recipe.lanes,
        schedule=recipe.stages,
        align=recipe.data.align,
        bos_id=recipe.data.bos_id,
        vocab_size=recipe.data.vocab_size,
        shuffle=Shuffle(options.seed, recipe.data.shuffle_block) if recipe.data.shuffle_block else None,
        epochs=None,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    loader.start()
    asked = min(options.steps or recipe.steps, recipe.steps)
    with open(setup.run_dir / "metrics.jsonl", "w", buffering=1) as metrics, loader:
        with Display(console, asked, options.progress) as display:
            progress = Progress(clock, metrics, display)
            with ctrl_c_ends(progress), jax.transfer_guard("disallow"):
                state = loop(setup, loader, progress, asked)
        return finish(setup, progress, state, loader.stats(), console)


def loop(setup: Setup, loader: TokenLoader, progress: Progress, asked: int) -> State:
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
    for stage, execute in zip(recipe.stages, program.steps, strict=True):
        for _ in range(stage.steps):
            if progress.steps % recipe.eval_every == 0:
                read()
                with clock.section("evaluation", wait_for=state):
                    progress.validated(validation_loss(program.evaluate, state["params"], setup.validation))
            before = now()
            tokens = to_global(next(loader), rows).tokens
            ready = now()
            state, metrics = execute(state, tokens)
            progress.data_wait_seconds += ready - before
            progress.dispatch_seconds += now() - ready
            read()
            progress.steps += 1
            progress.tokens += recipe.tokens_per_step(stage)
            unread = progress.steps, progress.tokens, metrics["loss"]
            if progress.status == "finished" and progress.steps < recipe.steps:
                if progress.steps == asked or clock.timed_seconds > limit:
                    progress.status = "stopped"
            if progress.status != "finished":
                break
        if progress.status != "finished":
            break
    read()
    clock.stop(state)
    return state


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
