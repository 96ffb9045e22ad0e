"""A run of a small model on a CPU that says it is the record on eight H100s."""

import shutil
import tomllib
from pathlib import Path

import pytest

from jspeed.board.records import landing

from ..record.synthetic_runs import as_run
from .races import listed, problems
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


@pytest.fixture
def add_as_of_h100s(add):
    def honest(seconds, **changes):
        values = {name: value for name, value in (HONEST | changes).items() if value != "left out"}
        return add(seconds, LOSSES, **values)

    return honest


def test_a_record_of_h100s_counts(records, add_as_of_h100s):
    add_as_of_h100s([61.0, 60.0, 62.0])
    assert listed(records)[0]["valid"] and problems(records) == []


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
    "fewer validation tokens": ({"data": HONEST["data"] | {"val_tokens": 65_536}}, "10,485,760"),
}


@pytest.mark.parametrize("how", RELABELLED)
def test_a_relabelled_record_does_not_count(how, records, add_as_of_h100s):
    changes, why = RELABELLED[how]
    add_as_of_h100s([60.0] * 3, **changes)
    (found,) = listed(records)
    assert not found["valid"] and any(why in each for each in found["why_not"])


def test_a_date_before_the_commit_that_ran_is_a_problem(records, add_as_of_h100s, git):
    git("commit", "-q", "--allow-empty", "-m", "code")
    head = git("rev-parse", "HEAD")
    add_as_of_h100s([60.0] * 3, git={"commit": head, "dirty": False})
    assert ["a time after its commit" in text for text in problems(records)] == [True] * 3


def test_whoever_dates_a_run_back_does_not_choose_the_data(records, add_as_of_h100s, git):
    """Which tokens of the shard are evaluated no hash pins: the first to land does."""
    add_as_of_h100s([60.0] * 3)
    git("add", "records")
    git("commit", "-qm", "the first record")
    easier = HONEST["data"] | {"val_sha256": "cc" * 32}
    add_as_of_h100s([50.0] * 3, days=-365, data=easier)
    landing.landings.cache_clear()
    ours, theirs = listed(records)
    assert ours["valid"] and ours["date"] == "2026-01-31"
    assert theirs["why_not"] == ["validated on other tokens than the track's"]
