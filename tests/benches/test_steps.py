"""Benchmarks of loader, steps and kernels run and report; their limits are not enforced, the
machine may be busy."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from jax.profiler import ProfileData

from jspeed.cli import main
from jspeed.errors import BadInput
from jspeed.parallel.mesh import make_mesh
from jspeed.run.find_recipe import find

from ..toys import TINY
from .call_bench import GPU_TOY, SCRIPTS, bench

STDLIB = SCRIPTS.parent / "python" / "jspeed" / "recipes" / "stdlib.py"


@pytest.mark.slow
def test_the_loader_is_measured(tmp_path):
    done = bench("loader", "--quick", "--json", tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    failed = [row for row in rows if row["passed"] is False]
    assert done.returncode == bool(failed), done.stderr
    masked = any("mask" in row["what"] for row in rows)  # where GPT-2's vocabulary is there
    assert len([row for row in rows if row["below"]]) == 13 + 2 * masked
    assert done.stdout.count("\n") == len(rows) + 1
    assert all(row["what"] in done.stdout for row in rows)


@pytest.mark.slow
def test_the_index_is_measured():
    done = bench("index", "--tokens", "1000000", "--lengths", "3", "6")
    assert done.returncode == ("FAIL" in done.stdout), done.stderr
    assert done.stdout.count("\n") == 8 and done.stdout.count("by arithmetic") == 2


@pytest.mark.slow
def test_the_table_of_rows_is_measured():
    done = bench("rows", "--rows", "70000", "--rounds", "2")
    assert done.returncode == ("FAIL" in done.stdout), done.stderr
    assert done.stdout.count("\n") == 15 and done.stdout.count("of a copy") == 4
    assert done.stdout.count("a share's rows are found") == 2


@pytest.mark.slow
def test_rows_that_a_text_names_are_counted(shards):
    done = bench("rows", "--data", shards)
    assert done.returncode == 2 and "8,388,608 are needed" in done.stderr


@pytest.mark.slow
def test_a_recipe_that_cannot_be_measured_stops_no_other(shards, tmp_path):
    odd = tmp_path / "odd.py"
    odd.write_text(
        STDLIB.read_text()
        .replace("lanes=LANES", "lanes=LANES + 1")
        .replace('name="stdlib"', 'name="odd"')
    )
    file = tmp_path / "gpu.json"
    done = bench(
        "gpu", "--recipe", odd, "stdlib", "--steps", 3, "--data", shards, "--json", file, *GPU_TOY
    )
    assert done.returncode == 1, done.stderr
    content = json.loads(file.read_text())
    assert list(content["failed"]) == ["odd"]
    assert "cannot be divided over 2 devices" in content["failed"]["odd"]
    assert content["failed"]["odd"][:60] in done.stdout
    (row,) = content["rows"]
    assert (row["recipe"], row["lanes"], row["lane_len"], row["steps"]) == ("stdlib", 8, 16, 3)
    assert 0 < row["step_ms_median"] <= row["step_ms_p99"] and row["compile_seconds"] > 0
    assert row["tokens_per_second"] == pytest.approx(8 * 16 / row["step_ms_in_a_row"] * 1e3)
    assert row["tokens_per_second_per_device"] == pytest.approx(row["tokens_per_second"] / 2)
    assert 0 < row["data_wait_ms"] < row["step_ms_in_a_row"] and 0 < row["loss"] < 6
    assert row["memory_needed"] > 0
    # A CPU has no peak in the table, an allocator that counts nothing, and no kernels: each is said
    # or left out.
    assert row["mfu"] is row["memory_peak"] is None and "no kernel table" in row["profile"]
    assert "no MFU" in done.stdout and row["profile"] in done.stdout


class Later:
    """An array that is being computed: a step that naps for 20 ms returned it before."""

    def __init__(self, pool):
        self.nap = pool.submit(time.sleep, 0.02)

    def block_until_ready(self):
        self.nap.result()

    def __array__(self, *_, **__):
        self.nap.result()
        return np.ones(())


@pytest.mark.parametrize("count", [2, 10])
def test_time_grows_with_steps(monkeypatch, count):
    """JAX returns from a step before it is computed; a clock that does not wait for it reads what a
    call takes."""
    from benches import steps

    monkeypatch.setattr(steps, "profile", lambda one: "none")
    recipe, mesh = find("stdlib", TINY).recipe, make_mesh({"data": 1}, jax.devices()[:1])
    setting = steps.Settings(mesh, None, None, count, None)

    def step(state, tokens):
        later = Later(pool)
        return later, {"loss": later}

    with ThreadPoolExecutor(1) as pool:
        _, timing = steps.run([step], Later(pool), recipe, recipe.stages[0], setting)
    assert len(timing.alone) == count and min(timing.alone) >= 0.02 and timing.in_a_row >= 0.02


def test_a_recipe_is_measured_with_its_own_attention(monkeypatch):
    from benches import steps

    recipe, mesh, asked = find("stdlib", TINY).recipe, make_mesh({"data": 1}, jax.devices()[:1]), []
    monkeypatch.setattr(steps, "device_of", lambda *given: asked.append(given) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(steps.measure_recipe(recipe, "hash", steps.Settings(mesh, "xla", None, 2, None)))
    assert asked == [(mesh, "xla", None, recipe, None, None)]


def test_kernels_of_a_gpu_are_added_up():
    """A profile as CUPTI leaves it: streams whose kernels overlap, and a line that repeats them by
    module."""
    from benches.kernel_profile import Kernel, read

    def line(name: str, *events: tuple[int, int, int]) -> str:
        said = 'stats { metadata_id: 9 str_value: "gemm.1" }'
        text = [
            f"events {{ metadata_id: {i} offset_ps: {a}000000000 duration_ps: {b}000000000"
            f" {said if i == 1 else ''} }}"
            for i, a, b in events
        ]
        return f'lines {{ name: "{name}" timestamp_ns: 1000 {" ".join(text)} }}'

    names = "".join(
        f'event_metadata {{ key: {i} value {{ id: {i} name: "{n}" }} }}'
        for i, n in enumerate("abc", 1)
    )
    names += 'stat_metadata { key: 9 value { id: 9 name: "hlo_op" } }'
    first = line("Stream #7(Compute)", (1, 0, 3), (2, 4, 1), (1, 6, 3)) + line(
        "Stream #8(NCCL)", (3, 1, 3)
    )
    gpu = f'planes {{ name: "/device:GPU:0" {first} {line("XLA Modules", (2, 0, 90))} {names} }}'
    other = f'planes {{ name: "/device:GPU:1" {line("Stream #7(Compute)", (1, 0, 50))} {names} }}'
    profile = read(ProfileData.from_text_proto(f'planes {{ name: "/host:CPU" }} {other} {gpu}'))
    assert profile.kernels == [
        Kernel("a", 2, 6.0, 0.6),
        Kernel("c", 1, 3.0, 0.3),
        Kernel("b", 1, 1.0, 0.1),
    ]
    assert (profile.device, profile.distinct, profile.kernel_ms, profile.busy_ms) == (
        "/device:GPU:0",
        3,
        10.0,
        8.0,
    )
    assert profile.by_operation == {"gemm.1": {"a": 6.0}, "": {"b": 1.0, "c": 3.0}}
    assert "no kernels" in read(ProfileData.from_text_proto('planes { name: "/device:GPU:0" }'))


def test_a_step_that_does_not_fit_is_one_error_message():
    from benches import gpu

    mesh, recipe = make_mesh({"data": 1}, jax.local_devices()[:1]), find("stdlib").recipe
    said = gpu.failure_reason(
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 70823337560 bytes.\nmore"),
        recipe,
        mesh,
    )
    assert said.startswith(
        "recipe stdlib does not fit into the memory of 1 x cpu: 70.8 GB were asked for at once;"
        " give"
    )
    assert (
        gpu.failure_reason(RuntimeError("INTERNAL: no\nmore"), recipe, mesh)
        == "recipe stdlib failed: INTERNAL: no"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--recipe", "stdlib", "--micro-batch", "7", *GPU_TOY],
            ["--micro-batch 7", "need one of 16, 32, 64"],
        ),
        pytest.param(
            ["--recipe", "stdlbi"], ["stdlbi", "did you mean 'stdlib'"], marks=pytest.mark.slow
        ),
        pytest.param(["--versus", "true"], ["--versus", "--data"], marks=pytest.mark.slow),
        pytest.param(["--rounds", "2"], ["--rounds would have no effect"], marks=pytest.mark.slow),
        pytest.param(
            ["--json", "no/such/folder.json"], ["there is no folder"], marks=pytest.mark.slow
        ),
    ],
)
def test_bad_input_is_one_error_message(arguments, words):
    done = bench("gpu", *arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ") and all(word in done.stderr for word in words)


@pytest.mark.parametrize("versus", [None, "true"])
def test_a_cpu_is_measured_only_if_told_to(versus, monkeypatch, tmp_path):
    """It timed the steps of the CPU without a word."""
    from benches import gpu

    ran = []
    monkeypatch.setattr(gpu, "race", lambda *_: ran.append("race"))
    monkeypatch.setattr(gpu, "measure_recipe", lambda *_: ran.append("steps") or ())
    monkeypatch.setattr(gpu, "visible_gpus", lambda _: 0)
    words = dict(
        recipe=("stdlib",), set=tuple(TINY), versus=versus, data=tmp_path if versus else None
    )
    before = jax.config.values["jax_platforms"]
    try:
        jax.config.update("jax_platforms", None)
        with pytest.raises(BadInput, match="JAX uses none here.*JAX_PLATFORMS=cpu"):
            gpu.gpu(**words)
        jax.config.update("jax_platforms", "cpu")
        gpu.gpu(**words)
    finally:
        jax.config.update("jax_platforms", before)
        jax.config.update("jax_enable_compilation_cache", True)
    assert ran == ["race" if versus else "steps"]


@pytest.mark.parametrize(
    "words", ["tokenise a.txt", "generate", "fused", "cpu --recipes stdlib", "gpu"]
)
def test_no_rounds_are_refused(words):
    with pytest.raises(BadInput, match="--rounds '0'"):
        main.call(["bench", *words.split(), "--rounds", "0"])
