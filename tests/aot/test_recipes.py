"""The real training step of every FineWeb recipe at full size, as XLA compiles it for eight H100s
and for one."""

import functools
import types
from collections import Counter

import pytest

from jspeed.base import compiler
from jspeed.parallel.layout import partitions, sharded_dim
from jspeed.plan import hlo
from jspeed.run.compute import program
from jspeed.run.compute.device import Placement, device_of
from jspeed.run.find_recipe import find

from .custom_calls import custom_calls, fmha_workspace
from .runs import step_of_a_run

GIGABYTE = 1e9
ATTENTION_LAYERS = {"llmc": 12, "track3": 12, "r21": 11, "r29": 11}


@functools.cache
def compiled(mesh, name):
    """Compile the last step as a run does: (recipe, optimised HLO, bytes a device needs)."""
    step = step_of_a_run(mesh, name)
    return find(name).recipe, step.program.as_text(), step.need


@pytest.fixture(params=["r21", "r29"])
def record(request, mesh):
    return compiled(mesh(8), request.param)


@pytest.fixture(params=ATTENTION_LAYERS)
def on_eight(request, mesh):
    return compiled(mesh(8), request.param)


def test_head_is_three_fp8_matmuls(record):
    recipe, text, _ = record
    vocabulary, width = recipe.parameters["head"].shape
    tokens = recipe.stages[-1].lane_len
    shapes = [
        call.arrays[0].dims for call in custom_calls(text) if call.target == "__cublas$lt$matmul$f8"
    ]
    assert Counter(shapes) == Counter([(tokens, vocabulary), (tokens, width), (vocabulary, width)])


def test_attention_is_fused_both_ways_in_every_layer(on_eight):
    recipe, text, _ = on_eight
    calls = Counter(call.target for call in custom_calls(text))
    layers = ATTENTION_LAYERS[recipe.name]
    assert calls["__cudnn$fmhaSoftmax"] == calls["__cudnn$fmhaSoftmaxBackward"] == layers


def test_attention_s_workspace_is_that_of_rows_not_of_lanes(mesh):
    """29.2 GB by lanes."""
    _, text, _ = compiled(mesh(8), "r29")
    sizes = {fmha_workspace(call) for call in custom_calls(text, "__cudnn$fmhaSoftmaxBackward")}
    assert sizes == {4 * 192 * 6 * 2048 * 129}


def test_a_run_counts_the_calls_that_are_in_its_text(record):
    _, text, _ = record
    counted = compiler.custom_calls(types.SimpleNamespace(as_text=lambda: text))
    assert counted == Counter(call.target for call in custom_calls(text))
    assert counted[compiler.FP8_CALL] == 3 and counted["__cudnn$fmhaSoftmax"] == 11


def test_parameters_are_gathered_and_gradients_scattered_once(on_eight, mesh):
    """Only scalars and small vectors cross between devices else: Newton-Schulz is local."""
    recipe, text, _ = on_eight
    cuts = partitions(recipe.parameters, "zero1", mesh(8)).values()
    large = sum(sharded_dim(cut) is not None for cut in cuts)
    found = hlo.collectives(text)
    sent = {
        kind: [array for c in found if c.kind == kind for array in c.arrays]
        for kind in {c.kind for c in found}
    }
    assert set(sent) <= {"all-gather", "reduce-scatter", "all-reduce"}
    assert len(sent["all-gather"]) == len(sent["reduce-scatter"]) == large
    assert {array.dtype for kind in ("all-gather", "reduce-scatter") for array in sent[kind]} == {
        "bf16"
    }
    assert max(array.bytes for array in sent["all-reduce"]) < 500_000


def test_no_logits_in_fp32(on_eight):
    recipe, text, _ = on_eight
    vocabulary = recipe.parameters["embed"].shape[0]
    tokens = recipe.lanes // 8 * recipe.stages[-1].lane_len
    wide = [
        b for b in hlo.buffers(text, 4 * tokens * vocabulary) if b.array.dtype in ("f32", "f64")
    ]
    assert not wide


def test_eight_devices_need_less_than_45_gigabytes_each(on_eight):
    assert on_eight[2] < 45 * GIGABYTE


@pytest.mark.parametrize("name", ["llmc", "track3"])
def test_one_device_accumulates_in_less_than_60_gigabytes(name, mesh):
    recipe, text, needed = compiled(mesh(1), name)
    assert needed < 60 * GIGABYTE
    assert not hlo.collectives(text)
    layers = ATTENTION_LAYERS[name]
    assert (
        Counter(call.target for call in custom_calls(text))["__cudnn$fmhaSoftmaxBackward"] == layers
    )


def test_layers_that_are_recomputed_free_half_of_the_memory(mesh):
    """Layers in a row, as r21 runs them: the compiler recomputes each when its gradient is due, not
    all at once."""
    recipe = find(
        "r21", ["LAYERS=4", "NO_ATTENTION=4", "VOCAB=1024", "LANES=1", "LANE_LEN=16384"]
    ).recipe
    device, needs = device_of(mesh(1)), []
    for layout in ("zero1", "zero1+remat"):
        lowered = program.trace_step(
            recipe, recipe.stages[-1], Placement(mesh(1), layout, device), 1
        ).lower()
        step = lowered.compile(compiler_options=compiler.options_for("cuda"))
        needs.append(step.memory_analysis().temp_size_in_bytes)
    assert needs[1] < 0.6 * needs[0]
