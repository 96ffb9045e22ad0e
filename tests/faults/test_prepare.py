"""`prepare.py text` in several processes, interrupted or killed at any moment: all of them end at
once."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from ..corpus.prepared import SCRIPT
from ..multi_process import environment

SECONDS = 3.0  # to end in, on a busy machine; a moment on a quiet one


def marked(mark: str) -> list[int]:
    """Processes with ``mark`` in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (
                mark in (entry / "environ").read_text()
                and (entry / "stat").read_text().split(") ")[1][0] != "Z"
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def all_gone(mark: str) -> bool:
    before = time.monotonic()
    while marked(mark):
        if time.monotonic() - before > SECONDS:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """50 MB, in documents of 2 kB."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    lines = "".join(
        f"document {i}: the quick brown fox jumps over {i % 97} lazy dogs\n" for i in range(30)
    )
    path.write_text("<|endoftext|>".join(f"{i}\n{lines}" for i in range(25_000)))
    return path


@pytest.fixture
def preparation(text, tmp_path):
    mark = f"mark-{uuid.uuid4().hex}"
    flags = ["--tokenizer", "bytes", "--processes", 4, "--out", tmp_path / "out"]
    words = [*map(str, [sys.executable, SCRIPT, "text", text, *flags])]
    own = {"env": environment(MARK=mark), "start_new_session": True}
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, **own)
    try:
        while not list(tmp_path.glob(".out.*.work")):
            assert process.poll() is None
            time.sleep(0.001)
        yield process, mark
    finally:
        for left in marked(mark):
            os.kill(left, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    "milliseconds", [0, 5, 10, 20, 35, 50, 75, 100, 150, 200, 300, 400, 500, 650, 800, 1000]
)
def test_ctrl_c(preparation, milliseconds):
    """As a terminal sends it: to all processes of the group."""
    process, mark = preparation
    time.sleep(milliseconds / 1000)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=SECONDS)
    assert (process.returncode, said) in (
        (130, "interrupted; run the same command to resume\n"),
        (0, ""),  # it was done already
    )
    assert all_gone(mark)


@pytest.mark.parametrize("milliseconds", [1, 10, 100])
def test_ctrl_c_twice(preparation, milliseconds):
    process, mark = preparation
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(milliseconds / 1000)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode in (130, -signal.SIGINT) and "Traceback" not in said
    assert "Exception" not in said
    assert all_gone(mark)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("milliseconds", [0, 100, 400])
def test_killed_alone(preparation, number, milliseconds):
    process, mark = preparation
    time.sleep(milliseconds / 1000)
    process.send_signal(number)
    process.wait(SECONDS)
    assert all_gone(mark)
