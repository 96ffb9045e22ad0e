"""A device that runs out of memory where the compiler said that a step fits: when tuning kernels,
and in warm-up."""

import dataclasses
import json
import threading

import jax
import numpy as np
import pytest
from rich.console import Console

from jspeed.errors import BadInput
from jspeed.run import setup
from jspeed.run.clock import Clock
from jspeed.run.compute import device, program, side_by_side, warm_up
from jspeed.run.options import Options
from jspeed.run.train import train

from ..data.on_disk import shard_bytes
from ..refusals import refused
from ..toys import TOYS

FULL = jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes"
)
GPU = device.Device("gpu", "cudnn", "native", 65_536)
CPU = device.Device("cpu", "xla", "emulated", 512)


@pytest.mark.parametrize(("kind", "most"), [(GPU, side_by_side.GPU_COMPILES), (CPU, 4)])
def test_two_programs_at_a_time_are_compiled_on_gpus(monkeypatch, kind, most):
    monkeypatch.setattr(side_by_side, "cores", lambda: 4)
    together = threading.Barrier(most)
    lock = threading.Lock()
    running = []
    seen = []

    def one(job, _):
        with lock:
            running.append(job)
            seen.append(len(running))
        together.wait(timeout=60)  # breaks with fewer at a time
        with lock:
            running.remove(job)
        return job

    assert side_by_side.compile_all(one, range(2 * most), kind) == list(range(2 * most))
    assert max(seen) == most


def test_what_runs_out_of_memory_is_compiled_again_alone():
    calls, beside = [], threading.Event()

    def one(job, _):
        calls.append((job, threading.current_thread() is threading.main_thread()))
        if job == 1 and not beside.is_set():
            beside.set()
            raise FULL
        return job

    assert side_by_side.compile_all(one, [0, 1, 2], GPU) == [0, 1, 2]
    assert (1, True) in calls and [job for job, _ in calls].count(1) == 2

    def never(job, _):
        raise FULL

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        side_by_side.compile_all(never, [0, 1], GPU)

    def broken(job, _):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        side_by_side.compile_all(broken, [0, 1], GPU)


def test_the_first_error_ends_the_other_jobs():
    begun, told = [], []

    def one(job, stop):
        begun.append(job)
        if job == 0:
            raise BadInput("too large")
        told.append(stop.wait(timeout=60))

    refused("too large", side_by_side.compile_all, one, range(24), GPU)
    # Each of two workers may have taken one more before the rest was cancelled.
    assert len(begun) <= 4 and all(told)


@pytest.mark.parametrize(
    ("name", "memory", "rows"),
    [
        pytest.param("r92", 60_500_000_000, 10_575_360, marks=pytest.mark.slow),
        ("jspeed3", 60_500_000_000, 10_575_360),  # an H100's
        ("r92", 107_900_000_000, 21_150_720),  # an H200's
    ],
)
def test_a_state_without_room_is_refused_before_compiling(name, memory, rows, monkeypatch):
    compiled = []
    one = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    gpu = dataclasses.replace(GPU, memory=memory)
    monkeypatch.setattr(setup, "make_mesh", lambda: one)
    monkeypatch.setattr(setup, "device_of", lambda *_, **__: gpu)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: compiled.append(1))
    monkeypatch.setattr(program, "need_and_step", lambda *_: compiled.append(1))
    message = refused("", setup.set_up, Options(name), Clock(), Console())
    assert not compiled
    said = message
    assert said.startswith(f"recipe {name} keeps 140.") and "parameter is ngrams, 130.0 GB" in said
    assert f"there are {memory / 1e9:.1f} GB" in said
    assert f"--set NGRAMS={rows}, which is another model" in said
    # What is advised is taken, and leaves half of the memory.
    setup.load_recipe_and_placement(Options(name, set_=(f"NGRAMS={rows}",)))
    monkeypatch.setattr(
        setup, "device_of", lambda *_, **__: dataclasses.replace(gpu, memory=memory // 2)
    )
    setup.load_recipe_and_placement(Options(name, set_=(f"NGRAMS={rows}",)))


def test_a_state_without_a_table_names_no_field(monkeypatch):
    one = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    monkeypatch.setattr(setup, "make_mesh", lambda: one)
    small = dataclasses.replace(GPU, memory=1_000_000_000)
    monkeypatch.setattr(setup, "device_of", lambda *_, **__: small)
    with pytest.raises(BadInput, match="and there are 1.0 GB; .*; use more or larger devices$"):
        setup.load_recipe_and_placement(Options("llmc"))


@pytest.fixture
def options(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for name in ("t_train_000.bin", "t_val_000.bin"):
        (tmp_path / "data" / name).write_bytes(shard_bytes(draw.integers(0, 257, 4000)))
    monkeypatch.setattr(
        setup, "make_mesh", lambda: jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    )
    small = "LAYERS=1", "HEADS=1", "WIDTH=16", "MLP_WIDTH=16"
    sets = (*TOYS["stdlib"], *small, "STEPS=3", "EVAL_TOKENS=64", "LANES=2")
    return Options("stdlib", data=tmp_path / "data", run_dir=tmp_path / "run", set_=sets,
    sample=False, progress=False,
                   target_loss=9.0)  # fmt: skip


def test_a_warm_up_without_room_is_followed_by_a_smaller_program(options, monkeypatch, capsys):
    tried, whole = [], warm_up.warm_up

    def short(made, *rest):
        tried.append((made.parts[-1], made.need))
        if len(tried) == 1:
            raise FULL
        whole(made, *rest)

    monkeypatch.setattr(warm_up, "warm_up", short)
    assert train(options) == 0
    (first, more), (second, less) = tried
    assert second > first and less < more
    run = json.loads((options.run_dir / "run.json").read_text())
    assert run["status"] == "finished" and run["steps"] == 3
    assert "GB a device were too much to run; taking less at once" in capsys.readouterr().out


def test_a_warm_up_that_never_has_room_is_one_sentence(options, monkeypatch):
    def full(*_):
        raise FULL

    monkeypatch.setattr(warm_up, "warm_up", full)
    lane = dataclasses.replace(options, set_=(*options.set_, "LANES=1"))  # few ways to divide it
    refused("recipe stdlib needs .* GB a device", train, lane)
    assert not options.run_dir.exists()
