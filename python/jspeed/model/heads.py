"""What attention heads do with each other: pairs, values taken out, probabilities shared."""

import jax
import jax.numpy as jnp

from jspeed.model.attention import Documents


def pair_heads(x_BTHK: jax.Array) -> jax.Array:
    """Lay heads h and h + H/2 behind one another, token by token: ``[B, T, H, K]`` to ``[B, 2T, H/2, K]``.

    A query then sees the keys of both heads: all of its own position if its head comes second, only its own
    head's there if it comes first (modded-nanogpt, record 58). Reshape the result back to take them apart.
    """
    rows, length, heads, width = x_BTHK.shape
    return x_BTHK.reshape(rows, 2 * length, heads // 2, width)


def pair_positions(length: int, heads: int) -> jax.Array:
    """Positions by which the heads of a pair turn: fp32 ``[T, H]``, 2t for even heads and 2t + 1 for odd ones."""
    return 2.0 * jnp.arange(length)[:, None] + (jnp.arange(heads) % 2)[None, :]


def pair_documents(documents: Documents) -> Documents:
    """Documents of twice as many tokens, as :func:`pair_heads` lays them."""
    offsets_BO = documents.offsets
    return Documents(jnp.repeat(documents.ids, 2, axis=1), None if offsets_BO is None else 2 * offsets_BO)


def without_own_value(y_BTHK: jax.Array, v_BTHK: jax.Array, alpha_BTH: jax.Array) -> jax.Array:
    """Take tanh(``alpha``) of what each head's output has of its own token's value out of it (XSA, record 82)."""
    along = jnp.sum(y_BTHK * v_BTHK, -1, keepdims=True) / jnp.maximum(jnp.sum(v_BTHK**2, -1, keepdims=True), 1e-8)
    return y_BTHK - jnp.tanh(alpha_BTH)[..., None] * along * v_BTHK
