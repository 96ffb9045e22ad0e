"""Our attention kernels in interpret mode against a dense float64 mask: every window, borders
anywhere."""

import sys
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.kernels import attention_backends, fused_attention
from jspeed.kernels.fused_attention import Blocks
from jspeed.model.attention import attention, find_documents

from ..model import dense
from ..refusals import refused

BOS = 7


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def lanes(length, *starts):
    """Tokens int ``[B, T]`` with a BOS at each of ``starts``, lane by lane."""
    tokens = np.ones((len(starts), length), int)
    for row, of_lane in zip(tokens, starts, strict=True):
        row[list(of_lane)] = BOS
    return tokens


def both(call, q, k, v, dout):
    """Output and all three gradients."""
    out, back = jax.vjp(call, q, k, v)
    return out, *back(dout)


def exact(tokens, window, scale, q, k, v, dout):
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    seen = dense.mask(tokens, BOS, window)
    return dense.forward(q, k, v, scale, seen)[0], *dense.backward(q, k, v, scale, seen, dout)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of which a lane of 27 holds several; own and visited ones differ."""
    for table, blocks in (("FORWARD", (8, 4)), ("DQ", (4, 8)), ("DK_DV", (8, 4))):
        monkeypatch.setattr(fused_attention, table, {4: Blocks(*blocks, 4, 2)})


@jax.jit  # once for all windows and borders: ranges are arguments
def in_small_blocks(first, last, *arrays):
    return both(
        lambda *qkv: fused_attention.attend(*qkv, first, last, 0.3, True, None, True), *arrays
    )


@jax.jit
def bounds(tokens):
    return attention_backends.token_bounds(find_documents(tokens, BOS, 6).offsets, tokens.shape[1])


@pytest.mark.parametrize(
    "length", [27] + [pytest.param(n, marks=pytest.mark.slow) for n in (3, 32)]
)
def test_agrees_with_dense_mask_for_every_window(small_blocks, length):
    borders = (
        [],
        [0, 1, 2, length - 1],
        [length // 3, length // 2],
        [t for t in (7, 8, 12, 16) if t < length],
    )
    tokens = lanes(length, *borders)
    arrays = normal(4, *tokens.shape, 2, 4)
    for window in [*range(1, length + 1), None]:
        found = in_small_blocks(*fused_attention.ranges(*bounds(tokens), window), *arrays)
        for one, wanted in zip(found, exact(tokens, window, 0.3, *arrays), strict=True):
            np.testing.assert_allclose(one, wanted, atol=1e-5)


def test_blocks_out_of_sight_are_not_visited(small_blocks):
    """Where blocks are visited, NaN in keys, values or gradients shows in sums, even times a weight
    of zero."""
    tokens = lanes(27, [8], [8], [8], [8])
    ranges = fused_attention.ranges(*bounds(tokens), 6)
    q, k, v, dout = normal(4, *tokens.shape, 2, 4)
    k[:, :8] = v[:, :8] = np.nan  # another document
    k[:, 16:] = v[:, 16:] = np.nan  # the future of queries before 16
    for found in in_small_blocks(*ranges, q, k, v, dout)[:2]:
        assert np.isfinite(found[:, 8:16]).all()
        assert np.isnan(found[:, :8]).all() and np.isnan(found[:, 16:]).all()
    q, k, v, dout = normal(4, *tokens.shape, 2, 4)
    q[:, :8] = dout[:, :8] = np.nan
    q[:, 24:] = dout[:, 24:] = np.nan  # keys before 16 are seen by queries before 21
    for found in in_small_blocks(*ranges, q, k, v, dout)[2:]:
        assert np.isfinite(found[:, 8:16]).all()
        assert np.isnan(found[:, :8]).all() and np.isnan(found[:, 24:]).all()


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(
        attention_backends, "triton", partial(attention_backends.triton, interpret=True)
    )


def test_as_a_backend_in_bfloat16(interpreted):
    """With its own blocks; a lane of more documents than slots is NaN, and others do not notice."""
    tokens = lanes(200, [0, 50, 51, 180], [3, 70], [10, 20, 30, 40, 50])
    arrays = normal(4, *tokens.shape, 1, 64).astype(jnp.bfloat16)

    @jax.jit
    def run(*arrays):
        documents = find_documents(tokens, BOS, 5)
        return both(
            partial(attention, scale=0.12, documents=documents, window=60, backend="triton"),
            *arrays,
        )

    for found, wanted in zip(run(*arrays), exact(tokens, 60, 0.12, *arrays), strict=True):
        assert found.dtype == jnp.bfloat16
        assert dense.distance(found[:2], wanted[:2]) < 0.006
        assert np.isnan(np.asarray(found[2], np.float32)).all()


def test_every_width_that_is_taken_has_blocks():
    for table in (fused_attention.FORWARD, fused_attention.DQ, fused_attention.DK_DV):
        assert tuple(table) == attention_backends.TRITON_WIDTHS


def test_token_bounds():
    starts, ends = bounds(lanes(12, [0, 3, 4], [5], []))
    expected = [
        [(0, 3)] * 3 + [(3, 4)] + [(4, 12)] * 8,
        [(0, 5)] * 5 + [(5, 12)] * 7,
        [(0, 12)] * 12,
    ]
    np.testing.assert_array_equal(np.stack([starts, ends], axis=-1), expected)


@pytest.mark.parametrize(
    ("dtype", "width", "words"),
    [
        (jnp.float16, 64, "takes bfloat16, found q in float16"),
        (jnp.bfloat16, 32, "64 and 128, found 32"),
    ],
)
def test_refuses(dtype, width, words):
    x = jax.ShapeDtypeStruct((1, 16, 2, width), dtype)
    refused(words, jax.eval_shape, lambda x: attention(x, x, x, scale=1.0, backend="triton"), x)


def test_pallas_is_told_what_a_gpu_is_that_it_has_no_name_for(monkeypatch):
    """A stand-in for a module of JAX 0.11, whose own refuses to compile for an RTX 3090."""
    module = types.SimpleNamespace(GpuInfo=lambda **told: told, registry={})
    gpu, cpu = (
        types.SimpleNamespace(device_kind="RTX 3090", compute_capability="8.6"),
        jax.devices()[0],
    )
    monkeypatch.setitem(sys.modules, "jax._src.pallas.triton.gpu_info", module)
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu, cpu])
    x = jax.ShapeDtypeStruct((1, 16, 2, 64), jnp.bfloat16)
    jax.eval_shape(lambda x: attention(x, x, x, scale=1.0, backend="triton"), x)
    assert list(module.registry) == ["RTX 3090"]
    assert module.registry["RTX 3090"]() == dict(
        gpu_version=None, arch_name="8.6", compute_capability=86
    )


@pytest.mark.slow
@pytest.mark.parametrize(("width", "window"), [(64, 1), (128, 384)])
def test_documents_of_1_to_2048_tokens(interpreted, width, window):
    """Real blocks and a lane that ends within its last document, in bfloat16 as on a GPU."""
    sizes = [1, 2, 3, 17, 63, 64, 65, 128, 500, 2048, 300]
    starts = np.cumsum([0, *sizes[:-1]])
    length = int(sum(sizes)) - 130
    tokens = lanes(length, starts)
    arrays = normal(4, *tokens.shape, 1, width).astype(jnp.bfloat16)

    @jax.jit
    def run(*arrays):
        documents = find_documents(tokens, BOS, 16)
        call = partial(
            attention, scale=width**-0.5, documents=documents, window=window, backend="triton"
        )
        return both(call, *arrays)

    names = "out", "dq", "dk", "dv"
    for name, found, wanted in zip(
        names, run(*arrays), exact(tokens, window, width**-0.5, *arrays), strict=True
    ):
        if window == 1 and name in ("dq", "dk"):  # one key: its weight is 1 whatever the scores
            assert np.abs(np.asarray(found, np.float64)).max() < 0.05
        else:
            assert dense.distance(found, wanted) < 0.006, name
