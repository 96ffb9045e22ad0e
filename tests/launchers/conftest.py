"""Run the commands of docs/launch.md for real (``make test-launchers``): two processes stand for
eight GPUs.

Every test is skipped where its launcher is missing; other test runs skip them all, for they take
minutes.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..multi_process import REPOSITORY, SAME_BITS, TOY, ended, environment, metrics

PAGE = (REPOSITORY / "docs" / "launch.md").read_text()
SMALL = "stdlib --steps 20 --set " + " ".join([*TOY, "EVAL_EVERY=10"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "JSPEED_TEST_LAUNCHERS" not in os.environ:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(
                    pytest.mark.skip(
                        reason="starting real launchers takes minutes; make test-launchers"
                    )
                )


def block(heading: str, number: int = 0) -> str:
    """The text of a code block under ``heading`` of the page."""
    (section,) = re.findall(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL
    )
    return re.findall(r"^```\w+\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[number]


class Place:
    """A folder in which the page's lines can be run as they stand, but for recipe, data and number
    of GPUs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("scripts", "pyproject.toml"):
            (folder / name).symlink_to(REPOSITORY / name)

    def line(self, heading: str, number: int = 0, **instead: str) -> str:
        text = block(heading, number)
        swaps = {
            "r29 --data /data/fineweb": SMALL,
            "--nproc-per-node 8": "--nproc-per-node 2",
            "-n 8": "-n 2",
        }
        for old, new in (swaps | instead).items():
            text = text.replace(old, new)
        return text if "--run-dir" in text else text.replace(SMALL, f"{SMALL} --run-dir run")

    def environment(self, **more: object) -> dict[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return environment(
            **SAME_BITS, PATH=path, JSPEED_CACHE=self.folder.parent / "cache", **more
        )

    def start(self, line: str, **more: object) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environment(**more),
            text=True,
            stdout=pipe,
            stderr=pipe,
        )

    def run(self, line: str, beside: str | None = None, **more: object) -> None:
        """Run ``line``, and another ``beside`` it, to their ends, which must be good."""
        processes = [self.start(line, **more) for line in (line, beside) if line]
        for code, out, err in ended(processes, 400):
            assert code == 0, out + err

    def losses(self, name: str = "run") -> dict[str, dict[int, float]]:
        return {kind: metrics(self.folder / name, kind) for kind in ("train_loss", "val_loss")}


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Place]:
    base = tmp_path_factory.mktemp("launchers")

    def make(name: str) -> Place:
        (base / name).mkdir()
        return Place(base / name)

    return make


@pytest.fixture
def place(places: Callable[[str], Place], request: pytest.FixtureRequest) -> Place:
    return places(re.sub(r"\W+", "-", request.node.name))


@pytest.fixture(scope="session")
def expected(places: Callable[[str], Place]) -> dict[str, dict[int, float]]:
    """The losses of the page's line for one machine, by launch.py."""
    place = places("expected")
    place.run(place.line("Eight GPUs of one machine", 1))
    losses = place.losses()
    assert sorted(losses["train_loss"]) == list(range(1, 21)) and sorted(losses["val_loss"]) == [
        0,
        10,
        20,
    ]
    return losses


def needs(*programs: str, why: str = "") -> None:
    for program in programs:
        if not shutil.which(program):
            pytest.skip(f"{program} is not on PATH{why}")
