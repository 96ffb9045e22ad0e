"""Detection of edited records: each is named by file and field, also with new hashes."""

import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from jspeed.board.records import store
from jspeed.board.records.preregistration import make_preregistration, write_preregistration
from jspeed.fields import recipe_hash
from jspeed.record.run_json import content_hash

from ..record.synthetic_runs import START, as_run, make_run, make_series, rewrite, source_of
from .races import problems


def recorded(tmp_path: Path, **changes: Any) -> Path:
    """Three planned runs of a recipe on the board; the second took longest."""
    folder = make_series(tmp_path / "series", [60.0, 75.0, 61.0], **changes)
    store.add([folder], tmp_path / "records")
    shutil.rmtree(folder)
    return tmp_path / "records"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return recorded(tmp_path)


def the_run(records: Path, seed: int) -> Path:
    return next(records.rglob(f"*-s{seed}-*.json"))


def forge(records: Path, path: Path, **changes: Any) -> Path:
    """Change a run as somebody would who knows the rules: consistent hashes, and the name that
    follows from them."""
    run = json.loads(path.read_text())
    run |= changes
    content = json.dumps(run | {"sha256": content_hash(run)}, indent=2).encode() + b"\n"
    path.unlink()
    place = records / store.run_path(run, content, run["track"])
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)
    return place


def only(found: list[str], path: Path, field: str, *words: str) -> None:
    assert len(found) == 1, found
    assert found[0].startswith(f"{path}: field '{field}': expected "), found[0]
    for word in words:
        assert word in found[0], found[0]


def test_what_was_not_touched_is_right(records: Path) -> None:
    assert problems(records) == []


@pytest.mark.parametrize(
    ("seed", "place", "value", "field", "words"),
    [
        (2, ["val_loss"], 1.35, "val_loss", "the last loss of the curve"),
        (2, ["curve", 1, "val_loss"], 1.5, "sha256", "one was changed"),
        (2, ["seed"], 9, "sha256", "one was changed"),
        (1, ["ledger", 1, "seconds"], 10.0, "timed_seconds", "the sum of the timed ledger entries"),
        (1, ["wall_seconds"], 50.0, "wall_seconds", "at least the sum of all ledger entries"),
    ],
)
def test_one_edit(records: Path, seed, place, value, field, words) -> None:
    path = the_run(records, seed)
    rewrite(path, *place, value=value)
    only(problems(records)[:1], path, field, words)


EARLY = {"started": "2026-01-31T11:00:00+00:00", "ended": "2026-01-31T11:01:20+00:00"}


def moved_seconds(run):
    """From the clock into a pause."""
    ledger = [dict(entry) for entry in run["ledger"]]
    ledger[1]["seconds"] -= 20
    ledger[2]["seconds"] += 20
    return {"ledger": ledger, "timed_seconds": run["timed_seconds"] - 20}


def other_shards(run):
    shards = [run["data"]["train_shards"][0] | {"sha256": "11" * 32}]
    return {"data": run["data"] | {"train_shards": shards}}


BACK = {"ended": "2026-01-31T12:00:30+00:00", "started": "2026-01-31T12:00:31+00:00"}


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        (lambda run: {"seed": 9}, "seed", ["expected 2, which plan-", "found 9"]),
        (lambda run: {"fields": {"RATE": 0.2}}, "recipe_hash", ["from fields and source"]),
        (lambda run: {"initial_state": "0" * 15 + "1"}, "seed", ["expected 1, because"]),
        (lambda run: EARLY, "started", ["a time after plan-"]),
        (lambda run: BACK, "ended", ["a time after started"]),
        (moved_seconds, "curve[2].timed_seconds", ["at most timed_seconds, 55.000"]),
        (
            lambda run: {"data": run["data"] | {"val_sha256": "00" * 32}},
            "data.val_sha256",
            ["expected dddddddddddd...", "found 000000000000..."],
        ),
        (other_shards, "data.train_shards[0].sha256", ["expected c3ae961c6afb..."]),
    ],
)
def test_one_edit_with_new_hashes(records: Path, changes, field, words) -> None:
    run = json.loads(the_run(records, 2).read_text())
    path = forge(records, the_run(records, 2), **changes(run))
    first, *others = problems(records)
    only([first], path, field, *words)
    # a second field contradicts these two as well
    assert len(others) == (field in ("ended", "curve[2].timed_seconds"))


def test_an_edited_loss_and_curve_with_new_hashes_is_misplaced(records: Path) -> None:
    path = the_run(records, 2)
    run = json.loads(path.read_text())
    run["val_loss"] = run["curve"][-1]["val_loss"] = 1.35
    path.write_text(json.dumps(run | {"sha256": content_hash(run)}, indent=2) + "\n")
    found = problems(records)
    assert f"{path} was changed, moved or renamed" in found[0] and "plan" in found[1]


