"""Composed-heads kernels on a real GPU, against plain JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jspeed.model.attention import find_documents
from jspeed.model.heads import composed

from ..model import dense

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="needs a GPU and JSPEED_TEST_GPU=1"
)
# T is no multiple of a block
LANES = 2
T = 4000
HEADS = 6
K = 128


def test_output_and_gradients():
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = [(LANES, T, HEADS, K)] * 3 + [(LANES, T, HEADS)] * 2
    arrays = [
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=False)
    ]
    g = jax.random.normal(keys[5], shapes[0], jnp.bfloat16)
    documents = find_documents(jnp.broadcast_to(jnp.minimum(jnp.arange(T) % 90, 1), (LANES, T)), 0)
    found, expected = [], []
    for results, own_kernels in (found, True), (expected, False):
        run = partial(composed, scale=0.1, documents=documents, window=112, own_kernels=own_kernels)
        out, back = jax.vjp(run, *arrays)
        results += [out, *back(g)]
    for one, other in zip(found, expected, strict=True):
        assert dense.distance(one, other) < 0.02
