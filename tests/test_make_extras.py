"""Which extras the Makefile's build installs: this machine's, or those of EXTRAS=, anew when that
changes."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def make(tmp_path):
    """A function that makes ``.venv/built``, or another target, and returns what maturin was called
    with, or None."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("pyproject.toml", "Cargo.toml", "Cargo.lock", "rust"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = {
        "python": 'case "$*" in *pip*) ;; *) cat machine;; esac\n',
        "maturin": 'echo "$*" > built\n',
    }
    for name, text in programs.items():
        (tmp_path / ".venv" / "bin" / name).write_text("#!/bin/sh\n" + text)
        (tmp_path / ".venv" / "bin" / name).chmod(0o755)
    environment = {
        name: value for name, value in os.environ.items() if name != "EXTRAS" and "MAKE" not in name
    }

    def call(
        *words: str, machine: str = "cpu no NVIDIA GPU", target: str = ".venv/built"
    ) -> str | None:
        (tmp_path / "machine").write_text(machine + "\n")
        (tmp_path / "built").unlink(missing_ok=True)
        command = ["make", "--file", ROOT / "Makefile", target, *words]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
        built = tmp_path / "built"
        return (
            built.read_text().strip().removeprefix("develop --release --quiet").strip()
            if built.exists()
            else None
        )

    return call


H100 = "cuda13 8 NVIDIA GPUs, driver 580.95.05, Python 3.13"


def test_the_machine_s_extra_unless_another_is_given(make):
    assert make() == "" and make() is None
    assert make(machine=H100) == "--extras cuda13" and make(machine=H100) is None, (
        "GPUs that come later"
    )
    assert make("EXTRAS=cuda12,log", machine=H100) == "--extras cuda12,log"
    assert make("EXTRAS=cuda12,log", machine=H100) is None
    assert make("EXTRAS=", machine=H100) == "" and make("EXTRAS=", machine=H100) is None


def test_the_tests_environment_has_both(make):
    assert make(machine=H100, target=".venv/dev") == "--extras cuda13,dev"
    assert make(machine=H100) is None and make(machine=H100, target=".venv/dev") is None


def test_what_the_tests_need_is_added(make):
    make(machine=H100)
    assert make(machine=H100, target=".venv/dev") == "--extras dev"