def test_a_dropped_slow_run(records: Path) -> None:
    the_run(records, 2).unlink()
    plan = next(records.rglob("plan-*.json"))
    only(problems(records), plan, "runs[1]", "a run of stdlib with seed 2", "found none")


def test_a_dropped_slow_run_with_its_plan(records: Path) -> None:
    the_run(records, 2).unlink()
    next(records.rglob("plan-*.json")).unlink()
    found = problems(records)
    assert len(found) == 2
    assert all("field 'plan.sha256': expected a plan among the records" in text for text in found)


def test_a_plan_made_anew_without_the_slow_run(records: Path) -> None:
    plan = next(records.rglob("plan-*.json"))
    old = json.loads(plan.read_text())
    runs = [(run["recipe"], run["recipe_hash"], run["seed"]) for run in old["runs"]]
    new = make_preregistration("seeds", old["made"], None, runs)
    new["runs"].pop(1)
    plan.write_text(json.dumps(new))
    the_run(records, 2).unlink()
    found = problems(records)
    assert f"{plan}: field 'sha256': expected the hash of the other fields" in found[0]
    assert sum("field 'plan.sha256'" in text for text in found) == 2


def test_two_seeds_swapped_with_new_hashes(records: Path) -> None:
    """Nothing contradicts the two alone; another run of either seed, as anybody can make, does."""
    paths = {seed: the_run(records, seed) for seed in (1, 2)}
    runs = {seed: json.loads(path.read_text()) for seed, path in paths.items()}
    for seed, path in paths.items():
        forge(records, path, seed=3 - seed, plan=runs[3 - seed]["plan"])
    assert problems(records) == []
    store.add(
        [make_run(records.parent / "again", seed=1, started=START + timedelta(days=1))], records
    )
    (found,) = problems(records)
    assert "field 'seed': expected 2, because the run began in the state of" in found


def test_a_second_config_among_the_seeds(records: Path) -> None:
    other, fields = source_of(0.2), {"RATE": 0.2}
    run = as_run(source=other, fields=fields)
    hashes = {name: run[name] for name in ("recipe_hash", "recipe_sha256")}
    new = forge(records, the_run(records, 2), fields=fields, **hashes)
    new.with_name(f"recipe-{run['recipe_sha256'][:8]}.py").write_text(other)
    only(problems(records), new, "recipe_hash", "which plan-", run["recipe_hash"])


def test_a_recipe_edited_after_the_run(records: Path) -> None:
    path = next(records.rglob("recipe-*.py"))
    path.write_text(path.read_text() + "# and now better\n")
    found = problems(records)
    assert f"{path} was changed, moved or renamed" in found[0]
    assert len(found) == 4
    assert all("field 'recipe_sha256'" in text for text in found[1:])


def test_a_recipe_edited_after_the_run_and_renamed_to_fit(records: Path) -> None:
    path = next(records.rglob("recipe-*.py"))
    edited = source_of(0.1, "Something better.")
    path.unlink()
    digest = as_run(source=edited)["recipe_sha256"]
    (path.parent / f"recipe-{digest[:8]}.py").write_text(edited)
    new = [forge(records, the_run(records, seed), recipe_sha256=digest) for seed in (1, 2, 3)]
    found = problems(records)
    assert sorted(text.split(": ")[0] for text in found) == sorted(map(str, new))
    assert all("field 'recipe_hash'" in text for text in found)


def test_a_time_to_come(records: Path) -> None:
    found = problems(records, START)
    assert len(found) == 6
    assert all("a time before now, 2026-01-31T12:00:00Z" in text for text in found)


def test_an_extra_run_in_a_planned_folder(records: Path) -> None:
    copy = the_run(records, 3).with_name("copy.json")
    shutil.copy(the_run(records, 3), copy)
    later = {"started": "2026-02-01T12:00:00+00:00", "ended": "2026-02-01T12:01:21+00:00"}
    path = forge(records, copy, **later)
    only(problems(records), path, "plan.folder", "that no other run has", "3-stdlib-s3")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[:700], "is cut short at line"),
        (lambda text: text.replace('"val_loss": 1.3905', '"val_loss": NaN'), "field 'val_loss': \
expected a finite"),
        (lambda text: text.replace('"seconds": 2.0', '"seconds": Infinity'), "field \
'ledger[2].seconds': expected a"),
        (lambda text: text.replace('"stdlib/cpu"', '"stdlib/gpu"'), "field 'sha256': expected"),
        (lambda text: "", "is cut short"),
        (lambda text: "\x00", "is not JSON"),
    ],
)  # fmt: skip
def test_a_file_that_is_broken(records: Path, change, says: str) -> None:
    path = the_run(records, 2)
    path.write_text(change(path.read_text()))
    assert problems(records)[0].startswith(str(path)) and says in problems(records)[0]


