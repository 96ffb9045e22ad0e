"""Estimates without a compiler, against published numbers and sums by hand."""

import dataclasses
import io
import math
import re

import jax
import numpy as np
import pytest
from rich.console import Console

from jspeed.board.records.remarks import RECORDS
from jspeed.parallel.layout import partition, sharded_dim
from jspeed.parallel.mesh import make_mesh
from jspeed.plan import estimates
from jspeed.plan.compile import place_on_gpus
from jspeed.plan.views import terminal
from jspeed.recipe import Context, init_parameters, leaves
from jspeed.record.sizes import parameter_count
from jspeed.run.compute import program
from jspeed.run.compute.device import Placement, device_of
from jspeed.run.find_recipe import find

from ..refusals import refused

EIGHT = estimates.abstract_mesh({"data": 8})


@pytest.fixture(scope="module")
def gpt2():
    return estimates.published("gpt2").recipe


@pytest.fixture(scope="module")
def r21():
    return find("r21", trace=False).recipe


@pytest.mark.parametrize(
    ("name", "count"),
    [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl",
    1_557_611_200),
     ("gpt3", 174_604_259_328)],
)  # fmt: skip
def test_published_parameter_counts(name, count):
    """Those of the checkpoints that Hugging Face has, and GPT-3 by the same formula."""
    recipe = estimates.published(name).recipe
    assert recipe.name == name and parameter_count(recipe.parameters) == count


def memory(recipe, stage, *placed):
    return estimates.memory(recipe, stage, place_on_gpus(recipe, *placed))


def said(recipe, layout, mesh, limit) -> str:
    console = Console(width=200, file=io.StringIO())
    terminal.print_estimates(console, recipe, place_on_gpus(recipe, layout, mesh), limit)
    return console.file.getvalue()


def test_gpt3_does_not_fit_in_layout_zero1():
    """Every device gathers all 349 GB of bf16 parameters."""
    recipe = estimates.published("gpt3").recipe
    mesh = estimates.abstract_mesh({"data": 64})
    assert memory(recipe, recipe.stages[0], "zero1", mesh).gathered == 2 * 174_604_259_328
    [line] = [
        line
        for line in said(recipe, "zero1", mesh, 80_000_000_000).splitlines()
        if line.startswith("fits ")
    ]
    assert line.split()[1] == "no" and "--layout fsdp gathers layer by layer" in line


def test_gpt3_in_layout_fsdp_gathers_one_layer_at_a_time():
    """What keeps it from fitting on 64 devices is then the activations."""
    recipe, mesh = estimates.published("gpt3").recipe, estimates.abstract_mesh({"data": 64})
    count = parameter_count(recipe.parameters)
    stacked = sum(s.size for _, s in leaves(recipe.parameters) if s.stacks_layers)
    found = memory(recipe, recipe.stages[0], "fsdp", mesh)
    outside = 2 * (count - stacked)
    assert found.gathered == pytest.approx(outside + 2 * stacked / 96 + 2 * stacked / 64, rel=5e-3)
    assert (found.fits(80_000_000_000), found.fits(10**9), found.fits(10**13)) == (
        "perhaps not",
        "no",
        "likely",
    )
    assert "unsharded, of the layers one at a time" in said(recipe, "fsdp", mesh, 80_000_000_000)


