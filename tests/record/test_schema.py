"""run.json: what is written is read back, and each invalid field gives an error message."""

import copy
import json
import math
from pathlib import Path

import pytest

from jspeed.errors import BadInput
from jspeed.record.consistent import PROBES
from jspeed.record.run_json import check, content_hash, parse_run, read_run, write_run
from jspeed.record.schema import Run, count_parameters

from ..refusals import refused
from .synthetic_runs import as_run

RUN = as_run(60.5) | {
    "fields": {"layers": 4, "rates": [0.02, 0.001], "clip": None},
    "plan": {"sha256": "", "folder": ""},
    "loader": {"waits": 3, "rate": 0.5},
}
TABLE = {"rows": {"shape": [1000, 8], "axes": ["row", "model"], "reads": 2}}
TABLE |= {"values": {"shape": [3, 100, 8], "axes": ["table", "token", "model"], "reads": 1}}
TABLE |= dict(head={"shape": [100, 8], "axes": ["vocab", "model"]}, gain={"shape": [], "axes": []})
RUN |= {"holdout": {"first": 65536, "tokens": 65536, "sha256": "ab" * 32, "val_loss": 1.395}}
RUN |= dict(
    parameter_table=TABLE, parameters=8000 + 2400 + 800 + 1, active_parameters=16 + 24 + 800 + 1
)
RUN |= {
    "gpus": {"driver": "570", "cuda": None, "links": [], "before": [], "after": []},
    "resumed": [],
}
HELD = {"program": "step", "shape": [100], "dtype": "float32", "numbers": 100}
RUN |= {
    "code": {"modules": 100, "sha256": "ab" * 32, "extension": "cd" * 32},
    "clock_stepped": 30.0,
    "unread": {"tokens": 65536, "sha256": "ab" * 32, "val_loss": 1.395},
    "carried": {"numbers": {"step": 120}, "places": {"step": 600}, "arrays": [HELD], "calls": []},
    "programs": {"loaded": False, "sha256": {"step": ["ab" * 32]}},
    "probes": RUN["probes"] | {"stream_repeats": {"passed": True}},
    "weighted": False,
    "told_by": "",
}
RUN |= {"sha256": content_hash(RUN)}
OPTIONAL = {
    "code",
    "unread",
    "clock_stepped",
    "carried",
    "programs",
    "weighted",
    "told_by",
    "holdout",
    "kernels",
    "head_chunk",
    "remat",
    "parameter_table",
}


def changed(place: str, value: object) -> dict:
    """Return the run above with one value replaced; ``place`` looks like ``ledger.1.seconds``."""
    run = copy.deepcopy(RUN)
    *way, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    node = run
    for part in way:
        node = node[part]
    node[last] = value
    return run


def message(run: object) -> str:
    return refused("", check, run)


def test_a_run_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = write_run(tmp_path / "new" / "run", RUN)
    assert path == tmp_path / "new" / "run" / "run.json"
    assert read_run(path) == read_run(path.parent) == json.loads(path.read_text()) == RUN
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]


def test_another_schema_is_neither_read_nor_written(tmp_path: Path) -> None:
    for schema in (1, 3):
        assert message(RUN | {"schema": schema}).startswith("field 'schema': expected 2")
        refused("written: field 'schema'", write_run, tmp_path / "new", RUN | {"schema": schema})
    assert not (tmp_path / "new").exists()


def test_a_run_whose_fields_had_hashes_each_is_read(tmp_path: Path) -> None:
    older = RUN | {"digests": {"seed": "0123456789abcdef"}}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(older | {"sha256": content_hash(older)}))
    assert read_run(path)["seed"] == RUN["seed"]


def test_the_same_run_is_the_same_bytes(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", RUN).read_bytes()
    backwards = dict(reversed(RUN.items()))
    assert write_run(tmp_path / "b", backwards).read_bytes() == first
    assert first.endswith(b"}\n") and first.startswith(b'{\n  "schema": 2,')


def test_the_types_cover_every_field() -> None:
    assert set(Run.__annotations__) == set(RUN)


@pytest.mark.parametrize("name", sorted(set(RUN) - OPTIONAL))
def test_each_field_is_required(name: str) -> None:
    run = {key: value for key, value in RUN.items() if key != name}
    assert f"field '{name}': expected" in message(run) and "found no such field" in message(run)


@pytest.mark.parametrize(
    ("names", "change"),
    [
        (["kernels"], {}),
        (["head_chunk", "remat"], {}),
        ([], {"head_chunk": None}),
        (["parameter_table", "active_parameters"], {"parameters": 5}),
    ],
)
def test_older_runs_lack_what_came_later(names, change) -> None:
    check({key: value for key, value in RUN.items() if key not in names} | change)


def test_kernels_are_checked_where_a_run_has_them() -> None:
    kernels = {key: value for key, value in RUN["kernels"].items() if key not in ("own", "calls")}
    check(changed("kernels", kernels))
    for place, value, says in (
        ("kernels.calls", {"a": 0}, "'kernels.calls.a': expected a whole number of"),
        ("kernels.refused", [1], "'kernels.refused[0]': expected text"),
        ("head_chunk", 0, "'head_chunk': expected a whole number of 1 or more"),
    ):
        assert message(changed(place, value)).startswith(f"field {says}")


def test_every_probe_is_required_of_a_run_that_had_it() -> None:
    for name in PROBES:
        probes = {key: value for key, value in RUN["probes"].items() if key != name}
        assert message(RUN | {"probes": probes}).startswith(
            f"field 'probes.{name}': expected a verdict"
        )
    probes = {key: value for key, value in RUN["probes"].items() if key != "replicas_agree"}
    older = {key: value for key, value in RUN.items() if key != "kernels"}
    check(older | {"probes": probes})


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("parameters", 11_200, "field 'parameters': expected 11201"),
        ("active_parameters", 11_201, "field 'active_parameters': expected 841"),
        ("parameter_table.rows.reads", 3, "field 'active_parameters': expected 849, which follows"),
        ("parameter_table.values.axes", ["token", "model"], "field 'parameter_table.values.axes'"),
        ("parameter_table.rows.shape", [-1, 8], "field 'parameter_table.rows.shape[0]'"),
    ],
)
def test_both_numbers_of_parameters_follow_from_the_table(place, value, says):
    assert message(changed(place, value)).startswith(says)


