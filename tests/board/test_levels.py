"""Levels of trust: what an entry must show to be audited or reproduced, and where each is read."""

import json

import pytest

from jspeed.board import formatting
from jspeed.board.records import store
from jspeed.board.views import page, readme, terminal
from jspeed.record.audits import file_of

from ..record.synthetic_runs import make_series, rewrite
from .races import entries, problems
from .test_trust import NEW


def audit_of(run, /, **changes):
    return {
        "run": run["sha256"],
        "weights": run["sha256"][::-1],
        "made": "2026-03-01T00:00:00Z",
        "commit": None,
        "machine": "another",
        "val_loss": run["val_loss"] + 1e-4,
        "difference": 1e-4,
        "second": None,
        "causality": {"passed": True},
        "numbers": {"evaluation": 34},
    } | changes


def audit(records, runs=9, **changes):
    """Put an audit beside as many of the runs."""
    for path in sorted(records.rglob("*-s?-*.json"))[:runs]:
        name, content = file_of(audit_of(json.loads(path.read_text()), **changes))
        (path.parent / name).write_bytes(content)


def level(records):
    return entries(records)["stdlib"]["level"]


def test_an_entry_is_audited_once_all_of_its_runs_are(records, add):
    add([60.0] * 3, **NEW)
    assert level(records) == "reported"
    audit(records, runs=2)
    entry = entries(records)["stdlib"]
    assert entry["level"] == "reported" and "2 of 3 runs" in formatting.trust(entry)
    audit(records)
    assert level(records) == "audited" and problems(records) == []


def test_runs_that_scored_themselves_stay_reported(records, add):
    add([60.0] * 3)
    audit(records)
    entry = entries(records)["stdlib"]
    assert entry["level"] == "reported" and "its own score" in formatting.trust(entry)


AGAIN = {
    "on another machine": ({"machine": "another"}, "reproduced"),
    "on the same machine": ({}, "reported"),
    "on a machine without a name": ({"machine": None}, "reported"),
    "to other losses": ({"machine": "another", "losses": [1.36, 1.361, 1.362]}, "reported"),
    "in twice the time": ({"machine": "another", "seconds": [120.0] * 3}, "reported"),
    "by code that scored itself": ({"machine": "another", "carried": "left out"}, "reported"),
}


@pytest.mark.parametrize("how", AGAIN)
def test_a_recipe_that_ran_again(how, records, add):
    changes, wanted = {"seconds": [61.0] * 3} | AGAIN[how][0], AGAIN[how][1]
    add([60.0] * 3, **NEW)
    values = {name: value for name, value in (NEW | changes).items() if value != "left out"}
    add(days=2, **values)
    assert level(records) == wanted


def test_one_bad_reproduction_takes_no_level_away(records, add):
    add([60.0] * 3, **NEW)
    add([61.0] * 3, days=2, machine="another", **NEW)
    add([200.0] * 3, days=4, machine="slow", **NEW)
    says = formatting.trust(entries(records)["stdlib"])
    assert says.startswith("reproduced") and "1 other machine do not agree" in says


def test_levels_are_on_board_page_and_readme(records, add):
    add([60.0] * 3, **NEW)
    audit(records)
    track = entries(records)["track"]
    assert any(line.startswith("audited: ") for line in terminal.notes(track["entries"][0]))
    assert ", audited 2" in readme.block([track])
    html = page.html([track], {}, {}, "the rule")
    assert 'data-v="audited">audited</td>' in html and "<dt>reproduced</dt>" in html


FALSE = {
    "another loss": ({"val_loss": 1.3}, "val_loss"),
    "a run that is not there": ({"run": "00" * 32}, "'run'"),
    "a leak": ({"causality": {"passed": False}}, "causality.passed"),
    "a table": ({"numbers": {"evaluation": 4225}}, "numbers.evaluation"),
    "a time before the run": ({"made": "2026-01-01T00:00:00Z"}, "'made'"),
    "a time to come": ({"made": "2027-01-01T00:00:00Z"}, "'made'"),
}


@pytest.mark.parametrize("what", FALSE)
def test_an_audit_that_contradicts_its_run(what, records, add):
    add([60.0] * 3, **NEW)
    changes, field = FALSE[what]
    audit(records, runs=1, **changes)
    assert [field in text for text in problems(records)] == [True]


def test_an_audit_of_other_parameters_than_those_kept(records, tmp_path):
    series = make_series(tmp_path / "s", [60.0] * 3, **NEW)
    for folder in series.glob("*-s?"):
        (folder / "model.safetensors").write_bytes(b"parameters")
    store.write_files(store.check_runs([series], records, "https://example.org").files)
    audit(records, runs=1)
    assert ["'weights'" in text for text in problems(records)] == [True]


def test_one_model_audits_no_two_runs(records, add):
    """Losses of seeds differ by less than those of two machines, so another seed's would agree."""
    add([60.0] * 3, **NEW)
    audit(records, weights="ab" * 32)
    assert ["other parameters than those audited" in text for text in problems(records)] == [
        True
    ] * 2


def test_an_audit_that_was_edited_is_refused(records, add):
    add([60.0] * 3, **NEW)
    audit(records, runs=1)
    rewrite(next(records.rglob("audit-*.json")), "val_loss", value=1.39)
    assert any("was changed" in text for text in problems(records))
