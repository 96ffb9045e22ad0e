"""Sinks: what TensorBoard and W&B get, missing packages, and a profiler's trace."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jspeed.run import metrics_log as module
from jspeed.run.metrics_log import sinks
from jspeed.run.options import LOGS, Options, check_sinks

from ...refusals import refused

LINES = [
    {"step": 0, "tokens": 0, "timed_seconds": 0.0, "val_loss": 5.5},
    {"step": 1, "tokens": 256, "timed_seconds": 1.25, "train_loss": 5.25},
    {"step": 2, "tokens": 512, "timed_seconds": 2.5, "train_loss": 4.75},
]
STARTED = "2026-01-01T00:00:00Z"


def test_tensorboard_reads_the_curve_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with sinks(("tensorboard",), tmp_path, {}, STARTED) as (sink,):
        for line in LINES:
            sink(line)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert sorted(read.Tags()["scalars"]) == ["train/loss", "val/loss"]
    train = read.Scalars("train/loss")
    assert [(event.step, event.value) for event in train] == [(1, 5.25), (2, 4.75)]
    assert train[1].wall_time - train[0].wall_time == 1.25  # timed seconds
    assert [(event.step, event.value) for event in read.Scalars("val/loss")] == [(0, 5.5)]


@pytest.mark.slow
def test_wandb_stays_on_disk(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with sinks(("wandb",), tmp_path, {"WIDTH": 3}, STARTED) as (sink,):
        for line in LINES:
            sink(line)
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(run.glob("*.wandb"))


class Fake:
    """The part of wandb that is used."""

    def __init__(self):
        self.logged, self.finished = [], False

    def init(self, **settings):
        self.settings = settings
        return self

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


def test_what_wandb_is_told(tmp_path, monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_SILENT", raising=False)
    with sinks(("wandb",), tmp_path, {"WIDTH": 3}, STARTED) as (sink,):
        assert os.environ["WANDB_MODE"] == "offline"
        for line in LINES:
            sink(line)
    assert fake.finished and fake.settings["config"] == {"WIDTH": 3}
    assert fake.logged[1] == (1, {"train/loss": 5.25, "tokens": 256, "timed_seconds": 1.25})


@pytest.mark.parametrize("blank", ["", " "])
def test_a_variable_that_is_set_to_nothing_is_not_set(tmp_path, monkeypatch, blank, capsys):
    """wandb refused an empty WANDB_MODE in three lines, of which the first was shown: "1 validation
    error ..."."""
    monkeypatch.setitem(sys.modules, "wandb", Fake())
    for name in ("WANDB_MODE", "WANDB_SILENT"):
        monkeypatch.setenv(name, blank)
    with sinks(("wandb",), tmp_path, {}, STARTED) as (_,):
        assert (os.environ["WANDB_MODE"], os.environ["WANDB_SILENT"]) == ("offline", "true")
    assert capsys.readouterr().err == ""


def test_a_reason_is_whole_and_one_line(tmp_path, monkeypatch, capsys):
    def init(self, **_):
        raise ValueError(
            "1 validation error for Settings\nmode\n  Input should be 'online' or 'offline'"
            + "." * 300
        )

    monkeypatch.setitem(sys.modules, "wandb", type("Broken", (Fake,), {"init": init})())
    with sinks(("wandb",), tmp_path, {}, STARTED) as opened:
        assert opened == []
    said = capsys.readouterr().err
    assert "(1 validation error for Settings mode Input should be 'online' or 'offline'..." in said
    assert said.count("\n") == 1 and said.endswith("...)\n")


@pytest.mark.parametrize(
    ("mode", "says"), [pytest.param("", None, marks=pytest.mark.slow), ("offlin", "'offline'")]
)
def test_what_wandb_itself_makes_of_its_mode(tmp_path, mode, says):
    """In a process of its own: wandb reads its variables once."""
    pytest.importorskip("wandb")
    program = "from pathlib import Path; from jspeed.run.metrics_log import sinks\n"
    program += (
        f"with sinks(('wandb',), Path({str(tmp_path)!r}), {{}}, {STARTED!r}) as opened:"
        " print(len(opened))"
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("WANDB_")
    }
    environment |= {"WANDB_MODE": mode}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    warning, *more = [
        line for line in done.stderr.splitlines() if line.startswith("warning: ")
    ] or [""]
    assert done.stdout.strip().startswith("0" if says else "1") and not more, done
    assert says in warning if says else warning == ""


def test_names_of_sinks_may_have_spaces_and_count_once():
    assert Options(log="wandb, tensorboard,wandb").sinks == ("wandb", "tensorboard")


def test_a_missing_package_is_a_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with sinks(("wandb",), tmp_path, {}, STARTED) as opened:
        assert opened == []
    assert capsys.readouterr().err.startswith("warning: --log wandb does nothing (")


# Before 40 hexadecimal digits that are git's name of a commit.
OF_GIT = re.compile(r'(commit": ?"|COMMIT = "|github\S*/[\w-]+/[\w-]+/|GITHUB\}/[\w-]+/)$')


def keys_in(text):
    """What may be keys of Weights & Biases: 40 hexadecimal digits that are no name of git's."""
    found = re.finditer(r"\b[0-9a-f]{40}\b", text)
    return [
        match[0] for match in found if not OF_GIT.search(text[: match.start()].rpartition("\n")[2])
    ]


def test_no_file_holds_a_key():
    key = "0a" * 20
    for line in (
        f'wandb.login(key="{key}")',
        f"WANDB_API_KEY={key}",
        f"  password {key}",
        f'"note": "{key}"',
    ):
        assert keys_in(f"import wandb\n{line}\n") == [key], line
    assert not keys_in(
        f'{{"commit": "{key}"}}, https://raw.githubusercontent.com/a/b-c/{key}/d.txt'
    )
    root = Path(__file__).parents[3]
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True
    ).stdout
    paths = [root / name for name in listed.decode().split("\0") if name]
    assert Path(__file__) in paths
    held = {str(path): keys_in(path.read_text(errors="ignore")) for path in paths if path.is_file()}
    assert not {path: keys for path, keys in held.items() if keys}


def test_unknown_sink():
    assert LOGS == list(module.SINKS)
    check_sinks(LOGS)
    refused("--log tensorbord .*'tensorboard'", check_sinks, ("tensorbord",))


def test_scalars_are_finite_numbers():
    assert module.scalars(json.loads('{"step": 1, "train_loss": 2.5}')) == {"train/loss": 2.5}
    line = {"step": 1, "val_loss": 2.5, "val_accuracy": 0.25}
    assert module.scalars(line) == {"val/loss": 2.5, "val/accuracy": 0.25}
