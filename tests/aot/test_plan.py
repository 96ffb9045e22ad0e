"""Plans of real recipes for absent H100s, against the compiler's own figures and independent
formulas."""

import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import pytest

from jspeed.base import compiler
from jspeed.plan import predict
from jspeed.plan.absent import machine_code
from jspeed.plan.compile import (
    Step,
    compile_stages,
    lower,
    memory_by_kind,
    place_on_target,
    with_stage,
)
from jspeed.plan.describe import describe_evaluation, describe_stage
from jspeed.plan.make import make_plan
from jspeed.plan.target import parse_target
from jspeed.run.find_recipe import find

from .test_recipes import compiled

BAD = str(Path(__file__).parents[1] / "plan" / "faulty_recipe.py")
EIGHT = parse_target("h100x8")
MEMORY = {"arguments": 0, "outputs": 0, "aliased": 0, "temporaries": 2**35}


def steps_of(mesh, name: str) -> list[Step]:
    """A step for every stage of a recipe on eight devices, of the compile in test_recipes."""
    recipe, text, needed = compiled(mesh(8), name)
    last = Step(recipe.stages[-1], 1, text, MEMORY | {"peak": needed})
    return [with_stage(last, stage) for stage in recipe.stages[:-1]] + [last]


def test_evaluation_of_r29():
    """No faster than the FLOPs of its matmuls at an H100's 989 TFLOP/s, nor four times slower."""
    recipe = find("r29").recipe
    found = describe_evaluation(recipe, place_on_target(recipe, EIGHT, "zero1"))
    matrices = 44 * 768**2 + 24 * 768 * 3072 + 50304 * 768
    least = 2 * 10_485_760 / 8 * matrices / 989e12
    assert least < found["seconds"][0] < 4 * least
    assert found["fits"] and found["after_the_clock"] == 12


def test_flops_of_r29(mesh):
    """6 for each weight of a matrix and each token, Newton-Schulz on a device's share, attention by
    keys seen."""
    recipe, _, _ = compiled(mesh(8), "r29")
    placement = place_on_target(recipe, EIGHT, "zero1")
    tokens = 49152
    width = 768
    up = 3072
    vocabulary = 50304
    matmuls = 6 * tokens * (44 * width * width + 24 * width * up + vocabulary * width)
    newton_schulz = 5 * (6 * 3 * 2 * width**3 + 3 * (2 * 2 * width**2 * up + 2 * width**3))
    for step, stage in zip(steps_of(mesh, "r29"), recipe.stages, strict=True):
        keys = [sum(min(t + 1, window) for t in range(2048)) / 2048 for window in stage.windows]
        del keys[7]  # the layer without attention
        attention = 2 * 7 * tokens * width * sum(keys)  # two matmuls forward and five backward
        described = describe_stage(recipe, placement, 1, step)
        assert described["flops"] == pytest.approx(matmuls + newton_schulz + attention, rel=0.01)
        assert described["flops_by_part"]["attention scores"] == pytest.approx(attention, rel=1e-6)
        # and the gates
        assert described["flops_by_part"]["optimizer"] == pytest.approx(newton_schulz, rel=1e-5)
        assert described["flops_by_dtype"]["f8"] == 6 * tokens * vocabulary * width
        assert described["kernels"]["fp8_matmul"] == 3
        assert (
            described["kernels"]["attention_forward"]
            == described["kernels"]["attention_backward"]
            == 11
        )
        collectives = Counter(one["kind"] for one in described["collectives"])
        assert collectives.pop("all-reduce") in (1, 2)  # JAX 0.12 combines them
        assert collectives == {"all-gather": 5, "reduce-scatter": 5}


@pytest.mark.parametrize("name", ["llmc", "track3", "r21", "r29"])
def test_sums_of_terms_of_published_programs(mesh, name):
    """The numbers that the calibration stands on follow from the compiled programs, within what a
    compiler changes."""
    steps = steps_of(mesh, name)
    [published] = [p for p in predict.MEASURED if p.recipe == name]
    seconds = sum(
        step.stage.steps * predict.simulate(step.kernels, EIGHT)[0].total for step in steps
    )
    assert 1e3 * seconds / sum(step.stage.steps for step in steps) == pytest.approx(
        published.tables_ms, rel=0.03
    )


