"""A plan's dictionary, its tables, its comparison and search, on a small recipe compiled for this CPU."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import jspeed.plan.compile
import jspeed.plan.plan
from jspeed.errors import BadInput
from jspeed.parallel.mesh import make_mesh
from jspeed.plan import predict
from jspeed.plan.compile import Hardware, Step, compile_stages, parts_of
from jspeed.plan.plan import fit, make_plan, require_devices, search
from jspeed.plan.target import parse_target
from jspeed.plan.views import compare, terminal
from jspeed.run.compute.device import Device
from jspeed.run.find_recipe import find
from jspeed.sizes import parameter_count

from ..toys import TOYS

SMALL = ["VOCAB=1024", "MATRICES=1", "LANE_LEN=512", "LANES=16"]
FOUND = find(str(Path(__file__).with_name("bad.py")), SMALL)


def hardware_for(layout: str = "zero1", memory: int = 10**10) -> Hardware:
    return Hardware(
        parse_target("h100x8"), make_mesh({"data": 8}), layout, Device("cpu", "xla", "emulated", 64, memory)
    )


def taking(hardware, micro_batch):
    return replace(hardware, device=replace(hardware.device, micro_batch=micro_batch))


@pytest.fixture(scope="module")
def plan():
    """The plan and, as "step", the compiled step that it is made of."""
    with pytest.MonkeyPatch.context() as patch:
        steps = compile_stages(FOUND.recipe, hardware_for())
        patch.setattr(jspeed.plan.plan, "compile_stages", lambda *_: steps)
        return make_plan(FOUND, hardware_for(), dollars_per_hour=3600.0) | {"step": steps[0]}


@pytest.fixture(scope="module")
def rows():
    """Where one micro-batch does not fit, a smaller one is tried."""
    [large] = search(FOUND, [taking(hardware_for(), 1024)])
    tight = hardware_for(memory=large["peak_bytes"] - 1)
    return search(FOUND, [taking(tight, 1024)])


def test_keys(plan):
    plan = json.loads(json.dumps({key: plan[key] for key in plan if key != "step"}))  # all of it is plain
    assert (plan["target"], plan["devices"], plan["recipe"]) == ("h100x8", 8, "bad")
    [stage] = plan["stages"]
    assert {"name", "steps", "tokens_per_step", "memory_bytes", "flops", "kernels", "collectives"} <= set(stage)
    assert {"arguments", "temporaries", "peak"} <= set(stage["memory_bytes"])
    assert {"fp8_matmul", "matmul", "attention_forward", "attention_backward", "fusion"} <= set(stage["kernels"])
    assert all({"kind", "bytes", "axis", "async"} <= set(send) for send in stage["collectives"])
    assert stage["predicted_ms"][0] < stage["predicted_ms"][1]
    assert plan["predicted_seconds"][0] < plan["predicted_seconds"][1]
    assert isinstance(plan["warnings"], list)


def test_numbers(plan):
    [stage] = plan["stages"]
    assert (stage["steps"], stage["tokens_per_step"], stage["micro_batches"]) == (10, 16 * 512, 2)
    # 6 x (one 128 x 128 matrix and the head) for each of a device's 1,024 tokens; Muon: 5 x 3 products on one matrix,
    # too small a bank to be cut, so on every device.
    assert stage["flops"] == 6 * 1024 * (128 * 128 + 1024 * 128) + 15 * 2 * 128**3
    assert plan["parameters"] == parameter_count(FOUND.recipe.parameters) == 2 * 1024 * 128 + 128 * 128
    assert sum(stage["memory_by_kind"].values()) == stage["memory_bytes"]["peak"]
    # Two tables in eighths, the matrix whole; Adam twice that of the tables, Muon once the matrix, three counters.
    assert stage["memory_by_kind"]["parameters"] == 4 * (2 * 1024 * 128 // 8 + 128 * 128)
    assert {send["axis"] for send in stage["collectives"]} == {"data"}
    times = stage["time_ms"]
    roofline = times["compute"] + times["memory"] + times["exposed_communication"]
    assert stage["predicted_ms"][0] == pytest.approx(predict.predicted_range(roofline)[0])
    assert plan["predicted_seconds"][0] == pytest.approx(10 * stage["predicted_ms"][0] / 1e3)
    assert plan["fitted_seconds"] == pytest.approx(10 * roofline / 1e3 * predict.slowdown())
    assert sum(row["share"] for row in plan["bottlenecks"]) == pytest.approx(1)
    kernels = times["compute"] + times["memory"]
    assert sum(row["seconds"] for row in plan["bottlenecks"]) == pytest.approx(kernels / 100 * predict.slowdown())
    shares = [row["share"] for row in plan["bottlenecks"]]
    assert shares == sorted(shares, reverse=True)
    assert plan["predicted_cost"]["low"] == pytest.approx(8 * plan["predicted_seconds"][0])


def test_out_of_memory_is_a_sentence_with_what_fits(plan, rows):
    """Found by compiling with fewer lanes; the steps of the test are real, so is what they need."""
    small = plan["stages"][0]["memory_bytes"]["peak"]
    large = next(row["peak_bytes"] for row in rows if row["micro_batch_tokens"] == 1024)
    hardware = hardware_for(memory=(small + large) // 2)
    step = replace(plan["step"], parts=1, memory=plan["step"].memory | {"peak": large})
    fits, sentence = fit(FOUND.recipe, hardware, [step])
    assert not fits
    assert "micro-batch of 1,024 tokens" in sentence and "--micro-batch 512 needs" in sentence
    fits, sentence = fit(FOUND.recipe, hardware_for(memory=small), [plan["step"]])
    assert fits and sentence.startswith("fits: ")


def test_search_ends_with_what_does_not_fit(rows):
    assert [(row["micro_batch_tokens"], row["fits"]) for row in rows] == [(512, True), (1024, False)]


def test_tables_and_comparison(plan, rows):
    console = Console(file=io.StringIO(), width=140)
    terminal.plan(plan | {"search": rows}, console)
    terminal.comparison(plan, plan, console)
    text = console.file.getvalue()
    for word in (
        "predicted ms",
        "held out",
        "all-gather",
        "tokens at once",
        "bounds:",
        "guesses:",
        "bottlenecks:",
        "-bound: ",
        "overlapping ms",
        "bad against bad",
    ):
        assert word in text
    assert all(before == after for _, before, after in compare.changes(plan, plan))


def test_lanes_that_do_not_divide_are_a_sentence():
    with pytest.raises(BadInput, match="--set LANES=64"):
        require_devices(replace(FOUND.recipe, lanes=60), hardware_for())


def test_a_plan_takes_the_micro_batch_that_training_would_find(monkeypatch):
    """Where the first does not fit: the largest that does, here a piece of a lane. Only the choice is looked at."""
    tried = []

    class Chosen(Exception):
        pass

    def compile_stages(recipe, hardware, micro_batch=None, at_most=None):
        if at_most:
            raise Chosen(at_most)
        [stage] = recipe.stages
        return [Step(stage, 1, "", {"peak": 100})]

    def lower(recipe, stage, hardware, tokens, phase=-1):
        tried.append(tokens)
        return tokens

    recipe = find("r29", [*TOYS["r29"], "LANE_LEN=128", "MAX_DOCS=129"]).recipe
    hardware = hardware_for(memory=40)
    monkeypatch.setattr(jspeed.plan.plan, "compile_stages", compile_stages)
    monkeypatch.setattr(jspeed.plan.compile, "lower", lower)
    monkeypatch.setattr(jspeed.plan.compile, "build", lambda lowered, device: lowered)
    monkeypatch.setattr(jspeed.plan.compile.program, "memory_needed", lambda tokens: tokens)
    with pytest.raises(Chosen, match="32"):
        make_plan(replace(FOUND, recipe=recipe), hardware)
    assert tried == [64, 32]


def test_stages_of_several_lengths_take_no_more_than_the_bound():
    """At 12,288 tokens, a quarter of the last stage's lane, which divides no lane of the others."""
    recipe, hardware = find("r89", trace=False).recipe, hardware_for()
    own = [recipe.tokens_per_step(stage) // hardware.mesh.shape["data"] for stage in recipe.stages]
    parts = [parts_of(recipe, stage, hardware, None, 12_288) for stage in recipe.stages]
    assert [n // m for n, m in zip(own, parts, strict=True)] == [8192, 8192, 12_288, 12_288]
