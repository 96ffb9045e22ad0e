"""Records that no honest run makes: each is refused or shown, beside honest ones that count."""

import json
import subprocess
from datetime import timedelta

import pytest

from jspeed.board import judge
from jspeed.board.records import store, trust, verify
from jspeed.record.run_json import content_hash

from ..record.synthetic_runs import NOW, START, as_run, make_series, source_of
from .races import CHILD, PARENT, entries, make_race

CARRIED = {
    "numbers": {"initial state": 20, "step": 60, "evaluation": 34},
    "places": {"initial state": 50, "step": 600, "evaluation": 160},
    "arrays": [],
    "calls": [],
}
PROBES = as_run()["probes"] | {"stream_repeats": {"passed": True}}
NEW = {"carried": CARRIED, "probes": PROBES, "weighted": False}
UNREAD = {"tokens": 65536, "sha256": "ab" * 32, "val_loss": 1.40}


def carrying(**numbers):
    return NEW | {"carried": CARRIED | {"numbers": CARRIED["numbers"] | numbers}}


def problems(folder):
    return [problem.text for problem in verify.verify(store.read(folder), NOW)]


def later(days, folder, *given, **changes):
    return make_series(folder, *given, start=START + timedelta(days=days), **changes)


def rule(records, lines):
    path = records / "stdlib/cpu/track.toml"
    path.write_text(path.read_text().replace("[hardware]", f"{lines}\n[hardware]"))


def test_honest_runs_count(records, tmp_path):
    rule(records, "[holdout]\nunread = true\nmost_above = 0.1\nreason = 'a test'")
    store.add([make_series(tmp_path / "s", [60.0] * 3, **NEW, unread=UNREAD)], records)
    assert entries(records)["stdlib"]["valid"] and problems(records) == []


def test_a_recipe_that_reaches_into_the_program_does_not_count(records, tmp_path):
    source = source_of() + "\nimport sys\n"
    store.add([make_series(tmp_path / "s", [60.0] * 3, source=source, **NEW)], records)
    found = entries(records)["stdlib"]
    assert not found["valid"] and "its recipe imports sys in line" in found["why_not"][0]


UNFAIR = {
    "a table in the first state": (
        carrying(**{"initial state": 4225}),
        "initial state holds 4,225",
    ),
    "a table in the steps": (carrying(step=111_488), "step holds 111,488 numbers"),
    "a table in the evaluation": (carrying(evaluation=300), "evaluation holds 300 numbers"),
    "a table of few levels in the first state": (
        NEW | {"carried": CARRIED | {"places": CARRIED["places"] | {"initial state": 4225}}},
        "initial state holds numbers in 4,225 places",
    ),
    "nothing on where numbers are": (
        NEW | {"carried": {name: each for name, each in CARRIED.items() if name != "places"}},
        "does not say in how many places",
    ),
    "rows told by a loader of its own": (NEW | {"told_by": None}, "what code of its own knows"),
    "a callback": (
        NEW | {"carried": CARRIED | {"calls": ["pure_callback"]}},
        "call the host (pure_callback)",
    ),
    "weights of its own": (NEW | {"weighted": True}, "weights of its own"),
    "parameters of another run": (
        NEW | {"fields": {"RATE": 0.1, "init_from": "ab" * 32}},
        "learned before its clock",
    ),
    "a gap": (NEW | {"unread": UNREAD | {"val_loss": 2.9}}, "above the first"),
    "a gap that is no number": (NEW | {"unread": UNREAD | {"val_loss": None}}, "not finite"),
    "no second text": (NEW | {"unread": None}, "left no text"),
}


@pytest.mark.parametrize("what", UNFAIR)
def test_what_was_learned_before_the_clock_does_not_count(what, records, tmp_path):
    rule(records, "[holdout]\nunread = true\nmost_above = 0.1\nreason = 'a test'")
    changes, why = UNFAIR[what]
    changes = {"unread": UNREAD} | changes
    if changes["unread"] is None:
        del changes["unread"]
    store.add([make_series(tmp_path / "s", [60.0] * 3, **changes)], records)
    (entry,) = judge.board(store.load(records))[0]["entries"]
    assert not entry["valid"] and any(why in each for each in entry["why_not"])


def test_slow_runs_by_others_move_no_entry(records, tmp_path):
    store.add([make_series(tmp_path / "s", [2.4, 2.5, 2.4], **NEW)], records)
    before = entries(records)["stdlib"]["seconds"]
    store.add([later(2, tmp_path / "slow", [7.3] * 5, **NEW)], records)
    entry = entries(records)["stdlib"]
    assert entry["seconds"] == before and len(entry["again"]) == 5


def test_fast_runs_that_are_added_later_move_no_entry(records, tmp_path):
    store.add([make_series(tmp_path / "s", [2.4, 2.5, 2.4], **NEW)], records)
    store.add([later(2, tmp_path / "fast", [0.7] * 5, **NEW)], records)
    assert entries(records)["stdlib"]["seconds"]["mean"] == pytest.approx(2.4333, abs=1e-3)


def test_a_race_on_a_busy_machine_moves_no_parent(records, tmp_path):
    store.add([make_series(tmp_path / "s", [60.0, 61.0, 62.0], **PARENT)], records)
    before = entries(records)["stdlib"]["seconds"]
    seconds = [90.0, 91.0] * 3, [80.0, 81.0] * 3
    store.add([make_race(tmp_path / "race", PARENT, CHILD, *seconds)], records)
    assert entries(records)["stdlib"]["seconds"] == before


