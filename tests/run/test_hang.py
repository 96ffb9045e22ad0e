"""A run that stands still ends, and says where it stood."""

import json
import subprocess
import sys
import time

from jspeed.run.clock import watched

from ..attacks.attack import edited
from ..multi_process import environment, shards

# the third call of the loss that the device waits for does not return
STANDS = """CALLS = []


def stand(x):
    CALLS.append(x)
    if len(CALLS) == 3:
        import time

        time.sleep(3600)
    return x


def loss("""

# a machine so busy that the clock moves between two looks at it: the timed part is still open
BUSY = """import runpy
import time

from jspeed.run import finish

identity = finish.identity
finish.identity = lambda setup: time.sleep(0.1) or identity(setup)
runpy.run_module("jspeed", run_name="__main__")
"""


def test_what_stands_still_is_told_once():
    """What moves, is nothing but slow, or is not watched, is not."""
    moved, told = [0], []

    def move():
        moved[0] += 1
        return moved[0]

    def tell():
        time.sleep(0.8)
        told.append("stood")

    with watched(0.2, lambda: 1, tell):
        time.sleep(0.4)  # and what moves on meanwhile waits for it
    assert told == ["stood"]
    with watched(0.2, move, lambda: told.append("moved")):
        time.sleep(0.8)
    with watched(0, lambda: 1, lambda: told.append("not watched")):
        time.sleep(0.2)
    assert told == ["stood"] and moved[0] > 3


def test_a_step_that_does_not_end(tmp_path):
    data, recipe = shards(tmp_path / "shards"), tmp_path / "mine.py"
    total = "total, loss_BT = cross_entropy"
    edits = {
        "def loss(": STANDS,
        "return cross_entropy": total,
        "cap=None)": "cap=None)\n    fixed = jax.lax.stop_gradient(loss_BT)\n"
        "    return total, loss_BT + 0.0 * jax.pure_callback(stand, fixed, fixed)",
    }
    recipe.write_text(edited(edits))
    found = subprocess.run(
        [sys.executable, "-c", BUSY, "run", recipe, "--data", data, "--run-dir", "run"]
        + ["--no-preflight", "--hang-after", "5", "--no-progress"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 75, found.stderr
    (line,) = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    assert "5 s" in line and "of 4 steps" in line and "--hang-after" in line
    assert "waiting in " in line
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["status"] == "interrupted" and not run["reached"]
