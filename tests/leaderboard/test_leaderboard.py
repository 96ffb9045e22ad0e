"""scripts/leaderboard.py as a user calls it."""

import subprocess
import sys
from pathlib import Path

import pytest

from ..record.runs import make_run, make_series, rewrite

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "leaderboard.py"


def script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done
    for word in words:
        assert word in done.stderr


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return tmp_path / "records"


def test_add_show_verify(records: Path, tmp_path: Path) -> None:
    empty = script("show", "--records", records)
    assert empty.returncode == 0 and empty.stdout.count("\n") == 1 and "leaderboard.py add RUN_DIR" in empty.stdout

    added = script("add", make_series(tmp_path / "series", [60.0, 62.0]), "--records", records)
    assert added.returncode == 0 and added.stdout.count("added ") == 2, added.stderr
    shown = script("show", "--records", records, "--track", "stdlib/cpu")
    assert shown.returncode == 0 and "61.0 s" in shown.stdout and not shown.stderr
    verified = script("verify", "--records", records)
    assert verified.returncode == 0 and "2 runs, 1 plans, 1 recipes, 0 tracks; every number follows" in verified.stdout

    path = next(records.rglob("*-s2-*.json"))
    rewrite(path, "timed_seconds", value=50.0)
    wrong = script("verify", "--records", records)
    assert wrong.returncode == 1 and f"{path}: field 'timed_seconds': expected the sum" in wrong.stdout
    assert script("verify", path, "--records", records).returncode == 1
    assert script("verify", next(records.rglob("*-s1-*.json")), "--records", records).returncode == 0
    refused(script("verify", tmp_path / "nowhere", "--records", records), "does not exist")
    refused(script("show", "--records", records), "timed_seconds")


def test_add_says_what_is_still_missing(records: Path, tmp_path: Path) -> None:
    folder = make_series(tmp_path / "series", [60.0, 62.0])
    (folder / "2-stdlib-s2" / "run.json").unlink()
    added = script("add", folder, "--records", records)
    assert added.returncode == 0 and "a run of stdlib with seed 2" in added.stdout
    assert script("verify", "--records", records).returncode == 1


def test_bad_input_is_a_sentence(records: Path, tmp_path: Path) -> None:
    refused(script("add", make_run(tmp_path / "bad", status="stopped"), "--records", records), "was stopped early")
    refused(script("add", tmp_path / "none", "--records", records), "does not exist")
    script("add", make_run(tmp_path / "good"), "--records", records)
    refused(script("show", "--records", records, "--track", "stdlib/cpus"), "did you mean 'stdlib/cpu'?")
