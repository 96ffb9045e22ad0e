"""Independent processes read disjoint lanes (rows of the batch) that form one stream, also after
kill and resume."""

import io
import json
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress

import numpy as np
import pytest

from jspeed.data import Stage, TokenLoader

from .on_disk import shards_of

# Makes a loader; after every batch it says so, and leaves the state where the next one finds it.
WORKER = """
    import json, os, pickle, sys
    import time
    from jspeed.data import TokenLoader, open_shards
    paths, arguments, state, folder, pause = pickle.load(sys.stdin.buffer)
    loader = TokenLoader(open_shards(paths), **arguments)
    loader.load_state_dict(state)
    for batch in loader:
        pickle.dump((batch.step, batch.epoch, batch.tokens.tolist()), sys.stdout.buffer)
        sys.stdout.flush()
        with open(f"{folder}/state.new", "w") as file:
            json.dump(loader.state_dict(), file)
        os.replace(f"{folder}/state.new", f"{folder}/state.json")
        time.sleep(pause)
"""


def spawn(shards, arguments, state, folder, pause=0.0):
    folder.mkdir(parents=True)
    command = [sys.executable, "-c", textwrap.dedent(WORKER)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdin.write(pickle.dumps((shards.paths, arguments, state, str(folder), pause)))
    process.stdin.close()
    process.stdin = None  # or communicate would flush it
    return process


def told(output):
    """The batches that a worker wrote; a kill may have cut the last one."""
    batches, file = [], io.BytesIO(output)
    with suppress(EOFError, pickle.UnpicklingError):
        while True:
            batches.append(pickle.load(file))
    return batches


def spawn_all(shards, arguments, count, state, folder, pause=0.0):
    """One process for each share of the lanes."""
    shares = [
        arguments | {"process_index": index, "process_count": count} for index in range(count)
    ]
    return [spawn(shards, share, state, folder / str(i), pause) for i, share in enumerate(shares)]


def joined(shards, arguments, count, state, folder):
    """The stream of ``count`` processes that all end by themselves, at one step."""
    processes = spawn_all(shards, arguments, count, state, folder)
    parts = [told(process.communicate(timeout=60)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0] * count
    rows = []
    for steps in zip(*parts, strict=True):
        assert len({step[:2] for step in steps}) == 1
        rows.append((*steps[0][:2], sum((step[2] for step in steps), [])))
    return rows


@pytest.fixture(scope="module")
def shards():
    rng = np.random.default_rng(5)
    return shards_of(
        *(np.where(rng.random(n) < 0.05, 0, rng.integers(1, 99, n)) for n in (1500, 700, 1100))
    )


STAGES = [Stage(4, 16, 9), Stage(5, 32, 20), Stage(60, 24, 20)]
# Orders, process counts and resumes within one process: tests/data/test_loader.py.
ARGUMENTS = {"lanes": 8, "schedule": STAGES, "align": "bos", "bos_id": 0, "epochs": 2}


def test_a_killed_run_continues_exactly_on_another_process_count(shards, tmp_path):
    arguments = ARGUMENTS
    loader = TokenLoader(shards, **arguments)
    whole = [(batch.step, batch.epoch, batch.tokens.tolist()) for batch in loader]
    start = TokenLoader(shards, **arguments).state_dict()
    running = spawn_all(shards, arguments, 2, start, tmp_path / "killed", 0.02)
    saved = tmp_path / "killed" / "0" / "state.json"
    deadline = time.monotonic() + 30
    while (
        not (saved.exists() and json.loads(saved.read_text())["step"] >= 6)
        and time.monotonic() < deadline
    ):
        time.sleep(0.005)
    for process in running:
        process.kill()
    outputs = [told(process.communicate()[0]) for process in running]
    assert [process.returncode for process in running] == [-signal.SIGKILL] * 2
    state = json.loads(saved.read_text())
    assert 6 <= state["step"] < len(whole)
    for before, (step, epoch, rows) in zip(outputs[0], whole, strict=False):
        assert before == (step, epoch, rows[:4])
    assert joined(shards, arguments, 4, state, tmp_path) == whole[state["step"] :]