@pytest.mark.parametrize("kind", ["*-s2-*.json", "plan-*.json", "recipe-*.py"])
def test_a_file_that_was_cut_is_named(records: Path, kind: str) -> None:
    path = next(records.rglob(kind))
    content = path.read_bytes()
    for length in (0, 1, len(content) // 3, len(content) - 3):
        path.write_bytes(content[:length])
        assert any(text.startswith(f"{path}") for text in problems(records)), length


def test_a_run_reordered_or_shortened_is_named(records: Path) -> None:
    path = the_run(records, 2)
    run = json.loads(path.read_text())
    for other in (
        dict(reversed(run.items())),
        run | {"curve": run["curve"][1:]},
        run | {"ledger": run["ledger"][::-1]},
    ):
        path.write_text(json.dumps(other, indent=2) + "\n")
        assert problems(records)[0].startswith(f"{path}"), other.keys()


def test_markup_in_a_name_with_new_hashes(records: Path) -> None:
    path = the_run(records, 2)
    run = json.loads(path.read_text()) | {"recipe": "<script>alert(1)</script>"}
    path.write_text(json.dumps(run | {"sha256": content_hash(run)}))
    words = "digits and . _ + -", "found '<script>alert(1)</script>'"
    only(problems(records)[:1], path, "recipe", *words)


def test_the_hash_is_that_of_fields_as_json() -> None:
    fields = {"A": 1, "B": (1, 2), "C": "ü", "D": None, "E": 1e-10}
    assert recipe_hash("source\n", json.loads(json.dumps(fields))) == recipe_hash(
        "source\n", fields
    )


def test_a_plan_that_is_broken(records: Path) -> None:
    plan = next(records.rglob("plan-*.json"))
    for place, value, says in [
        (("runs", 0, "seed"), -1, "field 'runs[0].seed': expected a whole number of 0 or more"),
        (("runs", 0, "folder"), "../x", "field 'runs[0].folder': expected a name"),
        (("kind",), "luck", "field 'kind': expected 'seeds' or 'race'"),
        (("runs",), [], "field 'runs': expected a folder of its own for every run"),
        (("runs", 0, "folder"), "2-stdlib-s2", "found 3 runs in 2 folders"),
        (("made",), "soon", "field 'made': expected a UTC time"),
    ]:
        content = plan.read_text()
        rewrite(plan, *place, value=value)
        assert says in problems(records)[0]
        plan.write_text(content)
    write_preregistration(plan.parent, json.loads(plan.read_text()))
    assert "is not a record" in problems(records)[0]


def test_a_run_lists_as_many_parameters_as_others_of_its_recipe(tmp_path: Path) -> None:
    table = {"head": {"shape": [100, 8], "axes": ["vocab", "model"]}}
    counts = {"parameters": 800, "active_parameters": 800, "parameter_table": table}
    records = recorded(tmp_path, **counts)
    assert problems(records) == []
    table = {"head": table["head"] | {"shape": [1, 8]}}
    small = {"parameters": 8, "active_parameters": 8, "parameter_table": table}
    path = forge(records, the_run(records, 2), **small)
    words = "a run of the same recipe", "8 parameters"
    only(problems(records), path, "parameter_table", *words)


def test_a_second_range_is_one_in_all_runs_on_the_same_tokens(tmp_path: Path) -> None:
    second = {"first": 65536, "tokens": 65536, "sha256": "ab" * 32, "val_loss": 1.395}
    records = recorded(tmp_path, holdout=second)
    assert problems(records) == []
    path = forge(records, the_run(records, 2), holdout=second | {"sha256": "cd" * 32})
    only(problems(records), path, "holdout.sha256", "abababababab...", "cdcdcd")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokens": -1}, "retrieval.tokens"),  # less than it trained on
        ({"tokens": 1}, "retrieval.tokens"),  # more than the rows of its batches hold
        ({"top": 0}, "in 'retrieval': field 'top'"),
    ],
)
def test_an_index_holds_what_its_run_trained_on(records: Path, change, field) -> None:
    path = the_run(records, 1)
    trained = json.loads(path.read_text())["tokens"]
    index = {"lengths": [6, 10], "recent": 96, "top": 4, "tokens": trained + 1}
    path = forge(records, path, retrieval=index)
    assert problems(records) == []
    if "tokens" in change:
        change = {"tokens": trained - 1 if change["tokens"] < 0 else 2 * trained + 1}
    path = forge(records, path, retrieval=index | change)
    [found] = problems(records)
    assert found.startswith(f"{path}: ") and field in found
