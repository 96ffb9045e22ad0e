"""plan/findings.py finds each deliberate fault, in programs compiled for eight virtual CPU
devices."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jspeed.parallel import layout as layouts
from jspeed.parallel.mesh import make_mesh
from jspeed.plan import cost, findings
from jspeed.plan.make import make_plan
from jspeed.recipe import leaves
from jspeed.record.sizes import scored_heads
from jspeed.run.compute import program
from jspeed.run.compute.device import Device, Placement
from jspeed.run.find_recipe import find

from .test_plan import placement_here

BAD = str(Path(__file__).with_name("faulty_recipe.py"))
HERE = Device("cpu", "xla", "emulated", 8192, memory=10**10)


def plan_here(*sets: str, layout: str = "zero1"):
    """Plan faulty_recipe.py for 8 H100s, its programs compiled for eight devices of this CPU."""
    found = find(BAD, sets)
    return make_plan(found, placement_here(found.recipe, layout, at_once=8192))


# What a matmul repeats on a mesh, worked out by hand, is in tests/test_sharding.py.
def errors(plan) -> set[str]:
    return {finding["name"] for finding in plan["findings"] if finding["level"] == "error"}


@pytest.mark.parametrize(
    ("axes", "columns"),
    [
        ({"data": 4, "model": 2}, 32),
        pytest.param({"data": 1, "model": 4}, 16, marks=pytest.mark.slow),
    ],
)
def test_a_tensor_parallel_step_repeats_no_matmul(axes, columns, monkeypatch):
    """All matmuls of a whole step, forward and backward: 1.0 to 1.1 times the FLOPs that one device
    needs."""
    monkeypatch.setattr(layouts, "SMALL", 0)
    toy = "VOCAB=272 BOS=5 WIDTH=64 LAYERS=1 HEADS=4 MLP_WIDTH=256 LANES=8 LANE_LEN=32".split()
    recipe = find("llmc", [*toy, "COMPUTE=float32", "EVAL_LEN=32", "EVAL_TOKENS=320"]).recipe
    mesh, one = (
        make_mesh(axes, jax.devices()[: math.prod(axes.values())]),
        make_mesh({"data": 1}, jax.devices()[:1]),
    )
    stage = recipe.stages[0]
    ideal = findings.ideal_flops(
        program.trace_step(recipe, stage, Placement(one, "dp", HERE), 1).jaxpr
    )
    text = (
        program.trace_step(recipe, stage, Placement(mesh, "tp", HERE), 1)
        .lower()
        .compile()
        .as_text()
    )
    rows = findings.matmuls(cost.kernels(text), ideal, mesh.size)
    # XLA forgets where some came from
    factors = [row["redundancy"] for row in rows if row["source"]]
    assert len(factors) >= 6 and all(1.0 <= factor <= 1.1 for factor in factors), rows
    assert 1.0 <= sum(row["flops"] for row in rows) / sum(ideal.values()) <= 1.1
    qkv = program.state_shardings(recipe, "tp", mesh)[0]["params"]["qkv"]
    assert qkv.sharding.shard_shape(qkv.shape) == (1, 64, 3 * columns)


def test_no_faults_no_errors_but_what_the_cpu_makes_wide():
    plan = plan_here()
    # the CPU multiplies bf16 as fp32
    assert errors(plan) <= {"fp32-logits", "exposed-collective", "cas-scatter"}
    assert all(
        row["redundancy"] == pytest.approx(1, abs=0.01)
        for row in plan["matmuls"]
        if row["redundancy"]
    )


def test_an_uncut_bank_is_orthogonalised_on_every_device():
    plan = plan_here("MATRICES=9")
    assert {"bank-cannot-shard", "replicated-muon"} <= errors(plan)
    [bank] = [finding for finding in plan["findings"] if finding["name"] == "bank-cannot-shard"]
    assert "9 matrices are not divisible by 8; pad the bank to 16" in bank["text"]
    muon = [finding for finding in plan["findings"] if finding["name"] == "replicated-muon"]
    assert {finding["value"] for finding in muon} == {8.0}


def test_dp_holds_everything_everywhere():
    plan = plan_here(layout="dp")
    assert "replicated-muon" in errors(plan)
    whole = [
        finding["text"] for finding in plan["findings"] if finding["name"] == "replicated-leaf"
    ]
    assert len(whole) == 3 and all("--layout zero1 shards them 8 ways" in text for text in whole)


def test_loops_count_as_often_as_they_run():
    mesh = make_mesh({"data": 8})
    x = jax.ShapeDtypeStruct((256, 96), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    w = jax.ShapeDtypeStruct((96, 96), jnp.float32, sharding=NamedSharding(mesh, P()))

    def five(x, w):
        return jax.lax.scan(lambda y, _: (jnp.tanh(y @ w), None), x, length=5)[0]

    traced = jax.jit(five).trace(x, w)
    ideal = findings.ideal_flops(traced.jaxpr)
    assert sum(ideal.values()) == 5 * 2 * 256 * 96 * 96
    [row] = findings.matmuls(cost.kernels(traced.lower().compile().as_text()), ideal, 8)
    assert row["redundancy"] == pytest.approx(1)


LOGITS = """HloModule jit_step

