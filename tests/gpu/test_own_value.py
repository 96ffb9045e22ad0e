"""Exclusive self-attention on a real GPU, against the plain path in fp32."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jspeed.kernels.own_value import KERNEL
from jspeed.model.attention import without_own_value

from ..model import dense

LANES, T, HEADS = 2, 1001, 3  # no multiple of the rows of a program


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_a_pass_and_its_gradients(width, gated):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(LANES, T, HEADS, width)] * 3 + [(LANES, T, HEADS)] * (1 + gated)
    g, y, v, *numbers = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=False)
    )
    found, expected = [], []
    for results, dtype, own in (found, jnp.bfloat16, KERNEL), (expected, jnp.float32, None):
        given = [x.astype(dtype) for x in (y + v, v.at[:, 3].set(0), *numbers)]
        out, back = jax.vjp(partial(without_own_value, kernel=own), *given)
        results += [out, *back(g.astype(dtype))]
    for one, other in zip(found, expected, strict=True):
        assert dense.distance(one, other) < 0.003
