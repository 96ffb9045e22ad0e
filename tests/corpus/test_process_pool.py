"""The process pool keeps the order of its items, and its workers end with their parent."""

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from jspeed.corpus import process_pool
from jspeed.corpus.process_pool import in_order
from jspeed.errors import BadInput, NoRoom

from ..refusals import refused

PARENT = """
import time
from jspeed.corpus.process_pool import in_order
for each in in_order(time.sleep, [0.01] * 2 + [60] * 20, 2):
    print("done", flush=True)
"""


def test_results_come_in_order_and_errors_in_their_place():
    with closing(in_order(math.factorial, [*range(50), -1, *range(9)], 2)) as results:
        assert [next(results) for _ in range(50)] == [math.factorial(n) for n in range(50)]
        with pytest.raises(ValueError, match="not defined for negative"):
            next(results)


def test_bad_input_is_raised_after_the_results_before_it():
    def items():
        yield from (1, 2, 3)
        raise BadInput("the fourth")

    results = in_order(math.factorial, items(), 2)
    assert [next(results) for _ in range(3)] == [1, 2, 6]
    refused("the fourth", next, results)


def test_no_more_processes_than_items(monkeypatch):
    started = []
    real = process_pool._started
    monkeypatch.setattr(process_pool, "_started", lambda: (started.append(real()), started[-1])[1])
    assert list(in_order(math.factorial, range(2), 1000)) == [1, 1]
    assert 1 <= len(started) <= 2 and all(worker.returncode is not None for worker in started)


def test_ctrl_c_before_a_thread_has_started(monkeypatch):
    def start(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(process_pool.threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        list(in_order(math.sqrt, [1.0, 4.0], 2))


def test_a_killed_process_has_an_error_message():
    with pytest.raises(
        NoRoom, match="was killed, probably out of memory.*fewer --processes to resume"
    ):
        list(in_order(signal.raise_signal, [signal.SIGKILL], 2))
    with pytest.raises(NoRoom, match="ended with exit code 3"):
        list(in_order(os._exit, [3], 2))


def children(pid: int) -> list[int]:
    """The processes that any thread of process ``pid`` has started."""
    return [
        int(word)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for word in path.read_text().split()
    ]


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_none_outlives_its_parent(number):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == process.stdout.readline() == "done\n"
        its = children(process.pid)
        assert len(its) == 2
        process.send_signal(number)
    before = time.monotonic()
    while any(Path(f"/proc/{pid}").exists() for pid in its):
        assert time.monotonic() - before < 3
        time.sleep(0.02)
