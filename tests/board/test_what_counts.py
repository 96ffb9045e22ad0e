"""Runs that cannot count (other data, dirty tree, cut short, unplanned) change no valid entry, rank
or sigma."""

from datetime import timedelta
from pathlib import Path

import pytest

from jspeed.board import judge
from jspeed.board.board import by_seed, losses
from jspeed.board.records import preregistration, store
from jspeed.board.views import terminal

from ..record.synthetic_runs import START, as_run, make_run, make_series, source_of
from .races import CHILD, PARENT, ROUNDS, entries, listed, make_race, rules

FIRST_SHARD = as_run()["data"]["train_shards"][0]
OTHER = dict(val_sha256="ab" * 32, fingerprint="cc" * 8, val_fingerprint="ff" * 8, name="stdlib")


def on(**changes) -> dict:
    """The data of a run, changed."""
    return {"data": as_run()["data"] | changes}


def shards(*sums: str) -> dict:
    """A run on these training shards, of equal names and sizes."""
    listed = [
        FIRST_SHARD | {"name": f"{n}.bin", "sha256": each * 32} for n, each in enumerate(sums)
    ]
    return on(train_shards=listed, fingerprint=f"{len(sums):02d}" * 8)


def two_days_later(add, losses=(0.50, 0.51, 0.52), **changes) -> None:
    add([1.0, 1.1, 1.2], list(losses), days=2, **changes)


@pytest.fixture
def valid(records, add) -> Path:
    """Records with a valid entry of stdlib, and of its child, which is faster."""
    add([60.0, 61.0, 62.0])
    add([50.0, 51.0, 49.0], **CHILD)
    return records


DAMAGE = {
    "validated on other data": on(**OTHER),
    "trained on other data": on(train_shards=[FIRST_SHARD | {"sha256": "ab" * 32}]),
    "from another second shard on": shards("ab", "cd"),
    "shuffled, with a second shard": on(
        train_shards=[FIRST_SHARD, FIRST_SHARD | {"name": "2.bin", "sha256": "ab" * 32}],
        position=as_run()["data"]["position"] | {"shuffle": "block"},
    ),
    "of a tree with changes": {"git": {"commit": "c0ffee00", "dirty": True}},
    "cut short": dict(
        asked_steps=4, steps=4, planned_steps=300, status="stopped", losses=[3.9, 4.0, 4.2]
    ),
}


@pytest.mark.parametrize("changes", DAMAGE.values(), ids=DAMAGE)
def test_runs_that_cannot_count_change_no_valid_entry(valid, add, changes):
    """The same recipe by hash on the same machine; whatever such runs did, ranks, times, sigma and
    verdicts stay."""
    before = judge.board(store.load(valid))
    two_days_later(add, **changes)
    (track,) = judge.board(store.load(valid))
    assert [entry for entry in track["entries"] if entry["valid"]] == before[0]["entries"]
    assert track["sigma"] == before[0]["sigma"] and track["val_sha256"] == before[0]["val_sha256"]
    (other,) = [entry for entry in track["entries"] if not entry["valid"]]
    assert other["recipe"] == "stdlib" and other["rank"] is None


def test_an_unplanned_run_changes_no_valid_entry(valid, tmp_path):
    before = listed(valid)
    store.add([make_run(tmp_path / "other", 1.0, 9, 0.5)], valid)
    assert listed(valid)[:2] == before


def test_runs_on_other_data_are_an_entry_that_says_so(valid, add):
    two_days_later(add, **on(**OTHER))
    assert [["validated on other tokens than the track's"]] == [
        entry["why_not"] for entry in listed(valid) if not entry["valid"]
    ]


def pin(records, train_sha256):
    """Pin the data of the track to a validation range and a first training shard."""
    path = records / "stdlib/cpu/track.toml"
    pins = f'val_sha256 = "{"dd" * 32}"\ntrain_sha256 = "{train_sha256}"\n[hardware]'
    path.write_text(path.read_text().replace("[hardware]", pins))


def test_an_earlier_run_on_other_data_takes_no_pinned_track(records, add):
    pin(records, FIRST_SHARD["sha256"])
    add([60.0, 61.0, 62.0])
    train = on(train_shards=[FIRST_SHARD | {"sha256": "ab" * 32}])
    for days, changes in ((9, on(**OTHER)), (8, train)):
        add([9.0, 9.1, 9.2], days=-days, **changes)
    assert sorted(entry["why_not"] for entry in listed(records)) == [
        [],
        ["trained on other shards than the track's"],
        ["validated on other tokens than the track's"],
    ]


def test_more_shards_on_disk_or_a_longer_run_are_the_same_data(records, add):
    """FineWeb downloaded in another number of shards: the first are the same files, the fingerprint
    differs."""
    few, many = shards("ab", "cd"), shards("ab", "cd", "ef")
    add([60.0, 61.0, 62.0], [1.390, 1.391, 1.389], **few)
    add([60.5, 61.5], [1.391, 1.390], days=2, **many)
    entry = entries(records)["stdlib"]
    assert entry["valid"] and len(entry["runs"] + entry["again"]) == 5


def test_a_second_shard_is_other_data_where_the_first_is_pinned(records, add):
    pin(records, "ab" * 32)
    add([60.0, 61.0, 62.0], **shards("ab", "cd"))
    two_days_later(add, **shards("ab", "ef"))
    why = [entry["why_not"] for entry in listed(records)]
    assert why == [[], ["trained on other shards than the track's"]]


def test_asking_for_all_steps_starts_no_new_entry(records, add):
    losses = [1.390, 1.391, 1.389]
    add([60.0, 61.0, 62.0], losses)
    two_days_later(add, losses, asked_steps=99_999)
    (entry,) = listed(records)
    assert len(entry["runs"]) == len(entry["again"]) == 3


