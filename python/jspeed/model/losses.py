"""Cross-entropy over softcapped logits that never keeps a [tokens, vocabulary] array from forward to backward."""

from functools import partial

import jax
import jax.numpy as jnp

Saved = tuple[jax.Array, jax.Array]


def softcap(logits: jax.Array, cap: float) -> jax.Array:
    """Bound logits smoothly to (0, 2 ``cap``): ``2 cap sigmoid(2 logits / cap)``.

    It is ``cap tanh(logits / cap)`` (Gemma 2) moved up by ``cap``, which a softmax does not see: the form
    of speedrun record 19. Because the bound is known, log-sum-exp needs no pass for the maximum.
    """
    return 2 * cap * jax.nn.sigmoid(2 * logits / cap)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def softcapped_cross_entropy(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    cap: float,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Return (sum of ``weights_BT`` x loss: fp32 scalar, loss: fp32 ``[B, T]`` in nats, without a gradient).

    ``targets_BT`` are integer ids below V; ``weights_BT`` are fp32 constants. Logits exist for ``chunk`` tokens
    of each row at a time. Under differentiation the gradients with respect to ``x_BTD`` and ``head_DV`` are
    formed in the forward pass, while a chunk's logits are at hand, and the backward pass only scales them: the
    head costs three matmuls, none is repeated.
    """
    losses = [_chunk(x, head_DV, t, cap)[0] for x, t, _ in _chunks(x_BTD, targets_BT, weights_BT, chunk)]
    loss_BT = jnp.concatenate(losses, axis=1)
    return _total(loss_BT, weights_BT), loss_BT


def _chunks(x_BTD: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, chunk: int):
    for start in range(0, x_BTD.shape[1], chunk):
        part = slice(start, start + chunk)
        yield x_BTD[:, part], targets_BT[:, part], weights_BT[:, part]


def _chunk(x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array, cap: float):
    logits_BTV = jnp.einsum("btd,dv->btv", x_BTD, head_DV, preferred_element_type=jnp.float32)
    z_BTV = softcap(logits_BTV, cap)
    exp_BTV = jnp.exp(z_BTV - 2 * cap)
    sum_BT = jnp.sum(exp_BTV, axis=-1)
    z_target_BT = jnp.take_along_axis(z_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return 2 * cap + jnp.log(sum_BT) - z_target_BT, z_BTV, exp_BTV, sum_BT


def _total(loss_BT: jax.Array, weights_BT: jax.Array) -> jax.Array:
    # Row by row first: a flat fp32 sum over all tokens depends on how they are spread over devices.
    return jnp.sum(jnp.sum(loss_BT * weights_BT, axis=1))


def _forward(x_BTD, head_DV, targets_BT, weights_BT, cap, chunk):
    losses, dx = [], []
    dhead_DV = jnp.zeros(head_DV.shape, jnp.float32)
    for x, targets, weights in _chunks(x_BTD, targets_BT, weights_BT, chunk):
        loss, z_BTV, exp_BTV, sum_BT = _chunk(x, head_DV, targets, cap)
        hit_BTV = targets[..., None] == jnp.arange(head_DV.shape[1])[None, None]
        dz_BTV = weights[..., None] * (exp_BTV / sum_BT[..., None] - hit_BTV)
        dlogits_BTV = (dz_BTV * z_BTV * (1 - z_BTV / (2 * cap)) * (2 / cap)).astype(x.dtype)
        losses.append(loss)
        dx.append(jnp.einsum("btv,dv->btd", dlogits_BTV, head_DV))
        dhead_DV += jnp.einsum("btd,btv->dv", x, dlogits_BTV, preferred_element_type=jnp.float32)
    loss_BT = jnp.concatenate(losses, axis=1)
    saved = jnp.concatenate(dx, axis=1), dhead_DV.astype(head_DV.dtype)
    return (_total(loss_BT, weights_BT), loss_BT), saved


def _backward(cap: float, chunk: int, saved: Saved, cotangents: tuple[jax.Array, jax.Array]):
    dx_BTD, dhead_DV = saved
    scale = cotangents[0]
    return (dx_BTD * scale.astype(dx_BTD.dtype), dhead_DV * scale.astype(dhead_DV.dtype), None, None)


softcapped_cross_entropy.defvjp(_forward, _backward)
