"""A run of a small model on a CPU that says it is the record on eight H100s."""

import shutil
import subprocess
import tomllib
from datetime import timedelta
from pathlib import Path

import pytest

from jspeed.board import judge
from jspeed.board.records import landing, store, verify

from ..record.synthetic_runs import NOW, START, as_run, make_series
from .test_trust import NEW

RECORDS = Path(__file__).parents[2] / "records"
TRACK = "fineweb/8xH100"
TOKENS = 1600 * 393_216
DATA = tomllib.loads((RECORDS / TRACK / "track.toml").read_text())["data"]
H100 = "NVIDIA H100 80GB HBM3"
GPU = {"driver": "570", "cuda": "12.8", "links": [], "before": [{"name": H100}], "after": []}
SECOND = {"first": 20_971_520, "tokens": 10_485_760, "sha256": "ab" * 32, "val_loss": 3.279}
HONEST = NEW | {
    "track": TRACK,
    "target_loss": 3.28,
    "reached": True,
    "steps": 1600,
    "tokens": TOKENS,
    "parameters": 123_532_032,
    "flops_per_token": 8e8,
    "devices": {"kind": H100, "count": 8, "processes": 8, "platform": "gpu"},
    "gpus": GPU,
    "holdout": SECOND,
    "data": as_run()["data"]
    | {
        "name": "fineweb",
        "val_tokens": 10_485_760,
        "val_shard_sha256": DATA["val_shard_sha256"],
        "train_shards": [as_run()["data"]["train_shards"][0] | {"sha256": DATA["train_sha256"]}],
    },
}
LOSSES = [3.270, 3.271, 3.272]


@pytest.fixture
def records(tmp_path):
    folder = tmp_path / "records"
    (folder / TRACK).mkdir(parents=True)
    shutil.copy(RECORDS / TRACK / "track.toml", folder / TRACK)
    return folder


def add(records, folder, seconds, **changes):
    values = {name: value for name, value in (HONEST | changes).items() if value != "left out"}
    store.add([make_series(folder, seconds, LOSSES, **values)], records)


def entry(records):
    (track,) = judge.board(store.load(records))
    return track["entries"][0]


def problems(records):
    return [problem.text for problem in verify.verify(store.read(records), NOW)]


def test_a_record_of_h100s_counts(records, tmp_path):
    add(records, tmp_path / "s", [61.0, 60.0, 62.0])
    assert entry(records)["valid"] and problems(records) == []


RELABELLED = {
    "no nvidia-smi": ({"gpus": None}, "showed no H100"),
    "another card": ({"gpus": GPU | {"before": [{"name": "NVIDIA L4"}]}}, "showed no H100"),
    "a loss of 9.9 on the second range": ({"holdout": SECOND | {"val_loss": 9.9}}, "6.6"),
    "no second range": ({"holdout": "left out"}, "not evaluated on the track's second"),
    "another second range": ({"holdout": SECOND | {"first": 10_485_760}}, "not evaluated on"),
    "another validation shard": (
        {"data": HONEST["data"] | {"val_shard_sha256": "ab" * 32}},
        "validated on another shard",
    ),
    "no hash of the validation shard": (
        {"data": HONEST["data"] | {"val_shard_sha256": None}},
        "validated on another shard",
    ),
    "another training shard": (
        {"data": HONEST["data"] | {"train_shards": as_run()["data"]["train_shards"]}},
        "trained on other shards",
    ),
    "fewer validation tokens": (
        {"data": HONEST["data"] | {"val_tokens": 65_536}},
        "not validated on 10,485,760",
    ),
}


@pytest.mark.parametrize("how", RELABELLED)
def test_a_relabelled_record_does_not_count(how, records, tmp_path):
    changes, why = RELABELLED[how]
    add(records, tmp_path / "s", [60.0] * 3, **changes)
    found = entry(records)
    assert not found["valid"] and any(why in each for each in found["why_not"])


@pytest.fixture
def git(tmp_path):
    def run(*words):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)

    run("init", "-q")
    return run


def test_a_date_before_the_commit_that_ran_is_a_problem(records, tmp_path, git):
    git("commit", "-q", "--allow-empty", "-m", "code")
    head = git("rev-parse", "HEAD").stdout.strip()
    add(records, tmp_path / "s", [60.0] * 3, git={"commit": head, "dirty": False})
    assert ["a time after its commit" in text for text in problems(records)] == [True] * 3


def test_whoever_dates_a_run_back_does_not_choose_the_data(records, tmp_path, git):
    """Which tokens of the shard are evaluated no hash pins: the first to land does."""
    add(records, tmp_path / "s", [60.0] * 3)
    git("add", "records")
    git("commit", "-qm", "the first record")
    early, easier = START - timedelta(days=365), HONEST["data"] | {"val_sha256": "cc" * 32}
    add(records, tmp_path / "t", [50.0] * 3, start=early, data=easier)
    landing.landings.cache_clear()
    ours, theirs = judge.board(store.load(records))[0]["entries"]
    assert ours["valid"] and ours["date"] == "2026-01-31"
    assert theirs["why_not"] == ["validated on other tokens than the track's"]
