"""JAX's TPU splash attention in interpret mode against a dense float64 mask."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.kernels import attention_backends, splash_attention
from jspeed.model.attention import attention, find_documents

from ..model import dense
from .test_fused_attention import BOS, both, exact, lanes, normal


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(
        attention_backends, "splash", partial(attention_backends.splash, interpret=True)
    )


def compare(tokens, heads, width, window, packed):
    """Output and gradients in bfloat16, each to what rounding explains."""
    arrays = normal(4, *tokens.shape, heads, width).astype(jnp.bfloat16)
    scale = width**-0.5

    @jax.jit
    def run(*arrays):
        documents = find_documents(tokens, BOS) if packed else None
        return both(
            partial(attention, scale=scale, documents=documents, window=window, backend="splash"),
            *arrays,
        )

    wanted = exact(tokens if packed else np.ones_like(tokens), window, scale, *arrays)
    for name, found, one in zip(("out", "dq", "dk", "dv"), run(*arrays), wanted, strict=True):
        assert found.dtype == jnp.bfloat16
        if window == 1 and name in ("dq", "dk"):  # one key: its weight is 1 whatever the scores
            assert np.abs(np.asarray(found, np.float64)).max() < 0.05
        else:
            assert dense.distance(found, one) < 0.006, name


@pytest.mark.parametrize(
    ("length", "heads", "width", "window", "packed"),
    [(300, 1, 128, 60, True)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in ((256, 1, 64, None, True), (20, 2, 16, 7, False))
    ],
)
def test_as_a_backend_in_bfloat16(interpreted, length, heads, width, window, packed):
    """Documents without ``max_docs``, windows, lanes that are no whole blocks, heads of less than
    128 channels."""
    compare(lanes(length, [0, 5, 6, length - 2], [length // 2]), heads, width, window, packed)


def test_blocks():
    """Whole blocks where there are some, and little padding."""
    expected = {49_152: 512, 14_464: 512, 1024: 512, 1280: 256, 640: 128, 300: 128, 16: 128}
    assert {length: splash_attention.block_of(length) for length in expected} == expected


def test_blocks_out_of_sight_are_not_visited():
    """The library's tables of blocks, made of masks that are computed once for each distance to the
    diagonal."""
    kernel = splash_attention._kernel(2048, 2, 300, 256, True)
    # of eight blocks of keys a query sees three
    assert kernel.fwd_mask_info.data_next.shape == (1, 8, 3)
    assert kernel.dkv_mask_info.data_next.shape == (1, 3, 8)
    assert kernel.fwd_mask_info.partial_mask_blocks is None  # the kernel computes them
    whole = splash_attention._kernel(2048, 2, None, 256, True).fwd_mask_info.block_mask[0]
    np.testing.assert_array_equal(np.sign(whole), np.tril(np.ones((8, 8))))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "window"), [(64, 1), (128, 384)])
def test_documents_of_1_to_2048_tokens(interpreted, width, window):
    sizes = [1, 2, 3, 17, 63, 64, 65, 128, 500, 2048, 300]
    compare(lanes(int(sum(sizes)) - 130, np.cumsum([0, *sizes[:-1]])), 1, width, window, True)
