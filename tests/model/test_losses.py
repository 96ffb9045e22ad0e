"""Cross-entropy and gradient against float64 NumPy and jax.grad; matmuls and residuals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.model import fp8
from jspeed.model.losses import (
    Head,
    asymmetric_cap,
    cross_entropy,
    multi_token_targets,
    root_cap,
    sigmoid_cap,
    softcap,
    with_prefix,
)

CAP = 15.0
CAPS = {"sigmoid": sigmoid_cap(CAP), "root": root_cap(CAP), "none": None}
# (values, slopes) of the caps in float64; a sigmoid cap is Gemma's tanh moved up.
BENDS = {
    "sigmoid": lambda z: (CAP + CAP * np.tanh(z / CAP), 1 - np.tanh(z / CAP) ** 2),
    "root": lambda z: (CAP * z / np.hypot(z, CAP), (CAP / np.hypot(z, CAP)) ** 3),
    "none": lambda z: (z, np.ones_like(z)),
}


def head(params, x):
    return x @ params["w"] + params["b"]


def model(params, x, targets, weights, cap):
    """Loss of every token and the weighted sum's gradients, in float64 from the formulas."""
    w, b, x, weights = (np.asarray(a, np.float64) for a in (params["w"], params["b"], x, weights))
    z, slope = BENDS[cap](x @ w + b)
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    hit = np.eye(w.shape[1])[np.asarray(targets)]
    dlogits = weights[..., None] * (p - hit) * slope
    dhead = {"w": np.einsum("btd,btv->dv", x, dlogits), "b": dlogits.sum((0, 1), keepdims=True)}
    return -np.log((p * hit).sum(-1)), dhead, dlogits @ w.T


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    w, b = 4 * rng.normal(size=(8, 40)), rng.normal(size=(1, 1, 40))
    params = {"w": jnp.asarray(w.astype(np.float32)), "b": jnp.asarray(b.astype(np.float32))}
    x = jnp.asarray(rng.normal(size=(3, 10, 8)).astype(np.float32))
    targets = jnp.asarray(rng.integers(0, 40, size=(3, 10)).astype(np.int32))
    weights = rng.uniform(size=(3, 10)) * (rng.uniform(size=(3, 10)) > 0.3)
    weights = jnp.asarray(weights.astype(np.float32))
    return params, x, targets, weights