def copied(folder, seconds, **changes):
    """Others' runs under another name: the losses of every evaluation are theirs."""
    return make_series(
        folder, seconds, source=source_of(0.3, "Mine."), fields={"RATE": 0.3}, **changes
    )


def test_losses_under_another_name_are_a_copy(records, tmp_path):
    store.add([make_series(tmp_path / "s", [60.0] * 3, **NEW)], records)
    store.add([copied(tmp_path / "c", [20.0] * 3, recipe="mine", **NEW)], records)
    found = [text for text in problems(records) if "field 'curve'" in text]
    assert len(found) >= 3 and all("other losses than those of" in text for text in found)


def test_a_run_that_was_made_again_is_out_of_order(records, tmp_path):
    folder = make_series(tmp_path / "s", [60.0] * 3, **NEW)
    path = folder / "1-stdlib-s1" / "run.json"
    run = json.loads(path.read_text())
    run |= {name: run[name].replace("T12:", "T22:") for name in ("started", "ended")}
    path.write_text(json.dumps(run | {"sha256": content_hash(run)}))
    store.add([folder], records)
    assert any("before it in plan-" in text for text in problems(records))


def test_an_interrupted_run_is_no_failure_that_is_allowed(records, tmp_path):
    folder = make_series(tmp_path / "s", [60.0] * 4, **NEW)
    path = folder / "4-stdlib-s4" / "run.json"
    run = json.loads(path.read_text())
    run |= {"status": "interrupted", "val_loss": None, "reached": False}
    path.write_text(json.dumps(run | {"sha256": content_hash(run)}))
    store.add([folder], records)
    (entry,) = judge.board(store.load(records))[0]["entries"]
    assert "a planned run was interrupted; resume it" in entry["why_not"]


def test_two_runs_are_too_few(records, tmp_path):
    store.add([make_series(tmp_path / "s", [60.0] * 2, [1.30, 1.3001], **NEW)], records)
    (entry,) = judge.board(store.load(records))[0]["entries"]
    assert "2 runs converged, fewer than 3" in entry["why_not"]


def test_more_work_than_devices_do_is_a_problem(records, tmp_path):
    store.add([make_series(tmp_path / "s", [2.4] * 3, flops_per_token=1e11, **NEW)], records)
    assert sum("FLOPs on 1 devices" in text for text in problems(records)) == 3


@pytest.fixture
def repository(records):
    def git(*words):
        command = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words)
        return subprocess.run(
            command, cwd=records.parent, check=True, capture_output=True, text=True
        )

    git("init", "-q", "-b", "main")
    git("add", "records")
    git("commit", "-qm", "rules")
    return git


def commit(git):
    git("add", "records")
    git("commit", "-qm", "more")
    return git("rev-parse", "HEAD").stdout.strip()


def test_a_commit_that_nobody_has_is_a_problem(records, repository, tmp_path):
    head = commit_of = repository("rev-parse", "HEAD").stdout.strip()
    late = {"start": NOW - timedelta(days=1)}
    honest = {"git": {"commit": commit_of, "dirty": False}}
    store.add([make_series(tmp_path / "s", [60.0] * 3, **late, **NEW, **honest)], records)
    found = [text for text in problems(records) if "git.commit" in text]
    assert found == [] and head
    forged = {"git": {"commit": "f" * 40, "dirty": False}, "recipe": "mine"}
    store.add([copied(tmp_path / "f", [9.0] * 3, **late, **NEW, **forged)], records)
    found = [text for text in problems(records) if "git.commit" in text]
    assert len(found) == 3 and "a commit of this repository" in found[0]


def test_records_and_rules_are_only_added_to(records, repository, tmp_path):
    store.add([make_series(tmp_path / "s", [60.0] * 3)], records)
    base = commit(repository)
    loaded = store.read(records)
    assert list(trust.append_only(loaded, base)) == []
    store.add([later(2, tmp_path / "t", [60.0] * 3, **NEW)], records)
    assert list(trust.append_only(store.read(records), base)) == []
    rule(records, "[holdout]\nmost_above = 9.0")
    next(records.rglob("*-s1-*.json")).unlink()
    said = [problem.text for problem in trust.append_only(store.read(records), base)]
    assert len(said) == 2 and any("another track" in text for text in said)
    store.add([later(4, tmp_path / "old", [60.0] * 3)], records)
    said = [problem.text for problem in trust.append_only(store.read(records), base)]
    assert sum("make the run again" in text for text in said) == 3


def test_the_rules_of_a_track_without_records_may_change(records, repository):
    base = repository("rev-parse", "HEAD").stdout.strip()
    rule(records, "[holdout]\nmost_above = 9.0")
    assert list(trust.append_only(store.read(records), base)) == []


def test_what_landed_first_is_the_entry_whatever_its_dates(records, repository, tmp_path):
    store.add([later(9, tmp_path / "s", [2.4, 2.5, 2.4], **NEW)], records)
    commit(repository)
    store.add([make_series(tmp_path / "early", [7.3] * 5, **NEW)], records)
    from jspeed.board.records import landing

    landing.landings.cache_clear()
    assert entries(records)["stdlib"]["seconds"]["n"] == 3
