"""Comparison of two recipes: the text of the verdict, and the differences between their sources."""

import re
from pathlib import Path

import pytest

from jspeed.board import compare, judge
from jspeed.board.records import store

from ..record.synthetic_runs import as_run, make_run, source_of
from ..refusals import refused
from .races import CHILD, PARENT, ROUNDS, make_race


def said(records: Path, a: str = "child", b: str = "stdlib") -> str:
    found = store.load(records)
    tracks = judge.board(found)
    sides = [compare.find_side(text, tracks, found.sources) for text in (a, b)]
    return "\n".join(compare.speed(*sides, judge.board_and_rounds(found)[1]))


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return tmp_path / "records"


def test_what_was_raced_is_answered_with_its_interval(records: Path, tmp_path: Path) -> None:
    store.add([make_race(tmp_path / "r", PARENT, CHILD, *ROUNDS)], records)
    text = said(records)
    assert text.startswith("child is faster than stdlib by 16.1%")
    assert re.search(r"It takes 0\.839 \(0\.\d+ to 0\.\d+\) of stdlib's time, in 2 inter", text)
    assert "Mean times on the board: 50.8 s and 60.5 s; steps: 300 and 300." in text
    back = said(records, "stdlib", "child")
    assert back.startswith("stdlib is slower than child by 19.2%") and "1.192 (" in back


def test_what_was_not_raced_says_so(records: Path, add) -> None:
    add([60.0, 62.0, 61.0])
    add([60.5, 58.0, 62.0], **CHILD)
    text = said(records)
    assert text.startswith("child is not shown to be faster or slower than stdlib: 1.4% faster")
    assert "in separate runs" in text and "Target: 1.4." in text


GPU = {"kind": "H100", "count": 1, "processes": 1, "platform": "gpu"}
OTHER = {"val_sha256": "ab" * 32, "fingerprint": "cc" * 8, "val_fingerprint": "ff" * 8}
TARGETS = "Not comparable: they ran for different targets or on different data ("


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, ["in one comparison, too few to tell"]),
        ({"devices": GPU}, ["1 x H100 and 1 x cpu", "jspeed leaderboard race stdlib child"]),
        ({"track": "other/cpu"}, [TARGETS]),
        ({"data": as_run()["data"] | OTHER}, [TARGETS]),
    ],
    ids=["one run each", "other devices", "another track", "other data"],
)
def test_what_one_run_each_shows(records: Path, tmp_path: Path, changes, parts) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", 50.0, **CHILD, **changes)]
    store.add(runs, records)
    text = said(records)
    assert all(part in text for part in parts)
    assert text.startswith(TARGETS) == (TARGETS in parts)


def test_a_recipe_without_runs_and_one_that_is_not_there(records: Path, tmp_path: Path) -> None:
    store.add([make_run(tmp_path / "a", **CHILD)], records)
    assert said(records, "child", "r21").endswith("r21 has no runs among the records.")
    own = tmp_path / "mine.py"
    own.write_text(source_of(0.5))
    assert "mine has no runs" in said(records, str(own), "child")
    for text, says in [
        ("chidl", "did you mean 'child'"),
        ("child@ffff", "no recipe 'child@ffff'"),
        ("no.py", "does not exist"),
    ]:
        refused(says, said, records, text, "child")


def test_what_differs_is_named() -> None:
    before = (
        source_of(0.1) + "\nDROPPED = 'x'\nTABLE = {loss: RATE}\n\n\ndef old(x):\n    return x\n"
    )
    after = (
        source_of(0.2).replace("x * RATE", "x + RATE")
        + "\nNEW = (1, 2)\nTABLE = {loss: 2 * RATE}\n"
    )
    found = compare.changes(after, before)
    assert found.phrases["changed"] == dict(
        fields=["RATE from 0.1 to 0.2"], functions=["loss"], names=["TABLE"]
    )
    assert found.phrases["new"] == {"fields": ["NEW = (1, 2)"], "functions": [], "names": []}
    assert found.phrases["gone"] == {"fields": ["DROPPED = 'x'"], "functions": ["old"], "names": []}
    # By hand: RATE, return, NEW, TABLE in; RATE, return, DROPPED, TABLE, two blank lines and the
    # two of old out.
    assert (found.added, found.removed) == (4, 8)
    assert "+RATE = 0.2" in found.diff and "-def old(x):" in found.diff
    assert compare.change_lines(found)[:2] == [
        "4 lines added, 8 removed.",
        "Changed fields: RATE from 0.1 to 0.2.",
    ]
    assert compare.changes(after, after) == compare.changes("", "")
    assert compare.changes("(", "").added == 1


def test_a_file_that_is_no_text_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_bytes(b"\xff\xfe\x00")
    refused(r"odd\.py is not UTF-8", compare.find_side, str(tmp_path / "odd.py"), [], {})


def test_runs_that_were_cut_short_do_not_compare(records: Path, add) -> None:
    cut = {"asked_steps": 4, "steps": 4, "planned_steps": 300, "status": "stopped"}
    add([9.0, 9.1], [3.9, 4.0], **cut)
    add([50.0], **CHILD)
    assert "Not comparable: the runs of stdlib" in said(records)


def test_names_assigned_together_or_with_a_type_are_named() -> None:
    found = compare.changes("A, B = 1, 3\nC: int = 2\n--x\n", "A, B = 1, 2\nC: int = 1\n")
    assert [
        text.replace("(", "").replace(")", "") for text in found.phrases["changed"]["fields"]
    ] == ["A, B from 1, 2 to 1, 3", "C from 1 to 2"]
    assert (found.added, found.removed) == (3, 2), "a line that begins with two signs counts"
