"""Attention against a dense float64 mask, both ways, for borders and windows anywhere."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import PartitionSpec as P

from jspeed.errors import BadInput
from jspeed.kernels import attention_backends
from jspeed.model import attention as module
from jspeed.model.attention import Documents, attention, find_documents, tags
from jspeed.model.layers import rms_norm

from ..refusals import refused
from . import dense

BOS = 7
PATHS = {"unrolled": 1000, "looped": 0}
few = settings(max_examples=6, deadline=None)
many = settings(max_examples=100, deadline=None)


@pytest.fixture(params=PATHS)
def blocks_of_8(request, monkeypatch):
    """Several blocks in a lane, one after the other in the program or in a loop."""
    monkeypatch.setattr(module, "QUERY_BLOCK", 8)
    monkeypatch.setattr(module, "UNROLLED_BLOCKS", PATHS[request.param])


@st.composite
def borders(draw, shape, most):
    """Tokens int ``[B, T]`` of which at most ``most`` in a lane are BOS, anywhere."""
    tokens = np.ones(shape, int)
    for row in tokens:
        row[draw(st.lists(st.integers(0, shape[1] - 1), max_size=most))] = BOS
    return tokens


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(4, *shape)).astype(np.float32)


@pytest.mark.parametrize("path", [pytest.param("unrolled", marks=pytest.mark.slow), "looped"])
@few
@given(st.data(), st.integers(1, 40), st.sampled_from([2, 4, 9, None, 30]), st.sampled_from([3, 8]))
def test_agrees_with_dense_mask(path, data, length, window, block):
    tokens = data.draw(borders((12, length), 6))  # many lanes, for each shape is compiled
    q, k, v, dout = normal(*tokens.shape, 1, 4)

    def both(q, k, v, tokens, dout):
        documents = find_documents(tokens, BOS)
        call = partial(attention, scale=0.3, documents=documents, window=window)
        out, back = jax.vjp(call, q, k, v)
        return out, back(dout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "QUERY_BLOCK", block)
        patch.setattr(module, "UNROLLED_BLOCKS", PATHS[path])
        out, grads = jax.jit(both)(q, k, v, tokens, dout)
    seen = dense.mask(tokens, BOS, window)
    np.testing.assert_allclose(out, dense.forward(q, k, v, 0.3, seen)[0], atol=2e-5)
    for found, expected in zip(grads, dense.backward(q, k, v, 0.3, seen, dout), strict=True):
        np.testing.assert_allclose(found, expected, atol=5e-5)


def some(names, by_default, others):
    """Cases of both paths, whose name is the first value; those of ``others`` are slow."""
    cases = [*by_default, *(pytest.param(*case, marks=pytest.mark.slow) for case in others)]
    return pytest.mark.parametrize(("blocks_of_8", *names), cases, indirect=["blocks_of_8"])


@some(
    ("window", "near"),
    [("looped", 9, 3), ("unrolled", 9, 20)],
    [("unrolled", None, 3), ("looped", None, 3), ("unrolled", 9, 3), ("looped", 9, 20)],
)
def test_gradients_of_near_keys_alone(blocks_of_8, window, near):
    """As a backward kernel has them that skips blocks: weights, and the mean that softmax
    subtracts, are of all."""
    tokens = np.ones((2, 27), int)
    tokens[0, [0, 6, 20]] = BOS
    q, k, v, dout = normal(2, 27, 1, 4)
    documents = find_documents(jnp.asarray(tokens), BOS)

    @jax.jit
    def both(q, k, v, dout):
        call = partial(
            attention, scale=0.3, documents=documents, window=window, gradient_window=near
        )
        out, back = jax.vjp(call, q, k, v)
        return out, back(dout)

    out, grads = both(q, k, v, dout)
    seen, t = dense.mask(tokens, BOS, window), np.arange(27)
    np.testing.assert_allclose(out, dense.forward(q, k, v, 0.3, seen)[0], atol=2e-5)
    expected = dense.backward(q, k, v, 0.3, seen, dout, t[:, None] - t < near)
    for found, wanted in zip(grads, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=5e-5)


@some(("window",), [("unrolled", 5)], [("looped", None), ("unrolled", None), ("looped", 5)])
def test_bfloat16_and_no_documents(blocks_of_8, window):
    q, k, v, dout = normal(2, 27, 2, 8).astype(jnp.bfloat16)

    @jax.jit
    def both(q, k, v, dout):
        out, back = jax.vjp(partial(attention, scale=0.3, window=window), q, k, v)
        return out, *back(dout)

    exact = [x.astype(np.float64) for x in (q, k, v)]
    seen = dense.mask(np.ones((2, 27), int), BOS, window)
    expected = (
        dense.forward(*exact, 0.3, seen)[0],
        *dense.backward(*exact, 0.3, seen, dout.astype(np.float64)),
    )
    for found, wanted in zip(both(q, k, v, dout), expected, strict=True):
        assert found.dtype == jnp.bfloat16
        assert dense.distance(found, wanted) < 0.01


def test_nothing_comes_from_beyond_document_or_window(blocks_of_8):
    tokens = np.ones((1, 40), int)
    tokens[0, [9, 22]] = BOS
    q, k, v, _ = normal(1, 40, 2, 4)

    def call(k, v):
        return attention(q, k, v, scale=0.3, documents=find_documents(tokens, BOS), window=11)

    @jax.jit
    def from_keys(t):
        return jax.grad(lambda kv: call(*kv)[0, t].sum())((k, v))

    for t, first in [(0, 0), (8, 0), (9, 9), (21, 11), (22, 22), (39, 29)]:
        expected = np.zeros(40, bool)
        expected[first : t + 1] = True
        dk, dv = (np.abs(x)[0].sum((1, 2)) for x in from_keys(t))
        np.testing.assert_array_equal(dk + dv > 0, expected)

    run = jax.jit(call)
    later = [np.concatenate([x[:, :30], x[:, :10] + 1], axis=1) for x in (k, v)]
    np.testing.assert_array_equal(run(*later)[:, :30], run(k, v)[:, :30])


@pytest.mark.parametrize("window", [None, 64])
def test_no_scores_larger_than_block_by_window(window):
    x = jax.ShapeDtypeStruct((1, 512, 1, 8), jnp.float32)
    text = jax.jit(lambda x: attention(x, x, x, scale=1.0, window=window)).lower(x).as_text()
    assert ("128x512xf32" in text) == (window is None)
    assert "512x512xf32" not in text


def backward_program(length, window):
    x, tokens = (
        jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32),
        jax.ShapeDtypeStruct((1, length), jnp.uint16),
    )

    def loss(q, k, v, tokens):
        return attention(
            q, k, v, scale=1.0, documents=find_documents(tokens, BOS, 64), window=window
        ).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x, tokens)


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 512])
def test_program_does_not_grow_with_the_lane(window):
    short, long = (len(backward_program(length, window).as_text()) for length in (4096, 262_144))
    assert long < 1.1 * short


def test_memory_is_less_than_the_scores():
    """Of 32,768 queries by 256 keys: blocks are recomputed, and nothing is kept for all of them."""
    compiled = backward_program(32_768, 256).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 32_768 * 256 * 4


@some(("model",), [("unrolled", 2)], [("looped", 1), ("unrolled", 1), ("looped", 2)])
def test_on_a_mesh(blocks_of_8, model):
    """Rows over ``data``, heads over ``model``, whose devices read documents of the same rows."""
    axes = {"axis_types": (jax.sharding.AxisType.Auto,) * 2, "devices": jax.devices()[: 2 * model]}
    mesh = jax.make_mesh((2, model), ("data", "model"), **axes)
    tokens = np.where(np.arange(80).reshape(4, 20) % 9 == 5, BOS, 1)
    q, k, v, _ = normal(4, 20, 2, 4)

    def loss(qkv, tokens):
        documents = find_documents(tokens, BOS, 4)
        assert documents.offsets is not None
        return attention(*qkv, scale=0.3, documents=documents, window=6) ** 2

    rows = P("data")
    spread = jax.shard_map(
        loss, mesh=mesh, in_specs=(rows, rows), out_specs=rows, axis_names={"data"}, check_vma=False
    )
    here, there = (
        jax.jit(jax.grad(lambda x, f=f: f(x, tokens).sum()))((q, k, v)) for f in (loss, spread)
    )
    for one, other in zip(here, there, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def pieces(row):
    """Where the pieces of one lane start, by counting."""
    return [0] + [t for t in range(1, len(row)) if row[t] == BOS]


FIND = jax.jit(find_documents, static_argnums=(1, 2))


@many
@given(st.data(), st.sampled_from([((1, 1), 9), ((3, 24), 1), ((3, 24), 3), ((3, 24), 9)]))
def test_find_documents(data, case):
    shape, max_docs = case
    tokens = data.draw(borders(shape, 5))
    found = FIND(tokens.astype(np.uint16), BOS, max_docs)
    assert found.ids.dtype == found.offsets.dtype == jnp.int32
    for row, ids, offsets in zip(
        tokens, np.asarray(found.ids), np.asarray(found.offsets), strict=True
    ):
        starts = pieces(row)
        np.testing.assert_array_equal(np.flatnonzero(np.diff(ids, prepend=-1)), starts)
        padded = starts + [len(row)] * (max_docs + 1)
        np.testing.assert_array_equal(offsets, padded[: max_docs + 1])
        assert (offsets[-1] < len(row)) == (len(starts) > max_docs)


def test_find_documents_never_scatters():
    tokens = jax.ShapeDtypeStruct((8, 8192), jnp.uint16)
    program = jax.jit(lambda x: find_documents(x, BOS, 64)).lower(tokens)
    assert not re.search(r"\bscatter\(", program.compile().as_text())
    assert "stablehlo.scatter" not in program.as_text()


def packed_mask(lengths, starts, length):
    """What cuDNN makes of packed lanes: all that is not -1 moves left, a start and a length are a
    document."""
    lanes = lengths.shape[0]
    seen = np.zeros((lanes, length, length), bool)
    flat = np.where(starts >= 0, starts + length * np.arange(lanes)[:, None], -1)
    for start, size in zip(flat[flat >= 0], lengths[lengths >= 0], strict=True):
        lane, at = divmod(start, length)
        assert at + size <= length and not seen[lane, at : at + size].any()
        seen[lane, at : at + size, at : at + size] = True
    return seen


@partial(jax.jit, static_argnums=1)
def cudnn_arguments(tokens, max_docs):
    """The kernels' arguments, and what JAX computes of them for cuDNN: starts in elements, unused
    slots at the end."""
    offsets = find_documents(tokens, BOS, max_docs).offsets
    lengths, starts = attention_backends.cudnn_slots(offsets, tokens.shape[1])
    x = jnp.zeros((*tokens.shape, 2, 8))
    by_jax = fused._fix_seqlen_offsets(lengths, lengths, starts, starts, x, x)
    return lengths, starts, by_jax[0], by_jax[2]


@many
@given(st.data(), st.sampled_from([((1, 1), 1), ((3, 24), 6), ((3, 24), 20)]))
def test_kernels_are_told_the_same_mask(data, case):
    shape, max_docs = case
    tokens, length = data.draw(borders(shape, 5)), shape[1]
    found = map(np.asarray, cudnn_arguments(tokens, max_docs))
    lengths, starts, jax_lengths, jax_starts = found

    assert lengths.shape[1] == max(max_docs, 2) and starts.shape[1] == lengths.shape[1] + 1
    causal = np.tril(np.ones((length, length), bool))
    np.testing.assert_array_equal(
        packed_mask(lengths, starts, length) & causal, dense.mask(tokens, BOS, None)
    )
    flat = [lane * length + start for lane, row in enumerate(tokens) for start in pieces(row)]
    np.testing.assert_array_equal(jax_starts.ravel()[: len(flat)], np.multiply(flat, 2 * 8))
    np.testing.assert_array_equal(jax_lengths.ravel()[: len(flat)], np.diff([*flat, tokens.size]))
    assert not jax_lengths.ravel()[len(flat) :].any()


@pytest.fixture
def fake_cudnn(monkeypatch):
    """In the place of cuDNN: dense attention with the mask that the arguments say."""

    def stand_in(
        q,
        k,
        v,
        *,
        q_seqlen,
        kv_seqlen,
        q_offsets,
        kv_offsets,
        scale,
        mask_type,
        sliding_window_length,
    ):
        length = q.shape[1]
        t, s = np.arange(length)[:, None], np.arange(length)[None, :]
        seen = np.broadcast_to(
            (s <= t) & (t - s < (sliding_window_length or length)), (len(q), length, length)
        )
        if q_offsets is not None:
            assert mask_type == fused.MaskType.PADDING_CAUSAL
            assert kv_seqlen is q_seqlen and kv_offsets is q_offsets
            seen = seen & packed_mask(np.asarray(q_seqlen), np.asarray(q_offsets), length)
        else:
            assert mask_type == fused.MaskType.CAUSAL and q_seqlen is None
        return jnp.asarray(
            dense.forward(*(np.asarray(x, np.float64) for x in (q, k, v)), scale, seen)[0], q.dtype
        )

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 92800)
    monkeypatch.setattr(fused, "dot_product_attention", stand_in)


@pytest.mark.parametrize("max_docs", [None, 1, 3, 9])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_cudnn_call(fake_cudnn, max_docs, window):
    tokens = np.ones((2, 20), int)
    tokens[0, [0, 6, 7, 15]] = tokens[1, [3, 19]] = BOS  # four pieces and three
    documents = find_documents(jnp.asarray(tokens), BOS, max_docs) if max_docs else None
    q, k, v, _ = jnp.asarray(normal(2, 20, 2, 8), jnp.bfloat16)
    out = attention(q, k, v, scale=0.3, documents=documents, window=window, backend="cudnn")
    seen = dense.mask(tokens if max_docs else np.ones_like(tokens), BOS, window)
    expected = dense.forward(*(np.asarray(x, np.float64) for x in (q, k, v)), 0.3, seen)[0]
    for lane, count in enumerate((4, 3)):
        if count > (max_docs or 20):
            assert np.isnan(np.asarray(out[lane], np.float32)).all()  # never another mask
        else:
            assert dense.distance(out[lane], expected[lane]) < 0.01


@pytest.mark.parametrize("checked", [False, True])
def test_checked_queries_are_not_made_nan_again(fake_cudnn, checked):
    q, k, v, _ = jnp.asarray(normal(2, 20, 2, 8), jnp.bfloat16)
    documents = find_documents(jnp.full((2, 20), BOS), BOS, 3)
    out = attention(
        q, k, v, scale=0.3, documents=documents, backend="cudnn", overflow_checked=checked
    )
    assert np.isnan(np.asarray(out, np.float32)).all() != checked


@pytest.mark.parametrize("documents_of", [0.6, pytest.param(0.05, marks=pytest.mark.slow)])
def test_tags_of_documents_stand_for_a_mask(documents_of):
    """Short documents and long ones."""
    check_tags(attention, documents_of)


def check_tags(attend, documents_of):
    """Output and gradients of normalised heads in fp32, to its rounding."""
    rng = np.random.default_rng(0)
    tokens = np.where(rng.uniform(size=(2, 90)) < documents_of, BOS, 1)
    documents = find_documents(jnp.asarray(tokens), BOS, 100)
    given = normal(2, 90, 2, 64)
    path = partial(attend, scale=0.13, window=41)

    @partial(jax.jit, static_argnums=0)
    def gradients(call, q, k, v, dout):
        out, back = jax.vjp(call, q, k, v)
        return out, *back(dout)

    def masked(q, k, v):
        return path(rms_norm(q), rms_norm(k), v, documents=documents)

    def tagged(q, k, v):
        tags_BTHK = jnp.broadcast_to(tags(documents, 64)[:, :, None].astype(q.dtype), q.shape)
        q, k = (jnp.concatenate([rms_norm(x), tags_BTHK], axis=-1) for x in (q, k))
        return path(q, k, v, documents=Documents(jnp.zeros_like(documents.ids)))

    both = (gradients(call, *given) for call in (tagged, masked))
    for found, expected in zip(*both, strict=True):
        assert dense.distance(found, expected) < 3e-5


def test_tagged_lanes_go_to_cudnn_without_a_table(fake_cudnn):
    tokens = np.ones((2, 20), int)
    tokens[0, [0, 6, 7, 15]] = tokens[1, [3, 19]] = BOS
    documents = find_documents(jnp.asarray(tokens), BOS, 9, 16)
    q, k, v, _ = jnp.asarray(normal(2, 20, 2, 16))
    tags_BTHK = jnp.broadcast_to(tags(documents, 8)[:, :, None], (2, 20, 2, 8))
    q, k = (
        jnp.concatenate([rms_norm(x[..., :8]), tags_BTHK], axis=-1).astype(jnp.bfloat16)
        for x in (q, k)
    )
    call = partial(
        attention, q, k, v.astype(jnp.bfloat16), window=6, backend="cudnn", doc_tagged=True
    )
    plain = jax.jit(partial(attention, scale=0.3, documents=documents, window=6))
    expected = plain(*(np.asarray(x, np.float32) for x in (q, k, v)))
    assert dense.distance(call(scale=0.3, documents=documents), expected) < 0.01
    overflown = find_documents(jnp.asarray(tokens), BOS, 3)
    np.testing.assert_array_equal(
        np.isnan(call(scale=0.3, documents=overflown)).any(axis=(1, 2, 3)), [True, False]
    )
    refused("by 0.992 at scale 0.002; 30 are needed", call, scale=0.002, documents=documents)
    refused("3 channels tell 8 documents apart, found 9 slots", tags, documents, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"backend": "cudn"}, "did you mean 'cudnn'"),
        ({"window": 0}, "window=0"),
        ({"backend": "cudnn", "dtype": jnp.float32}, "found q in float32"),
        ({"backend": "cudnn", "width": 12}, "head widths .* found 12"),
        ({"backend": "cudnn", "width": 264}, "head widths .* found 264"),
        ({"backend": "cudnn", "lanes": 2**20}, "counts elements in int32"),
        ({"backend": "cudnn", "max_docs": None}, "give find_documents a max_docs"),
        ({"backend": "splash", "dtype": jnp.float16}, "'splash' takes bfloat16"),
        ({"backend": "splash", "width": 12}, "head widths .* found 12"),
    ],
)
def test_refuses(change, words):
    given = {
        "backend": "xla",
        "dtype": jnp.bfloat16,
        "width": 64,
        "window": None,
        "max_docs": 4,
        "lanes": 2,
        **change,
    }
    x = jax.ShapeDtypeStruct((given["lanes"], 16, 2, given["width"]), given["dtype"])
    tokens = jax.ShapeDtypeStruct((given["lanes"], 16), jnp.int32)

    def call(x, tokens):
        documents = find_documents(tokens, BOS, given["max_docs"])
        return attention(
            x,
            x,
            x,
            scale=1.0,
            documents=documents,
            window=given["window"],
            backend=given["backend"],
        )

    refused(words, jax.eval_shape, call, x, tokens)


def test_refuses_what_the_library_refuses(monkeypatch):
    x = jnp.zeros((1, 16, 2, 64), jnp.bfloat16)
    documents = Documents(jnp.zeros((1, 16), jnp.int32), jnp.asarray([[0, 16, 16]], jnp.int32))
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 92800)
    with pytest.raises(BadInput, match="Hopper"):  # a CPU is no Hopper
        attention(x, x, x, scale=1.0, documents=documents, backend="cudnn")
    monkeypatch.undo()
    if fused.cuda_versions is None:
        refused("no cuDNN", attention, x, x, x, scale=1.0, documents=documents, backend="cudnn")
    refused("max_docs=0", find_documents, jnp.zeros((1, 4), jnp.int32), BOS, 0)
