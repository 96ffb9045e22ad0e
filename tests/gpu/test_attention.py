"""Every attention backend on a real GPU or TPU against the dense float64 mask, forward and
backward.

The other tests hide GPUs from jax, so this folder runs by itself: ``JSPEED_TEST_GPU=1 python -m
pytest tests/gpu``.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.kernels import backends
from jspeed.model.attention import attention, find_documents

from ..model import dense

BOS = 7
MAX_DOCS = 24
DEVICES = "gpu", "tpu"


def lanes(length: int) -> np.ndarray:
    """Four lanes: random borders; none; a document of one token at either end; borders on tiles of
    kernels."""
    tokens = np.ones((4, length), int)
    tokens[0, np.random.default_rng(0).integers(0, length, MAX_DOCS - 1)] = BOS
    tokens[2, [0, 1, length - 1]] = BOS
    tokens[3, 128 : length - 1 : 128] = BOS
    return tokens


@pytest.fixture(params=["xla", *backends()])
def backend(request):
    if (request.param == "splash") != (jax.default_backend() == "tpu") and request.param != "xla":
        pytest.skip(f"{request.param} is not for {jax.default_backend()} devices")
    return request.param


def all_of(call, q, k, v, dout):
    out, back = jax.vjp(call, q, k, v)
    return out, *back(dout)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 100, 384])
@pytest.mark.parametrize(("length", "width"), [(640, 64), (2304, 128), (1001, 128)])
def test_agrees_with_dense_mask(backend, packed, window, length, width):
    tokens = lanes(length) if packed else np.ones((4, length), int)
    q, k, v, dout = (
        np.random.default_rng(1).normal(size=(4, 4, length, 2, width)).astype(jnp.bfloat16)
    )

    @jax.jit
    def run(tokens, *arrays):
        documents = find_documents(tokens, BOS, MAX_DOCS) if packed else None
        return all_of(
            partial(attention, scale=0.12, documents=documents, window=window, backend=backend),
            *arrays,
        )

    exact = [x.astype(np.float64) for x in (q, k, v, dout)]
    seen = dense.mask(tokens, BOS, window)
    expected = (
        dense.forward(*exact[:3], 0.12, seen)[0],
        *dense.backward(*exact[:3], 0.12, seen, exact[3]),
    )
    for name, found, wanted in zip(
        ("out", "dq", "dk", "dv"), run(tokens, q, k, v, dout), expected, strict=True
    ):
        if window == 1 and name in ("dq", "dk"):  # one key: its weight is 1 whatever the scores
            assert np.abs(np.asarray(found, np.float64)).max() < 0.05
        else:
            assert dense.distance(found, wanted) < 0.01, name


@pytest.mark.parametrize("window", [None, 1, 384])
def test_lanes_as_rows_of_the_longest_document(backend, window):
    """Documents of up to 700 tokens, across borders of rows of 768; cuDNN alone uses it."""
    tokens = lanes(3072)
    tokens[:, ::700] = BOS
    q, k, v, dout = np.random.default_rng(1).normal(size=(4, 4, 3072, 2, 128)).astype(jnp.bfloat16)

    @jax.jit
    def run(tokens, *arrays):
        documents = find_documents(tokens, BOS, MAX_DOCS + 5, 700)
        return all_of(
            partial(attention, scale=0.12, documents=documents, window=window, backend=backend),
            *arrays,
        )

    exact = [x.astype(np.float64) for x in (q, k, v, dout)]
    seen = dense.mask(tokens, BOS, window)
    expected = (
        dense.forward(*exact[:3], 0.12, seen)[0],
        *dense.backward(*exact[:3], 0.12, seen, exact[3]),
    )
    for name, found, wanted in zip(
        ("out", "dq", "dk", "dv"), run(tokens, q, k, v, dout), expected, strict=True
    ):
        if window != 1 or name not in ("dq", "dk"):
            assert dense.distance(found, wanted) < 0.01, name


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_near_keys_alone(backend, packed):
    """With the weights of all keys; documents of at most 700 tokens, which cuDNN must be told."""
    if backend not in ("xla", "cudnn"):
        pytest.skip(f"{backend} computes all gradients")
    tokens = np.ones((4, 3072), int)
    tokens[:, ::700] = BOS
    q, k, v, dout = np.random.default_rng(1).normal(size=(4, 4, 3072, 2, 128)).astype(jnp.bfloat16)

    @jax.jit
    def run(tokens, *arrays):
        documents = find_documents(tokens, BOS, MAX_DOCS, 700) if packed else None
        how = dict(
            scale=0.12, documents=documents, window=640, gradient_window=257, backend=backend
        )
        return all_of(partial(attention, **how), *arrays)

    exact, t = [x.astype(np.float64) for x in (q, k, v, dout)], np.arange(3072)
    seen = dense.mask(tokens if packed else np.ones_like(tokens), BOS, 640)
    of_qkv = dense.backward(*exact[:3], 0.12, seen, exact[3], t[:, None] - t < 257)
    expected = dense.forward(*exact[:3], 0.12, seen)[0], *of_qkv
    for name, found, wanted in zip(
        ("out", "dq", "dk", "dv"), run(tokens, q, k, v, dout), expected, strict=True
    ):
        assert dense.distance(found, wanted) < 0.01, name


def test_too_many_documents_are_nan_and_leave_other_lanes_alone(backend):
    if backend == "xla":
        pytest.skip("xla reads the numbers of documents and has no limit")
    tokens = lanes(1024)
    tokens[1, ::10] = BOS
    q, k, v, dout = np.random.default_rng(1).normal(size=(4, 4, 1024, 2, 128)).astype(jnp.bfloat16)

    @partial(jax.jit, static_argnums=0)
    def run(backend, *arrays):
        documents = find_documents(tokens, BOS, MAX_DOCS)
        return all_of(partial(attention, scale=0.12, documents=documents, backend=backend), *arrays)

    found, wanted = (
        jax.tree.map(lambda x: np.asarray(x, np.float32), run(b, q, k, v, dout))
        for b in (backend, "xla")
    )
    assert all(np.isnan(x[1]).all() for x in found)
    # outputs: a tile of queries may reach into the next lane, and zero times NaN is NaN
    for lane in (0, 2, 3):
        assert dense.distance(found[0][lane], wanted[0][lane]) < 0.02
