"""Fault injection on real multi-process runs. They take minutes: only `make test-faults` runs
them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from ..multi_process import REPOSITORY, SAME_BITS, environment, metrics, shards, toy

FIELDS = toy("STEPS=160", "EVAL_EVERY=80")  # about 30 ms a step
SAVE_EVERY = 20


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "JSPEED_TEST_FAULTS" not in os.environ:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(
                    pytest.mark.skip(reason="faults take minutes; make test-faults runs them")
                )


@dataclass
class Run:
    """One launch of two processes on ``folder``'s shards; ``ended`` says how it went."""

    folder: Path
    name: str
    process: subprocess.Popen[str] = field(init=False, repr=False)

    @property
    def path(self) -> Path:
        return self.folder / self.name

    def start(self, *words: object, launch: str = "--standalone", **variables: object) -> "Run":
        """Start launch.py with the flags ``launch`` and speedrun.py with ``words``."""
        scripts = REPOSITORY / "scripts"
        command = [sys.executable, scripts / "launch.py", "--nproc-per-node", 2, *launch.split()]
        command += [
            scripts / "speedrun.py",
            "--data",
            "shards",
            "--run-dir",
            self.name,
            *words,
            *FIELDS,
        ]
        with (
            open(self.folder / f"{self.name}.out", "a") as out,
            open(self.folder / f"{self.name}.err", "a") as err,
        ):
            self.process = subprocess.Popen(
                list(map(str, command)),
                cwd=self.folder,
                env=environment(**SAME_BITS, **variables),
                stdout=out,
                stderr=err,
                text=True,
            )
        return self

    def resumable(self, **more: object) -> "Run":
        return self.start("--checkpoint-every", SAVE_EVERY, "--resume", **more)

    def steps(self) -> int:
        """The last step in metrics.jsonl, 0 before the first."""
        return max(metrics(self.path), default=0) if (self.path / "metrics.jsonl").exists() else 0

    def wait_for(self, happened: Callable[[], object], seconds: float = 120) -> None:
        before = time.monotonic()
        while not happened():
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode}: {self.said()}"
            )
            assert time.monotonic() - before < seconds, self.said()
            time.sleep(0.002)

    def until(self, step: int) -> "Run":
        self.wait_for(lambda: self.steps() >= step)
        return self

    def rank(self, rank: int) -> int:
        """The process id of ``rank``, a child of the launcher."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and f"RANK={rank}" in (
                    entry / "environ"
                ).read_text().split("\0"):
                    return int(entry.name)
            except OSError:
                continue
        raise AssertionError(f"no process of rank {rank}")

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> range:
        """Send ``number`` to ``rank``; returns the steps that the run may resume from."""
        newest = self.newest()
        os.kill(self.rank(rank), number)
        return range(newest, self.steps() + 1, SAVE_EVERY)

    def newest(self) -> int:
        return max((int(name) for name in self.checkpoints() if name.isdigit()), default=0)

    def said(self) -> str:
        return (self.folder / f"{self.name}.err").read_text()

    def errors(self) -> list[str]:
        return [line for line in self.said().splitlines() if line.startswith("error: ")]

    def printed(self) -> str:
        return (self.folder / f"{self.name}.out").read_text()

    def ended(self, seconds: float) -> int:
        """The exit code; fails if that takes longer than ``seconds``."""
        return self.process.wait(seconds)

    def record(self) -> dict:
        return json.loads((self.path / "run.json").read_text())

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.path / "checkpoints").glob("*"))

    def is_as(self, other: "Run") -> bool:
        """Whether every training and validation loss is that of ``other``, bit for bit, and
        run.json's too."""
        kinds = ("train_loss", "val_loss")
        same = all(metrics(self.path, kind) == metrics(other.path, kind) for kind in kinds)
        return same and self.record()["val_loss"] == other.record()["val_loss"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs are made; compiled programs are shared between them."""
    path = tmp_path_factory.mktemp("faults")
    (whole,) = shards(path / "shards").glob("*_train_*")
    tokens = np.fromfile(whole, "<u2", offset=1024)
    # so that a run opens some of them late
    for number, part in enumerate(np.array_split(tokens, 8), 1):
        header = np.fromfile(whole, "<i4", count=256)
        header[2] = len(part)
        whole.with_name(f"toy_train_{number:06d}.bin").write_bytes(
            header.tobytes() + part.tobytes()
        )
    return path


@pytest.fixture(scope="session")
def undisturbed(folder: Path) -> Run:
    """The run that nothing happened to."""
    run = Run(folder, "undisturbed").start(JSPEED_CACHE=folder / "cache")
    assert run.ended(300) in (0, 1), run.said()
    assert run.steps() == 160 and not run.said()
    return run


@pytest.fixture
def run(
    undisturbed: Run, folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """A run that has not been started; nothing of it is left behind."""
    monkeypatch.setenv("JSPEED_CACHE", str(folder / "cache"))
    run = Run(folder, request.node.name.replace("[", "-").rstrip("]"))
    yield run
    if run.process.poll() is None:
        for rank in (0, 1):
            with suppress(AssertionError, OSError):
                os.kill(run.rank(rank), signal.SIGKILL)
        run.process.kill()
        run.process.wait()
