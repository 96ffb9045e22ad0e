"""Lanes as rows of the longest document: cuDNN's tables are those that JAX makes of lanes, and so
are the numbers."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.cudnn import fused_attention_stablehlo as fused

from jspeed.kernels import attention_backends, packed_cudnn
from jspeed.model.attention import attention, find_documents
from jspeed.recipe import Context
from jspeed.run.compute import division, program, step
from jspeed.run.compute.device import Placement, device_of
from jspeed.run.find_recipe import find
from jspeed.speedrun.heads import attention_in_pairs

from ..run.compute.steps import mesh_of
from ..toys import TOYS, moved_parameters
from . import fake_cudnn

BOS = 5
HEADS, WIDTH = 2, 8


@pytest.fixture
def fake(monkeypatch):
    fake_cudnn.put_in_place(monkeypatch)


def lanes_of(lengths, shape):
    """Tokens int ``[B, T]`` whose documents have ``lengths``, one after the other; a lane cuts its
    last one off."""
    tokens, lengths = np.ones(shape, np.int32), iter(lengths)
    for row in tokens:
        at = 0
        while at < len(row):
            row[at] = BOS
            at += next(lengths, len(row))
    return tokens


@partial(jax.jit, static_argnums=(1, 2))
def both_tables(tokens, max_docs, longest):
    """Of the same documents: packed_cudnn's tables, those that JAX makes of lanes, and which lanes
    are in order."""
    lanes, length = tokens.shape
    documents = find_documents(tokens, BOS, max_docs, longest)
    slots = attention_backends.cudnn_slots(documents.offsets, length)
    row = packed_cudnn.row_length(lanes * length, longest)
    x = jnp.zeros((lanes, length, HEADS, WIDTH))
    sizes, _, starts, _ = fused._fix_seqlen_offsets(slots[0], slots[0], slots[1], slots[1], x, x)
    return (
        packed_cudnn.tables(*slots, length, row),
        (sizes, starts),
        documents.offsets[:, -1] == length,
    )


def compare(tokens, max_docs, longest):
    """The tables are equal, but only lanes of NaN have a document longer than a row."""
    row = packed_cudnn.row_length(tokens.size, longest)
    (sizes, starts), (jax_sizes, jax_starts), in_order = jax.tree.map(
        np.asarray, both_tables(tokens, max_docs, longest)
    )
    assert sizes.shape[0] == starts.shape[0] == tokens.size // row
    assert sizes.size >= len(tokens) * max_docs
    assert starts.shape[1] == sizes.shape[1] + 1 > 2 and sizes.dtype == starts.dtype == np.int32
    assert sizes.max() <= row and row >= longest
    sizes, starts, jax_sizes, jax_starts = (
        x.ravel() for x in (sizes, starts, jax_sizes, jax_starts)
    )
    used = int((jax_sizes > 0).sum())
    np.testing.assert_array_equal(starts[:used] * HEADS * WIDTH, jax_starts[:used])
    np.testing.assert_array_equal(sizes[:used], np.minimum(jax_sizes[:used], row))
    assert not sizes[used:].any() and (starts[used:] == tokens.size).all()
    assert not jax_sizes[used:].any()
    of_lane = jax_starts[:used] // (HEADS * WIDTH * tokens.shape[1])
    for lane, fine in enumerate(in_order):
        whole = (tokens[lane] == BOS).sum() + (tokens[lane, 0] != BOS) <= max_docs
        assert fine == (whole and jax_sizes[:used][of_lane == lane].max() <= longest)
        assert sizes[:used][of_lane == lane].sum() == tokens.shape[1] or not fine


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60),
    st.sampled_from([((1, 64), 20, 16), ((3, 64), 4, 24), ((8, 48), 48, 40), ((2, 128), 9, 16)]),
)
def test_tables_are_those_of_jax(lengths, case):
    """Lanes of too many documents and of too long ones among them."""
    shape, max_docs, longest = case
    compare(lanes_of(lengths, shape), max_docs, longest)


@pytest.mark.slow
def test_tables_of_pieces_and_of_evaluation_are_those_of_jax():
    """At full size: record 29's lane, its first piece of two with the margin before it, a row of
    evaluation."""
    recipe, draw = find("r29", trace=False).recipe, np.random.default_rng(0)
    stage = recipe.stages[-1]
    tokens = np.ones((1, stage.lane_len + 1), np.int32)
    at = 0
    while at < tokens.size:
        tokens[0, at] = recipe.data.bos_id
        at += int(np.clip(draw.lognormal(6, 1), 33, stage.max_doc_len))
    cut, _ = jax.jit(partial(division.cut, recipe, stage, 2))(tokens)
    rows = draw.integers(0, 2, (1, recipe.eval_len)) * 7
    rows[0, np.cumsum(np.clip(draw.lognormal(6.5, 1.2, 200), 5, 60_000)).astype(int)] = (
        recipe.data.bos_id
    )
    context = program.eval_context(recipe, device_of(mesh_of(1)))
    for these, max_docs, longest in (
        (tokens[:, :-1], stage.max_docs, stage.max_doc_len),
        (np.asarray(cut)[:1, :-1], stage.max_docs, stage.max_doc_len),
        (rows, context.stage.max_docs, 60_000),
    ):
        compare(np.where(these == recipe.data.bos_id, BOS, 0).astype(np.int32), max_docs, longest)


@pytest.mark.parametrize(
    ("tokens", "longest", "row"),
    [
        (49_152, 2048, 2048),
        (16_384, 896, 1024),
        (8 * 49_152, 2048, 2048),
        (98_304, 4096, 4096),
        (26_752, 2048, 2432),  # two and four pieces of record 29's lane
        (14_464, 2048, 3616),
        (262_144, 60_000, 65_536),
        (262_144, 140_000, 262_144),  # nothing divides it: the lane
        (8 * 13, 9, 8 * 13),
    ],
)
def test_rows_divide_the_lanes_and_hold_the_longest_document(tokens, longest, row):
    assert packed_cudnn.row_length(tokens, longest) == row


WINDOWS = [(None, None), (1, None), (7, None), (None, 5), (7, 5)]
CASES = [(*each, paired) for each in WINDOWS for paired in (False, True)]
FEW = [(None, None, False), (7, None, True), (None, 5, True), (7, 5, False)]


@pytest.mark.parametrize(
    ("window", "near", "paired"),
    [*FEW, *(pytest.param(*c, marks=pytest.mark.slow) for c in CASES if c not in FEW)],
)
def test_output_and_gradients_are_those_of_plain_attention(fake, window, near, paired):
    """Documents across the borders of rows, lanes of different numbers of them, in one program with
    its gradients."""
    tokens = lanes_of([1, 24, 3, 24, 12, 20, 24, 20, 5, 7, 24, 24, 4], (3, 64))
    q, k, v, g = np.random.default_rng(0).normal(size=(4, 3, 64, HEADS, WIDTH)).astype(np.float32)

    @partial(jax.jit, static_argnums=0)
    def call(backend, q, k, v, g):
        documents = find_documents(tokens, BOS, 9, 24)
        how = {"scale": 0.3, "documents": documents, "window": window, "backend": backend}
        how |= {"gradient_window": near}
        out, back = jax.vjp(partial(attention_in_pairs if paired else attention, **how), q, k, v)
        return out, *back(g)

    for found, expected in zip(call("cudnn", q, k, v, g), call("xla", q, k, v, g), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("window", "near"), [(None, 5), (7, 5)])
def test_gradients_of_near_keys_alone_in_whole_lanes(fake, window, near):
    q, k, v, g = np.random.default_rng(0).normal(size=(4, 3, 16, HEADS, WIDTH)).astype(np.float32)

    @partial(jax.jit, static_argnums=0)
    def call(backend, q, k, v, g):
        how = {"scale": 0.3, "window": window, "gradient_window": near, "backend": backend}
        out, back = jax.vjp(partial(attention, **how), q, k, v)
        return out, *back(g)

    for found, expected in zip(call("cudnn", q, k, v, g), call("xla", q, k, v, g), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", ["too many", "too long"])
def test_only_a_lane_with_too_many_documents_is_nan(fake, wrong):
    tokens = lanes_of([4] * 16 if wrong == "too many" else [8, 40, 16], (3, 64))
    tokens[1:] = lanes_of([24, 24, 16], (1, 64))
    q, k, v, _ = np.random.default_rng(0).normal(size=(4, 3, 64, HEADS, WIDTH)).astype(np.float32)
    documents = find_documents(jnp.asarray(tokens), BOS, 9, 24)
    how = {"scale": 0.3, "documents": documents, "window": 7}
    found, expected = (
        np.asarray(jax.jit(partial(attention, **how, backend=backend))(q, k, v))
        for backend in ("cudnn", "xla")
    )
    assert np.isnan(found[0]).all()
    np.testing.assert_allclose(found[1:], expected[1:], rtol=1e-5, atol=1e-5)


LANE = 128
SETS = {
    "r29": [*TOYS["r29"], f"LANE_LEN={LANE}", f"EVAL_LEN={LANE}", "MAX_DOCS=129", "LANES=2"],
    "r89": [
        *TOYS["r89"],
        f"LANE_LENS=(16,{LANE})",
        f"EVAL_LEN={LANE}",
        "MAX_DOCS=(17,129)",
        "LANES=2",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parts"), [("r29", 2), ("r89", 8)])
def test_gradients_and_evaluation_are_those_of_plain_attention(fake, name, parts):
    """One lane at once, and pieces of one; evaluation of two knows its longest document too."""
    recipe = find(name, SETS[name]).recipe
    stage, draw = recipe.stages[-1], np.random.default_rng(0)
    tokens = draw.integers(6, 257, (2, LANE + 1), dtype=np.int32)
    for row in tokens:
        row[np.cumsum([0, *draw.integers(1, stage.max_doc_len + 1, 200)]).clip(max=LANE)] = BOS
    params = moved_parameters(recipe)

    def results(backend):
        ctx = Context(stage, True, attention=backend)
        gradients = jax.jit(partial(step.gradients, recipe, ctx, parts, (0, 0), 1 / tokens.size))(
            params, tokens, {}
        )
        known = recipe if backend == "xla" else replace(recipe, eval_max_doc_len=stage.max_doc_len)
        ctx = replace(program.eval_context(known, device_of(mesh_of(1))), attention=backend)
        return gradients, jax.jit(
            partial(
                step.eval_step, known, ctx, Placement(mesh_of(1), "zero1", device_of(mesh_of(1))), 2
            )
        )(params, tokens, tokens[:, 1:])

    for found, expected in zip(*map(jax.tree.leaves, map(results, ("cudnn", "xla"))), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-6)
