"""Clock: the ledger adds up to the wall time; only named pauses are untimed."""

import os
import shutil
import subprocess
import time

import jax.numpy as jnp
import pytest

from jspeed.run.clock import Clock, utc_now


def test_ledger_adds_up_and_pauses_are_named():
    clock = Clock()
    before = clock.wall_seconds
    with clock.section("compile"):
        time.sleep(0.02)
    assert clock.timed_seconds == 0
    clock.start(jnp.zeros(3))
    time.sleep(0.03)
    with clock.section("evaluation", wait_for=jnp.zeros(3)):
        paused = clock.timed_seconds
        time.sleep(0.02)
        assert clock.timed_seconds == paused
    time.sleep(0.01)
    clock.stop(jnp.zeros(3))
    stopped = clock.timed_seconds
    time.sleep(0.01)
    assert clock.timed_seconds == stopped >= 0.04
    ledger = clock.ledger
    names = ["start-up", "compile", "start-up", "training", "evaluation", "training", "finish"]
    assert [section["name"] for section in ledger] == names
    assert [section["name"] for section in ledger if section["timed"]] == ["training", "training"]
    assert sum(section["seconds"] for section in ledger) == pytest.approx(
        clock.wall_seconds, abs=5e-3
    )
    assert clock.seconds("evaluation") >= 0.02 and clock.wall_seconds > before


@pytest.mark.skipif(not shutil.which("ps"), reason="there is no ps")
def test_wall_seconds_count_from_the_command():
    """Imports too: the process's age by somebody else's account, whole seconds."""
    age = subprocess.check_output(["ps", "-o", "etimes=", "-p", str(os.getpid())], text=True)
    assert Clock().wall_seconds == pytest.approx(int(age), abs=2)


def test_a_section_ends_when_its_body_fails():
    clock = Clock()
    with pytest.raises(ValueError), clock.section("compile"):
        raise ValueError
    assert clock.ledger[-1]["name"] == "start-up"


def test_utc_now_is_iso_8601():
    assert utc_now().endswith("Z") and "T" in utc_now()
