"""Exclusive self-attention in interpret mode, against the plain path and float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.kernels.own_value import subtract_own_value
from jspeed.model.attention import without_own_value
from jspeed.model.custom_kernels import Kernel

from ..model import dense
from ..refusals import refused

LANES, HEADS = 2, 3
NAMES = "out", "dy", "dv", "dalpha", "dgate"


KERNEL = Kernel(lambda *args: subtract_own_value(*args, interpret=True))


def arrays(length, width, gated):
    """A gradient, outputs near their own values, values, some of them 0 or tiny, and numbers of
    each head: bf16."""
    rng = np.random.default_rng(length + width)
    g, y, v = rng.normal(size=(3, LANES, length, HEADS, width))
    y += v
    v[:, 3], v[:, 4] = 0, 1e-6
    g[:, 4] *= 1e-4  # times y v / 1e-8 in the gradient of v
    numbers = rng.normal(size=(1 + gated, LANES, length, HEADS))
    return tuple(jnp.asarray(x, jnp.bfloat16) for x in (g, y, v, *numbers))


def exact(g, y, v, alpha, gate=None):
    """Result and gradients in float64, where nothing is rounded; NumPy alone."""
    g, y, v, alpha, *gated = (
        np.asarray(x, np.float64) for x in (g, y, v, alpha, *([] if gate is None else [gate]))
    )
    factor = gated[0] if gated else np.ones_like(alpha)
    square, turn = (v * v).sum(-1), np.tanh(alpha)
    length = np.maximum(square, 1e-8)
    share = (y * v).sum(-1) / length
    whole = y - (turn * share)[..., None] * v
    into = factor[..., None] * g
    dshare = -turn * (into * v).sum(-1)
    dalpha = -(1 - turn**2) * share * (into * v).sum(-1)
    dy = into + (dshare / length)[..., None] * v
    dlength = np.where(square > 1e-8, -dshare * share / length, 0)
    dv = (
        -(turn * share)[..., None] * into
        + (dshare / length)[..., None] * y
        + 2 * dlength[..., None] * v
    )
    return factor[..., None] * whole, dy, dv, dalpha, *([(g * whole).sum(-1)] if gated else [])


def all_of(kernel, g, *arguments):
    """The result and all gradients."""
    out, back = jax.vjp(partial(without_own_value, kernel=kernel), *arguments)
    return out, *back(g)


@pytest.mark.parametrize(
    ("length", "width", "gated"),
    [
        (43, 64, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (40, 128, False),
                (40, 128, True),
                (43, 64, False),
                (64, 64, False),
                (64, 64, True),
            )
        ),
    ],
)
def test_agrees_with_float64_and_is_nearer_than_the_plain_path(length, width, gated):
    """Lengths that fill the blocks of rows and that do not; values that are 0, or shorter than what
    counts."""
    given = arrays(length, width, gated)
    found = jax.jit(partial(all_of, KERNEL))(*given)
    plain = all_of(None, *given)  # rounds after each operation
    assert [x.dtype for x in found] == [jnp.bfloat16] * (4 + gated)
    for name, one, other, wanted in zip(NAMES, found, plain, exact(*given), strict=False):
        assert dense.distance(one, wanted) < 0.003, name
        assert dense.distance(one, wanted) <= dense.distance(other, wanted), name
    out, dy, dv, *_ = (x[:, 3] for x in found)  # of values that are 0
    g, y, factor = given[0][:, 3], given[1][:, 3], given[4][:, 3, :, None] if gated else 1
    np.testing.assert_array_equal([out, dy, dv], [factor * y, factor * g, 0 * y])


@pytest.mark.parametrize(
    ("width", "dtypes", "words"),
    [
        (48, (jnp.bfloat16,) * 2, "power of two up to 4096, found 48"),
        (8192, (jnp.bfloat16,) * 2, "power of two up to 4096, found 8192"),
        (64, (jnp.float32, jnp.bfloat16), "needs bfloat16, found float32"),
        (64, (jnp.bfloat16, jnp.float32), "needs bfloat16, found float32"),
    ],
)
def test_refuses(width, dtypes, words):
    y, alpha = (
        jax.ShapeDtypeStruct(s, dtype)
        for s, dtype in zip(((1, 8, 3, width), (1, 8, 3)), dtypes, strict=True)
    )
    refused(words, jax.eval_shape, partial(without_own_value, kernel=KERNEL), y, y, alpha)
