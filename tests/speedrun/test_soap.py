"""SOAP-Muon's parts against NumPy; tests/parity has the whole of it, beside its source."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jspeed.recipes import track3_soap
from jspeed.speedrun import soap

RNG = np.random.default_rng(0)


def test_the_size_of_a_matrix_is_between_its_largest_singular_value_and_its_norm():
    x = RNG.standard_normal((3, 6, 9)).astype(np.float32)
    values = np.linalg.svd(x, compute_uv=False)
    expected = (values**4).sum(-1) ** 0.25
    for given in (x, x.mT):
        np.testing.assert_allclose(soap.schatten4(given)[:, 0, 0], expected, rtol=1e-5)


def test_a_basis_turns_into_eigenvectors():
    x = RNG.standard_normal((2, 5, 40)).astype(np.float32) * np.arange(1, 6)[:, None]
    gram, basis = x @ x.mT, jnp.broadcast_to(jnp.eye(5), (2, 5, 5))
    for _ in range(60):
        basis, _ = soap.turned(gram, basis)
    for found in (basis, soap.eigenvectors(gram)):
        inside = np.asarray(found.mT @ gram @ found)
        values = np.linalg.eigvalsh(gram)[:, ::-1]
        np.testing.assert_allclose(inside, values[..., None] * np.eye(5), atol=1e-3 * values.max())


def test_weights_keep_their_norm_but_for_what_updates_do_along_them():
    p, update = RNG.standard_normal((2, 1, 4, 8)).astype(np.float32)
    floor = soap.Floor(ratio=0.5, outward=0.25, decay=0.0)
    for sign in (1, -1):  # to 0, and away from it
        given = update - (update * p).sum() / (p * p).sum() * p + sign * 0.1 * p
        share = 1 if sign == 1 else floor.outward
        change = soap.on_sphere(jnp.asarray(50 * given), p, jnp.float32(1e-3), floor, True)
        norm = np.linalg.norm(p)
        expected = norm * (1 - sign * share * 1e-3 * 50 * 0.1)
        assert np.linalg.norm(p + change) == pytest.approx(expected, rel=1e-5)
    # An update that is small beside every output's weights is lifted to the ratio for each.
    change = soap.on_sphere(jnp.asarray(1e-6 * update), p, jnp.float32(1e-3), floor, True)
    moved = np.linalg.norm(change, axis=-2) / np.linalg.norm(p, axis=-2)
    np.testing.assert_allclose(moved, 0.5e-3, rtol=1e-2)


def test_looking_ahead_is_a_step_along_the_mean_movement_before_each_gradient():
    distance = lambda step: jnp.where(step >= 2, 0.5, 0.0)
    ahead = soap.look_ahead(distance, decay=0.9)
    x = mean = last = np.float32([1.0, -2.0])
    mean = 0 * mean
    ours, state = jnp.asarray(x), ahead.init(x)
    for step in range(6):
        x = x + float(distance(step)) * mean
        np.testing.assert_allclose(ours, x, rtol=1e-6)
        changes, state = ahead.update(-0.1 * ours, state)
        ours = optax.apply_updates(ours, changes)
        x = x - np.float32(0.1) * x
        mean, last = 0.9 * mean + 0.1 * (x - last), x


def test_schedules_are_those_of_the_record():
    muon, adam = track3_soap.falling(1.0, track3_soap.MUON_FALL), track3_soap.falling(1.0)
    for step in (0, 513, 520, 1486, 1500, 2690):
        rest = (2900 - step) ** 1.2
        assert muon(step) == pytest.approx(min(1, 3.3169534699576625e-06 / 0.0375 * rest), rel=1e-5)
        assert adam(step) == pytest.approx(min(1, 4.976805410800738e-05 / 0.3 * rest), rel=1e-5)
    momenta = [float(track3_soap.momentum(step)) for step in (0, 150, 300, 2690, 2800)]
    assert momenta == pytest.approx([0.85, 0.9, 0.95, 0.95, 0.9])
    (average,) = track3_soap.AVERAGES
    np.testing.assert_allclose(average.rates[2400:], 1 / 150)
    assert list(average.rates[2397:2400]) == [0, 0, 1]


def test_gains_of_a_layer_have_opposite_signs():
    drawn = jax.jit(
        lambda: {
            name: spec.init(jax.random.key(1), spec.shape, spec.dtype)
            for name, spec in track3_soap.PARAMETERS.items()
            if "gain" in name or "bias" in name
        }
    )()
    np.testing.assert_allclose(drawn["attention_gain"] + drawn["mlp_gain"], 2, rtol=1e-6)
    assert set(np.unique(drawn["attention_gain"])) == {np.float32(0.875), np.float32(1.125)}
    zero = ~np.any(drawn["attention_bias"], axis=1)
    assert list(zero) == [False, False, False, True] * 12
