"""Composed-heads kernels in interpret mode, against float64 and plain JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.errors import BadInput
from jspeed.model import kv_cache
from jspeed.model.attention import find_documents
from jspeed.model.heads import composed
from jspeed.model.kernels import composed_heads

from .. import dense

BOS = 7
SCALE = 0.3
NAMES = "out", "dq", "dk", "dv", "dtake", "dgive"
# of documents; no block of 64 tokens divides their sum
SIZES = 1, 2, 3, 17, 63, 64, 65, 300, 128, 20


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(composed_heads, "compose", partial(composed_heads.compose, interpret=True))


def lanes(*sizes):
    """Tokens int ``[B, T]`` with a BOS where each document of each lane starts."""
    tokens = np.ones((len(sizes), sum(sizes[0])), int)
    for row, of_lane in zip(tokens, sizes, strict=True):
        row[np.cumsum((0, *of_lane[:-1]))] = BOS
    return tokens


def draw(tokens, heads=3, width=16, dtype=jnp.float32):
    """Queries, keys, values, take, give, and the gradient of the result."""
    rng = np.random.default_rng(0)
    shapes = (
        [(*tokens.shape, heads, width)] * 3
        + [(*tokens.shape, heads)] * 2
        + [(*tokens.shape, heads, width)]
    )
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@partial(jax.jit, static_argnames=("window", "own_kernels"))
def run(tokens, *arrays, window, own_kernels=True):
    """Output and all five gradients."""
    *operands, g = arrays
    how = {
        "scale": SCALE,
        "documents": find_documents(tokens, BOS),
        "window": window,
        "own_kernels": own_kernels,
    }
    out, back = jax.vjp(lambda *operands: composed(*operands, **how), *operands)
    return out, *back(g)


def exact(tokens, window, *arrays):
    q, k, v, take, give, g = (np.asarray(x, np.float64) for x in arrays)
    root = np.sqrt(np.mean(take**2, axis=-1, keepdims=True) + 1e-6)
    take = take / root
    p = dense.forward(q, k, v, SCALE, dense.mask(tokens, BOS, window))[1]
    mixed = np.einsum("bth,bhts->bts", take, p)
    y, dy = np.einsum("bts,bshk->bthk", mixed, v), give[..., None] * g
    dmixed = np.einsum("bthk,bshk->bts", dy, v)
    dtake = np.einsum("bts,bhts->bth", dmixed, p)
    ds = (
        SCALE
        * p
        * np.einsum("bth,bhts->bhts", take, dmixed[:, None] - np.moveaxis(dtake, 2, 1)[..., None])
    )
    dq, dk = np.einsum("bhts,bshk->bthk", ds, k), np.einsum("bhts,bthk->bshk", ds, q)
    dtake = (dtake - take * np.mean(dtake * take, axis=-1, keepdims=True)) / root
    return (
        give[..., None] * y,
        dq,
        dk,
        np.einsum("bts,bthk->bshk", mixed, dy),
        dtake,
        np.sum(g * y, axis=-1),
    )


@pytest.mark.parametrize(
    "window", [112] + [pytest.param(n, marks=pytest.mark.slow) for n in (1, 7, 65, 66, 128, 129)]
)
def test_output_and_gradients_match_float64(interpreted, window):
    """Documents of 1 to 300 tokens, two lanes that differ, the last block not full."""
    tokens = lanes(SIZES, SIZES[::-1])
    arrays = draw(tokens)
    found = run(tokens, *arrays, window=window)
    for name, one, wanted in zip(NAMES, found, exact(tokens, window, *arrays), strict=True):
        np.testing.assert_allclose(one, wanted, atol=2e-5, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    "length", [10] + [pytest.param(n, marks=pytest.mark.slow) for n in (63, 64, 128, 192)]
)
def test_lanes_of_few_blocks(interpreted, length):
    tokens = lanes((4, length - 4))
    arrays = draw(tokens)
    for one, wanted in zip(
        run(tokens, *arrays, window=112), exact(tokens, 112, *arrays), strict=True
    ):
        np.testing.assert_allclose(one, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.slow
def test_bfloat16_is_as_far_from_float64_as_plain_jax_is(interpreted):
    tokens = lanes(SIZES, SIZES[::-1])
    arrays = draw(tokens, dtype=jnp.bfloat16)
    wanted = exact(tokens, 112, *arrays)
    own, plain = (run(tokens, *arrays, window=112, own_kernels=on) for on in (True, False))
    for name, ours, other, value in zip(NAMES, own, plain, wanted, strict=True):
        assert ours.dtype == other.dtype == jnp.bfloat16
        assert dense.distance(ours, value) < max(0.004, 1.1 * dense.distance(other, value)), name
        assert dense.distance(ours, np.asarray(other, np.float64)) < 0.01, name


def test_blocks_out_of_reach_are_not_read(interpreted):
    """NaN in them would show in sums, even times a weight of zero."""
    tokens = lanes((320,))
    *operands, give, g = draw(tokens)
    spoilt = [x.at[:, :64].set(jnp.nan) for x in operands]
    for name, x in zip(NAMES[:5], run(tokens, *spoilt, give, g, window=112), strict=False):
        assert np.isfinite(x[:, 192:]).all() and np.isnan(x[:, :64]).any(), name
    *operands, give, g = draw(tokens)
    spoilt = g.at[:, 256:].set(jnp.nan)
    for name, x in zip(
        NAMES[1:], run(tokens, *operands, give, spoilt, window=112)[1:], strict=True
    ):
        assert np.isfinite(x[:, :128]).all() and np.isnan(x[:, 256:]).any(), name


def test_an_open_cache_does_without_them(monkeypatch):
    monkeypatch.setattr(composed_heads, "compose", None)
    tokens = lanes((5, 5))
    *operands, _ = draw(tokens)

    def forward(tokens, own_kernels=True):
        here = (x[:, : tokens.shape[1]] for x in operands)
        how = {"documents": find_documents(tokens, BOS), "window": 4, "own_kernels": own_kernels}
        return composed(*here, scale=SCALE, **how)

    cache, start = kv_cache.empty(forward, 1, 16), jnp.zeros(1, jnp.int32)
    found = kv_cache.advance(forward, cache, start, jnp.asarray(tokens))[1]
    np.testing.assert_allclose(found, forward(tokens, own_kernels=False), atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "width", "window", "words"),
    [
        (jnp.float32, 64, 112, "needs bfloat16, found q in float32"),
        (jnp.bfloat16, 96, 112, "16, 32, 64 or 128, found 96"),
        (jnp.bfloat16, 64, 130, "1 to 129 tokens, found 130"),
        (jnp.bfloat16, 64, 0, "1 to 129 tokens, found 0"),
    ],
)
def test_refuses(dtype, width, window, words):
    tokens = lanes((16,))
    x, one = (jax.ShapeDtypeStruct((*tokens.shape, *rest), dtype) for rest in ((2, width), (2,)))
    how = {
        "scale": 1.0,
        "documents": find_documents(tokens, BOS),
        "window": window,
        "own_kernels": True,
    }
    with pytest.raises(BadInput, match=words):
        jax.eval_shape(lambda x, one: composed(x, x, x, one, one, **how), x, one)
