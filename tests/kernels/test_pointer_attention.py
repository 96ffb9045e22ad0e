"""The pointer's kernels in interpret mode, against float64 with a dense mask and against the plain
path."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.errors import BadInput
from jspeed.kernels import pointer_attention
from jspeed.kernels.fused_attention import Blocks
from jspeed.model import pointer
from jspeed.model.attention import find_documents
from jspeed.model.custom_kernels import Kernel

from ..model import dense

BOS = 20
NAMES = "on target", "on none", "dq", "dk", "dnone"


KERNEL = Kernel(partial(pointer_attention.shares, interpret=True))


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of which a lane of 43 holds several; own and visited ones differ."""
    for name, blocks in (("FORWARD", (16, 4)), ("DQ", (4, 16)), ("DK", (16, 4))):
        monkeypatch.setattr(pointer_attention, name, Blocks(*blocks, 4, 2))


def lanes(length, *starts):
    """Tokens of which few differ, and targets: int ``[B, T]``. Target 9 never occurs before."""
    tokens = np.random.default_rng(0).integers(0, 5, size=(len(starts), length + 1))
    for row, of_lane in zip(tokens, starts, strict=True):
        row[list(of_lane)] = BOS
    targets = tokens[:, 1:].copy()
    targets[:, ::6] = 9
    return jnp.asarray(tokens[:, :-1]), jnp.asarray(targets)


def arrays(tokens, width, dtype=jnp.float32):
    """Gradients of both shares, fp32; queries, keys and the key of no token."""
    rng = np.random.default_rng(1)
    numbers = tuple(jnp.asarray(rng.normal(size=tokens.shape), jnp.float32) for _ in range(2))
    shapes = [(*tokens.shape, width)] * 2 + [(width,)]
    return numbers, *(jnp.asarray(width**-0.25 * rng.normal(size=shape), dtype) for shape in shapes)


@partial(jax.jit, static_argnums=(0, 1))
def found(kernel, window, tokens, targets, gradients, *given):
    """Both shares and all gradients."""

    def run(*qkn):
        documents = find_documents(tokens, BOS)
        return pointer.copies(*qkn, tokens, targets, documents, window, kernel)

    out, back = jax.vjp(run, *given)
    return *out, *back(gradients)


def exact(window, tokens, targets, gradients, *given):
    """The same in float64, NumPy alone."""
    tokens, targets = np.asarray(tokens), np.asarray(targets)
    q, k, none, dtarget, dnone = (np.asarray(x, np.float64) for x in (*given, *gradients))
    seen = dense.mask(tokens, BOS, window + 1) & ~np.eye(tokens.shape[1], dtype=bool)
    scores = np.where(seen, np.einsum("btk,bsk->bts", q, k), -np.inf)
    p = np.exp(np.concatenate([scores, (q @ none)[..., None]], axis=-1))  # none is the last key
    p /= p.sum(-1, keepdims=True)
    dp = dtarget[..., None] * (targets[..., None] == tokens[:, None])
    dp = np.concatenate([dp, dnone[..., None]], axis=-1)
    dscores = p * (dp - (p * dp).sum(-1, keepdims=True))
    on_target = (p[..., :-1] * (targets[..., None] == tokens[:, None])).sum(-1)
    dq = dscores[..., :-1] @ k + dscores[..., -1:] * none
    return (
        on_target,
        p[..., -1],
        dq,
        np.swapaxes(dscores[..., :-1], 1, 2) @ q,
        np.einsum("bt,btk", dscores[..., -1], q),
    )


BORDERS = [], [0, 1, 2, 42], [14, 21], [15, 16, 17, 32]


@pytest.mark.parametrize(
    "window", [7, *(pytest.param(window, marks=pytest.mark.slow) for window in (1, 16, 100))]
)
def test_agrees_with_float64(small_blocks, window):
    """Windows shorter and longer than documents and lanes; queries that see no key; targets that
    nothing is."""
    given = *(lane := lanes(43, *BORDERS)), *arrays(lane[0], 16)
    results = found(KERNEL, window, *given)
    for name, one, other, wanted in zip(
        NAMES, results, found(None, window, *given), exact(window, *given), strict=True
    ):
        np.testing.assert_allclose(one, wanted, atol=2e-5, err_msg=name)
        np.testing.assert_allclose(one, other, atol=2e-5, err_msg=name)
    np.testing.assert_array_equal(results[1][:, 0], 1)  # no token is before the first of a lane
    np.testing.assert_array_equal(results[0][:, ::6], 0)


def test_blocks_out_of_sight_are_not_visited(small_blocks):
    """Where blocks are visited, NaN in keys or queries shows, even times a weight of zero."""
    tokens, targets = lanes(43, [16])
    gradients, q, k, none = arrays(tokens, 16)
    # another document, and the future of queries before 32
    k = k.at[:, :16].set(np.nan).at[:, 32:].set(np.nan)
    for one in found(KERNEL, 6, tokens, targets, gradients, q, k, none)[:3]:
        assert np.isfinite(one[:, 16:32]).all() and np.isnan(one[:, 40:]).all()
    gradients, q, k, none = arrays(tokens, 16)
    # keys before 32 are seen by queries before 38
    q = q.at[:, :16].set(np.nan).at[:, 40:].set(np.nan)
    dk = found(KERNEL, 6, tokens, targets, gradients, q, k, none)[3]
    assert np.isfinite(dk[:, 16:32]).all() and np.isnan(dk[:, 32:]).all()


@pytest.mark.parametrize("length", [200, pytest.param(256, marks=pytest.mark.slow)])
def test_in_bfloat16_with_its_own_blocks(length):
    """As on a GPU, with real blocks, and more keys than one holds."""
    given = *(lane := lanes(length, [0, 50, 51, 180], [3])), *arrays(lane[0], 128, jnp.bfloat16)
    for name, one, wanted in zip(
        NAMES, found(KERNEL, 150, *given), exact(150, *given), strict=True
    ):
        assert one.dtype == (jnp.bfloat16 if name.startswith("d") else jnp.float32)
        assert dense.distance(one, wanted) < (0.004 if name.startswith("d") else 1e-5), name


@pytest.mark.parametrize(
    ("width", "dtypes", "words"),
    [
        (48, (jnp.bfloat16,) * 2, "16, 32, 64 or 128, found 48"),
        (128, (jnp.float32, jnp.bfloat16), "needs bfloat16, found q in float32"),
        (128, (jnp.bfloat16, jnp.float32), "needs bfloat16, found k in float32"),
    ],
)
def test_refuses(width, dtypes, words):
    q, k = (jax.ShapeDtypeStruct((1, 8, width), dtype) for dtype in dtypes)
    none, gradients = (
        jax.ShapeDtypeStruct((width,), jnp.bfloat16),
        (jax.ShapeDtypeStruct((1, 8), jnp.float32),) * 2,
    )
    with pytest.raises(BadInput, match=words):
        jax.eval_shape(
            partial(found, pointer_attention.KERNEL, 4), *lanes(8, []), gradients, q, k, none
        )
