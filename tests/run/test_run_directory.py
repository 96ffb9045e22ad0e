"""Run directory: one run at a time locks it; an abandoned run removes only its own files; resume
checks them."""

import json
import os

import pytest
from rich.console import Console

from jspeed.run.checkpoint import HASH, check_same
from jspeed.run.options import Options, check_options
from jspeed.run.run_directory import checkpoint_to_resume, create_and_lock, open_run_directory

from ..multi_process import said

SAY = Console(quiet=True)
IDENTITY = {HASH: "s", "seed": 1}
OWN = json.dumps({"recipe_hash": "s", "options": {"seed": 1}})


def start(run_dir, resume=False):
    return open_run_directory(
        Options(run_dir=run_dir, resume=resume, checkpoint_every=1), "toy", IDENTITY, SAY
    )


def test_two_runs_cannot_have_one_directory(tmp_path):
    run_dir = tmp_path / "run"
    with start(run_dir) as first:
        for resume in (False, True):
            assert "another run is writing to" in said(lambda resume=resume: start(run_dir, resume))
        first.metrics.write("{}")
    assert "already holds a run (metrics.jsonl)" in said(lambda: start(run_dir))
    (run_dir / "config.json").write_text(OWN)
    with start(run_dir, resume=True) as again:
        again.begin()
    assert again.checkpoint is None and (run_dir / "metrics.jsonl").read_bytes() == b""
    assert (run_dir / "interrupted" / "metrics.jsonl").read_bytes() == b"{}\n"


def test_what_was_there_stays_until_its_like_is_written(tmp_path):
    """An interrupted run's model and best parameters, where it has no checkpoint to resume from."""
    (tmp_path / "config.json").write_text(OWN)
    (tmp_path / "best").mkdir()
    written = ("model.safetensors", "samples.txt", "loss.svg", "best/model.safetensors")
    for turn in ("1", "2"):
        for name in written:
            (tmp_path / "best").mkdir(exist_ok=True)
            (tmp_path / name).write_text(turn)
        with start(tmp_path, resume=True) as directory:
            directory.begin()
            earlier = tmp_path / "interrupted"
            assert {name: (earlier / name).read_text() for name in written} == dict.fromkeys(
                written, turn
            )
            assert not any((tmp_path / name).exists() for name in written)
            directory.begin()  # killed, and again: nothing new to move
            assert (earlier / "model.safetensors").read_text() == turn
    (earlier / "notes.txt").write_text("mine")
    directory.end()
    assert [path.name for path in earlier.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["model.safetensors", "samples.txt", "best", "loss.svg"])
def test_files_that_a_run_would_write_over_are_refused(tmp_path, name, resume):
    """As in a folder of GPT-2's weights, with its own config.json or none."""
    (tmp_path / name).write_text("mine")
    for config in (None, "{}", "[]", "not JSON", OWN.replace('"s"', '"another"')):
        if config:
            (tmp_path / "config.json").write_text(config)
        before = {path: path.read_text() for path in tmp_path.iterdir()}
        assert ("already holds", "not known to be of this run")[resume] in said(
            lambda: start(tmp_path, resume)
        )
        assert {path: path.read_text() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["run.json", "config.json", "checkpoints"])
def test_a_directory_that_holds_a_run_is_left_as_it_was(tmp_path, name):
    (tmp_path / name).write_text("{}")
    assert f"already holds a run ({name})" in said(lambda: start(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_abandoning_takes_back_what_is_ours_only(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for run_dir, left in [(tmp_path, ["notes.txt"]), (tmp_path / "deep" / "run", None)]:
        directory = start(run_dir)
        (run_dir / "config.json").write_text("{}")
        directory.abandon()
        assert [path.name for path in run_dir.iterdir()] == left if left else not run_dir.exists()
    directory = start(tmp_path, resume=True)
    directory.abandon()
    with start(tmp_path) as directory:
        (tmp_path / "config.json").write_text(OWN)
    with start(tmp_path, resume=True) as directory:
        directory.abandon()
    assert (tmp_path / "config.json").exists()


def test_a_name_that_is_not_utf8_is_refused(tmp_path):
    """Orbax said so at the end, when the checkpoint was lost."""
    assert "its name is not UTF-8" in said(lambda: start(tmp_path / os.fsdecode(b"caf\xe9")))
    assert not list(tmp_path.iterdir())


def test_a_failure_while_opening_leaves_no_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("jspeed.run.run_directory.gather", lambda *_: [True, False])
    assert "not all processes see" in said(lambda: start(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_abandoning_removes_the_folders_of_sinks_too(tmp_path):
    (tmp_path / "wandb").mkdir()
    directory = start(tmp_path)
    for name in ("tensorboard", "wandb", "profile"):
        (tmp_path / name).mkdir(exist_ok=True)
    directory.abandon()
    assert [path.name for path in tmp_path.iterdir()] == ["wandb"]


def test_neither_an_ended_nor_a_nameless_run_is_resumed(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    read = lambda _: {"status": path.read_text()}
    monkeypatch.setattr("jspeed.run.run_directory.read_run", read)
    for status in ("finished", "diverged"):
        path.write_text(status)
        assert "has ended" in said(lambda: create_and_lock(tmp_path, resume=True))
    for status in ("interrupted", "stopped"):
        path.write_text(status)
        create_and_lock(tmp_path, resume=True).file.close()
    assert "--resume needs --run-dir" in said(lambda: check_options(Options(resume=True)))


def test_fewer_steps_than_were_made_already_are_refused(tmp_path, monkeypatch):
    same = {"recipe hash": "a", "seed": 1}
    monkeypatch.setattr("jspeed.run.run_directory.read_checkpoint", lambda *_: {"identity": same})
    assert checkpoint_to_resume(tmp_path, 7, same, None) == checkpoint_to_resume(
        tmp_path, 7, same, 7
    )
    assert "--steps 6: the run in" in said(lambda: checkpoint_to_resume(tmp_path, 7, same, 6))


def test_a_run_that_is_another_names_what_differs(tmp_path):
    before = {"LANES": 8, "STEPS": [3, 4], "recipe source": "a1", "recipe hash": "b1"}
    before |= {"seed": 1, "--steps": 5}

    def refusal(saved, **changed):
        return said(lambda: check_same({"identity": saved}, before | changed, tmp_path))

    check_same({"identity": before}, before | {"STEPS": (3, 4), "--steps": 9, "--new": 1}, tmp_path)
    for saved, changed, message in [
        (before, {"LANES": 16, "recipe hash": "b2"}, "LANES 8 but this run has LANES 16; give"),
        (before, {"seed": 2}, "was made with seed 1 but this run has seed 2; give"),
        (before, {"recipe source": "a2", "recipe hash": "b2"}, "has recipe source a2"),
        (before, {"LANES": 4, "STEPS": [3], "recipe hash": "b2"}, "LANES 8, STEPS [3, 4] but this"),
        ({f"F{n}": n for n in range(9)} | before, {}, "F5 5, and 3 more, but this run has F0 None"),
        ({"GONE": 1} | before, {"recipe hash": "b2"}, "GONE 1 but this run has GONE None"),
        ({"recipe hash": "b1", "seed": 1}, {"recipe hash": "b2"}, "run has recipe hash b2"),
    ]:
        assert message in refusal(saved, **changed)
        assert f"({tmp_path}/recipe.py)" in refusal(saved, **changed)


def test_the_name_holds_the_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with start(None) as directory:
        assert directory.path.match("runs/toy-20*T*Z-seed1")
