"""Fixtures: a records folder of one track with rules, series of runs to add, and a repository."""

import itertools
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from jspeed.board.records import store

from ..record.synthetic_runs import START, make_series
from .races import rules


@pytest.fixture
def records(tmp_path: Path) -> Path:
    rules(tmp_path / "records")
    return tmp_path / "records"


@pytest.fixture
def add(records: Path, tmp_path: Path) -> Callable[..., list[Path]]:
    """``add(seconds, losses, days=0, **changes)`` adds a series that was planned so many days
    later."""
    numbers = itertools.count()

    def series(seconds, losses=None, days=0, **changes) -> list[Path]:
        folder, start = tmp_path / f"series-{next(numbers)}", START + timedelta(days=days)
        return store.add([make_series(folder, seconds, losses, start=start, **changes)], records)

    return series


@pytest.fixture
def git(tmp_path: Path) -> Callable[..., str]:
    """``git(*words)`` in a repository around the records; returns what it prints."""

    def call(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    call("init", "-q", "-b", "main")
    return call
