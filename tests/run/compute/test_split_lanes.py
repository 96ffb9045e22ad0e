"""Lanes that are cut at document borders: every token once, and the same training as with whole
lanes."""

import dataclasses
import types
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.base import compiler
from jspeed.recipe import Context, Stage
from jspeed.run.compute import device, division, program, step
from jspeed.run.compute.device import Placement
from jspeed.run.compute.division import place
from jspeed.run.find_recipe import find

from ...refusals import refused
from ...toys import TOYS, first_parameters, moved_parameters
from .steps import mesh_of, run

BOS = 5
LANE = 128
R29 = [*TOYS["r29"], f"LANE_LEN={LANE}", "MAX_DOC_LEN=16", "MAX_DOCS=129", "LANES=8"]
R29 += ["WINDOWS=(2,)"]


def packed(recipe, count, longest, seed=0):
    """Batches in which a document starts every 1 to ``longest`` tokens, lanes with the last one cut
    off."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        shape = recipe.lanes, recipe.stages[0].lane_len + 1
        tokens = draw.integers(6, 257, size=shape, dtype=np.uint16)
        for row in tokens:
            at = 0
            while at < len(row):
                row[at] = BOS
                at += int(draw.integers(1, longest + 1))
        found.append(tokens)
    return found


def test_every_token_counts_once_with_its_document():
    recipe = find("r29", R29).recipe
    stage = recipe.stages[0]
    [tokens] = packed(recipe, 1, 16)
    assert division.numbers_of_sub_lanes(recipe, stage) == [2, 4, 8, 16, 32]
    for number in (2, 8):
        length = division.sub_lane_length(stage, number)
        cut = jax.jit(partial(division.cut, recipe, stage, number))
        cut, counts = jax.device_get(cut(tokens.astype(np.int32)))
        assert length < LANE and cut.shape == (8 * number, length + 1)
        assert counts.shape == (8 * number, length)
        for row, these, marks in zip(tokens, np.split(cut, 8), np.split(counts, 8), strict=True):
            counted = [(a[:-1][m > 0], a[1:][m > 0]) for a, m in zip(these, marks, strict=True)]
            np.testing.assert_array_equal(np.concatenate([a for a, _ in counted]), row[:-1])
            np.testing.assert_array_equal(np.concatenate([b for _, b in counted]), row[1:])
            # two shares may begin in one document
            assert all(len(a) == 0 or a[0] == BOS for a, _ in counted)


def test_a_document_longer_than_promised_is_nan():
    recipe = find("r29", R29).recipe
    tokens = np.full((1, LANE + 1), 7, np.int32)
    tokens[0, 0] = BOS
    assert np.isnan(jax.jit(partial(division.cut, recipe, recipe.stages[0], 4))(tokens)[1]).any()


def test_only_lanes_of_bounded_documents_are_cut():
    recipe = find("r29", R29).recipe
    unbounded = dataclasses.replace(recipe.stages[0], max_doc_len=None)
    contiguous = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, align=None))
    for given, stage in ((recipe, unbounded), (contiguous, recipe.stages[0])):
        assert division.numbers_of_sub_lanes(given, stage) == []
    full = Stage(steps=1, lane_len=49_152, max_doc_len=2048, max_docs=192)
    assert division.numbers_of_sub_lanes(recipe, full) == [2, 4, 8, 16, 32]
    lengths = [division.sub_lane_length(full, n) for n in (1, 2, 4, 32)]
    assert lengths == [49_152, 26_752, 14_464, 3_712]


STAGED = ["LANE_LENS=(128,128)", "MAX_DOC_LENS=(16,16)", "MAX_DOCS=(129,129)", "LANES=8"]


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("r29", [*R29, "LAYERS=2"]),
        pytest.param("r89", [*TOYS["r89"], *STAGED], marks=pytest.mark.slow),
    ],
)
def test_gradients_of_pieces_and_chunks_are_those_of_lanes(name, sets):
    recipe = find(name, sets).recipe
    [tokens] = packed(recipe, 1, 16)
    ctx = Context(recipe.stages[0], training=True)
    # but for r29 so that the parts whose output starts at 0 have gradients
    params = first_parameters(recipe) if name == "r29" else moved_parameters(recipe)

    def of(parts, head_chunk=None):
        now = dataclasses.replace(ctx, head_chunk=head_chunk)
        run = jax.jit(partial(step.gradients, recipe, now, parts, (0, 0), 1 / tokens[:, 1:].size))
        return run(params, jnp.asarray(tokens[:2]), {})

    wanted, wanted_losses, _ = of(1)
    atol = 1e-5 if name == "r29" else 1e-4
    for grads, losses, _ in (of(8), of(1, 24), of(8, 24)):
        # XLA sums logits of other shapes in another order
        np.testing.assert_allclose(losses, wanted_losses, rtol=2e-6)
        for found, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(found, expected, atol=atol * np.abs(expected).max() + 1e-9)


@pytest.mark.slow
def test_fp8_scales_are_those_of_lanes():
    """The mean over lanes of the largest entry becomes the mean over their sub-lanes, no larger."""
    recipe = find("r89", [*TOYS["r89"], *STAGED, "FP8=on"]).recipe
    [tokens] = packed(recipe, 1, 16)
    ctx, params = Context(recipe.stages[0], training=True), first_parameters(recipe)
    largest = []
    for parts in (1, 8):
        gradients = jax.jit(partial(step.gradients, recipe, ctx, parts, (0, 0), 1e-3))
        largest.append(np.stack(gradients(params, jnp.asarray(tokens[:2]), {})[0]["largest"]))
    assert np.all(largest[1] <= 1.02 * largest[0]) and np.all(largest[1] > 0.5 * largest[0])


@cache
def losses_of_lanes():
    recipe = find("r29", R29).recipe
    return run(recipe, mesh_of(1), None, packed(recipe, 10, 16))[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "at_once", "head_chunk"), [(1, 0.25, None), (4, 0.25, 24), (8, 1, 24)]
)
def test_pieces_and_chunks_are_the_same_training_as_lanes(devices, at_once, head_chunk):
    recipe = find("r29", R29).recipe
    tokens = packed(recipe, 10, 16)
    _, losses = run(recipe, mesh_of(devices), at_once, tokens, head_chunk=head_chunk)
    expected = losses_of_lanes()
    assert abs(expected[-1] - expected[0]) > 1e-3
    np.testing.assert_allclose(losses, expected, atol=1e-5)


def test_a_micro_batch_may_be_a_piece():
    recipe, mesh = find("r29", R29).recipe, mesh_of(2)

    def parts(tokens):
        asked = device.device_of(mesh, micro_batch=tokens)
        return division.micro_batches(recipe, recipe.stages[0], mesh, asked)

    assert [parts(n) for n in (8, 32, 128, 256)] == [(64,), (16,), (4,), (2,)]
    refused("need one of 4, 8, 16, 32, 64, 128, 256, 512", parts, 48)


@pytest.mark.slow
def test_what_fits_is_found_largest_first():
    recipe, mesh = find("r29", R29).recipe, mesh_of(8)
    cpu, stage = device.device_of(mesh), recipe.stages[0]
    traced = [
        program.trace_step(recipe, stage, Placement(mesh, "zero1", cpu), n) for n in (1, 2, 4)
    ]
    needs = [compiler.memory_needed(one.lower().compile()) for one in traced]
    assert needs == sorted(needs, reverse=True)
    tight = dataclasses.replace(cpu, memory=(needs[1] + needs[2]) // 2)
    assert program.fit(recipe, place(recipe, mesh, "zero1", tight), 0)[1] == 4
    asked = dataclasses.replace(tight, asked=device.Request(None, LANE))
    refused("128.*--micro-batch", program.fit, recipe, place(recipe, mesh, "zero1", asked), 0)


@pytest.fixture
def fitted(monkeypatch):
    """``fitted(recipe, memory)``: what fits (micro-batches, chunk, whether layers are recomputed),
    what was lowered for it, and what was compiled."""
    trace = program.trace_step
    compile_ = compiler.compiled
    lowered = []
    built = []

    def trace_step(recipe, stage, placement, parts, phase, head_chunk):
        found = trace(recipe, stage, placement, parts, phase, head_chunk).lower()
        lowered.append(((parts, head_chunk, "remat" in placement.layout), found))
        return types.SimpleNamespace(lower=lambda: found)

    def compiled(one, device):
        built.extend(what for what, other in lowered if other is one)
        return compile_(one, device)

    monkeypatch.setattr(program, "trace_step", trace_step)
    monkeypatch.setattr(program, "compiled", compiled)

    def fit(recipe, memory):
        lowered.clear()
        built.clear()
        mesh = mesh_of(1)
        small = dataclasses.replace(device.device_of(mesh), memory=memory)
        found = program.fit(recipe, place(recipe, mesh, "zero1", small), 0)
        return found[1:4], [what for what, _ in lowered], list(built)

    return fit


# logits and gradient take 16 MB, all else less
CHUNKED = [*R29, "LAYERS=2", "VOCAB=4096", "LANE_LEN=512", "LANES=1"]
WHOLE, IN_CHUNKS, HALVES = (1, None, False), (1, 24, False), (2, None, False)


def one_lane():
    """The recipe and the bytes that a step over its lane needs."""
    recipe = find("r29", CHUNKED).recipe
    placed = Placement(mesh_of(1), "zero1", device.device_of(mesh_of(1)))
    traced = program.trace_step(recipe, recipe.stages[0], placed, 1, -1, None)
    return recipe, compiler.memory_needed(traced.lower().compile())


@pytest.mark.slow
def test_a_loss_is_in_chunks_before_its_lane_is_in_pieces(fitted, monkeypatch):
    recipe, lane = one_lane()
    monkeypatch.setattr(division, "HEAD_CHUNK", 24)
    assert fitted(recipe, lane - 1) == (IN_CHUNKS, [WHOLE, IN_CHUNKS], [WHOLE, IN_CHUNKS])


@pytest.mark.slow
def test_chunks_are_taken_where_they_help_alone(fitted, monkeypatch):
    recipe, lane = one_lane()
    monkeypatch.setattr(division, "HEAD_CHUNK", 24)
    assert fitted(recipe, lane) == (WHOLE, [WHOLE], [WHOLE])

    def loss(params, tokens, targets, weights, ctx):
        whole = dataclasses.replace(ctx, head_chunk=None)
        return recipe.loss(params, tokens, targets, weights, whole)

    # as a recipe that does not know of chunks: nothing to compile
    without = dataclasses.replace(recipe, loss=loss)
    assert fitted(without, lane - 1) == (HALVES, [WHOLE, IN_CHUNKS, HALVES], [WHOLE, HALVES])

    monkeypatch.setattr(division, "HEAD_CHUNK", 400)
    can = division.bytes_freed_by_chunks(recipe, recipe.stages[0], mesh_of(1), 1)
    assert can == 2 * 4 * 4096 * (512 - 400)
    assert fitted(recipe, lane - can) == (HALVES, [WHOLE, HALVES], [WHOLE, HALVES])


def test_chunks_free_nothing_of_lanes_pipelines_or_the_unscored():
    recipe, mesh = find("r29", trace=False).recipe, mesh_of(1)
    stage = recipe.stages[0]
    tokens = [max(0, length - division.HEAD_CHUNK) for length in (0, 0, 0, 49_152, 26_752)]
    for parts, n in zip((1, 4, 256, 8, 16), tokens, strict=True):
        assert division.bytes_freed_by_chunks(recipe, stage, mesh, parts) == 4 * 50_304 * n
    assert division.bytes_freed_by_chunks(recipe, stage, mesh_of(data=1, pipe=2), 8) == 0
    sampled = dataclasses.replace(stage, scored=5000)
    assert division.bytes_freed_by_chunks(recipe, sampled, mesh, 8) == 4 * 5000 * tokens[3]


@pytest.mark.parametrize(
    ("name", "sets", "expected"),
    [
        # Documents of any length, a loop of the recipe's own over layers that differ.
        ("r21", ["LANES=2", "LAYERS=2"], [(1, None, False), (2, None, False), (2, None, True)]),
        # Layers that are alike; the head's loss stays in chunks.
        ("track3", ["LANES=1", "LAYERS=1"], [(1, None, False), (1, 4, False), (1, 4, True)]),
        # Sub-lanes, and no layer that could be recomputed by itself.
        pytest.param(
            "r29",
            [*R29, "LANES=1", "LAYERS=2"],
            [(parts, None, False) for parts in (1, 2, 4, 8, 16, 32)],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_layers_are_recomputed_where_nothing_else_fits(name, sets, expected, monkeypatch):
    recipe, mesh = find(name, [*TOYS[name], *sets]).recipe, mesh_of(1)
    stage, cpu = recipe.stages[0], device.device_of(mesh)
    monkeypatch.setattr(division, "HEAD_CHUNK", 4 if name == "track3" else stage.lane_len)

    def lower(parts, head_chunk, remat):
        layout = "zero1+remat" if remat else "zero1"
        placed = Placement(mesh, layout, cpu)
        return program.trace_step(recipe, stage, placed, parts, -1, head_chunk).lower()

    def tried(fits):
        numbers, need = division.divisions(recipe, stage, mesh), lambda lowered: (2 - fits, lowered)
        found = division.attempts(recipe, stage, mesh, numbers, 1, lower, need)
        return [(attempt.parts, attempt.head_chunk, attempt.remat) for attempt in found]

    assert tried(False) == expected and all(way[1:] == (None, False) for way in tried(True))


def test_recomputed_layers_have_the_same_gradients():
    recipe = find("r21", [*TOYS["r21"], "LANES=2", "LAYERS=4"]).recipe
    stage, params = recipe.stages[0], moved_parameters(recipe)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 257, (2, stage.lane_len + 1)))
    ctx = Context(stage, training=True)
    ways, weight = (ctx, dataclasses.replace(ctx, layer=jax.checkpoint)), 1 / tokens[:, 1:].size
    (wanted, losses, _), (found, again, _) = (
        jax.jit(partial(step.gradients, recipe, how, 1, (0, 0), weight))(params, tokens, {})
        for how in ways
    )
    np.testing.assert_allclose(again, losses, rtol=1e-6)
    for grad, expected in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(grad, expected, atol=1e-5 * np.abs(expected).max())


def test_notes_on_what_makes_a_step_fit_in_memory():
    stage = Stage(steps=1, lane_len=49_152, max_doc_len=2048, max_docs=192)
    for tokens in (65_536, 49_152):
        assert not [*division.memory_notes(stage, tokens, None, False)]
    sub_lanes, chunks, remat = division.memory_notes(stage, 24_576, 4096, True)
    assert "49,152 tokens" in sub_lanes and "2 sub-lanes of at most 26,752" in sub_lanes
    assert "4,096 tokens" in chunks and "recomputed" in remat
