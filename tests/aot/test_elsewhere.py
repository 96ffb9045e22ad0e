"""Programs for an absent H100 can be written, for scripts/gpu_day.sh to load where there is one."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_case_is_written(tmp_path):
    """By a process of its own, which has the compiler and no GPU."""
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT / "scripts")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    words = [sys.executable, "-m", "benches.elsewhere", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env=variables, cwd=ROOT)
    assert done.returncode == 0 and not done.stdout, done
    made = {path.stem: pickle.loads(path.read_bytes())[1][0] for path in tmp_path.iterdir()}
    assert sorted(made) == ["FP8", "Mosaic", "Triton", "XLA"]
    assert all(len(code) > 1000 for code in made.values())
