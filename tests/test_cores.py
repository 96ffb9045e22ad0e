"""The cores that a process may use: its affinity, and the quotas of its cgroups."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jspeed.base.cores import cores

PACKAGE = Path(__file__).parents[1]
MINE = len(os.sched_getaffinity(0))


def cgroup(root, name, **quotas):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"1:cpu:/elsewhere\n0::{name}\n")
    for place, text in quotas.items():
        folder = root / "sys/fs/cgroup" / place.replace("_", "/").strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "quotas", "found"),
    [
        ("/", {"_": "150000 100000\n"}, 1),  # as docker run --cpus 1.5
        ("/", {"_": "50000 100000\n"}, 1),  # half a core
        ("/", {"_": "max 100000\n"}, MINE),
        ("/", {"_": "99900000 100000\n"}, MINE),
        ("/a/b", {"a": "100000 100000\n", "a_b": "max 100000\n"}, 1),  # of a group above
        ("/a/b", {"a": "max 100000\n"}, MINE),
        ("/gone", {}, MINE),
        ("/a", {"a": "what?\n"}, MINE),
    ],
)
def test_quotas(tmp_path, name, quotas, found):
    assert cores(cgroup(tmp_path, name, **quotas)) == found


def test_more_cores_than_a_quota_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert cores(cgroup(tmp_path, "/a/b", a="400000 100000\n", a_b="800000 100000\n")) == 4
    assert cores(tmp_path / "without") == 64


@pytest.mark.skipif(MINE < 2, reason="one core")
def test_affinity():
    """As under taskset -c 0."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from jspeed.base.cores"
        " import cores; "
    )
    done = subprocess.run(
        [sys.executable, "-c", code + "print(cores())"], capture_output=True, text=True
    )
    assert done.stdout == "1\n"


def test_nothing_counts_the_cores_of_the_machine():
    """Workers beyond those that may be used wait for each other."""
    paths = [path for folder in ("python", "scripts") for path in (PACKAGE / folder).rglob("*.py")]
    assert [path.name for path in paths if "cpu_count" in path.read_text()] == ["cores.py"]
