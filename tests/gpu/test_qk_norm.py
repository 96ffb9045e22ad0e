"""Fused QK-norm and RoPE on a real GPU, against the plain path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.kernels.qk_norm import norm_and_rotate
from jspeed.model.positions import frequencies, queries_and_keys
from jspeed.speedrun.heads import pair_positions

from ..model import dense

# T is no multiple of the tokens of a program
LANES = 2
T = 4000
HEADS = 6
K = 128


@pytest.mark.parametrize("look_back", [False, True])
def test_a_pass_and_its_gradient(look_back):
    keys = jax.random.split(jax.random.key(0), 3)
    y = jax.random.normal(keys[0], (LANES, T, 2 * HEADS * K), jnp.bfloat16)
    grads = tuple(jax.random.normal(key, (LANES, T, HEADS, K), jnp.bfloat16) for key in keys[1:])
    angles, positions = frequencies(K // 4), pair_positions(T)
    angle = positions[..., None] * angles.astype(np.float32)[None, None]
    rest = jnp.cos(angle), jnp.sin(angle), jnp.ones(LANES), None, HEADS, look_back
    plain = (LANES, T, HEADS, K), angles, positions, False, None, look_back
    found, expected = [], []
    for results, call, arguments in (
        (found, norm_and_rotate, rest),
        (expected, queries_and_keys, plain),
    ):
        out, back = jax.vjp(lambda y, call=call, arguments=arguments: call(y, *arguments), y)
        results += [*out, *back(grads)]
    for one, other in zip(found, expected, strict=True):
        assert dense.distance(one, other) < 0.005