@pytest.mark.parametrize(
    ("cap", "chunk"),
    [
        *((cap, 4) for cap in CAPS),
        ("sigmoid", None),
        *(pytest.param("sigmoid", chunk, marks=pytest.mark.slow) for chunk in (1, 64)),
    ],
)
def test_value_and_gradients(case, chunk, cap):
    params, x, targets, weights = case

    @jax.jit
    def ours(params, x):
        total, loss = cross_entropy(Head(head, chunk), params, x, targets, weights, cap=CAPS[cap])
        return 3 * total, loss

    (total, loss), (dhead, dx) = jax.jit(jax.value_and_grad(ours, argnums=(0, 1), has_aux=True))(
        params, x
    )
    loss_, dhead_, dx_ = model(params, x, targets, weights, cap)
    np.testing.assert_allclose(loss, loss_, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(total, 3 * np.sum(loss_ * np.asarray(weights)), rtol=1e-5)
    np.testing.assert_allclose(dx, 3 * dx_, atol=5e-5)
    for name, found in dhead.items():
        np.testing.assert_allclose(found, 3 * dhead_[name], atol=5e-5)
    np.testing.assert_allclose(ours(params, x)[1], loss, atol=1e-5)


def test_logits_kept_in_e4m3_make_loss_and_gradient(case):
    params, x, targets, weights = case
    exact = np.asarray(x) @ np.asarray(params["w"]) + np.asarray(params["b"])
    rounded = np.asarray(2 * exact, jnp.float8_e4m3fn).astype(np.float64) / 2
    z, slope = BENDS["root"](rounded)
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    hit = np.eye(40)[np.asarray(targets)]
    dlogits = np.asarray(weights, np.float64)[..., None] * (p - hit) * slope

    kept = Head(head, keep=partial(fp8.kept_in_e4m3, scale=0.5))

    def total(x, head=kept):
        return cross_entropy(head, params, x, targets, weights, cap=CAPS["root"])

    (_, loss), dx = jax.jit(jax.value_and_grad(total, has_aux=True))(x)
    np.testing.assert_allclose(loss, -np.log((p * hit).sum(-1)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, dlogits @ np.asarray(params["w"], np.float64).T, atol=5e-5)
    # without a gradient nothing is rounded
    np.testing.assert_array_equal(jax.jit(total)(x)[1], jax.jit(partial(total, head=head))(x)[1])


@pytest.mark.parametrize("cap", CAPS)
def test_gradients_are_those_of_the_plain_formula(case, cap):
    params, x, targets, weights = case

    def ours(params, x):
        return cross_entropy(Head(head, 4), params, x, targets, weights, cap=CAPS[cap])[0]

    def plain(params, x):
        log_p = jax.nn.log_softmax(softcap(head(params, x), CAPS[cap]), axis=-1)
        return -jnp.sum(jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0] * weights)

    found, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(params, x) for f in (ours, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


@pytest.mark.parametrize("cap", CAPS)
def test_bf16(case, cap):
    params, x, targets, weights = case
    # Logits of a few units: one of 16 to 32 would be 1/16 from the next bf16.
    params, x = jax.tree.map(
        lambda a: a.astype(jnp.bfloat16), (jax.tree.map(lambda p: p / 4, params), x)
    )
    loss_, dhead_, dx_ = model(params, x, targets, weights, cap)

    def ours(params, x):
        return cross_entropy(head, params, x, targets, weights, cap=CAPS[cap])

    (_, loss), (dhead, dx) = jax.jit(jax.value_and_grad(ours, argnums=(0, 1), has_aux=True))(
        params, x
    )
    assert loss.dtype == jnp.float32 and dx.dtype == dhead["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(loss, loss_, atol=0.03)
    for found, expected in ((dx, dx_), *((dhead[name], dhead_[name]) for name in dhead_)):
        np.testing.assert_allclose(
            found.astype(jnp.float32), expected, atol=0.02 * np.abs(expected).max()
        )


def test_several_targets_are_as_many_losses_of_the_same_logits(case):
    """modded-nanogpt's sum over the next tokens and one target more, in float64 from the formula of
    the record."""
    params, x, targets, weights = case
    w, b, x64, weights64 = (
        np.asarray(a, np.float64) for a in (params["w"], params["b"], x, weights)
    )
    logits = x64 @ w + b
    sigma = 1 / (1 + np.exp(-(logits + 5) / 7.5))
    z = 23 * sigma
    lse = np.log(np.exp(z).sum(-1))
    expected, dlogits = 0.0, np.zeros_like(z)
    prefixes = np.random.default_rng(3).integers(-10, 40, size=40)
    prefix = np.maximum(prefixes, -1)[np.asarray(targets)]
    for late, share, ids in (
        (0, 1, targets),
        (1, 0.5, targets),
        (2, 0.25, targets),
        (0, 0.1, prefix),
    ):
        for row in range(3):
            for t in range(10 - late):
                target, weight = int(ids[row, t + late]), share * weights64[row, t]
                if target < 0:
                    continue
                expected += weight * (lse[row, t] - z[row, t, target])
                dlogits[row, t] += weight * (
                    np.exp(z[row, t] - lse[row, t]) - (np.arange(40) == target)
                )
    dlogits *= 23 / 7.5 * sigma * (1 - sigma)

    def ours(params, x):
        several = multi_token_targets(targets, weights, jnp.array([1, 0.5, 0.25]))
        several = with_prefix(*several, jnp.asarray(prefixes, jnp.int32), jnp.float32(0.1))
        return cross_entropy(Head(head, 4), params, x, *several, cap=asymmetric_cap(23, 5, 7.5))

    (total, loss), (dhead, dx) = jax.jit(jax.value_and_grad(ours, argnums=(0, 1), has_aux=True))(
        params, x
    )
    assert float(total) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(dx, dlogits @ w.T, atol=5e-5)
    np.testing.assert_allclose(dhead["w"], np.einsum("btd,btv->dv", x64, dlogits), atol=5e-5)
    first = lse - np.take_along_axis(z, np.asarray(targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, first, atol=1e-5)


def test_head_gradient_accumulates_in_fp32():
    """512 chunks that each add 1/40 to a bf16 bias's gradient; a bf16 sum would stop at 8."""
    x, targets = jnp.zeros((1, 512, 8), jnp.bfloat16), jnp.zeros((1, 512), jnp.int32)
    params = {"w": jnp.zeros((8, 40), jnp.bfloat16), "b": jnp.zeros((1, 1, 40), jnp.bfloat16)}

    def ours(params):
        return cross_entropy(Head(head, 1), params, x, targets, jnp.ones((1, 512)), cap=None)[0]

    np.testing.assert_allclose(
        jax.jit(jax.grad(ours))(params)["b"][0, 0, 1:].astype(jnp.float32), 512 / 40, rtol=0.01
    )


def test_zero_head_gives_log_of_vocabulary(case):
    params, x, targets, weights = case
    zero = jax.tree.map(jnp.zeros_like, params)
    for cap in CAPS.values():
        loss = jax.jit(
            lambda p, x, cap=cap: cross_entropy(head, p, x, targets, weights, cap=cap)[1]
        )(zero, x)
        np.testing.assert_allclose(loss, np.log(40), rtol=1e-6)


def test_weights_of_zero_give_zero(case):
    params, x, targets, weights = case

    def ours(params, x):
        return cross_entropy(head, params, x, targets, 0 * weights, cap=CAPS["root"])[0]

    total, grads = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(params, x)
    assert total == 0 and all(not np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_fp8_sees_the_gradient_of_the_unweighted_loss(case):
    """Weights of 1e-9 would vanish in e5m2 (smallest: 2e-5); they are multiplied in afterwards
    instead."""
    _, x, targets, weights = case
    w = jax.random.normal(jax.random.key(0), (40, 8))
    scales = fp8.Scales(8 / 448, 8 / 448, 0.75 / 448)

    @jax.jit
    def grads(weights):
        def total(w, x):
            return cross_entropy(
                Head(lambda w, x: fp8.matmul(x, w, scales), 4),
                w,
                x,
                targets,
                weights,
                cap=CAPS["sigmoid"],
            )[0]

        return jax.grad(total, argnums=(0, 1))(w, x)

    for found, expected in zip(grads(1e-9 * weights), grads(weights), strict=True):
        assert np.any(expected)
        np.testing.assert_allclose(1e9 * found, expected, rtol=1e-5)


def test_softcaps():
    logits = jnp.linspace(-200, 200, 41)
    for name, bend in BENDS.items():
        np.testing.assert_allclose(
            softcap(logits, CAPS[name]), bend(np.asarray(logits, np.float64))[0], atol=1e-4
        )
        if CAPS[name]:
            assert jnp.max(softcap(logits, CAPS[name])) <= CAPS[name].bound
    assert softcap(logits.astype(jnp.bfloat16), CAPS["root"]).dtype == jnp.float32


def test_products_are_one_without_and_three_with_a_gradient(case):
    params, x, targets, weights = case

    def ours(params, x):
        return cross_entropy(Head(head, 5), params, x, targets, weights, cap=CAPS["sigmoid"])[0]

    assert jax.jit(ours).lower(params, x).as_text().count("dot_general") == 1
    assert (
        jax.jit(jax.grad(ours, argnums=(0, 1))).lower(params, x).as_text().count("dot_general") == 3
    )


def test_nothing_of_logits_size_is_saved(case):
    params, x, targets, weights = case

    def saved(params, x):
        return jax.vjp(
            lambda p, x: cross_entropy(head, p, x, targets, weights, cap=CAPS["sigmoid"])[0],
            params,
            x,
        )[1]

    leaves = jax.tree.leaves(jax.eval_shape(saved, params, x))
    assert leaves and all(leaf.size <= params["w"].size for leaf in leaves)
