"""Run a recipe that cheats: the honest parent with some of its lines replaced."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspeed.run.options import Options
from jspeed.run.train import train

PARENT = (Path(__file__).parent / "parent.py").read_text()


def edited(edits: Mapping[str, str], source: str = PARENT) -> str:
    """Return ``source`` with each key, which is there once, replaced by its value."""
    for old, new in edits.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def attack(folder: Path, data: Path, edits: Mapping[str, str], **options: Any) -> dict[str, Any]:
    """Return the run.json of the parent with these ``edits``, trained on ``data``."""
    recipe = folder / "mine.py"
    recipe.write_text(edited(edits))
    given = {"data": data, "run_dir": folder / "run", "progress": False} | options
    train(Options(str(recipe), **given))
    run: dict[str, Any] = json.loads((folder / "run" / "run.json").read_text())
    return run


def failed(run: Mapping[str, Any]) -> set[str]:
    """Return the probes that a run failed; it counts only without one."""
    names = {name for name, probe in run["probes"].items() if not probe["passed"]}
    assert run["reached"] == (not names)
    return names
