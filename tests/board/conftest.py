"""Fixture: a records folder of one track with rules."""

from pathlib import Path

import pytest

from .races import rules


@pytest.fixture
def records(tmp_path: Path) -> Path:
    rules(tmp_path / "records")
    return tmp_path / "records"
