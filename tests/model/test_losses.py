"""The loss against float64 NumPy and JAX's own derivative, and what it keeps for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.model.losses import softcap, softcapped_cross_entropy


def plain(x, head, targets, weights, cap):
    log_p = jax.nn.log_softmax(cap * jnp.tanh((x @ head) / cap), axis=-1)
    loss = -jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    return jnp.sum(loss * weights), loss


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 10, 8)), jnp.float32)
    head = jnp.asarray(4 * rng.normal(size=(8, 40)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 40, size=(3, 10)))
    weights = jnp.asarray(rng.uniform(size=(3, 10)), jnp.float32)
    return x, head, targets, weights


@pytest.mark.parametrize("chunk", [1, 4, 10, 64])
def test_value_and_gradients(case, chunk):
    x, head, targets, weights = case

    def ours(x, head):
        total, loss = softcapped_cross_entropy(x, head, targets, weights, 15.0, chunk)
        return 3 * total, loss

    def theirs(x, head):
        total, loss = plain(x, head, targets, weights, 15.0)
        return 3 * total, loss

    (total, loss), grads = jax.value_and_grad(ours, argnums=(0, 1), has_aux=True)(x, head)
    (total_, loss_), grads_ = jax.value_and_grad(theirs, argnums=(0, 1), has_aux=True)(x, head)
    np.testing.assert_allclose(total, total_, rtol=1e-5)
    np.testing.assert_allclose(loss, loss_, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(softcapped_cross_entropy(x, head, targets, weights, 15.0, chunk)[1], loss, atol=1e-6)
    for found, expected in zip(grads, grads_, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_zero_head_gives_log_of_vocabulary(case):
    x, head, targets, weights = case
    loss = softcapped_cross_entropy(x, 0 * head, targets, weights, 15.0, 10)[1]
    np.testing.assert_allclose(loss, np.log(40), rtol=1e-6)


def test_softcap_is_shifted_tanh():
    logits = jnp.linspace(-200, 200, 41)
    np.testing.assert_allclose(softcap(logits, 15.0), 15 * np.tanh(logits / 15) + 15, atol=1e-4)


def test_nothing_of_logits_size_is_saved(case):
    x, head, targets, weights = case
    saved = jax.vjp(lambda x, h: softcapped_cross_entropy(x, h, targets, weights, 15.0, 4)[0], x, head)[1]
    assert all(leaf.shape != (3, 10, 40) and leaf.size <= head.size for leaf in jax.tree.leaves(saved))