ENTRY %main (x: f32[1024,768]) -> f32[1024,768] {
  %x = f32[1024,768]{1,0} parameter(0)
  %activation = f32[1024,768]{1,0} tanh(%x)
  %logits = f32[1024,DIM]{1,0} custom-call(%x), custom_call_target="k"
  ROOT %out = f32[1024,768]{1,0} custom-call(%logits, %activation), custom_call_target="k"
}
"""


def test_logits_are_arrays_over_the_vocabulary():
    """Not everything as large as they are: an activation is, where the vocabulary is small."""
    [found] = findings.wide_logits(LOGITS.replace("DIM", "272"), 1024, 272)
    assert (found.name, found.value) == ("fp32-logits", 1)
    assert not [*findings.wide_logits(LOGITS.replace("DIM", "300"), 1024, 272)]
    # the head computes in fp32
    assert not [*findings.wide_logits(LOGITS.replace("DIM", "272"), 1024, None)]


def test_heads_have_rows_that_are_scored_and_the_size_of_a_logit():
    for sets, size in (((), 2), (("COMPUTE=float32",), 4)):
        recipe = find(BAD, sets).recipe
        assert scored_heads(recipe, recipe.stages[0]) == [(4096, size)]


def test_a_matrix_cut_over_another_axis_is_not_replicated():
    toy = "VOCAB=272 BOS=5 WIDTH=256 LAYERS=1 HEADS=4 MLP_WIDTH=1024 LANES=8 LANE_LEN=32".split()
    recipe = find("llmc", [*toy, "EVAL_LEN=32", "EVAL_TOKENS=320"]).recipe
    mesh = make_mesh({"data": 4, "model": 2})
    specs = dict(leaves(layouts.partitions(recipe.parameters, "tp", mesh)))
    found = findings.replicated_parameters(recipe, specs, mesh)
    assert not [f for f in found if findings.axes_of(specs[f.text.split()[0]])]


SCATTER = """HloModule jit_count

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (into: f32[272], at: s32[65536,1], what: f32[65536,WIDTH]) -> f32[272] {
  %into = f32[272]{0} parameter(0)
  %at = s32[65536,1]{1,0} parameter(1)
  %what = f32[65536,WIDTH]{1,0} parameter(2)
  ROOT %out = f32[272]{0} scatter(%into, %at, %what), update_window_dims={1}, \
inserted_window_dims={}, \
scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add
}
"""


def test_scalar_scatters_are_loops_of_compare_and_swap():
    [found] = findings.slow_scatters(SCATTER.replace("WIDTH", "1"))
    assert (found.name, found.value) == ("cas-scatter", 65536)
    assert not [*findings.slow_scatters(SCATTER.replace("WIDTH", "4"))]  # one vector instruction
    alone = SCATTER.replace("WIDTH", "1").replace(
        "index_vector_dim=1,", "index_vector_dim=1, unique_indices=true,"
    )
    assert not [*findings.slow_scatters(alone)]
    named = SCATTER.replace("WIDTH", "1").replace(
        "(%into, %at, %what)", "(f32[272]{0} %into, s32[9,1] %at, f32[9,1] %what)"
    )
    assert [*findings.slow_scatters(named)] == [found], (
        "operands as older and newer versions write them"
    )


def test_exposed_communication():
    gather = {
        "kind": "all-gather",
        "bytes": 10**9,
        "async": True,
        "count": 1,
        "ms": 8.0,
        "exposed_ms": 7.0,
    }
    [found] = findings.exposed([gather], 50.0, "stage 2")
    assert found.name == "exposed-collective" and found.text.startswith("stage 2: ")
    assert not [*findings.exposed([gather | {"exposed_ms": 1.0}], 50.0, "stage 2")]
    synchronous = gather | {"async": False, "exposed_ms": 0.1, "ms": 0.1, "count": 12}
    [found] = findings.exposed([synchronous], 50.0, "stage 2")
    assert found.name == "synchronous-collective" and "(12 times)" in found.text
    assert found.value == pytest.approx(12 * 0.1 / 50) and found.value > found.threshold