def test_memory_of_r21_by_hand(r21):
    """zero1 on eight devices: banks and tables are cut in eight, 54 scalars are not."""
    attention, mlp, table = 48 * 768 * 768, 24 * 768 * 3072, 50_304 * 768
    scalars = 2 * 12 + 2 * 12 + 6
    found = memory(r21, r21.stages[-1], "zero1", EIGHT)
    # "values" is [3, 50304, 768] and is cut along its second axis; "embed" and "head" are one table
    # each.
    cut = attention + mlp + 5 * table
    assert found.parameters == 4 * (cut // 8 + scalars)
    moments = (attention + mlp) // 8 + 2 * (5 * table // 8 + scalars)
    counters = 2 * 2 + 3 * 2  # of two Muons (steps, schedule) and three Adams
    assert found.optimizer == 4 * (moments + counters + 1)  # and the number of the step
    assert found.batch == 49_153 * 2
    assert found.gathered == 2 * cut
    assert found.gradients == 2 * cut + 4 * scalars + found.parameters
    a_token = 44 * 2 * 768 + 24 * (768 + 3072) + 4 * 768 + 768 + 2 * 50_304
    assert found.activations == 49_152 * 2 * a_token
    assert found.kept == 374_784_694


@pytest.mark.parametrize("name", ["llmc", "r21", "stdlib"])
@pytest.mark.parametrize("layout", ["zero1", "dp"])
@pytest.mark.parametrize("devices", [1, 4])
def test_parameters_lie_as_the_layout_says(name, layout, devices):
    recipe = find(name, trace=False).recipe
    mesh = estimates.abstract_mesh({"data": devices})
    local = 0
    for _, spec in leaves(recipe.parameters):
        dim = sharded_dim(partition(spec, layout, mesh))
        local += math.prod(n // devices if i == dim else n for i, n in enumerate(spec.shape)) * 4
    found = memory(recipe, recipe.stages[0], layout, mesh)
    assert found.parameters == local
    if devices == 1:
        copies = (s for _, s in leaves(recipe.parameters) if s.compute)
        # nothing cast, nothing gathered: no copy
        assert found.gathered == sum(2 * math.prod(s.shape) for s in copies)


def test_what_is_kept_is_what_the_compiled_step_takes():
    """The compiler's size of all arguments, on devices that are here."""
    layout, fields = "zero1", ["WIDTH=256", "LAYERS=1", "HEADS=1", "LANE_LEN=8", "LANES=8"]
    recipe = find(str(RECORDS / "ideas" / "stdlib_adamw.py"), fields, trace=False).recipe
    mesh = make_mesh({"data": 4}, jax.devices()[:4])
    lowered = program.trace_step(
        recipe, recipe.stages[0], Placement(mesh, layout, device_of(mesh)), 1
    ).lower()
    arguments = lowered.compile().memory_analysis().argument_size_in_bytes
    assert memory(recipe, recipe.stages[0], layout, mesh, 16).kept == arguments
    shapes, shardings = program.state_shardings(recipe, layout, mesh)
    state = jax.tree.map(
        lambda x, to: jax.device_put(np.zeros(x.shape, x.dtype), to), shapes, shardings
    )
    here = [shard for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
    assert sum(s.data.nbytes for s in here if s.device == jax.devices()[0]) == arguments - 2 * 9 * 2


def test_a_mesh_of_two_axes_divides_what_it_shards():
    """Layout tp: matrices over ``model`` are never gathered, and stored and updated in halves."""
    recipe = find("track3", trace=False).recipe
    mesh = estimates.abstract_mesh({"data": -1, "model": 2}, 8)
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    tp, dp = (
        memory(recipe, recipe.stages[0], layout, on) for layout, on in (("tp", mesh), ("dp", EIGHT))
    )
    halved = sum(
        s.size for _, s in leaves(recipe.parameters) if "model" in partition(s, "tp", mesh)
    )
    assert halved > 50e6
    assert dp.gathered - tp.gathered == halved and dp.parameters - tp.parameters == 2 * halved
    assert tp.batch == 2 * dp.batch


def test_batches_of_large_vocabularies_take_four_bytes(r21):
    wide = dataclasses.replace(r21, data=dataclasses.replace(r21.data, vocab_size=100_000))
    narrow, found = (memory(r, r.stages[-1], "zero1", EIGHT).batch for r in (r21, wide))
    assert found == 2 * narrow


def test_a_gpt_keeps_what_korthikanti_counts(gpt2):
    """34 bytes x width a layer and token, of which two are masks of dropout, which there is none of
    here."""
    outside = 2 * (768 + 2 * 50_257)  # rows into the head; logits and their gradient
    assert estimates.activation_bytes(gpt2, 1) == 12 * 32 * 768 + outside


def test_queries_keys_and_values_apart_keep_what_one_axis_does():
    """Recipe gpt2 has [width, 3, width], the published sizes, by llmc, [width, 3 x width]."""
    apart, one = find("gpt2", trace=False).recipe, estimates.published("gpt2").recipe
    assert estimates.activation_bytes(apart, 1) == estimates.activation_bytes(one, 1)


def test_fewer_tokens_at_once_keep_less(gpt2):
    stage = gpt2.stages[0]
    whole, halves = (memory(gpt2, stage, "dp", EIGHT, n) for n in (65_536, 32_768))
    assert whole.activations == 2 * halves.activations
    assert halves.gradients - whole.gradients == 4 * 124_439_808  # the sum over micro-batches
    assert whole.kept == halves.kept


def test_a_published_size_can_be_trained():
    sets = "LAYERS=1 WIDTH=8 HEADS=2 MLP_WIDTH=32 LANE_LEN=16 LANES=2".split()
    recipe = estimates.published("gpt2", sets).recipe
    params = jax.eval_shape(lambda: init_parameters(recipe.parameters, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((2, 16), "int32")
    ctx = Context(recipe.stages[0], training=True)
    assert jax.eval_shape(lambda p, t: recipe.forward(p, t, ctx), params, tokens).shape == (
        2,
        16,
        50_257,
    )


def test_every_number_is_printed_with_a_formula(r21):
    text = said(r21, "zero1", EIGHT, 80_000_000_000)
    rows = [line for line in text.splitlines() if "  " in line.strip()]
    assert len(rows) > 12 and all(len(re.split(r"\s{2,}", row.strip())) >= 2 for row in rows)
    assert "275,742,774" in text and "FLOPs/token" in text


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: memory(r, r.stages[0], "zero2", EIGHT), "--layout zero2 is unknown"),
        (
            lambda r: memory(r, r.stages[0], "zero1", estimates.abstract_mesh({"data": 3})),
            "divides 8",
        ),
        (lambda r: memory(r, r.stages[0], "zero1", EIGHT, 1000), "--micro-batch 1000"),
        (lambda r: estimates.abstract_mesh({"data": -1, "model": 3}, 8), "whose product is 8"),
    ],
)
def test_bad_input_is_one_error_message(call, words, r21):
    refused(words, call, r21)
