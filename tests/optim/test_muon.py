"""Muon against optax's own, a float64 model, and published singular values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jspeed.optim import muon as module
from jspeed.optim.muon import NEWTON_SCHULZ_5, NEWTON_SCHULZ_12, POLAR_EXPRESS, muon
from jspeed.parallel.mesh import make_mesh

orthogonalise = jax.jit(module.orthogonalise, static_argnames=("polynomial", "dtype"))


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# Images of single singular values in exact arithmetic, from the polynomials alone, as tabulated for
# the reference recipe (appendix A).
IMAGES = {
    NEWTON_SCHULZ_5: {
        1e-4: 0.0485,
        1e-3: 0.4705,
        0.003: 1.1104,
        0.01: 0.6989,
        0.03: 1.1223,
        0.1: 0.7121,
        0.6: 0.7229,
    },
    POLAR_EXPRESS: {
        1e-4: 0.0988,
        1e-3: 0.8589,
        0.003: 0.9664,
        0.01: 1.0271,
        0.1: 1.0592,
        0.3: 0.9831,
        0.6: 0.8713,
    },
}


@pytest.mark.parametrize("polynomial", IMAGES, ids=["newton-schulz-5", "polar-express"])
def test_singular_value_map(polynomial):
    """A matrix with the tabulated singular values, and one that makes its Frobenius norm 1 (1.02
    for the safety)."""
    images = IMAGES[polynomial]
    values = np.array([*images])
    values *= polynomial.safety
    values = np.append(values, np.sqrt(1 - np.sum(values**2)))
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.normal(size=(8, 8)))
    v, _ = np.linalg.qr(rng.normal(size=(12, 12)))
    with jax.enable_x64(True):
        x = jnp.asarray(u @ np.diag(values) @ v[:8])
        y = orthogonalise(x, polynomial=polynomial, dtype=jnp.float64)
        found = np.diag(u.T @ np.asarray(y) @ v[:8].T)
    np.testing.assert_allclose(found[:-1], [*images.values()], atol=6e-5)


def test_twelve_iterations_converge_to_one():
    x = draw(4, 24, 96)
    y = orthogonalise(x, polynomial=NEWTON_SCHULZ_12, dtype=jnp.float32)
    np.testing.assert_allclose(np.linalg.svd(np.asarray(y), compute_uv=False), 1, atol=1e-3)


@pytest.mark.parametrize(
    "shape",
    [
        (3, 2, 256, 64),
        *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((6, 64, 256), (64, 64))),
    ],
)
def test_orthogonalised_singular_values_lie_in_a_band(shape):
    x = draw(*shape)
    values = np.linalg.svd(np.asarray(orthogonalise(x, dtype=jnp.float32)), compute_uv=False)
    assert values.max() < 1.3 and np.quantile(values, 0.1) > 0.5


def test_bank_equals_matrix_by_matrix_and_zero_stays_zero():
    bank = draw(5, 16, 8)
    bank[2] = 0
    whole = orthogonalise(bank, dtype=jnp.float32)
    for matrix, result in zip(bank, whole, strict=True):
        np.testing.assert_allclose(orthogonalise(matrix, dtype=jnp.float32), result, atol=1e-5)
    assert not np.any(np.asarray(whole[2]))


def test_equals_optax_muon_without_momentum():
    # With momentum the two differ on purpose: optax corrects its Nesterov average for the zero
    # start.
    params = {"wide": jnp.zeros((16, 24)), "tall": jnp.zeros((24, 16))}
    theirs = optax.contrib.muon(0.02, beta=0.0, eps=1e-7)
    ours = muon(0.02, lambda step: 0.0, dtype=jnp.float32)
    grads = {name: draw(*p.shape, seed=n) for n, (name, p) in enumerate(params.items())}
    found, expected = (
        jax.jit(lambda grads, by: by.update(grads, by.init(params), params)[0], static_argnums=1)(
            grads, by
        )
        for by in (ours, theirs)
    )
    for name in params:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)


def test_equals_float64_model_with_momentum_schedule():
    rng = np.random.default_rng(0)
    momentum = optax.linear_schedule(0.85, 0.95, 3)
    ours = muon(0.1, momentum, dtype=jnp.float32)
    params = jnp.zeros((2, 6, 10))
    state, buffer, ours_update = ours.init(params), np.zeros((2, 6, 10)), jax.jit(ours.update)
    for step in range(5):
        g = rng.normal(size=(2, 6, 10))
        beta = min(0.85 + 0.1 * step / 3, 0.95)
        buffer = beta * buffer + (1 - beta) * g
        x = beta * buffer + (1 - beta) * g
        x /= np.linalg.norm(x, axis=(1, 2), keepdims=True)
        for _ in range(5):
            gram = x @ x.transpose(0, 2, 1)
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        update, state = ours_update(g.astype(np.float32), state, params)
        np.testing.assert_allclose(update, -0.1 * (10 / 6) ** 0.5 * x, atol=1e-4)


def test_scale_and_decoupled_decay():
    params, grads = draw(2, 2, 8, 32)
    scale = np.array([2.0, 1.0], np.float32)[:, None, None]

    def update(**options):
        transform = muon(0.1, lambda step: 0.9, dtype=jnp.float32, **options)
        run = jax.jit(lambda: transform.update(grads, transform.init(params), params)[0])
        return np.asarray(run())

    plain = update()
    np.testing.assert_allclose(
        update(scale=scale), plain * np.array([1.0, 0.5])[:, None, None], atol=1e-6
    )
    np.testing.assert_allclose(update(weight_decay=0.05), plain - 0.1 * 0.05 * params, atol=1e-6)


def test_a_bank_cut_over_devices_equals_that_of_one():
    """Momentum and orthogonalisation where the matrices lie; half a matrix orthogonalised alone is
    another matrix."""
    transform = muon(0.1, lambda step: 0.9, dtype=jnp.float32)
    params = jnp.zeros((8, 16, 32))
    grads = [*draw(3, *params.shape)]

    def steps(grads):
        state = transform.init(params)
        for g in grads:
            update, state = transform.update(g, state, params)
        return update

    mesh = make_mesh({"data": 8})
    expected = jax.jit(steps)(grads)
    for cut in (PartitionSpec("data"), PartitionSpec(None, "data")):
        found = jax.jit(steps)(jax.device_put(grads, NamedSharding(mesh, cut)))
        np.testing.assert_allclose(found, expected, atol=1e-5)
    whole, halves = PartitionSpec("data"), PartitionSpec(None, "data")
    by_matrix = jax.shard_map(steps, mesh=mesh, in_specs=(whole,), out_specs=whole, check_vma=False)
    by_part = jax.shard_map(steps, mesh=mesh, in_specs=(halves,), out_specs=halves, check_vma=False)
    params = jnp.zeros((1, 16, 32))
    np.testing.assert_allclose(jax.jit(by_matrix)(grads), expected, atol=1e-5)
    params = jnp.zeros((8, 2, 32))
    assert np.max(np.abs(jax.jit(by_part)(grads) - expected)) > 1e-2
