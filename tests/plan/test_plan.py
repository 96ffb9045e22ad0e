"""A plan's dictionary, its tables, its comparison and search, on a small recipe compiled for this
CPU."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import jax
import pytest
from jax.sharding import Mesh
from rich.console import Console

import jspeed.plan.compile
import jspeed.plan.make
from jspeed.base import compiler
from jspeed.base.compiler import DoesNotFit
from jspeed.errors import BadInput
from jspeed.fields import check_json
from jspeed.parallel.mesh import make_mesh
from jspeed.plan import describe, hlo, predict
from jspeed.plan.absent.machine_code import without_machine_code
from jspeed.plan.compile import TargetPlacement, compile_stages, compile_that_fits, with_stage
from jspeed.plan.make import candidates, make_plan, memory_summary, search
from jspeed.plan.schema import Allocation, Kind, Plan
from jspeed.plan.target import parse_target
from jspeed.plan.views import tables, terminal
from jspeed.recipe import Recipe
from jspeed.recipes import r92
from jspeed.record.sizes import parameter_count
from jspeed.run.compute import division, program
from jspeed.run.compute.accumulators import first_alike, updates
from jspeed.run.compute.device import Device, Request
from jspeed.run.compute.division import place
from jspeed.run.find_recipe import find

from ..refusals import refused
from ..toys import TOYS

SMALL = ["VOCAB=1024", "MATRICES=1", "LANE_LEN=512", "LANES=16"]
FOUND = find(str(Path(__file__).with_name("faulty_recipe.py")), SMALL, trace=False)


def placement_here(
    recipe: Recipe = FOUND.recipe,
    layout: str = "zero1",
    memory: int = 10**10,
    at_once: int = 64,
    micro_batch: int | None = None,
    mesh: Mesh | None = None,
    platform: str = "cpu",
) -> TargetPlacement:
    """Eight devices of this CPU in the place of eight H100s, which take ``at_once`` tokens or
    ``micro_batch``."""
    asked = Request(None, micro_batch)
    device = Device(platform, "xla", "emulated", at_once, memory, asked=asked)
    placed = place(recipe, mesh or make_mesh({"data": 8}), layout, device)
    return TargetPlacement(cluster=parse_target("h100x8"), **vars(placed))


@pytest.fixture(scope="module")
def plan():
    """The plan and, as "step", the compiled step that it is made of."""
    with pytest.MonkeyPatch.context() as patch:
        steps = compile_stages(FOUND.recipe, placement_here())
        patch.setattr(jspeed.plan.make, "compile_stages", lambda *_: steps)
        return make_plan(FOUND, placement_here()) | {"step": steps[0]}


@pytest.fixture(scope="module")
def rows():
    """Where one micro-batch does not fit, a smaller one is tried."""
    [large] = search(FOUND, [placement_here(at_once=1024)])
    return search(FOUND, [placement_here(memory=large["peak_bytes"] - 1, at_once=1024)])


def test_keys(plan, rows):
    # all of it is plain
    plan = json.loads(json.dumps({key: plan[key] for key in plan if key != "step"}))
    check_json(plan | {"search": rows, "against": plan}, Plan)
    worse = plan | {"stages": [{**plan["stages"][0], "flops": "many"}]}
    with pytest.raises(
        BadInput, match=r"field 'against.stages\[0\].flops': expected a finite number \(FLOPs\)"
    ):
        check_json(plan | {"against": worse}, Plan)
    assert (plan["target"], plan["devices"], plan["recipe"]) == ("h100x8", 8, "bad")
    [stage] = plan["stages"]
    assert list(stage["memory_bytes"]) == list(get_args(Allocation))
    assert tuple(stage["time_ms"]) == predict.Times._fields
    assert [*stage["kernels"], "collective"] == list(get_args(Kind))
    assert stage["predicted_ms"][0] < stage["predicted_ms"][1]
    assert plan["predicted_seconds"][0] < plan["predicted_seconds"][1]


def test_numbers(plan):
    [stage] = plan["stages"]
    assert (stage["steps"], stage["tokens_per_step"], stage["micro_batches"]) == (10, 16 * 512, 2)
    # 6 x (one 128 x 128 matrix and the head) for each of a device's 1,024 tokens; Muon: 5 x 3
    # matmuls on one matrix, too small a bank to be cut, so on every device.
    assert stage["flops"] == 6 * 1024 * (128 * 128 + 1024 * 128) + 15 * 2 * 128**3
    assert (
        plan["parameters"] == parameter_count(FOUND.recipe.parameters) == 2 * 1024 * 128 + 128 * 128
    )
    assert sum(stage["memory_by_kind"].values()) == stage["memory_bytes"]["peak"]
    # Two tables in eighths, the matrix whole; Adam twice that of the tables, Muon once the matrix,
    # three counters.
    assert stage["memory_by_kind"]["parameters"] == 4 * (2 * 1024 * 128 // 8 + 128 * 128)
    assert {one["axis"] for one in stage["collectives"]} == {"data"}
    times = stage["time_ms"]
    roofline = (
        times["compute"] + times["memory"] + times["exposed_communication"] + times["launches"]
    )
    assert times["launches"] == pytest.approx(1e3 * predict.GAP * sum(stage["kernels"].values()))
    assert roofline > 0
    # without cuDNN
    assert times["empty_blocks"] == 0 and stage["roofline_ms"] == pytest.approx(roofline)
    assert stage["predicted_ms"][0] == pytest.approx(
        predict.predicted_range(roofline, parse_target("h100x8"))[0]
    )
    assert plan["predicted_seconds"][0] == pytest.approx(10 * stage["predicted_ms"][0] / 1e3)
    assert plan["expected_seconds"] == pytest.approx(10 * roofline / 1e3)
    assert sum(row["seconds"] for row in plan["terms"]) == pytest.approx(plan["expected_seconds"])
    assert sum(row["share"] for row in plan["terms"]) == pytest.approx(1)
    assert 0 < plan["guessed"] < 1
    assert sum(row["share"] for row in plan["bottlenecks"]) == pytest.approx(1)
    kernels = times["compute"] + times["memory"]
    assert sum(row["seconds"] for row in plan["bottlenecks"]) == pytest.approx(kernels / 100)
    shares = [row["share"] for row in plan["bottlenecks"]]
    assert shares == sorted(shares, reverse=True)
    price = parse_target("h100x8").target.data_sheet.dollars_per_hour
    assert plan["predicted_cost"]["low"] == pytest.approx(
        8 * price * plan["predicted_seconds"][0] / 3600
    )


def test_out_of_memory_says_what_fits(plan, rows):
    """Found by compiling with fewer lanes; the steps of the test are real, so is what they need."""
    small = plan["stages"][0]["memory_bytes"]["peak"]
    large = next(row["peak_bytes"] for row in rows if row["micro_batch_tokens"] == 1024)
    placement = placement_here(memory=(small + large) // 2)
    step = replace(plan["step"], parts=1, memory=plan["step"].memory | {"peak": large})
    fits, summary = memory_summary(FOUND.recipe, placement, [step])
    assert not fits
    assert "micro-batch of 1,024 tokens" in summary and "--micro-batch 512 needs" in summary
    fits, summary = memory_summary(FOUND.recipe, placement_here(memory=small), [plan["step"]])
    assert fits and summary.startswith("fits: ")
    for changes, end in (
        ({"head_chunk": 64}, "the head's loss in chunks of 64"),
        ({"remat": True}, "layers recomputed for their gradients"),
    ):
        step = replace(plan["step"], **changes)
        _, summary = memory_summary(FOUND.recipe, placement_here(memory=small), [step])
        assert summary.endswith(f"with a micro-batch of 512 tokens, {end}")


def test_the_ideal_of_a_step_with_remat_recomputes_too(plan, monkeypatch):
    """Else its recomputed matmuls would be redundant."""
    layouts = []

    def trace_step(recipe, stage, placement, parts):
        layouts.append(placement.layout)
        return SimpleNamespace(jaxpr=SimpleNamespace(eqns=[]))

    monkeypatch.setattr(
        jspeed.plan.make, "compile_stages", lambda *_: [replace(plan["step"], remat=True)]
    )
    monkeypatch.setattr(program, "trace_step", trace_step)
    monkeypatch.setattr(jspeed.plan.make, "check_shard_map", lambda _: [])
    assert make_plan(FOUND, placement_here())["layout"] == "zero1"
    assert layouts == ["zero1+remat"] * 2


def test_the_text_of_a_program_is_read_once(plan):
    """Stages that share a program ask for the same again."""
    hlo.instructions.cache_clear()
    step = with_stage(plan["step"], FOUND.recipe.stages[0])
    stage = describe.describe_stage(FOUND.recipe, placement_here(), 1, step)
    assert stage["flops"] == plan["stages"][0]["flops"]
    assert hlo.instructions.cache_info().misses == 0


def test_search_ends_with_what_does_not_fit(rows):
    assert [(row["micro_batch_tokens"], row["fits"]) for row in rows] == [
        (512, True),
        (1024, False),
    ]


def test_search_recomputes_from_the_largest_micro_batch_on(monkeypatch):
    """What training falls back to at last, its smallest micro-batch with remat, is not the best
    with remat."""

    def until_it_fits(recipe, placement):
        remat = placement.layout.endswith("+remat")
        for tokens in (1024, 512):
            row = dict(layout=placement.layout, micro_batch_tokens=tokens, fits=remat, peak_bytes=1)
            yield row | {"predicted_ms": [1, 2]}
            if remat:
                return
        yield row | {"layout": placement.layout + "+remat", "fits": True, "predicted_ms": [3, 4]}

    monkeypatch.setattr(jspeed.plan.make, "search_layout", until_it_fits)
    found = search(replace(FOUND, recipe=replace(FOUND.recipe, alike=True)), [placement_here()])
    first, *others = [
        (row["layout"].endswith("+remat"), row["micro_batch_tokens"], row["fits"]) for row in found
    ]
    assert first == (True, 1024, True) and sorted(others) == [
        (False, 512, False),
        (False, 1024, False),
    ]


def test_search_goes_on_where_the_compiler_refuses_a_program(monkeypatch, rows):
    """libtpu refuses what needs too much memory; other compilers leave that to us."""
    build = compiler.compiled
    largest = [True]

    def refuses(lowered, device, more):
        if largest.pop() if largest else False:
            raise DoesNotFit(12 * 10**9)
        return build(lowered, device, more)

    monkeypatch.setattr(compiler, "compiled", refuses)
    monkeypatch.setattr(division, "bytes_freed_by_chunks", lambda *_: 0)
    fits, large = search(FOUND, [placement_here(at_once=1024)])
    assert fits == next(row for row in rows if row["fits"])
    assert (large["fits"], large["peak_bytes"], large["predicted_ms"]) == (False, 12 * 10**9, None)
    console = Console(file=io.StringIO(), width=140)
    terminal.print_table(console, tables.searched({"search": [fits, large]}))
    assert "12.00 GB" in console.file.getvalue()


def test_candidates_are_layouts_that_can_share_the_lanes(monkeypatch):
    """Four lanes: data=4,model=2 takes them, data=8 does not, and is left out."""

    def here(recipe, cluster, layout, axes):
        return placement_here(recipe, layout, mesh=make_mesh(axes or {"data": 8}))

    monkeypatch.setattr(jspeed.plan.make, "place_on_target", here)
    recipe = find("llmc", [*TOYS["llmc"], "LANES=4"]).recipe
    meshes = [dict(one.mesh.shape) for one in candidates(recipe, parse_target("h100x8"))]
    assert {"data": 4, "model": 2} in meshes and {"data": 8} not in meshes


def test_tables_and_comparison(plan, rows):
    console = Console(file=io.StringIO(), width=140)
    terminal.print_plan(plan | {"search": rows}, console)
    terminal.print_table(console, tables.compared(plan, plan))
    text = console.file.getvalue()
    for word in (
        "predicted ms",
        "seconds by term",
        *"all-gather micro-batch bounds: guesses: bottlenecks:".split(),
        "-bound: ",
        "compute ms between",
        "bad against bad",
    ):
        assert word in text
    assert not any(change for *_, change, _ in tables.compared(plan, plan).rows)


def test_lanes_that_do_not_divide_are_one_error_message():
    refused("--set LANES=64", placement_here, replace(FOUND.recipe, lanes=60))


@pytest.fixture
def tried(monkeypatch):
    """What is lowered, (tokens of a lane or less, chunk of the head's loss), and needs so many
    bytes: nothing is."""
    found = []

    def lower(recipe, stage, placement, parts, phase=-1, head_chunk=None):
        tokens = recipe.tokens_per_step(stage) // placement.mesh.shape["data"] // parts
        found.append((tokens, head_chunk))
        return SimpleNamespace(
            as_text=lambda: str((tokens, head_chunk)), need=1000 * tokens - 10 * (head_chunk or 0)
        )

    monkeypatch.setattr(jspeed.plan.compile, "lower", lower)
    monkeypatch.setattr(compiler, "compiled", lambda lowered, device, more: lowered)
    monkeypatch.setattr(jspeed.plan.compile.compiler, "memory_needed", lambda step: step.need)
    return found


def test_a_plan_compiles_as_a_run_does(monkeypatch):
    """The same program with the same options of XLA, but for machine code, which a plan does
    without; ``bench.py gpu`` takes :func:`program.fit` too."""
    given, compile_it = [], jax.stages.Lowered.compile

    def compile_here(lowered, compiler_options=None):
        given.append((compiler_options, lowered.as_text()))
        return compile_it(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_here)
    recipe, placement = FOUND.recipe, placement_here(at_once=512, platform="cuda")
    compile_that_fits(recipe, placement, 0)
    program.fit(recipe, placement, 0)
    program.compile_evaluation(recipe, placement, 512, 8)
    (options, planned), (_, run), _ = given
    of_run = [also for also, _ in given[1:]]
    assert of_run[0] and of_run == [of_run[0]] * 2 and planned == run
    stop = {"xla_gpu_kernel_cache_file", "xla_dump_to", "xla_dump_hlo_as_proto"}
    of_plan = {name: value for name, value in options.items() if name not in stop}
    assert of_plan == {
        name: value
        for name, value in (of_run[0] | without_machine_code()).items()
        if name not in stop
    }


def test_a_plan_takes_what_training_would_find(tried, monkeypatch):
    """Where a lane does not fit: its head's loss in chunks if they can free as much, then pieces,
    then these."""
    monkeypatch.setattr(division, "HEAD_CHUNK", 48)
    recipe = find("r29", [*TOYS["r29"], "LANE_LEN=128", "MAX_DOCS=129", "VOCAB=100"]).recipe
    [stage], mesh = recipe.stages, placement_here().mesh
    # Logits and their gradient, fp32, of a lane, of a half and a quarter with a document more, but
    # of 48 tokens.
    assert [division.bytes_freed_by_chunks(recipe, stage, mesh, parts) for parts in (1, 2, 4)] == [
        64_000,
        38_400,
        12_800,
    ]

    def found(memory, micro_batch=None):
        tried.clear()
        taken = compile_that_fits(
            recipe, placement_here(recipe, memory=memory, micro_batch=micro_batch), 0
        )
        return taken.parts, taken.head_chunk

    assert found(128_000) == (1, None) and tried == [(128, None)]
    assert found(127_520) == (1, 48) and tried == [(128, None), (128, 48)]
    assert found(64_000) == (2, None) and tried == [(128, None), (64, None)]
    assert found(64_001) == (2, None) and tried == [(128, None), (128, 48), (64, None)]
    assert found(63_600) == (2, 48) and tried == [(128, None), (64, None), (64, 48)]
    assert found(1000) == (32, None) and tried[-1] == (4, None)  # the least, which does not fit
    assert found(1000, 64) == (2, None) and tried == [(64, None)]
    assert found(63_600, 64) == (2, 48) and tried == [(64, None), (64, 48)]


def test_stages_of_several_lengths_take_their_own(tried):
    recipe = find("r89", trace=False).recipe
    placement = placement_here(recipe, memory=12_288_000, at_once=65_536)
    for number, tokens in enumerate((8192, 8192, 12_288, 12_288)):
        taken = compile_that_fits(recipe, placement, number)
        assert recipe.tokens_per_step(recipe.stages[number]) // 8 // taken.parts == tokens
        assert taken.head_chunk is None


def test_steps_that_are_one_program():
    """Record 92 updates tables every second step, later every fourth: 28 steps, 24 programs.

    The first of the second stage is that of the third.
    """
    recipe = r92.RECIPE
    found = [[first_alike(recipe, stage, phase) for phase in range(4)] for stage in recipe.stages]
    assert found == [[0, 1, 0, 1]] * 2 + [[0, 1, 2, 3]] * 5
    assert updates(recipe, recipe.stages[1], 0) == updates(recipe, recipe.stages[2], 0)
