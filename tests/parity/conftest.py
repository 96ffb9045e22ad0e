"""Parity fixtures: skip without modded-nanogpt's clone and PyTorch; print a table of agreement at
the end."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parent
KINDS = ("forward", "gradients", "optimizer", "whole steps", "data", "FP8 head")
TORCH = importlib.util.find_spec("torch") is not None
if TORCH:
    import torch

    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--print-golden",
        action="store_true",
        help="print the golden numbers instead of comparing them",
    )


def missing() -> str:
    """Why the records' source cannot be executed here; empty if it can."""
    if not TORCH:
        return "torch is not installed; make test-parity installs it"
    clone = os.environ.get("MODDED", "")
    if not clone:
        return "MODDED does not name a clone of modded-nanogpt"
    return "" if (Path(clone) / ".git").exists() else f"MODDED={clone} is not a git clone"


@pytest.fixture(scope="session")
def clone() -> str:
    """Path of the clone of modded-nanogpt."""
    return os.environ["MODDED"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    if reason and "JSPEED_TEST_PARITY" in os.environ:
        raise pytest.UsageError(reason)
    for item in items:
        if FOLDER in item.path.parents:
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
            # PyTorch's own: of schedulers that are stepped without an optimizer, of what it will
            # rename.
            item.add_marker(
                pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
            )
            item.add_marker(pytest.mark.filterwarnings("ignore::UserWarning:torch"))
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning:torch"))


@pytest.fixture
def agree(record_property: Callable[[str, Any], None]) -> Callable[..., None]:
    """``agree(recipe, kind, found, expected, limit)``: compare trees leaf by leaf, relative to each
    leaf's norm.

    The largest difference goes into the table at the end; one above ``limit`` fails.
    """

    def compare(recipe: str, kind: str, found: Any, expected: Any, limit: float) -> None:
        record_property("agreement", (recipe, kind, max(differences(found, expected).values())))
        check(recipe, kind, found, expected, limit)

    return compare


def check(recipe: str, kind: str, found: Any, expected: Any, limit: float) -> None:
    """Compare as ``agree`` does, and leave nothing in the table."""
    leaf, worst = max(differences(found, expected).items(), key=lambda item: item[1])
    assert worst <= limit, f"{recipe}, {kind}: {leaf} differs by {worst:.2e}, more than {limit:.0e}"


def differences(found: Any, expected: Any) -> dict[str, float]:
    """Norm of the difference over norm of the expected, of every leaf of two trees of arrays."""
    import jax

    leaves, others = (dict(jax.tree.leaves_with_path(tree)) for tree in (found, expected))
    assert leaves.keys() == others.keys(), f"{leaves.keys() ^ others.keys()}"
    result = {}
    for path, value in leaves.items():
        a, b = np.asarray(value, np.float64), np.asarray(others[path], np.float64)
        assert a.shape == b.shape, f"{jax.tree_util.keystr(path)}: {a.shape} and {b.shape}"
        norm = np.linalg.norm(b)
        difference = np.linalg.norm(a - b) / (norm if norm else 1.0)
        result[jax.tree_util.keystr(path)] = (
            float(difference) if np.isfinite(difference) else np.inf
        )
    return result


def pytest_terminal_summary(terminalreporter: Any) -> None:
    found: dict[str, dict[str, float]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "agreement" and getattr(report, "when", "") == "call":
                    recipe, kind, difference = value
                    row = found.setdefault(recipe, {})
                    row[kind] = max(row.get(kind, 0.0), difference)
    if not found:
        return
    kinds = [kind for kind in KINDS if any(kind in row for row in found.values())]
    lines = [["recipe", *kinds], ["---"] * (1 + len(kinds))]
    for recipe in sorted(found):
        row = found[recipe]
        lines.append(
            [
                recipe,
                *(("" if k not in row else f"{row[k]:.1e}" if row[k] else "equal") for k in kinds),
            ]
        )
    terminalreporter.section("largest relative difference from the records' own source")
    for line in lines:
        terminalreporter.write_line("| " + " | ".join(line) + " |")
