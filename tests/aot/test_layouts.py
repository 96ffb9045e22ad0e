"""The step of track3 at full size on eight absent H100s, in every layout: communication and memory
of a device."""

import functools
import math
from collections import Counter

import pytest

from jspeed.base import compiler
from jspeed.parallel.layout import partitions
from jspeed.parallel.mesh import make_mesh
from jspeed.plan import hlo
from jspeed.recipe import leaves
from jspeed.run.compute import program
from jspeed.run.compute.device import device_of
from jspeed.run.compute.division import place
from jspeed.run.find_recipe import find

MESHES = {
    "dp": {"data": 8},
    "fsdp": {"data": 8},
    "tp": {"data": 4, "model": 2},
    "fsdp+tp": {"data": 4, "model": 2},
    "pp": {"data": 2, "pipe": 4},
}
LAYERS = 12
WIDTH = 768
MLP = 3072
VOCAB = 50_304
RECIPE = find("track3", trace=False).recipe


@pytest.fixture(params=MESHES)
def compiled(request, mesh):
    return compile_step(request.param, mesh(8))


@functools.cache
def compile_step(layout, devices):
    """Compile the step: (layout, mesh, elements sent by (kind, dtype, shape), bytes of a device's
    arguments)."""
    mesh = make_mesh(MESHES[layout], list(devices.devices.flat))
    device, [stage] = device_of(mesh), RECIPE.stages
    placement = place(RECIPE, mesh, layout, device)
    lowered = program.trace_step(RECIPE, stage, placement, placement.parts[0]).lower()
    step = lowered.compile(compiler_options=compiler.options_for("cuda"))
    found = Counter(
        (c.kind, a.dtype, a.dims) for c in hlo.collectives(step.as_text()) for a in c.arrays
    )
    return layout, mesh, found, step.memory_analysis().argument_size_in_bytes


def count(found, kind, *shapes):
    return sum(
        n
        for (k, dtype, dims), n in found.items()
        if k == kind and dtype == "bf16" and dims in shapes
    )


def test_collectives(compiled):
    layout, mesh, found, _ = compiled
    banks = [(4 * LAYERS, WIDTH, WIDTH), (2 * LAYERS, WIDTH, MLP)]
    tables = [(VOCAB, WIDTH)]
    kinds = {kind for kind, _, dims in found if math.prod(dims) > 10**6}
    if layout == "dp":  # every large gradient is summed, and nothing else is sent
        assert kinds == {"all-reduce"}
        assert count(found, "all-reduce", *banks, *tables) == 4
    # each layer's matrices are gathered for it and again for its gradient, which is scattered
    elif layout == "fsdp":
        a_layer = [(4, WIDTH, WIDTH), (2, WIDTH, MLP)]
        assert count(found, "all-gather", *a_layer) == 2 * 2 * LAYERS
        assert (
            count(found, "reduce-scatter", (4, WIDTH // 8, WIDTH), (2, WIDTH // 8, MLP))
            == 2 * LAYERS
        )
        # the last: whole matrices for Muon
        assert kinds == {"all-gather", "reduce-scatter", "all-to-all"}
        assert not count(found, "all-gather", *banks)
    # two sums a block forward and two backward, as XLA writes them
    elif layout in ("tp", "fsdp+tp"):
        half = count(found, "reduce-scatter", (64, 1024, WIDTH // 2))
        assert half + count(found, "all-reduce", (64, 1024, WIDTH)) == 4 * LAYERS
        assert count(found, "all-gather", (64, 1024, WIDTH)) >= half
        if layout == "fsdp+tp":  # of a layer's matrices a device gathers its half only
            assert (
                count(found, "all-gather", (4, WIDTH, WIDTH // 2), (2, WIDTH, MLP // 2))
                == 2 * 2 * LAYERS
            )
            assert not count(found, "all-gather", (4, WIDTH, WIDTH), (2, WIDTH, MLP), *banks)
    # rows go into the pipeline, from stage to stage, and out, and their gradients the other way
    else:
        assert count(found, "collective-permute", (64, 1024, WIDTH)) == 2
        assert (
            count(found, "all-gather", (4 * 64, 1024, WIDTH))
            == count(found, "reduce-scatter", (64, 1024, WIDTH))
            == 2
        )
        assert not count(found, "all-gather", *banks, *tables)


def test_arguments_are_what_the_layout_cuts(compiled):
    """A device's parameters, Adam's two moments or Muon's one, in fp32, and its rows of tokens."""
    layout, mesh, _, size = compiled
    cuts = partitions(RECIPE.parameters, layout, mesh)
    expected = 0
    for name, spec in leaves(RECIPE.parameters):
        parts = math.prod(mesh.shape[axis] for axis in cuts[name] if axis)
        expected += (
            4 * math.prod(spec.shape) // parts * (2 if spec.group in ("attention", "mlp") else 3)
        )
    expected += RECIPE.lanes // (mesh.shape["data"] * mesh.shape.get("pipe", 1)) * 1025 * 2
    assert size == pytest.approx(expected, abs=1000)  # counters of steps
