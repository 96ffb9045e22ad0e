"""A run's history: losses are read one step late, and a checkpoint's record restores it."""

import math
from types import SimpleNamespace

import jax.numpy as jnp

from jspeed.run.clock import Clock
from jspeed.run.metrics_log import History


def history():
    shown = SimpleNamespace(step=lambda *_: None, validation=lambda *_: None)
    return History(Clock(), None, shown)


def test_a_loss_is_read_when_the_next_step_has_been_dispatched():
    run = history()
    run.stepped(10, jnp.float32(3))
    assert run.steps == 1 and not run.lines
    run.stepped(10, jnp.float32(2))
    assert [(line["step"], line["tokens"], line["train_loss"]) for line in run.lines] == [
        (1, 10, 3.0)
    ]
    run.read()
    run.read()
    assert [loss for _, loss in run.train] == [3.0, 2.0] and not run.at_validation
    run.validated(2.5)
    assert run.at_validation and run.losses == [2.5] and run.curve[0]["step"] == 2
    run.stepped(10, jnp.float32(math.nan))
    assert not run.at_validation and run.status == "finished"
    run.read()
    assert run.status == "diverged" and len(run.lines) == 3


def test_a_record_restores_what_was_recorded():
    run, again = history(), history()
    run.stepped(10, jnp.float32(3))
    run.read()
    run.validated(2.5, 0.1)
    again.resume(run.for_checkpoint({"step": 1}, {"seed": 1}))
    assert again.resumed == [1] and again.at_validation
    assert (again.lines, again.curve, again.train, again.tokens) == (
        run.lines,
        run.curve,
        run.train,
        10,
    )
