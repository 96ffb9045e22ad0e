"""A healthy run ends with its record: whatever happens to the machine's clock, and to its disk for
a while."""

import errno
import json
import os
from datetime import timedelta

import orbax.checkpoint as ocp
import pytest

from jspeed.base.files import Lines
from jspeed.board.records.track import Track
from jspeed.board.records.trust import unfair
from jspeed.errors import NoRoom
from jspeed.record.run_json import read_run
from jspeed.run import checkpoint, finish
from jspeed.run.clock import after, between, utc_now

from ..attacks.attack import attack
from ..attacks.conftest import on_one_device
from ..multi_process import shards
from ..refusals import refused


@pytest.fixture
def data(tmp_path):
    with on_one_device():
        yield shards(tmp_path / "shards")


def test_a_clock_that_is_set_is_in_the_record(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finish, "utc_now", lambda: after(utc_now(), -3600))
    attack(tmp_path, data, {}, steps=1)
    run = read_run(tmp_path / "run")
    assert run["clock_stepped"] == pytest.approx(-3600, abs=2)
    assert "clock was set back" in capsys.readouterr().err
    timed, steps = (
        list(unfair(run, Track("t", {"rank": rank}))) for rank in ("timed_seconds", "steps")
    )
    assert "clock was set" in timed[0] and steps == []


def test_moments_are_added_to_and_compared():
    moment = "2026-01-31T23:59:50Z"
    assert after(moment, 15) == "2026-02-01T00:00:05Z"
    assert between(moment, after(moment, 15)) == timedelta(seconds=15).total_seconds()


@pytest.fixture
def no_room(monkeypatch):
    """Have no room for checkpoints of these steps; for the line of step 2 the first two times."""

    def fix(*steps):
        real, write = ocp.CheckpointManager.save, Lines.write
        left = iter(range(2))

        def save(self, step, *given, **more):
            if step in steps:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(self, step, *given, **more)

        def line(self, text):
            if json.loads(text)["step"] == 2 and next(left, None) is not None:
                raise NoRoom("metrics.jsonl cannot be written (No space left on device)")
            write(self, text)

        monkeypatch.setattr(ocp.CheckpointManager, "save", save)
        monkeypatch.setattr(Lines, "write", line)

    return fix


def test_a_disk_that_is_full_for_a_while_ends_no_run(no_room, data, tmp_path, capsys):
    no_room(2, 4)
    refused("a checkpoint could not be written", attack, tmp_path, data, {}, checkpoint_every=1)
    run = read_run(tmp_path / "run")
    assert run["status"] == "finished" and run["reached"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all("goes on" in line for line in said)
    assert 3 in checkpoint.steps_in(tmp_path / "run" / "checkpoints")
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "train_loss" in line] == [1, 2, 3, 4]
