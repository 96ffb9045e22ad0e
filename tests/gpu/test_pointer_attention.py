"""The pointer's kernels on a real GPU, against plain JAX in fp32."""

import jax
import jax.numpy as jnp
import pytest

from jspeed.kernels.pointer_attention import KERNEL
from jspeed.model import pointer
from jspeed.model.attention import find_documents

from ..model import dense

LANES, T, K = 2, 4000, 128  # T is no multiple of a block


@pytest.mark.parametrize("window", [300, 2048])
def test_shares_and_gradients(window):
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = (LANES, T, K), (LANES, T, K), (K,)
    q, k, none = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=False)
    )
    gradients = tuple(jax.random.normal(key, (LANES, T)) for key in keys[3:5])
    tokens = jax.random.randint(keys[5], (LANES, T + 1), 1, 50).at[:, ::900].set(0)
    found, expected = [], []
    for results, dtype, own in (found, jnp.bfloat16, KERNEL), (expected, jnp.float32, None):

        def run(q, k, none, own=own):
            documents = find_documents(tokens[:, :-1], 0)
            of_tokens = tokens[:, :-1], tokens[:, 1:]
            return pointer.copies(q, k, none, *of_tokens, documents, window, own)

        out, back = jax.vjp(run, *(x.astype(dtype) for x in (q / 8, k, none)))
        results += [*out, *back(gradients)]
    for one, other in zip(found, expected, strict=True):
        assert dense.distance(one, other) < 0.008
