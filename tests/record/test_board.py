"""The records folder and the leaderboard made from it."""

import copy
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jspeed.errors import BadInput
from jspeed.record import board
from jspeed.record.schema import write_run

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "leaderboard.py"


def make_run(folder: Path, timed: float = 60.0, seed: int = 1, **changes: Any) -> Path:
    """Write the run.json of a run that took ``timed`` seconds into ``folder`` and return the folder."""
    run = {
        "schema": 1,
        "recipe": "stdlib",
        "recipe_hash": "0123456789abcdef",
        "recipe_source": "stdlib.py",
        "fields": {},
        "overrides": {},
        "parent": None,
        "track": "stdlib/cpu",
        "seed": seed,
        "status": "finished",
        "reached": True,
        "target_loss": 1.4,
        "val_loss": 1.39,
        "timed_seconds": timed,
        "compile_seconds": 8.0,
        "wall_seconds": timed + 20,
        "started": "2026-01-31T12:00:00+00:00",
        "steps": 300,
        "planned_steps": 300,
        "tokens": 2457600,
        "parameters": 1234567,
        "flops_per_token": 6.1e6,
        "devices": {"kind": "cpu", "count": 1, "processes": 1, "platform": "cpu"},
        "mesh": {"data": 1},
        "layout": "dp",
        "micro_batch": 8192,
        "data": {
            "name": "stdlib",
            "fingerprint": "aa" * 8,
            "val_fingerprint": "bb" * 8,
            "train_tokens": 20000000,
            "val_tokens": 524288,
            "tokenizer": None,
        },
        "loader": {},
        "host": {"data_wait_seconds": 0.01, "dispatch_seconds": 0.2},
        "ledger": [{"name": "train", "seconds": timed, "timed": True}],
        "curve": [{"step": 300, "timed_seconds": timed, "val_loss": 1.39}],
        "probes": {"causality": {"passed": True}},
        "versions": dict.fromkeys(("python", "jax", "jaxlib", "numpy", "optax", "jspeed"), "1"),
        "xla_flags": "",
        "git": {"commit": "c0ffee00c0ffee00", "dirty": False},
    }
    run = copy.deepcopy(run) | changes
    write_run(folder, run)
    return folder


def shown(rows: list[board.Row], width: int = 80) -> str:
    console = Console(width=width, no_color=True, record=True, file=open("/dev/null", "w"))
    with console.file:
        console.print(board.table(rows))
        return console.export_text()


def script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_record_is_a_copy_in_its_place(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", seed=7)
    content = (run_dir / "run.json").read_bytes()
    path = board.add(run_dir, tmp_path / "records")
    digest = hashlib.sha256(content).hexdigest()[:8]
    assert path == tmp_path / "records" / "stdlib" / "cpu" / "stdlib" / f"20260131T120000Z-s7-{digest}.json"
    assert path.read_bytes() == content
    assert [row.path for row in board.load(tmp_path / "records")] == [path]


def test_a_run_counts_once(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    path = board.add(run_dir, tmp_path / "records")
    with pytest.raises(BadInput, match="on the leaderboard already, as .*; a run counts once") as caught:
        board.add(run_dir, tmp_path / "records")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"status": "stopped"}, "the run was stopped early"),
        ({"status": "interrupted"}, "the run was interrupted"),
        ({"status": "diverged", "reached": False, "val_loss": None}, "the run diverged"),
        (
            {"reached": False, "val_loss": 1.41},
            "ended at validation loss 1.4100.*reached their target, here 1.4",
        ),
        ({"probes": {"causality": {"passed": False}}}, "failed the validity probe causality"),
        ({"track": "../../elsewhere"}, "field 'track': .*found '../../elsewhere'"),
        ({"track": "stdlib//cpu"}, "field 'track'"),
        ({"recipe": "a/b"}, "field 'recipe'"),
        ({"recipe": ".."}, "field 'recipe'"),
    ],
)
def test_what_is_not_a_result_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    run_dir = make_run(tmp_path / "run", **changes)
    with pytest.raises(BadInput, match=says):
        board.add(run_dir, tmp_path / "records")
    assert not (tmp_path / "records").exists()


def test_an_edited_recipe_competes_under_its_own_hash(tmp_path: Path) -> None:
    records = tmp_path / "records"
    board.add(make_run(tmp_path / "a"), records)
    board.add(make_run(tmp_path / "b", 50.0, recipe_hash="fedcba98", overrides={"rate": 0.03}), records)
    text = shown(board.load(records))
    assert text.index("fedcba98") < text.index("01234567")
    assert "rate=0.03" in text


def test_a_record_that_was_touched_is_found_out(tmp_path: Path) -> None:
    records = tmp_path / "records"
    path = board.add(make_run(tmp_path / "run"), records)
    run = json.loads(path.read_text())
    run["val_loss"] = 1.2
    path.write_text(json.dumps(run, indent=2) + "\n")
    with pytest.raises(BadInput, match="was changed, moved or renamed"):
        board.load(records)
    run_dir = make_run(path.parent, reached=False, val_loss=None)
    (run_dir / "run.json").replace(path)
    with pytest.raises(BadInput, match="reached their target"):
        board.load(records)
    path.write_text("{}")
    with pytest.raises(BadInput, match="field 'schema'"):
        board.load(records)