def test_a_token_reads_no_more_than_there_is() -> None:
    assert count_parameters({"few": {"shape": [2, 8], "axes": ["row", "model"], "reads": 5}}) == (
        16,
        16,
    )
    assert count_parameters({"none": {"shape": [0, 8], "axes": ["row", "model"], "reads": 5}}) == (
        0,
        0,
    )


@pytest.mark.parametrize("name", RUN)
def test_each_field_has_a_type(name: str) -> None:
    # No field is a bare complex number, so this is wrong for all of them.
    assert f"field '{name}': expected" in message(changed(name, 1j))


@pytest.mark.parametrize(
    ("place", "value", "expected", "found"),
    [
        ("seed", True, "a whole number", "True (bool)"),
        ("seed", 1.0, "a whole number", "1.0 (float)"),
        ("steps", -1, "a whole number of 0 or more", "-1"),
        *(("track", name, "joined by /", name) for name in ("../../elsewhere", "stdlib//cpu")),
        *(
            ("recipe", name, "digits and . _ + -", name)
            for name in ("a/b", "<script>alert(1)</script>", "..")
        ),
        ("target_loss", math.nan, "a finite number (nats per token)", "nan"),
        ("wall_seconds", math.inf, "a finite number of at least 0 and at most 1e12", "inf"),
        ("val_loss", "1.39", "a finite number or null", "'1.39' (str)"),
        ("status", "done", "'finished' or 'stopped' or 'interrupted' or 'diverged'", "'done'"),
        ("status", ["finished"], "'finished' or", "list"),
        ("started", "2026-01-31T12:00:00", "a UTC time", "'2026-01-31T12:00:00'"),
        ("started", "2026-01-31T12:00:00+02:00", "a UTC time", "+02:00"),
        ("started", "yesterday", "a UTC time", "'yesterday'"),
        ("devices.count", 0, "a whole number of 1 or more", "0"),
        ("mesh.data", "8", "a whole number of 1 or more", "'8' (str)"),
        ("data.tokenizer", 3, "text or null", "3 (int)"),
        ("git.dirty", "no", "true or false or null", "'no'"),
        ("ledger", {}, "a list", "{} (dict)"),
        ("probes.causality", True, "an object", "True"),
    ],
)
def test_a_wrong_value_is_named(place: str, value: object, expected: str, found: str) -> None:
    text = message(changed(place, value))
    assert text.startswith(f"field '{place}': expected ")
    before, after = text.split(", found ")
    assert expected in before and found in after


def test_places_inside_lists_and_objects_are_named() -> None:
    assert "'ledger[1].timed': expected true or false" in message(changed("ledger.1.timed", 1))
    assert "'curve[2].step'" in message(changed("curve.2.step", None))
    assert "'probes.causality.passed'" in message(changed("probes", {"causality": {}}))


