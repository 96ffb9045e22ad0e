"""Coefficients, blends and prefixes against NumPy and plain Python."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.model.mudd import blend, coefficients, named, slots
from jspeed.model.prefixes import gpt2_prefixes, longest_prefixes


def test_coefficients_by_the_formula():
    rng = np.random.default_rng(0)
    x, up, down, bias = rng.normal(size=(2, 3, 8)), rng.normal(size=(8, 5)), rng.normal(size=(5, 4)), rng.normal(size=4)
    hidden = x @ up
    erf = np.vectorize(math.erf)
    expected = 0.1 * ((0.5 * hidden * (1 + erf(hidden / np.sqrt(2)))) @ down + bias)
    arrays = {"g_up": up, "g_down": down, "g_bias": bias}
    params = {name: jnp.asarray(np.stack([0 * a, a]), jnp.float32) for name, a in arrays.items()}
    found = coefficients(jnp.asarray(x, jnp.float32), params, "g", 1, 0.1)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_blend_of_scalars_and_tokens():
    x, y = jax.random.normal(jax.random.key(0), (2, 2, 3, 4))
    c = jax.random.normal(jax.random.key(1), (2, 3))
    np.testing.assert_allclose(blend((0.5, x), (c, y)), 0.5 * x + c[..., None] * y, atol=1e-6)
    assert blend((c, x.astype(jnp.bfloat16)), (c, y)).dtype == jnp.bfloat16


def test_named_coefficients():
    c = jax.random.normal(jax.random.key(0), (2, 3, 6))
    found = named(c, {"a": 2, ("b", 1): 1, "c": 2})  # what is left over belongs to nobody
    assert list(found) == ["a", ("b", 1), "c"]
    np.testing.assert_array_equal(found["a"], c[..., :2])
    np.testing.assert_array_equal(found["b", 1], c[..., 2])
    np.testing.assert_array_equal(found["c"], c[..., 3:5])


def test_slots_by_layer_and_set():
    sizes, starts = slots({"heads": ((0, 3), 2, 0.25), "in": ((0, 1, 2), 1, 0.5)}, (range(1), range(1, 4)))
    assert sizes == [{("heads", 0): 2, ("in", 0): 1}, {("heads", 3): 2, ("in", 1): 1, ("in", 2): 1}]
    np.testing.assert_array_equal(starts, [[0.25, 0.25, 0.5, 0], [0.25, 0.25, 0.5, 0.5]])


def test_longest_prefixes_by_hand():
    vocabulary = [b"a", b"b", b"ab", b"abc", b"abcde", b"cd", b"", b" a", b"a"]
    assert longest_prefixes(vocabulary).tolist() == [-1, -1, 8, 2, 3, -1, -1, -1, -1]


@pytest.fixture
def without_a_network(monkeypatch, tmp_path):
    """No vocabulary in tiktoken's folder, and nobody to fetch it from."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


def test_prefixes_need_no_vocabulary(without_a_network):
    gpt2_prefixes.cache_clear()
    assert gpt2_prefixes(50_256, 50_304).max() == 50_252


def test_prefixes_of_gpt2(gpt2_vocabulary):
    """The file is what its vocabulary gives; made with the lines below."""
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    made = longest_prefixes([encoding.decode_single_token_bytes(id) for id in range(50_256)])
    # np.savez_compressed(TABLE, prefixes=np.where(made < 0, NONE, made).astype(np.uint16))
    found = gpt2_prefixes(50_256, 50_304)
    np.testing.assert_array_equal(found[:50_256], made)
    few = longest_prefixes([encoding.decode_single_token_bytes(id) for id in range(4095)])
    np.testing.assert_array_equal(gpt2_prefixes(4095, 4096)[:4095], few)
    assert found.shape == (50_304,) and found.dtype == np.int32
    assert np.all(found[50_256:] == -1) and np.all(found[:256] == -1) and np.all(found < 50_256)
    # In a vocabulary of fewer byte pairs, what lies beyond them is no byte pair, nor the prefix of one.
    few = gpt2_prefixes(4095, 4096)
    assert found[4095] >= 0 and few[4095] == -1 and few.max() < 4095
    np.testing.assert_array_equal(few[:300], np.where(found[:300] < 4095, found[:300], few[:300]))
    for id in np.random.default_rng(0).integers(256, 50_256, size=300):
        token, prefix = (encoding.decode_single_token_bytes(int(i)) for i in (id, found[id]))
        assert token.startswith(prefix) and len(prefix) < len(token)
        for end in range(len(prefix) + 1, len(token)):
            with pytest.raises(KeyError):
                encoding.encode_single_token(token[:end])