def run_of_plan(folder, name, *values, minute=31, **changes):
    """Make a run again, with other values, in its place of the plan."""
    plan = preregistration.read_preregistration(folder / "plan.json")
    place = {"plan": {"sha256": plan["sha256"], "folder": name}}
    made = {"started": START + timedelta(minutes=minute)} | place | changes
    make_run(folder / name, *values, **made)


def test_a_plan_may_span_machines_where_steps_are_ranked(records, tmp_path):
    rules(records, "steps")
    folder = make_series(tmp_path / "s", [60.0, 61.0, 62.0])
    other = as_run()["devices"] | {"kind": "another", "processes": 4}
    run_of_plan(folder, "3-stdlib-s3", 9.0, 3, 1.390, devices=other)
    store.add([folder], records)
    (entry,) = listed(records)
    assert entry["missing"] == 0 and len(entry["runs"]) == 3


def test_planned_runs_that_ran_on_other_data_are_missing(records, tmp_path):
    """Nobody gets rid of a bad run by sending it to other data, or to another machine."""
    folder = make_series(tmp_path / "s", [60.0, 61.0, 62.0, 63.0])
    run_of_plan(folder, "4-stdlib-s4", 9.0, 4, 0.5, **on(**OTHER))
    store.add([folder], records)
    one, two = listed(records)
    assert not one["valid"] and not two["valid"]
    assert {
        "of 4 planned runs 1 are missing, 0 are extra",
        "of 4 planned runs 3 are missing, 0 are extra",
    } == {why for entry in (one, two) for why in entry["why_not"] if "planned" in why}


def test_only_complete_plans_of_a_clean_commit_feed_sigma(valid, tmp_path, add):
    """Another recipe's junk: a dirty tree, four steps, a run missing, no plan."""
    sigma = entries(valid)["track"]["sigma"]
    junk = {"recipe": "junk", "source": source_of(0.5), "fields": {"RATE": 0.5}}
    add([9, 9], [1.2, 1.39], days=2, git={"commit": "c0", "dirty": True}, **junk)
    cut = {"asked_steps": 4, "steps": 4, "planned_steps": 300, "status": "stopped"}
    cut |= {"started": START + timedelta(days=4)}
    add([9.0, 9.1], [3.0, 4.0], **cut, **junk)
    folder = make_series(tmp_path / "m", [9.0, 9.1, 9.2], [1.2, 1.3, 1.39], **junk)
    (folder / "3-junk-s3" / "run.json").unlink()
    unplanned = [make_run(tmp_path / str(n), 9.0, n, 1.1 + n / 10, **junk) for n in (1, 2)]
    store.add([folder, *unplanned], valid)
    assert entries(valid)["track"]["sigma"] == sigma
    said = " ".join(terminal.rules(judge.board(store.load(valid))[0]).split())
    assert f"sigma {sigma:.4f} (of a run's loss, over seeds)" in said


@pytest.mark.parametrize(
    "changes", [on(**OTHER), {"git": {"commit": "c0ffee00", "dirty": True}}], ids=["data", "dirty"]
)
def test_a_race_that_cannot_count_says_nothing(valid, tmp_path, changes):
    before = entries(valid)["child"]["better"]
    seconds = [9.0, 9.1, 9.0, 9.1], [90.0, 91.0, 90.0, 92.0]
    store.add([make_race(tmp_path / "race", PARENT, CHILD, *seconds, **changes)], valid)
    assert before["verdict"] == "yes"
    found = [entry["better"] for entry in listed(valid) if entry["valid"] and entry["better"]]
    assert found == [before]


def test_of_a_repeated_seed_the_first_run_counts_everywhere(records, add):
    add([60.0, 61.0], [1.390, 1.392])
    add([60.0, 61.0], [1.30, 1.31], days=2)
    entry = entries(records)["stdlib"]
    assert losses(entry["runs"]) == [1.390, 1.392] and len(entry["runs"] + entry["again"]) == 4
    assert (entry["loss"]["n"], entry["loss"]["mean"]) == (2, pytest.approx(1.391))
    assert {run["val_loss"] for run in by_seed(entry["runs"]).values()} == {1.390, 1.392}


def test_a_run_of_unknown_data_does_not_count(valid, add, monkeypatch):
    """Should one come among the records, although ``leaderboard add`` refuses it."""
    before = listed(valid)
    monkeypatch.setattr(store, "shards_of", lambda run: ("any",))
    recipe = {"recipe": "own", "source": source_of(0.5), "fields": {"RATE": 0.5}}
    for days, fingerprint in ((2, as_run()["data"]["fingerprint"]), (3, "99" * 8)):
        unknown = on(val_sha256=None, train_shards=[], fingerprint=fingerprint)
        for changes in ({}, recipe):
            add([1.0, 1.1], [0.5, 0.6], days, **unknown, **changes)
    found = listed(valid)
    assert found[:2] == before
    assert all("its data are not identified by hashes" in entry["why_not"] for entry in found[2:])


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": {"kind": "another", "count": 1, "processes": 1, "platform": "cpu"}},
        {"machine": "another"},
        {"minute": 20 * 24 * 60},
    ],
    ids=["devices", "machine", "order"],
)
def test_a_round_not_in_turn_on_one_machine_does_not_count(records, tmp_path, changes):
    folder = make_race(tmp_path / "race", PARENT, CHILD, *ROUNDS)
    run_of_plan(folder, "2-child-s1", 1.0, 1, **CHILD | {"minute": 11} | changes)
    store.add([folder], records)
    (pair, rounds), *_ = judge.board_and_rounds(store.load(records))[1].items()
    assert len(rounds) == 1 and rounds[0] == ([60.0, 61.0], [50.0, 52.0])
