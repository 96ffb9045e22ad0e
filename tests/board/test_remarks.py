"""Notes on a run: data that are not its track's, a recipe name that is taken."""

from pathlib import Path
from typing import Any

import pytest

from jspeed.board import hooks
from jspeed.board.records import remarks, store
from jspeed.record.run_json import write_run
from jspeed.run.console import closing
from jspeed.run.find_recipe import find

from ..record.synthetic_runs import SHA, as_run, make_run, source_of

PINS = f"""
title = "A track in a test"
rank = "timed_seconds"
target_loss = 1.4
data = {{name = "stdlib", val_sha256 = "{"dd" * 32}", train_sha256 = "{SHA}"}}
timing = {{text = "the clock", resumed = false}}
significance = {{text = "the test", test = "t", p = 0.01, failures = 1, source = "none"}}
"""
LOADER = ("batches", "bytes_read", "wait_p50", "wait_p99", "wait_max", "queue_empty",
"shard_switches",
          "dropped_tokens")  # fmt: skip


@pytest.fixture
def records(tmp_path: Path) -> Path:
    home = tmp_path / "records" / "stdlib" / "cpu"
    home.mkdir(parents=True)
    (home / "track.toml").write_text(PINS)
    return tmp_path / "records"


def on(**changes: Any) -> dict[str, Any]:
    return as_run(recipe="own", data=as_run()["data"] | changes)


def test_a_run_on_its_tracks_data_says_nothing(records: Path) -> None:
    assert remarks.remarks(on(), records) == []
    longer = [
        *as_run()["data"]["train_shards"],
        {"name": "2", "sha256": "ab" * 32, "first": 0, "end": 9},
    ]
    assert remarks.remarks(on(train_shards=longer, fingerprint="cc" * 8), records) == []
    assert remarks.remarks(on(val_sha256=None), records) == [], "interrupted: nothing is known"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"val_sha256": "ab" * 32}, "validated on other tokens than the track's (stdlib)"),
        ({"train_shards": [{"name": "1", "sha256": "ab" * 32}]}, "trained on other shards"),
    ],
)
def test_a_run_on_other_data_says_so(records: Path, changes: dict[str, Any], says: str) -> None:
    (remark,) = remarks.remarks(on(**changes), records)
    assert remark.startswith(says) and "the run does not count on track stdlib/cpu" in remark


def test_a_run_that_is_too_large_for_its_track_says_so(records: Path) -> None:
    path = records / "stdlib" / "cpu" / "track.toml"
    path.write_text(f"{PINS}model = {{most_parameters = 1000}}\n")
    large = on() | {"parameters": 1008, "parameter_table": {}}
    (remark,) = remarks.remarks(large, records)
    assert remark.startswith("1,008 parameters") and remark.endswith("on track stdlib/cpu")
    assert remarks.remarks(large | {"parameters": 1000}, records) == []


def test_a_run_with_retrieval_on_a_track_without_says_so(records: Path) -> None:
    told = on() | {"retrieval": {"lengths": [6], "recent": 96, "top": 4, "tokens": 10}}
    (remark,) = remarks.remarks(told, records)
    assert remark.endswith("with retrieval allows: the run does not count on track stdlib/cpu")
    (records / "stdlib" / "cpu" / "track.toml").write_text(f"{PINS}model = {{retrieval = true}}\n")
    assert remarks.remarks(told, records) == remarks.remarks(on(), records) == []


@pytest.mark.parametrize(
    ("reached", "begins"), [(True, "reached 1.4 on your "), (False, "a run on your ")]
)
def test_the_library_of_another_python_is_no_failure(records, reached, begins):
    path = records / "stdlib" / "cpu" / "track.toml"
    other = on(val_sha256="ab" * 32, python="CPython 3.13.5") | {"reached": reached}
    (remark,) = remarks.remarks(other, records)
    assert "not comparable" in remark, "a track that ranks no Python's library"
    path.write_text(PINS.replace('name = "stdlib"', 'name = "stdlib", python = "CPython 3.11.7"'))
    (remark,) = remarks.remarks(other, records)
    assert remark.startswith(f"{begins}CPython 3.13.5's library;") and "3.11.7" in remark
    pinned = path.read_text()
    path.write_text(pinned.replace('name = "stdlib"', 'name = "stdlib", val_tokens = 9', 1))
    (remark,) = remarks.remarks(other, records)  # once the other Python was blamed for it
    tokens = other["data"]["val_tokens"]
    assert remark.startswith(f"validation is on {tokens:,} tokens and the track's on 9: the run")
    path.write_text(pinned)
    assert remarks.remarks(on(python="CPython 3.11.7"), records) == []
    (remark,) = remarks.remarks(on(val_sha256="ab" * 32), records)
    assert "not comparable" in remark, "text of another kind"


