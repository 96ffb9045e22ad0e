"""A device that runs out of memory where the compiler said that a step fits: when tuning kernels,
and in warm-up."""

import json
import threading

import jax
import numpy as np
import pytest

from jspeed.errors import BadInput
from jspeed.run import setup
from jspeed.run.compute import device, program
from jspeed.run.options import Options
from jspeed.run.train import train

from ..data.on_disk import shard_bytes
from ..toys import TOYS

FULL = jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes"
)
GPU = device.Device("gpu", "cudnn", "native", 65_536)
CPU = device.Device("cpu", "xla", "emulated", 512)


@pytest.mark.parametrize(("kind", "most"), [(GPU, program.GPU_COMPILES), (CPU, 4)])
def test_two_programs_at_a_time_are_compiled_on_gpus(monkeypatch, kind, most):
    monkeypatch.setattr(program, "cores", lambda: 4)
    together = threading.Barrier(most)
    lock = threading.Lock()
    running = []
    seen = []

    def one(job):
        with lock:
            running.append(job)
            seen.append(len(running))
        together.wait(timeout=60)  # breaks with fewer at a time
        with lock:
            running.remove(job)
        return job

    assert program.compile_all(one, range(2 * most), kind) == list(range(2 * most))
    assert max(seen) == most


def test_what_runs_out_of_memory_beside_others_is_compiled_again_alone():
    calls, beside = [], threading.Event()

    def one(job):
        calls.append((job, threading.current_thread() is threading.main_thread()))
        if job == 1 and not beside.is_set():
            beside.set()
            raise FULL
        return job

    assert program.compile_all(one, [0, 1, 2], GPU) == [0, 1, 2]
    assert (1, True) in calls and [job for job, _ in calls].count(1) == 2

    def never(job):
        raise FULL

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        program.compile_all(never, [0, 1], GPU)

    def broken(job):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        program.compile_all(broken, [0, 1], GPU)


@pytest.fixture
def options(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for name in ("t_train_000.bin", "t_val_000.bin"):
        (tmp_path / "data" / name).write_bytes(shard_bytes(draw.integers(0, 272, 4000)))
    monkeypatch.setattr(
        setup, "make_mesh", lambda: jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    )
    sets = (*TOYS["track3"], "STEPS=3", "EVAL_TOKENS=64", "LANES=2")
    return Options("track3", data=tmp_path / "data", run_dir=tmp_path / "run", set_=sets,
    sample=False, progress=False,
                   target_loss=9.0)  # fmt: skip


def test_a_warm_up_without_room_is_followed_by_a_smaller_program(options, monkeypatch, capsys):
    tried, warm_up = [], setup.warm_up

    def short(made, *rest):
        tried.append((made.parts[-1], made.need))
        if len(tried) == 1:
            raise FULL
        warm_up(made, *rest)

    monkeypatch.setattr(setup, "warm_up", short)
    assert train(options) == 0
    (first, more), (second, less) = tried
    assert second > first and less < more
    run = json.loads((options.run_dir / "run.json").read_text())
    assert run["status"] == "finished" and run["steps"] == 3
    assert "GB a device were too much to run; taking less at once" in capsys.readouterr().out


def test_a_warm_up_that_never_has_room_is_one_sentence(options, monkeypatch):
    def full(*_):
        raise FULL

    monkeypatch.setattr(setup, "warm_up", full)
    with pytest.raises(BadInput, match="recipe track3 needs .* GB a device"):
        train(options)
    assert not options.run_dir.exists()