def test_memory_is_the_compilers(mesh):
    """Arguments and peak are those of memory_analysis; parameters, optimizer state and batch are
    counted by hand."""
    found = find(BAD)
    placement = place_on_target(found.recipe, EIGHT, "zero1")
    [step] = compile_stages(found.recipe, placement)
    state = 2 * 4096 * 128 // 8 + 8 * 128 * 128 // 8
    kinds = memory_by_kind(step)
    assert kinds["parameters"] == 4 * state
    assert kinds["optimizer"] == pytest.approx(
        4 * (2 * 2 * 4096 * 128 // 8 + 8 * 128 * 128 // 8), abs=64
    )
    assert kinds["batch"] == 2 * 513
    assert sum(kinds.values()) == step.memory["peak"]
    needed = sum(kinds[kind] for kind in ("parameters", "optimizer", "batch"))
    assert needed == pytest.approx(step.memory["arguments"], abs=4096)  # alignment


def test_a_plan_needs_no_machine_code(mesh, monkeypatch):
    """The same text and memory where XLA is stopped before it writes code as in a whole
    compilation; and with the pretended assembler, LLVM's least effort, and kernels of an earlier
    program."""
    monkeypatch.delenv("XLA_FLAGS")  # XLA has read them
    recipe = find(BAD).recipe
    placement = place_on_target(recipe, EIGHT, "zero1")
    quick = machine_code.without_machine_code()
    kept = Path(quick["xla_gpu_kernel_cache_file"])
    assert quick.keys() - {"xla_gpu_kernel_cache_file"} == {
        "xla_gpu_cuda_data_dir",
        "xla_backend_optimization_level",
    }
    programs, sizes = [], []
    whole = [partial(compiler.compiled, more=more) for more in (None, quick, quick)]
    for build in (machine_code.compiled, *whole):
        jax.clear_caches()
        lowered = lower(recipe, recipe.stages[0], placement, 1)
        programs.append(build(lowered, placement.device))
        sizes.append(kept.stat().st_size if kept.exists() else 0)
    assert isinstance(programs[0], machine_code.Stopped) or not jax.__version__.startswith("0.10")
    assert sizes[1] < sizes[2] and sizes[3] < 1.1 * sizes[2]
    texts = [program.as_text() for program in programs]
    assert len({text.split("\n", 1)[1] for text in texts}) == 1
    assert all("num_partitions=8" in text[: text.index("\n")] for text in texts)
    for one in machine_code.Sizes._fields:
        assert len({getattr(program.memory_analysis(), one) for program in programs}) == 1


@pytest.mark.parametrize(
    ("sets", "names"),
    [
        ([], set()),
        (["WIDE_LOGITS=True"], {"fp32-logits"}),
        (["MATRICES=9"], {"bank-cannot-shard", "replicated-muon"}),
    ],
)
def test_each_deliberate_fault_is_found(h100, sets, names):
    found = find(BAD, sets)
    plan = make_plan(found, place_on_target(found.recipe, EIGHT, "zero1"))
    errors = {finding["name"] for finding in plan["findings"] if finding["level"] == "error"}
    # so small a step has no compute to overlap its collectives
    assert errors - {"exposed-collective"} == names


def test_several_nodes_and_other_gpus(h100):
    found = find(BAD, ["LANES=32", "MATRICES=32"])
    plan = make_plan(found, place_on_target(found.recipe, parse_target("h100x8x4"), "zero1"))
    assert (plan["devices"], plan["nodes"], plan["mesh"]) == (32, 4, {"data": 32})
    assert {one["group"] for one in plan["stages"][0]["collectives"]} == {32}
    for kind in ("a100", "b200", "h200"):
        placement = place_on_target(found.recipe, parse_target(f"{kind}x1"), "zero1")
        [step] = compile_stages(found.recipe, placement)
        assert sum(kernel.flops for kernel in step.kernels) > 0


def test_a_plan_prints_no_log():
    """Of the plugin's four libraries, which say in two lines each that there is no GPU."""
    words = [sys.executable, *"-m jspeed plan stdlib --target h100x1 --set LAYERS=1".split()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "") and "predicted" in done.stdout.lower()
