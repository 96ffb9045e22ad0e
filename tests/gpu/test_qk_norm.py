"""Fused QK-norm and RoPE on a real GPU, against its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.model.heads import pair_positions
from jspeed.model.kernels.qk_norm import norm_and_turn, norm_and_turn_reference
from jspeed.model.positions import frequencies

from ..model import dense

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU and JSPEED_TEST_GPU=1")
LANES, T, HEADS, K = 2, 4000, 6, 128  # T is no multiple of the tokens of a program


@pytest.mark.parametrize("look_back", [False, True])
def test_a_pass_and_its_gradient(look_back):
    keys = jax.random.split(jax.random.key(0), 3)
    y = jax.random.normal(keys[0], (LANES, T, 2 * HEADS * K), jnp.bfloat16)
    grads = tuple(jax.random.normal(key, (LANES, T, HEADS, K), jnp.bfloat16) for key in keys[1:])
    angle = pair_positions(T)[..., None] * frequencies(K // 4).astype(np.float32)[None, None]
    rest = jnp.cos(angle), jnp.sin(angle), jnp.ones(LANES), HEADS, look_back
    found, expected = [], []
    for results, call in (found, norm_and_turn), (expected, norm_and_turn_reference):
        out, back = jax.vjp(lambda y, call=call: call(y, *rest), y)
        results += [*out, *back(grads)]
    for one, other in zip(found, expected, strict=True):
        assert dense.distance(one, other) < 0.005
