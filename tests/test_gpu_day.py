"""scripts/gpu_day.sh: what fails does not stop the rest, and wrong input is one error message."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_a_gpu_day_goes_on_after_a_part_that_fails(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *track3*) exit 4;; *fa4_jax*) exit 1;; esac\n')
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "OUT": str(tmp_path / "day")}
    done = subprocess.run([SCRIPTS / "gpu_day.sh"], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1, done.stdout
    passed = "gpu-llmc gpu-r21 gpu-r29 gpu-r62 gpu-r89 lane-r62 lane-r89 jspeed2-own-off jspeed2-own-on fused"
    assert f"passed: devices tests {passed} attention-cudnn attention-triton\n" in done.stdout.replace(
        "nvidia-smi ", ""
    )
    assert "gpu-track3 (4)" in done.stdout and "training: no TOKEN_FOLDER given, skipped" in done.stdout
    assert (tmp_path / "day" / "log.txt").read_text() == done.stdout


@pytest.mark.parametrize("what", ["missing", "a file", "empty", "no python", "no results"])
def test_a_gpu_day_says_what_is_wrong_with_its_input(tmp_path, what):
    folder, environment = tmp_path / "tokens", os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path / "day")}
    if what == "a file":
        folder.touch()
    elif what != "missing":
        folder.mkdir()
    if what.startswith("no "):
        (folder / "x_train_000001.bin").touch()
        environment |= {"PYTHON": "/nowhere/python"} if what == "no python" else {"OUT": "/proc/day"}
    done = subprocess.run([SCRIPTS / "gpu_day.sh", folder], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not (tmp_path / "day").exists()
    named = {"no python": "/nowhere/python", "no results": "/proc/day"}.get(what, str(folder))
    assert named in done.stderr