def test_the_table_has_means_in_order_and_fits_80_columns(tmp_path: Path) -> None:
    records = tmp_path / "records"
    for seed, (timed, loss) in enumerate([(60.0, 1.39), (64.0, 1.38), (65.0, 1.37)]):
        board.add(make_run(tmp_path / f"slow{seed}", timed, seed, val_loss=loss), records)
    device = {"kind": "NVIDIA H100 80GB HBM3", "count": 8, "processes": 8, "platform": "gpu"}
    git = {"commit": "abcdef0123456789", "dirty": True}
    name = "a-recipe-with-a-name-that-is-longer-than-any"
    large = {"tokens": 3_250_000_000, "parameters": 124_475_904, "devices": device, "git": git}
    names = {"recipe": name, "recipe_hash": "ffff0000ffff", "track": "fineweb/8"}
    board.add(make_run(tmp_path / "fast", 8123.4, 0, **large, **names), records)
    board.add(make_run(tmp_path / "mid", 62.0, 0, recipe="other", recipe_hash="eeee0000eeee"), records)

    text = shown(board.load(records))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert text.index("fineweb/8") < text.index("stdlib/cpu")
    assert text.index("eeee0000") < text.index("01234567"), "62 s beats a mean of 63 s"
    line = next(line for line in text.splitlines() if line.startswith("stdlib  "))
    assert re.findall(r"[\d.]+M?", line) == ["3", "63.00", "1.3800", "300", "1.23M", "1"]
    for expected in ("60.00", "2.46M", "2026-01-31 c0ffee00", "target 1.4", "8123.4", "3.25G", "124M"):
        assert expected in text
    # Long names are folded in the first and the last column, never cut.
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("a-recipe"))
    at_runs, at_devices = lines[first - 2].index("runs"), lines[first - 3].index("devices")
    rows = lines[first : first + 4]
    assert "".join(row[:at_runs].strip() for row in rows) == name + "ffff0000"
    folded = " ".join(row[at_devices:] for row in rows).split()
    assert folded == "8 x NVIDIA H100 80GB HBM3 in 8 processes 2026-01-31 abcdef01+".split()


def test_only_like_is_ranked_with_like(tmp_path: Path) -> None:
    records = tmp_path / "records"
    board.add(make_run(tmp_path / "a", 60.0), records)
    board.add(make_run(tmp_path / "b", 5.0, target_loss=3.0), records)
    other = {"kind": "h9", "count": 2, "processes": 1, "platform": "gpu"}
    board.add(make_run(tmp_path / "c", 30.0, devices=other), records)
    text = shown(board.load(records))
    assert text.index("target 1.4") < text.index("30.00") < text.index("60.00") < text.index("target 3 ")


def test_square_brackets_in_names_are_shown(tmp_path: Path) -> None:
    devices = {"kind": "[red]odd[/red]", "count": 1, "processes": 1, "platform": "cpu"}
    board.add(make_run(tmp_path / "run", devices=devices, overrides={"x": "[bold]"}), tmp_path / "records")
    text = shown(board.load(tmp_path / "records"))
    assert "[red]odd[/red]" in text and "x=[bold]" in text


def test_the_script_adds_and_shows(tmp_path: Path) -> None:
    records = tmp_path / "records"
    empty = script("show", "--records", records)
    assert empty.returncode == 0 and empty.stdout.count("\n") == 1
    assert "leaderboard.py add RUN_DIR" in empty.stdout

    first, second = make_run(tmp_path / "a", 60.0, 1), make_run(tmp_path / "b", 62.0, 2)
    added = script("add", first, second, "--records", records)
    assert added.returncode == 0, added.stderr
    assert len(list(records.rglob("*.json"))) == added.stdout.count("added ") == 2

    board_text = script("show", "--records", records, "--track", "stdlib/cpu")
    assert board_text.returncode == 0 and "61.00" in board_text.stdout and "Traceback" not in board_text.stderr


def test_the_script_answers_bad_input_with_a_sentence(tmp_path: Path) -> None:
    records = tmp_path / "records"
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad", status="stopped")
    refused = script("add", good, bad, "--records", records)
    assert refused.returncode == 2 and refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1
    assert not records.exists(), "all of them or none"

    board.add(good, records)
    unknown = script("show", "--records", records, "--track", "stdlib/cpus")
    assert unknown.returncode == 2
    assert (
        unknown.stderr == "error: no record is of track 'stdlib/cpus', only of stdlib/cpu; did you mean 'stdlib/cpu'?\n"
    )


def test_the_committed_records_are_whole_and_in_their_place():
    rows = board.load(Path(__file__).parents[2] / "records")
    assert rows and all(row.run["reached"] and row.run["git"]["dirty"] is False for row in rows)
