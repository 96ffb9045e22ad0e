"""Records 62 and 89 at full size, as XLA compiles them for eight H100s: both kinds of
step, evaluation."""

import functools
from collections import Counter

import numpy as np
import pytest

from jspeed.base import compiler
from jspeed.errors import BadInput
from jspeed.model.prefixes import gpt2_prefixes
from jspeed.parallel.layout import partitions
from jspeed.plan import cost, hlo
from jspeed.plan.cost import TRITON
from jspeed.run.compute import program
from jspeed.run.compute.device import Placement
from jspeed.run.find_recipe import find

from .custom_calls import custom_calls, fmha_workspace
from .runs import device_for, step_of_a_run

pytestmark = pytest.mark.slow  # minutes of compiling: make test-aot ARGS='-m slow'

GIGABYTE = 1e9
TABLE = 50_304 * 768 * 2  # bytes in bf16
# By recipe: FP8 matmuls of a step in the first stage and in others, bytes of all banks with their
# padding and of the tables that are gathered, rows of the bigram table.
FACTS = {
    "r62": ((3, 3), 2 * (40 * 768**2 + 24 * 768 * 3072), 5 * TABLE, 251_520),
    "r89": (
        (3 + 22, 3 + 22),
        2 * (64 * 768 * 256 + 24 * 768**2 + 24 * 768 * 3072),
        7 * TABLE,
        377_280,
    ),
}


@functools.cache
def compiled(mesh, name, number, phase):
    """Compile the step of one stage, or with ``phase`` None the evaluation: (recipe, optimised HLO,
    bytes needed)."""
    try:
        gpt2_prefixes(50_256, 50_304)
    except BadInput as reason:
        pytest.skip(str(reason))
    found = find(name)
    if phase is not None:
        step = step_of_a_run(mesh, name, number, phase)
        return found.recipe, step.program.as_text(), step.need
    tokens = found.recipe.stages[number].lane_len
    _, built = program.compile_evaluation(
        found.recipe, Placement(mesh, "zero1", device_for(found, mesh)), tokens, 40
    )
    return found.recipe, built.as_text(), compiler.memory_needed(built)


@pytest.fixture(params=FACTS)
def name(request):
    return request.param


@pytest.mark.parametrize(("number", "phase"), [(0, 0), (-1, 0), (-1, 1)])
def test_a_step_needs_less_than_60_gb_and_uses_fast_kernels(mesh, name, number, phase):
    recipe, text, needed = compiled(mesh(8), name, number, phase)
    assert needed < 60 * GIGABYTE
    calls = Counter(call.target for call in custom_calls(text))
    assert calls["__cudnn$fmhaSoftmax"] == calls["__cudnn$fmhaSoftmaxBackward"] == 10
    assert calls["__cublas$lt$matmul$f8"] == FACTS[name][0][number]
    assert not calls[TRITON] and not calls["mosaic_gpu_v2"]
    sizes = {fmha_workspace(call) for call in custom_calls(text, "__cudnn$fmhaSoftmaxBackward")}
    assert max(sizes) < 1.3 * GIGABYTE
    stage = recipe.stages[number]
    logits = 4 * stage.lane_len * (stage.scored or 50_304)
    assert not [b for b in hlo.buffers(text, logits) if b.array.dtype in ("f32", "f64")]


def test_the_final_evaluation_compiles_and_fits(mesh, name):
    _, text, needed = compiled(mesh(8), name, -1, None)
    assert needed < 60 * GIGABYTE
    assert Counter(call.target for call in custom_calls(text))["__cudnn$fmhaSoftmax"] == 10


def test_two_steps_communicate_no_more_than_the_record(mesh, name):
    """The record sends banks both ways in every step, and tables both ways in every other: of the
    bigrams' gradients the rows that 2 x 49,152 tokens name, but all of the new table."""
    _, banks, tables, rows = FACTS[name]
    sent = [
        sum(c.bytes for c in hlo.collectives(compiled(mesh(8), name, -1, phase)[1]))
        for phase in (0, 1)
    ]
    record = 2 * (2 * banks) + 2 * tables + rows * 768 * 2 + 2 * 49_152 * 768 * 2
    assert sum(sent) < 1.05 * record


def test_tables_are_gathered_and_sent_in_turn(mesh, name):
    recipe = compiled(mesh(8), name, -1, 0)[0]
    cuts = partitions(recipe.parameters, "zero1", mesh(8))
    banks = sum(spec.axes[:1] == ("matrix",) for spec in recipe.parameters.values())
    tables = sum(bool({"token", "vocab"} & set(recipe.parameters[name].axes)) for name in cuts)
    for phase, gathered, scattered in ((0, banks + tables, banks), (1, banks, banks + tables)):
        found = hlo.collectives(compiled(mesh(8), name, -1, phase)[1])
        sent = Counter(c.kind for c in found for array in c.arrays if np.prod(array.dims) > 2**18)
        assert sent == {"all-gather": gathered, "reduce-scatter": scattered, "all-to-all": 2}


def test_the_last_step_moves_no_more_than_it_did(mesh):
    """162.7 GB (lab/2026-11-25-bytes-of-r89.md); 168 before, with three copies of Adam's state."""
    _, text, _ = compiled(mesh(8), "r89", -1, 1)
    moved = sum(
        kernel.runs * kernel.bytes for kernel in cost.kernels(text, 2048) if not kernel.collective
    )
    assert moved < 164 * GIGABYTE
    copies = [step for step in hlo.running(text) if step.opcode == "copy"]
    assert not [step.name for step in copies if step.arrays[0].dims == (5, 50_304 // 8, 768)]
