"""Fused QK-norm and RoPE in interpret mode, against the plain path and float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.errors import BadInput
from jspeed.kernels.qk_norm import norm_and_rotate
from jspeed.model.attention import Documents, find_documents, tags
from jspeed.model.custom_kernels import Kernel
from jspeed.model.positions import frequencies, offset_keys, queries_and_keys
from jspeed.speedrun.heads import pair_positions

from ..model import dense

LANES, HEADS = 2, 4


KERNEL = Kernel(lambda *args: norm_and_rotate(*args, interpret=True))


def arrays(length, width):
    """The matmul's output, some tokens of which are 0 or large, and gradients of queries and keys:
    bf16."""
    rng = np.random.default_rng(length + width)
    y = rng.normal(size=(LANES, length, 2 * HEADS * width)) * np.exp(
        rng.normal(size=(LANES, length, 1))
    )
    y[:, 3] = 0
    grads = rng.normal(size=(2, LANES, length, HEADS, width))
    grads[:, :, 3:5] *= 1e-3  # those of 0 are multiplied by 2,896
    return jnp.asarray(y, jnp.bfloat16), tuple(jnp.asarray(grads, jnp.bfloat16))


def positions_of(length, paired):
    return pair_positions(length) if paired else jnp.arange(length)[:, None]


def exact(y, grads, angles, positions, look_back):
    """Queries, keys and the gradient of ``y`` in float64, where nothing is rounded; NumPy alone."""
    y, angle = np.asarray(y, np.float64), np.asarray(positions, np.float64)[..., None] * angles
    rows, length, width = y.shape[0], y.shape[1], y.shape[2] // (2 * HEADS)
    x = y.reshape(rows, length, 2, HEADS, width)
    root = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + np.finfo(np.float32).eps)
    count, column = len(angles), np.arange(HEADS) % positions.shape[1]
    turn = np.exp(-1j * angle[:, column])[None, :, None]

    def turned(x, turn):
        z = (x[..., :count] + 1j * x[..., count : 2 * count]) * turn
        return np.concatenate([z.real, z.imag, x[..., 2 * count :]], axis=-1)

    out = turned(x / root, turn)
    g = np.stack([np.asarray(g, np.float64) for g in grads], axis=2)
    if look_back:
        late, late_g = out[:, :, 1, :, width // 2 :].copy(), g[:, :, 1, :, width // 2 :].copy()
        out[:, 1:, 1, :, width // 2 :] = late[:, :-1]
        g[:, :, 1, :, width // 2 :] = np.pad(late_g[:, 1:], [(0, 0), (0, 1), (0, 0), (0, 0)])
        g[:, 0, 1, :, width // 2 :] += late_g[:, 0]
    g = turned(g, turn.conj())
    dx = (g - x * np.mean(g * x, axis=-1, keepdims=True) / root**2) / root
    return out[:, :, 0], out[:, :, 1], dx.reshape(y.shape)


def by_operation(call, y, grads):
    """Queries, keys and the gradient of ``y``, rounded after every operation."""
    out, back = jax.vjp(call, y)
    return *out, *back(grads)


both = jax.jit(by_operation, static_argnums=0)  # the same in one program


def ulps(found, wanted):
    """How many bfloat16 numbers lie between each two."""
    bits = (np.asarray(x).view(np.int16).astype(int) for x in (found, wanted))
    one, other = (np.where(x < 0, -(x & 0x7FFF), x) for x in bits)
    return np.abs(one - other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "paired", "length", "look_back"),
    [(128, True, 40, True), (64, False, 40, False), (64, True, 64, False), (128, False, 64, True)],
)
def test_agrees_with_the_plain_path_and_float64(width, paired, length, look_back):
    """Lengths that fill the blocks of tokens and that do not; heads that turn by one column, and by
    two in turn."""
    (y, grads), angles, positions = (
        arrays(length, width),
        frequencies(width // 4),
        positions_of(length, paired),
    )
    shape = LANES, length, HEADS, width

    def call(own, y):
        return queries_and_keys(y, shape, angles, positions, own, None, look_back)

    found = both(partial(call, KERNEL), y, grads)
    plain = by_operation(partial(call, None), y, grads)
    assert [x.dtype for x in found] == [jnp.bfloat16] * 3
    for one, other in zip(found[:2], plain[:2], strict=True):
        assert ulps(one, other).max() <= 1 and (ulps(one, other) > 0).mean() < 1e-3
    for name, one, other, wanted in zip(
        ("q", "k", "dy"), found, plain, exact(y, grads, angles, positions, look_back), strict=True
    ):
        assert dense.distance(one, wanted) < 0.003, name
        assert dense.distance(one, wanted) <= 1.01 * dense.distance(other, wanted), name


@pytest.mark.parametrize("look_back", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_nan_factor_is_the_only_difference_to_the_plain_path(look_back):
    (y, grads), angles, positions = arrays(40, 64), frequencies(16), positions_of(40, True)
    angle = positions[..., None] * angles.astype(np.float32)[None, None]
    rest = jnp.cos(angle), jnp.sin(angle), jnp.array([1.0, np.nan]), None, HEADS, look_back
    found = both(lambda y: norm_and_rotate(y, *rest, interpret=True), y, grads)
    shape = LANES, 40, HEADS, 64
    plain = both(
        lambda y: queries_and_keys(y, shape, angles, positions, None, None, look_back), y, grads
    )
    for one, other in zip(found, plain, strict=True):
        assert dense.distance(one[:1], other[:1]) < 0.003
        assert np.isnan(np.asarray(one[1:], np.float32)).all()


def test_lanes_with_more_documents_than_slots_are_nan():
    (y, grads), angles, positions = arrays(40, 64), frequencies(16), positions_of(40, False)
    documents = Documents(jnp.zeros((LANES, 40), jnp.int32), jnp.array([[0, 7, 40], [0, 7, 30]]))
    shape = LANES, 40, HEADS, 64
    for found in both(
        lambda y: queries_and_keys(y, shape, angles, positions, KERNEL, documents), y, grads
    ):
        found = np.asarray(found, np.float32)
        assert np.isfinite(found[0]).all() and np.isnan(found[1]).all()


def test_keys_that_look_back_are_those_of_offset_keys():
    (y, _), angles, positions = arrays(40, 64), frequencies(16), positions_of(40, False)
    shape = LANES, 40, HEADS, 64

    @partial(jax.jit, static_argnums=0)
    def rotated(look_back, y):
        return queries_and_keys(y, shape, angles, positions, KERNEL, None, look_back)

    plain, moved = rotated(False, y), rotated(True, y)
    np.testing.assert_array_equal(moved[0], plain[0])
    np.testing.assert_array_equal(moved[1], offset_keys(plain[1]))


@pytest.mark.parametrize(
    ("paired", "length"), [(True, 40), pytest.param(False, 64, marks=pytest.mark.slow)]
)
def test_heads_that_turn_whole_and_get_zeros(paired, length):
    """Narrow heads of record 92: all channels turn, and zeros make them as wide as values."""
    (y, grads), angles, positions = (
        arrays(length, 32),
        frequencies(16),
        positions_of(length, paired),
    )
    shape, wide = (LANES, length, HEADS, 32), [(0, 0)] * 3 + [(0, 32)]
    rng = np.random.default_rng(0)
    # gradients of the zeros
    beyond = [jnp.asarray(rng.normal(size=g.shape), g.dtype) for g in grads]

    def call(own, y):
        return queries_and_keys(y, shape, angles, positions, own, None, False, 64)

    found = both(
        partial(call, KERNEL),
        y,
        tuple(jnp.concatenate(g, axis=-1) for g in zip(grads, beyond, strict=True)),
    )
    plain = by_operation(partial(call, None), y, grads)
    q, k, dy = exact(y, grads, angles, positions, False)
    for one, other, wanted in zip(
        found, plain, (np.pad(q, wide), np.pad(k, wide), dy), strict=True
    ):
        assert one.shape == wanted.shape and dense.distance(one, wanted) < 0.003
        other = np.pad(other, wide) if other.ndim == 4 else other
        assert dense.distance(one, wanted) <= 1.01 * dense.distance(other, wanted)
    assert not np.asarray(found[0][..., 32:]).any() and not np.asarray(found[1][..., 32:]).any()


def test_heads_get_tags_of_their_documents():
    (y, grads), angles, positions = arrays(40, 32), frequencies(16), positions_of(40, True)
    tokens = jnp.asarray(np.broadcast_to(np.arange(40) % 7 == 0, (LANES, 40)), jnp.int32)
    documents, shape = find_documents(tokens, 1, 6), (LANES, 40, HEADS, 32)
    wide = tuple(jnp.concatenate([g, g], axis=-1) for g in grads)
    plain = both(
        lambda y: queries_and_keys(y, shape, angles, positions, KERNEL, None, False, 64), y, wide
    )
    found = both(
        lambda y: queries_and_keys(y, shape, angles, positions, KERNEL, documents, False, 64),
        y,
        wide,
    )
    np.testing.assert_array_equal(found[2], plain[2])
    for one, other in zip(found[:2], plain[:2], strict=True):
        np.testing.assert_array_equal(one[..., :32], other[..., :32])
        expected = np.broadcast_to(tags(documents, 16)[:, :, None], (LANES, 40, HEADS, 16))
        np.testing.assert_array_equal(one[..., 32:48], expected)
        assert not np.asarray(one[..., 48:]).any()


@pytest.mark.parametrize(
    ("shape", "count", "columns", "dtype", "words"),
    [
        ((1, 8, 4, 64), 16, 1, jnp.float32, "needs bfloat16, found float32"),
        ((1, 8, 4, 48), 12, 1, jnp.bfloat16, "12 angles"),
        ((1, 8, 4, 64), 8, 1, jnp.bfloat16, "512 channels, 8 angles"),
        ((1, 8, 3, 64), 16, 2, jnp.bfloat16, "2 x 3 heads"),
    ],
)
def test_refuses(shape, count, columns, dtype, words):
    y = jax.ShapeDtypeStruct((*shape[:2], 2 * shape[2] * shape[3]), dtype)
    with pytest.raises(BadInput, match=words):
        jax.eval_shape(
            lambda y: queries_and_keys(
                y, shape, frequencies(count), jnp.zeros((shape[1], columns)), KERNEL
            ),
            y,
        )
