"""The end of a run: run.json first, the plot last; what could not be written is said."""

import errno
import json
import os
import tempfile
from contextlib import contextmanager
from dataclasses import replace

import pytest

from jspeed.base.files import Lines
from jspeed.cli.satellites import hooks
from jspeed.errors import BadInput
from jspeed.fields import Stage
from jspeed.record import provenance
from jspeed.record.consistent import PROBES
from jspeed.record.run_json import read_run
from jspeed.run import metrics_log as sinks
from jspeed.run.finish import stage_borders
from jspeed.run.hooks import Hooks
from jspeed.run.options import Options
from jspeed.run.train import train

from ..multi_process import TOY, said, shards


@pytest.fixture
def full_for(monkeypatch: pytest.MonkeyPatch):
    """Have no room for files of these names; returns the names asked for, in order."""
    real, asked = tempfile.mkstemp, []

    def fix(*names: str) -> list[str]:
        def mkstemp(*arguments, prefix="", **more):
            asked.append(prefix.strip("."))
            if asked[-1] in names:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, prefix=prefix, **more)

        monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
        return asked

    return fix


@pytest.fixture
def a_log_that_breaks(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a sink of --log that takes two lines, then neither more nor its end."""

    @contextmanager
    def breaks(*_):
        left = iter(range(2))

        def sink(line):
            if next(left, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        yield sink
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setitem(sinks.SINKS, "breaks", breaks)
    monkeypatch.setattr("jspeed.run.options.LOGS", [*sinks.SINKS])
    return "breaks"


def with_board(told: list) -> Hooks:
    """Hooks that draw, and tell where the run is that has kept its parameters."""
    return replace(hooks(), afterwards=lambda _, folder: told.append(folder))


def three_steps(tmp_path, **more) -> Options:
    """A run into ``tmp_path / "run"`` that reaches its target."""
    fixed = {"set_": (*TOY, "LAYERS=1", "STEPS=3"), "target_loss": 9.0, "progress": False}
    return Options(
        "stdlib", data=shards(tmp_path / "shards"), run_dir=tmp_path / "run", **fixed | more
    )


def test_the_commit_is_that_of_the_start(tmp_path, monkeypatch):
    """Code that is changed at the start and committed during the run has run as changed."""
    states = iter([{"commit": "a" * 40, "dirty": True}, {"commit": "b" * 40, "dirty": False}])
    monkeypatch.setattr(provenance, "git", lambda *_: next(states))
    train(three_steps(tmp_path))
    assert read_run(tmp_path / "run")["git"] == {"commit": "a" * 40, "dirty": True} and next(states)


@pytest.mark.parametrize("planned", [False, True])
def test_only_what_could_count_is_probed(planned, tmp_path, monkeypatch, capsys):
    """Fewer steps than the schedule has count where a plan says so, and nowhere else."""
    place = {"sha256": "ab" * 32, "folder": "run"}
    added = replace(hooks(), announcement_of=lambda *_: place if planned else None)
    options = three_steps(tmp_path, set_=(*TOY, "LAYERS=1", "STEPS=9"), steps=1, sample=False)
    assert train(options, added) == 0
    run = read_run(tmp_path / "run")
    assert set(run["probes"]) == (set(PROBES) if planned else set())
    assert run["reached"] == planned and run["val_loss"] < run["target_loss"]
    assert ("unread" in run) == planned
    assert ("does not count, nor is probed" in capsys.readouterr().out) == (not planned)


@pytest.mark.slow
def test_the_record_comes_though_the_last_checkpoint_does_not(
    tmp_path, full_for, a_log_that_breaks, monkeypatch, capsys
):
    """All that is written before run.json: of a run that has made its steps nothing else is worth
    losing them."""
    full_for("sha256.json")
    real = Lines.write

    def write(self, line):
        if json.loads(line).keys() >= {"val_loss"} and json.loads(line)["step"] == 3:
            raise BadInput("metrics.jsonl cannot be written (No space left on device)")
        real(self, line)

    monkeypatch.setattr(Lines, "write", write)
    run_dir = tmp_path / "run"
    options = three_steps(tmp_path, checkpoint_every=2, log=a_log_that_breaks)
    sentence = said(lambda: train(options))
    for words in ("--log stopped at", "a checkpoint could not be", "metrics.jsonl cannot be"):
        assert words in sentence, sentence
    assert f"warning: --log {a_log_that_breaks} could not be closed" in capsys.readouterr().err
    run = read_run(run_dir)
    assert run["status"] == "finished" and run["reached"] and run["curve"][-1]["step"] == 3
    assert not list((run_dir / "checkpoints").iterdir())
    assert (run_dir / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("steps", "borders"), [(9, [0.2, 0.5]), (6, [0.2, 0.5]), (5, [0.2]), (2, []), (0, [])]
)
def test_the_picture_marks_where_stages_began(steps, borders):
    stages = [Stage(2, 8), Stage(3, 8), Stage(4, 8)]
    train = [(step / 10, 2.0) for step in range(1, steps + 1)]
    assert stage_borders(stages, train) == borders


def test_the_record_is_written_though_model_and_picture_are_not(tmp_path, full_for, capsys):
    options, told = three_steps(tmp_path), []
    run_dir = options.run_dir
    asked = full_for("model.safetensors", "loss.svg")
    sentence = said(lambda: train(options, with_board(told)))
    assert asked[-3:] == ["run.json", "model.safetensors", "loss.svg"]
    for name in asked[-2:]:
        assert f"{run_dir / name} cannot be written (No space left on device)" in sentence
    run = read_run(run_dir)
    assert run["status"] == "finished" and run["reached"] and not told
    rows, width = run["parameter_table"]["embed"]["shape"]
    assert run["active_parameters"] == run["parameters"] - (rows - 1) * width
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "config.json",
        "metrics.jsonl",
        "recipe.py",
        "run.json",
    ]
    out = capsys.readouterr().out.splitlines()
    assert any(line.endswith("run: run.json, metrics.jsonl") for line in out)
    assert out[-1].startswith(f"{run['val_loss']:.4f} nats/")

    # Work that prints nothing itself says how long it takes.
    for words in (
        "compiling ...",
        "warming up ...",
        "final evaluation ...",
        "validity probes ...",
        "evidence",
    ):
        (line,) = [line for line in out if line.startswith(words)]
        assert line.endswith(" s"), line


@pytest.mark.slow
def test_without_room_for_the_record_the_result_is_said(tmp_path, full_for, capsys):
    options, told = three_steps(tmp_path), []
    run_dir = options.run_dir
    full_for("run.json")
    assert f"{run_dir / 'run.json'} cannot be written" in said(
        lambda: train(options, with_board(told))
    )
    assert (run_dir / "model.safetensors").exists() and (run_dir / "loss.svg").exists()
    assert " nats/token <= 9.0 in" in capsys.readouterr().out
    assert json.loads((run_dir / "config.json").read_text())["recipe"] == "stdlib" and not told
