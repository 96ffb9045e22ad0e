"""Records that no honest run makes: each is refused or shown, beside honest ones that count."""

import json

import pytest

from jspeed.board.records import landing, store, trust
from jspeed.record.run_json import content_hash

from ..record.synthetic_runs import NOW, START, as_run, make_series, source_of
from .races import CHILD, PARENT, entries, listed, make_race, problems, rules

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


def test_honest_runs_count(records, add):
    rules(records, more="[holdout]\nunread = true\nmost_above = 0.1\nreason = 'a test'")
    add([60.0] * 3, **NEW, unread=UNREAD)
    assert entries(records)["stdlib"]["valid"] and problems(records) == []


def test_a_recipe_that_reaches_into_the_program_does_not_count(records, add):
    source = source_of() + "\nimport sys\n"
    add([60.0] * 3, source=source, **NEW)
    found = entries(records)["stdlib"]
    assert not found["valid"] and "its recipe imports sys in line" in found["why_not"][0]


UNFAIR = {
    "a table in the first state": (carrying(**{"initial state": 4225}), "holds 4,225"),
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
    "a callback": (NEW | {"carried": CARRIED | {"calls": ["pure_callback"]}}, "pure_callback"),
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
def test_what_was_learned_before_the_clock_does_not_count(what, records, add):
    rules(records, more="[holdout]\nunread = true\nmost_above = 0.1\nreason = 'a test'")
    changes, why = UNFAIR[what]
    changes = {"unread": UNREAD} | changes
    if changes["unread"] is None:
        del changes["unread"]
    add([60.0] * 3, **changes)
    (entry,) = listed(records)
    assert not entry["valid"] and any(why in each for each in entry["why_not"])


@pytest.mark.parametrize("seconds", [7.3, 0.7])
def test_runs_that_are_added_later_move_no_entry(records, add, seconds):
    add([2.4, 2.5, 2.4], **NEW)
    before = entries(records)["stdlib"]["seconds"]
    add([seconds] * 5, days=2, **NEW)
    entry = entries(records)["stdlib"]
    assert entry["seconds"] == before and len(entry["again"]) == 5


def test_a_race_on_a_busy_machine_moves_no_parent(records, tmp_path, add):
    add([60.0, 61.0, 62.0], **PARENT)
    before = entries(records)["stdlib"]["seconds"]
    seconds = [90.0, 91.0] * 3, [80.0, 81.0] * 3
    store.add([make_race(tmp_path / "race", PARENT, CHILD, *seconds)], records)
    assert entries(records)["stdlib"]["seconds"] == before


def copied(**changes):
    """Others' runs under another name: the losses of every evaluation are theirs."""
    return changes | {"source": source_of(0.3, "Mine."), "fields": {"RATE": 0.3}}


def test_losses_under_another_name_are_a_copy(records, tmp_path, add):
    add([60.0] * 3, **NEW)
    add([20.0] * 3, **copied(recipe="mine", **NEW))
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
    (entry,) = listed(records)
    assert "a planned run was interrupted; resume it" in entry["why_not"]


def test_two_runs_are_too_few(records, add):
    add([60.0] * 2, [1.30, 1.3001], **NEW)
    (entry,) = listed(records)
    assert "2 runs converged, fewer than 3" in entry["why_not"]


def test_more_work_than_devices_do_is_a_problem(records, add):
    add([2.4] * 3, flops_per_token=1e11, **NEW)
    assert sum("FLOPs on 1 devices" in text for text in problems(records)) == 3


def commit(git):
    git("add", "records")
    git("commit", "-qm", "more")
    return git("rev-parse", "HEAD")


def test_a_commit_that_nobody_has_is_a_problem(records, add, git):
    honest = {"git": {"commit": commit(git), "dirty": False}}
    late = (NOW - START).days - 1
    add([60.0] * 3, days=late, **NEW, **honest)
    assert not [text for text in problems(records) if "git.commit" in text]
    forged = {"git": {"commit": "f" * 40, "dirty": False}, "recipe": "mine"}
    add([9.0] * 3, days=late, **copied(**NEW, **forged))
    found = [text for text in problems(records) if "git.commit" in text]
    assert len(found) == 3 and "a commit of this repository" in found[0]


def test_records_and_rules_are_only_added_to(records, git, add):
    def said():
        return [problem.text for problem in trust.append_only(store.read(records), base)]

    add([60.0] * 3)
    base = commit(git)
    assert said() == []
    add([60.0] * 3, days=2, **NEW)
    assert said() == []
    rules(records, more="[holdout]\nmost_above = 9.0")
    next(records.rglob("*-s1-*.json")).unlink()
    assert len(said()) == 2 and any("another track" in text for text in said())
    add([60.0] * 3, days=4)
    assert sum("make the run again" in text for text in said()) == 3


def test_the_rules_of_a_track_without_records_may_change(records, git):
    base = commit(git)
    rules(records, more="[holdout]\nmost_above = 9.0")
    assert list(trust.append_only(store.read(records), base)) == []


def test_what_landed_first_is_the_entry_whatever_its_dates(records, git, add):
    add([2.4, 2.5, 2.4], days=9, **NEW)
    commit(git)
    add([7.3] * 5, **NEW)
    landing.landings.cache_clear()
    assert entries(records)["stdlib"]["seconds"]["n"] == 3
