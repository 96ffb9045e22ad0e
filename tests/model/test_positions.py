"""RoPE, YaRN, token shift and key offset against NumPy and the reference recipe's values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.model.positions import frequencies, offset_keys, rotate, shift_right, smear, yarn

# Longest windows in tokens, and what belongs to the last of them: some angles and the softmax
# scale.
SHOWN = [0, 5, 10, 15, 20, 25, 31]
TABLE = {
    (384,): ([1, 0.326940, 0.106890, 0.034946, 0.011425, 0.003735, 0.000977], 0.1),
    (384, 896): ([1, 0.254507, 0.056711, 0.015709, 0.004897, 0.001601, 0.000419], 0.116946),
    (384, 896, 1408): ([1, 0.254507, 0.040803, 0.010225, 0.003116, 0.001019, 0.000266], 0.127518),
    (384, 896, 1408, 1664): (
        [1, 0.254507, 0.036175, 0.008717, 0.002637, 0.000862, 0.000225],
        0.131778,
    ),
}


@pytest.mark.parametrize("windows", TABLE)
def test_yarn_gives_the_tabulated_frequencies_and_scales(windows):
    angles, scale = yarn(frequencies(32), 0.1, windows)
    np.testing.assert_allclose(angles[SHOWN], TABLE[windows][0], atol=6e-7)
    assert scale == pytest.approx(TABLE[windows][1], abs=6e-7)


@pytest.mark.parametrize("paired", [False, True])
def test_rotation_is_the_records_with_its_neighbours_apart(paired):
    """The record turns channels 2j and 2j + 1 of the first half of a head by position x f_j."""
    x = np.random.default_rng(0).normal(size=(2, 9, 4, 16))
    angles = frequencies(4)
    position = np.arange(9)[:, None] + np.zeros(4)
    if paired:  # two heads make 32 columns: the first 16 turn by 2t, the others by 2t + 1
        position = np.stack(
            [2 * np.arange(9), 2 * np.arange(9) + 1, 2 * np.arange(9), 2 * np.arange(9) + 1], 1
        )
    z = (x[..., 0:8:2] + 1j * x[..., 1:8:2]) * np.exp(-1j * position[None, ..., None] * angles)
    expected = x.copy()
    expected[..., 0:8:2], expected[..., 1:8:2] = z.real, z.imag
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7, *range(8, 16)])
    places = jnp.arange(9)[:, None]
    places = 2 * places + jnp.arange(2)[None] if paired else places
    found = jax.jit(lambda x: rotate(x, angles, places))(x[..., order].astype(np.float32))
    np.testing.assert_allclose(found, expected[..., order], atol=2e-6)


def test_smear_and_key_offset_reach_back_one_token():
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    gate = np.random.default_rng(1).normal(size=(2, 5)).astype(np.float32)
    expected = x.copy()
    expected[:, 1:] += gate[:, 1:, None] * x[:, :-1]
    np.testing.assert_allclose(smear(jnp.asarray(x), jnp.asarray(gate)), expected, atol=1e-6)
    assert not np.any(np.asarray(shift_right(jnp.asarray(x)))[:, 0])

    k = np.random.default_rng(2).normal(size=(2, 5, 3, 8)).astype(np.float32)
    expected = k.copy()
    expected[:, 1:, :, 4:] = k[:, :-1, :, 4:]
    np.testing.assert_array_equal(offset_keys(jnp.asarray(k)), expected)