@pytest.mark.parametrize(
    ("place", "value", "names"),
    [
        ("timed_seconds", 55.0, "timed_seconds"),  # 60.5 in the ledger
        ("timed_seconds", 60.57, "timed_seconds"),  # just over 1 ms + 0.1 %
        ("ledger.2.timed", True, "timed_seconds"),
        ("wall_seconds", 79.0, "wall_seconds"),  # 80.5 in the ledger, 1 % more than 79.0 is 79.79
        ("wall_seconds", 84.0, "ledger"),
        ("compile_seconds", 7.0, "compile_seconds"),
        ("target_loss", 1.38, "reached"),
        ("probes.causality.passed", False, "reached"),
        ("reached", False, "reached"),
        ("val_loss", 1.3, "val_loss"),
        ("val_loss", None, "val_loss"),
        ("curve.2.val_loss", 1.3, "val_loss"),
        ("curve", [], "val_loss"),
        ("steps", 299, "curve[2].step"),
        ("planned_steps", 299, "steps"),
        ("status", "diverged", "val_loss"),
        ("probes", {}, "probes.causality"),
        ("ended", "2026-01-31T12:00:00+00:00", "ended"),
        ("ended", "2026-01-31T12:05:30+00:00", "timed_seconds"),
        ("ended", "2026-01-31T12:09:00+00:00", "wall_seconds"),
        ("curve.1.step", 0, "curve[1].step"),
        ("holdout.first", 65535, "holdout.first"),
        ("curve.2.step", 150, "curve[2].step"),
        ("curve.2.timed_seconds", 20.0, "curve[2].timed_seconds"),
        ("curve.2.timed_seconds", 60.6, "curve[2].timed_seconds"),
        ("curve.1.val_loss", -0.1, "curve[1].val_loss"),
        ("holdout.val_loss", -0.1, "holdout.val_loss"),
        ("programs.loaded", True, "programs.loaded"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(place, value, names):
    assert message(changed(place, value)).startswith(f"field '{names}': expected ")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("timed_seconds", 60.55),
        ("wall_seconds", 81.0),
        ("target_loss", 1.39),
        ("something_newer", [1, "two"]),
        ("resumed", [100]),
        ("gpus", None),
        ("started", "2026-01-31T12:05:00.123456Z"),
        ("flops_per_token", 6100000),
    ],
)
def test_what_the_rules_allow_is_accepted(place: str, value: object) -> None:
    check(changed(place, value))


def test_a_diverged_run_has_null_for_its_losses(tmp_path: Path) -> None:
    run = changed("val_loss", math.nan) | {"reached": False, "status": "diverged"}
    run["curve"][2]["val_loss"] = math.inf
    run["probes"]["normalisation"] = {"passed": False, "largest_error": math.nan}
    text = write_run(tmp_path, run).read_text()
    assert "NaN" not in text and "Infinity" not in text
    read = read_run(tmp_path)
    assert read["val_loss"] is read["curve"][2]["val_loss"] is None
    assert read["probes"]["normalisation"] == {"passed": False, "largest_error": None}


def test_nothing_is_written_when_the_run_is_wrong(tmp_path: Path) -> None:
    for place, value, says in (
        ("timed_seconds", math.nan, "timed_seconds"),
        ("fields.rate", 1j, "holds what JSON"),
    ):
        refused(rf"run\.json .*{says}", write_run, tmp_path / "run", changed(place, value))
    assert list(tmp_path.iterdir()) == []


WHOLE = json.dumps(RUN)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is cut short at line 1"),
        (WHOLE[:400].encode(), "is cut short"),
        (WHOLE[:-1].encode(), "is cut short"),
        (WHOLE.replace(":", "=", 1).encode(), "is not JSON (Expecting ':' delimiter) at line 1"),
        (b"\xff\xfe{}", "is not JSON text"),
        (b"[1, 2]", "expected an object with the fields of a run, found [1, 2] (list)"),
        (WHOLE.replace('"schema": 2', '"schema": 3').encode(), "field 'schema': expected 2"),
        (WHOLE.replace('"rate": 0.5', '"rate": NaN').encode(), "holds what JSON cannot"),
        (WHOLE.replace("80.5", "NaN").encode(), "field 'wall_seconds': expected a finite number"),
        (WHOLE.replace("80.5", "1e999").encode(), "field 'wall_seconds': expected a finite number"),
    ],
)
def test_a_bad_file_gives_an_error_message_that_names_it(tmp_path, content, says):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    said = refused("", read_run, path)
    assert said.startswith(str(path)) and says in said


def test_a_missing_file_gives_an_error_message(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "run.json", tmp_path / "no" / "such"):
        refused("cannot be read .*; give a run directory", read_run, path)


def test_any_value_that_was_changed_is_noticed(tmp_path: Path) -> None:
    """Whatever no other field contradicts, the hash does."""
    for place, value in [
        ("seed", 3), ("curve.1.val_loss", 1.6), ("data.val_sha256", "ab" * 32), ("git.commit", "0"
        * 16),
        ("fields.layers", 5), ("devices.kind", "NVIDIA H100"), ("machine", None),
        ("something_newer", 1),
        ("sha256", "0" * 64),
    ]:  # fmt: skip
        with pytest.raises(BadInput, match=r"x\.json: field 'sha256': expected the hash"):
            parse_run(json.dumps(changed(place, value)).encode(), tmp_path / "x.json")
    spaced = json.dumps(dict(reversed(RUN.items())), indent=8).encode()
    assert parse_run(spaced, tmp_path / "x.json") == RUN, "order and white space are no content"


def test_seconds_too_large_to_add_are_a_message(tmp_path: Path) -> None:
    run = as_run()
    run["ledger"] += [{"name": "pause", "seconds": 1.7e308, "timed": False}] * 2
    refused(r"field 'ledger\[5\]\.seconds': expected a finite", write_run, tmp_path, run)
