"""scripts/plan.py as a user runs it where nothing can be compiled: what it still says, and what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jspeed.plan.target import missing

SCRIPT = Path(__file__).parents[2] / "scripts" / "plan.py"


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "160"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_without_a_compiler_there_are_still_counts_memory_and_flops():
    done = plan("r29", "--target", "h100x8", "--no-compile")
    assert done.returncode == 0, done.stderr
    assert "275,743,638" in done.stdout


def test_gpt3_by_its_sizes():
    done = plan("--gpt3", "--target", "h100x64")
    assert done.returncode == 0, done.stderr
    assert "174,604,259,328" in done.stdout and "43.65 GB" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["r290", "--target", "h100x8"], "did you mean 'r29'"),
        (["r29", "--target", "h101x8"], "h100"),
        (["r29", "--target", "h100x0"], "h100x0"),
        ([], "no recipe given"),
    ],
)
def test_refuses(arguments, words):
    done = plan(*arguments)
    assert done.returncode == 2 and words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(missing() is None, reason="a CUDA plugin is installed here")
def test_says_what_to_install():
    done = plan("track3")
    assert done.returncode == 2
    assert "pip install 'jspeed[aot]'" in done.stderr and "223 MB" in done.stderr
    assert "124" in done.stdout or "parameters" in done.stdout
