"""The examples, run as a reader would."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(cwd, *arguments, **variables):
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    own = {"JAX_PLATFORMS": "cpu", "JSPEED_CACHE": str(cwd / "cache"), "MPLBACKEND": "Agg"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=kept | own | variables, capture_output=True, text=True, timeout=300)


def test_three_ways_to_shard(tmp_path):
    done = run(tmp_path, EXAMPLES / "spmd_modes.py")
    assert done.returncode == 0, done.stderr
    out = done.stdout
    # seeds.md section 5: sums of four of 32 numbers each on eight devices, and of all.
    assert "[6, 22, 38, 54, 70, 86, 102, 118], psum 496" in out
    assert "float32[1024@data,32]" in out and "one device sees x as (128, 32)" in out
    losses = [[float(word) for word in line.split()[1:]] for line in out.splitlines()[-4:-1]]
    # Section 3: the corrected loop starts at 0.25 and ends at 0.2137404; one that trains nothing stays at 0.2495842.
    assert losses[0][0] == 0.25 and losses[0][1] == pytest.approx(0.2495842, abs=1e-6)
    assert losses[0][-1] == pytest.approx(0.2137404, abs=1e-6)
    assert all(sooner - later > 1e-4 for later, sooner in zip(losses[0][1:], losses[0], strict=False))
    assert max(abs(a - b) for row in losses for a, b in zip(row, losses[0], strict=True)) <= 1e-6
    assert out.endswith("all three agree to 1e-6\n")


@pytest.mark.slow
def test_notebook_from_top_to_bottom(tmp_path):
    notebook = json.loads((EXAMPLES / "names.ipynb").read_text())
    assert notebook["nbformat"] == 4 and not any(cell.get("outputs") for cell in notebook["cells"])
    assert "pip install notebook" in "".join(notebook["cells"][0]["source"])  # nothing else installs it
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (tmp_path / "notebook.py").write_text("\n".join(cells))
    middles = ("n", "l", "r", "st", "nd", "v", "th")
    names = [a + b + c for a in ("ma", "bri", "car", "do", "e", "jo") for b in middles for c in ("a", "e", "o", "y")]
    (tmp_path / "names.txt").write_text("\n".join(names))
    done = run(tmp_path, "notebook.py", NAMES=str(tmp_path / "names.txt"), STEPS="60")
    assert done.returncode == 0, done.stderr
    last = done.stdout.partition("loss over the last 50 steps: ")[2]
    assert float(last.split()[0]) < 2.5
    assert done.stdout.count("temperature ") == 3 and "#" in done.stdout
