"""Records folder: which runs are accepted, where they go, and detection of changed files."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from jspeed.board.records import preregistration, store, verify
from jspeed.board.records.track import track_of
from jspeed.errors import BadInput
from jspeed.record.run_json import content_hash

from ..record.synthetic_runs import NOW, as_run, make_run, make_series, source_of
from ..refusals import refused

REPOSITORY = Path(__file__).parents[2]


def test_a_record_is_a_copy_in_its_place(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", seed=7)
    content = (run_dir / "run.json").read_bytes()
    (path,) = store.add([run_dir], tmp_path / "records")
    digest = hashlib.sha256(content).hexdigest()[:8]
    folder = tmp_path / "records" / "stdlib" / "cpu" / "stdlib"
    assert path == folder / f"20260131T123500Z-s7-{digest}.json" and path.read_bytes() == content
    source = hashlib.sha256(source_of().encode()).hexdigest()[:8]
    assert (folder / f"recipe-{source}.py").read_text() == source_of()
    records = store.load(tmp_path / "records")
    assert [row.path for row in records.rows] == [path] and len(records.sources) == 1


def test_a_series_goes_in_whole_with_its_plan(tmp_path: Path) -> None:
    folder = make_series(tmp_path / "series", [60, 61, 62], [1.39, None, 1.41])
    paths = store.add([folder], tmp_path / "records")
    records = store.load(tmp_path / "records")
    assert len(paths) == 3 and [row.run["status"] for row in records.rows] == [
        "finished",
        "diverged",
        "finished",
    ]
    ((path, plan),) = records.plans.values()
    assert path.name == f"plan-{plan['sha256'][:8]}.json"
    assert plan == json.loads((folder / "plan.json").read_text())


def test_a_run_counts_once(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (path,) = store.add([run_dir, run_dir], tmp_path / "records")
    said = refused("on the leaderboard already, as ", store.add, [run_dir], tmp_path / "records")
    assert str(path) in said


FAILED = as_run()["probes"] | {"causality": {"passed": False}}
HASHES = "field 'data': expected the SHA-256"
NONE = {"train_shards": []}  # the trainer writes this when its shards are gone at the end


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"status": "stopped"}, "the run was stopped early"),
        ({"status": "interrupted", "loss": None}, "the run was interrupted"),
        ({"status": "diverged", "loss": None}, "the run diverged"),
        ({"track": "ideas"}, "field 'track'"),
        ({"probes": FAILED, "reached": False}, "failed the validity check causality"),
        ({"data": as_run()["data"] | NONE}, HASHES),
        ({"data": as_run()["data"] | NONE | {"val_sha256": None}}, HASHES),
    ],
)
def test_what_is_not_a_result_is_refused(tmp_path, changes, says):
    run_dir = make_run(tmp_path / "run", **changes)
    refused(says, store.add, [run_dir], tmp_path / "records")
    assert not (tmp_path / "records").exists()


def test_a_miss_is_a_result(tmp_path: Path) -> None:
    assert store.add([make_run(tmp_path / "run", loss=1.41)], tmp_path / "records")


def test_all_of_them_or_none(tmp_path: Path) -> None:
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad", status="stopped")
    with pytest.raises(BadInput):
        store.add([good, bad], tmp_path / "records")
    assert not (tmp_path / "records").exists()


def test_a_source_that_is_not_the_runs_is_refused(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "recipe.py").write_text(source_of(0.2))
    refused(r"recipe\.py was edited after the run", store.add, [run_dir], tmp_path / "records")
    (run_dir / "recipe.py").unlink()
    refused(r"recipe\.py cannot be read", store.add, [run_dir], tmp_path / "records")


def test_another_plan_beside_the_run_is_refused(tmp_path: Path) -> None:
    one, two = (make_series(tmp_path / name, [60.0] * n) for name, n in (("one", 1), ("two", 2)))
    (two / "plan.json").replace(one / "plan.json")
    refused("belongs to another plan", store.add, [one], tmp_path / "records")


def test_a_file_that_does_not_belong_is_named(tmp_path: Path) -> None:
    store.add([make_run(tmp_path / "run")], tmp_path / "records")
    odd = tmp_path / "records" / "stdlib" / "cpu" / "notes.json"
    odd.write_text("{}")
    (problem,) = store.read(tmp_path / "records").problems
    assert problem.path == odd and problem.text.startswith(f"{odd} is not a record")
    odd.unlink()
    for aside in store.ASIDE:
        (tmp_path / "records" / aside).mkdir()
        (tmp_path / "records" / aside / "x.csv").write_text("")
    assert not store.read(tmp_path / "records").problems


def test_a_folder_that_is_a_file_and_one_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, says in (("none", "does not exist"), ("file", "is a file")):
        refused(f"the records folder .*{name} {says}; give the folder", store.load, tmp_path / name)
    assert store.add([make_run(tmp_path / "run")], tmp_path / "none"), (
        "the first record makes the folder"
    )


def test_a_recipe_for_eight_gpus_run_on_one_enters_that_track(tmp_path: Path) -> None:
    records, classes = tmp_path / "records", ("8xH100-200M", "8xH100-retrieval")
    for name in ("8xH100", *classes, "1xGPU", "1xH100", "1xH200", "1xB200", "steps"):
        (records / "fineweb" / name).mkdir(parents=True)
        rules = REPOSITORY / "records" / "fineweb" / name / "track.toml"
        (records / "fineweb" / name / "track.toml").write_bytes(rules.read_bytes())
    for count, kind, home in [
        (1, "NVIDIA L40S", "1xGPU"),
        (8, "NVIDIA H100 80GB HBM3", "8xH100"),
        (2, "A100", "8xH100"),
        (1, "NVIDIA H100 80GB HBM3", "1xH100"),
        (1, "NVIDIA H200", "1xH200"),
        (1, "NVIDIA GH200 480GB", "1xGPU"),
        (1, "NVIDIA B200", "1xB200"),
    ]:
        devices = {"kind": kind, "count": count, "processes": 1, "platform": "gpu"}
        run_dir = make_run(tmp_path / kind, 60 + count, track="fineweb/8xH100", devices=devices)
        (path,) = store.add([run_dir], records)
        assert path.relative_to(records).parts[:2] == ("fineweb", home)
    found = store.load(records)
    assert {row.track for row in found.rows} == found.tracks.keys() - {
        "fineweb/steps",
        *(f"fineweb/{name}" for name in classes),
    }
    for name in classes:
        one = as_run(
            track=f"fineweb/{name}", devices={"kind": "NVIDIA H100", "count": 1, "platform": "gpu"}
        )
        assert track_of(one, found.tracks) == one["track"], (
            "a track of another class of models is no sibling"
        )
    assert verify.verify(found, NOW) == [], "each folder has the recipe's source"


def test_the_committed_records_are_whole_and_in_their_place() -> None:
    records = store.load(REPOSITORY / "records")
    assert records.rows and all(row.run["git"]["dirty"] is False for row in records.rows)
    assert {
        "fineweb/8xH100",
        "fineweb/8xH100-200M",
        "fineweb/8xH100-retrieval",
        "fineweb/1xGPU",
        "fineweb/1xH100",
        "fineweb/1xH200",
        "fineweb/1xB200",
        "fineweb/steps",
        "stdlib/cpu",
        "shakespeare/cpu",
    } <= records.tracks.keys()
    # Whatever else a track says, the five have one test or the other and a p of at most one in a
    # hundred.
    assert all(track.rules["significance.p"] <= 0.01 for track in records.tracks.values())


def test_a_folder_that_cannot_be_read_is_no_empty_one(tmp_path, monkeypatch):
    store.add([make_run(tmp_path / "run")], tmp_path / "records")
    closed, listed = tmp_path / "records" / "stdlib", os.scandir

    def scandir(path):
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    # root, who runs tests in containers, may read everything
    monkeypatch.setattr(os, "scandir", scandir)
    (problem,) = store.read(tmp_path / "records").problems
    assert problem == (closed, f"{closed} cannot be read (Permission denied); restore it")


@pytest.mark.parametrize(
    "name",
    (
        "track.toml 20260131T120500Z-s1-00000000.json plan-00000000.json recipe-00000000.py"
        " notes.txt"
    ).split(),
)
def test_a_pipe_among_the_records_is_named_and_not_waited_for(tmp_path: Path, name: str) -> None:
    home = tmp_path / "records" / "stdlib" / "cpu"
    home.mkdir(parents=True)
    os.mkfifo(home / name)
    (problem,) = store.read(tmp_path / "records").problems
    assert problem.text.startswith(f"{home / name} ")
    assert "not a record" in problem.text or "regular file" in problem.text


@pytest.mark.parametrize(
    "name", ["run.json", "plan.json", "1-stdlib-s1/run.json", "1-stdlib-s1/recipe.py"]
)
def test_a_pipe_in_a_run_directory_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = make_series(tmp_path / "series", [60.0])
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(BadInput, match="regular file|plan.json|no run of it|run.json"):
        store.add([folder if name != "run.json" else path.parent], tmp_path / "records")
    assert not (tmp_path / "records").exists()


def test_a_device_among_the_records_is_not_read(tmp_path: Path) -> None:
    home = tmp_path / "records" / "stdlib" / "cpu"
    home.mkdir(parents=True)
    (home / "recipe-00000000.py").symlink_to("/dev/zero")
    (problem,) = store.read(tmp_path / "records").problems
    assert "regular file" in problem.text


@pytest.mark.parametrize("at_once", [True, False])
def test_a_second_run_in_the_place_of_a_planned_one_is_refused(tmp_path: Path, at_once) -> None:
    """Whatever it ran on: it would be an extra run of the plan, and take the validity of the runs
    before."""
    one, two, records = (
        make_series(tmp_path / "one", [60.0]),
        tmp_path / "two",
        tmp_path / "records",
    )
    shutil.copytree(one, two)
    plan = json.loads((one / "plan.json").read_text())
    again = {"plan": {"sha256": plan["sha256"], "folder": "1-stdlib-s1"}}
    make_run(two / "1-stdlib-s1", 9.0, 1, 0.5, **again)
    if not at_once:
        store.add([one], records)
    with pytest.raises(BadInput, match="is another run of 1-stdlib-s1 of this plan"):
        store.add([one, two] if at_once else [two / "1-stdlib-s1"], records)
    assert records.exists() is not at_once


def test_a_plan_cannot_name_a_path_outside_the_records(tmp_path: Path) -> None:
    folder = make_series(tmp_path / "series", [60.0])
    plan = preregistration.read_preregistration(folder / "plan.json")
    names = [("../../../../outside", "a", 9), ("stdlib", plan["runs"][0]["recipe_hash"], 1)]
    bad = preregistration.make_preregistration("seeds", plan["made"], None, names)
    bad["runs"][0]["folder"], bad["runs"][1]["folder"] = "1-x-s9", "1-stdlib-s1"
    bad["sha256"] = content_hash(bad)
    preregistration.write_preregistration(folder, bad)
    make_run(folder / "1-stdlib-s1", plan={"sha256": bad["sha256"], "folder": "1-stdlib-s1"})
    with pytest.raises(BadInput, match=r"plan\.json: field 'runs\[0\]\.recipe'"):
        store.add([folder / "1-stdlib-s1"], tmp_path / "records")


def test_a_write_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_whole(path: Path, content: bytes) -> None:
        if path.name.startswith("plan-"):
            raise BadInput(f"{path} cannot be written (No space left on device)")
        path.write_bytes(content)

    monkeypatch.setattr(store, "write_whole", write_whole)
    with pytest.raises(BadInput, match="No space left"):
        store.add([make_series(tmp_path / "series", [60.0])], tmp_path / "records")
    assert not [path for path in (tmp_path / "records").rglob("*") if path.is_file()]


def test_the_current_folder_is_a_run_of_a_plan_too(tmp_path, monkeypatch):
    monkeypatch.chdir(make_series(tmp_path / "series", [60.0]) / "1-stdlib-s1")
    assert store.add([Path()], tmp_path / "records")


def test_a_record_says_where_its_weights_are_kept(tmp_path: Path) -> None:
    folder, records = make_series(tmp_path / "series", [60.0, 75.0]), tmp_path / "records"
    for run_dir in folder.iterdir():
        if run_dir.is_dir():
            (run_dir / "model.safetensors").write_bytes(run_dir.name.encode())
    paths = store.add([folder], records, "https://example.org/kept/")
    found = store.load(records)
    by_run = {kept["run"]: kept for kept in found.weights.values()}
    assert len(by_run) == 2 and verify.verify(found, NOW) == []
    name = "2-stdlib-s2"
    assert by_run[json.loads(paths[1].read_text())["sha256"]] == {
        "run": json.loads(paths[1].read_text())["sha256"],
        "kept": f"https://example.org/kept/{name}/model.safetensors",
        "bytes": len(name),
        "sha256": hashlib.sha256(name.encode()).hexdigest(),
    }
    assert not list(records.rglob("*.safetensors")), "gigabytes stay where they are"
    first = next(iter(found.weights))
    first.write_text(first.read_text().replace("example.org", "example.com"))
    assert "was changed, moved or renamed" in store.read(records).problems[0].text


def test_weights_of_no_run(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "model.safetensors").write_bytes(b"weights")
    (path,) = store.add([run_dir], tmp_path / "records", "/mnt/kept")
    path.unlink()
    (problem,) = [each.text for each in verify.verify(store.read(tmp_path / "records"), NOW)]
    assert "weights-" in problem
    assert "field 'run': expected the sha256 of a run beside it" in problem


@pytest.mark.parametrize("kept", ["", " ", "two\nlines"])
def test_a_place_of_weights_is_one_line(tmp_path: Path, kept: str) -> None:
    (make_run(tmp_path / "run") / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(BadInput, match="--weights .*: expected one line, the address or path"):
        store.add([tmp_path / "run"], tmp_path / "records", kept)
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="model.safetensors cannot be read .* --weights"):
        store.add([tmp_path / "run"], tmp_path / "records", "/mnt/kept")
    assert not (tmp_path / "records").exists()
