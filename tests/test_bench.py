"""The benchmark runs and says what it measured; whether a busy machine holds the gates is not a test's business."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench.py"


def test_the_loader_is_measured(tmp_path):
    command = [sys.executable, SCRIPT, "loader", "--quick", "--json", tmp_path / "rows.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    failed = [row for row in rows if row["passed"] is False]
    assert done.returncode == bool(failed), done.stderr
    assert len([row for row in rows if row["below"]]) == 11 and done.stdout.count("\n") == len(rows) + 1
    assert all(row["what"] in done.stdout for row in rows)