def test_the_track_that_the_run_enters_is_named(records: Path) -> None:
    (records / "stdlib" / "gpu").mkdir()
    (records / "stdlib" / "gpu" / "track.toml").write_text(PINS + 'hardware = {platform = "gpu"}\n')
    path = records / "stdlib" / "cpu" / "track.toml"
    path.write_text(PINS + 'hardware = {platform = "cpu"}\n')
    run = on(val_sha256="ab" * 32) | {
        "devices": {"kind": "L40S", "count": 1, "processes": 1, "platform": "gpu"}
    }
    (remark,) = remarks.remarks(run, records)
    assert "the run does not count on track stdlib/gpu" in remark


def test_no_track_and_no_records_are_no_remark(tmp_path: Path) -> None:
    assert remarks.remarks(on(val_sha256="ab" * 32), tmp_path) == []


def test_a_new_source_under_a_known_name_says_so(records: Path, tmp_path: Path) -> None:
    store.add([make_run(tmp_path / "run", recipe="own")], records)
    assert remarks.remarks(as_run(recipe="own"), records) == []
    (remark,) = remarks.remarks(as_run(recipe="own", source=source_of(0.7)), records)
    assert remark.startswith("another recipe with a different source is named 'own' too")
    assert "RECIPE" in remark
    # a recipe of the package
    (remark,) = remarks.remarks(as_run(recipe="shakespeare-char"), records)
    assert "'shakespeare-char'" in remark


def test_a_run_ends_with_its_remarks(records, monkeypatch, tmp_path):
    monkeypatch.setattr(remarks.remarks, "__defaults__", (records,))
    run = on(val_sha256="ab" * 32) | {"loader": dict.fromkeys(LOADER, 0)}
    *_, note, last = closing(run, tmp_path, remarks=remarks.remarks(run))
    assert "note: validated on other tokens than the track's" in note
    assert "1.3900 nats/token <= 1.4" in last


def test_the_repositorys_tracks_with_records_pin_their_data() -> None:
    """Else a run could not say that its data are others, and an earlier run on others would set the
    track's."""
    found = store.load(remarks.RECORDS)
    for name in {row.track for row in found.rows}:
        track = found.tracks[name]
        assert track.rules["data.val_sha256"] and track.rules["data.train_sha256"], name
    assert all(remarks.other_data(row.run, found.tracks[row.track]) is None for row in found.rows)


def test_a_track_says_where_the_second_range_begins(tmp_path, monkeypatch):
    recipe = find("stdlib", trace=False).recipe
    text = (remarks.RECORDS / "stdlib/cpu/track.toml").read_text().split("\n# What")[0]
    home = tmp_path / "stdlib" / "cpu"
    home.mkdir(parents=True)
    (home / "track.toml").write_text(text.replace("[holdout]\n", "[holdout]\nfirst = 1280\n"))
    monkeypatch.setattr(remarks, "RECORDS", tmp_path)
    assert hooks.second_range(recipe) == 1280
    monkeypatch.setattr(remarks, "RECORDS", tmp_path / "of an installed package")
    assert hooks.second_range(recipe) is None


def test_the_parent_is_its_newest_record_of_that_validation(tmp_path: Path) -> None:
    home = tmp_path / "stdlib" / "cpu" / "parent"
    home.mkdir(parents=True)
    run = as_run(recipe="child", parent="parent")
    assert hooks.parent_curve(run, tmp_path) is None
    assert hooks.parent_curve(run | {"parent": None}, tmp_path) is None
    for day, seconds, changes in (
        (1, 90.0, {}),
        (2, 80.0, {}),
        (3, 70.0, {"status": "stopped"}),
        (4, 60.0, {}),
    ):
        here = tmp_path / str(day)
        write_run(here, as_run(seconds, recipe="parent", **changes))
        content = (here / "run.json").read_bytes()
        (home / f"2026010{day}T000000Z-s1-00000000.json").write_bytes(
            content if day < 4 else b"{"
        )  # the last is broken
    label, points = hooks.parent_curve(run, tmp_path)
    assert label == "parent parent, 1.390 in 80 s" and points[-1] == (80.0, 1.39)
    of_fields = as_run(recipe="parent", overrides={"RATE": 0.3})
    assert hooks.parent_curve(of_fields, tmp_path)[0] == "recorded parent, 1.390 in 80 s"
    other = run | {"devices": run["devices"] | {"kind": "GPU"}}
    assert hooks.parent_curve(other, tmp_path)[0].endswith("80 s, another machine")
    for sha in ("0" * 64, None):
        assert (
            hooks.parent_curve(run | {"data": run["data"] | {"val_sha256": sha}}, tmp_path) is None
        )
    assert hooks.parent_curve(run | {"track": "other/cpu"}, tmp_path) is None
