"""Hash the last two or three tokens to rows of tables, and to sign patterns."""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from jspeed.model.layers import key_of, position_ids, token_before

SIGN_ROWS = 8192


def bigram_rows(tokens_BT: jax.Array, rows: int) -> jax.Array:
    """Hash every token with the one before it into ``rows`` rows: int32 ``[B, T]``; the last row is
    the first token's.

    (36313 x[t]) xor (27191 x[t-1]) in int32, modulo ``rows`` - 1, across document borders
    (modded-nanogpt, record 62). As there, the second token is hashed with ``rows`` - 1 in place of
    the first.
    """
    last = rows - 1
    tokens_BT, position_BT = tokens_BT.astype(jnp.int32), position_ids(tokens_BT.shape[1])
    before_BT = jnp.where(position_BT == 1, last, token_before(tokens_BT, 1, last))
    hashed_BT = jnp.bitwise_xor(36313 * tokens_BT, 27191 * before_BT) % last
    return jnp.where(position_BT == 0, last, hashed_BT)


def trigram_rows(tokens_BT: jax.Array, rows: int) -> jax.Array:
    """Hash every token with the two before it into ``rows`` rows: int32 ``[B, T]``; the last row is
    that of the first two tokens. As :func:`bigram_rows` with (17351 x[t]) xor (60961 x[t-1]) xor
    (45259 x[t-2]) (record 92)."""
    last = rows - 1
    hashed_BT = _hashed(tokens_BT, (17351, 60961, 45259)) % last
    return jnp.where(position_ids(tokens_BT.shape[1]) < 2, last, hashed_BT)


def bigram_and_trigram_rows(tokens_BT: jax.Array, rows: int) -> jax.Array:
    """Return the rows of one table whose first half is for bigrams and the second for trigrams:
    int32 ``[B, 2 T]``, first those of all bigrams."""
    half = rows // 2
    trigrams_BT = half + trigram_rows(tokens_BT, rows - half)
    return jnp.concatenate([bigram_rows(tokens_BT, half), trigrams_BT], axis=1)


def _hashed(tokens_BT: jax.Array, factors: tuple[int, ...]) -> jax.Array:
    """Return the xor of factor x token over each token and those before it, in int32, 0 for missing
    ones."""
    tokens_BT = tokens_BT.astype(jnp.int32)
    products = [
        factor * token_before(tokens_BT, back, 0).astype(jnp.int32)
        for back, factor in enumerate(factors)
    ]
    return reduce(jnp.bitwise_xor, products)


def sign_rows(tokens_BT: jax.Array, factors: tuple[int, ...] = (1, 1)) -> jax.Array:
    """Hash every token with those before it into ``SIGN_ROWS`` sign patterns: int32 ``[B, T]``, 0
    where one is missing.

    The xor of ``factors`` x tokens, the first for the token itself.
    """
    missing_BT = position_ids(tokens_BT.shape[1]) < len(factors) - 1
    return jnp.where(missing_BT, 0, _hashed(tokens_BT, factors) % SIGN_ROWS)


def signs(
    tokens_BT: jax.Array, width: int, dtype: Any = jnp.int32, factors: tuple[int, ...] = (1, 1)
) -> jax.Array:
    """Return +1 or -1 for ``width`` channels of every token, fixed for its pair of tokens: ``[B, T,
    width]``.

    Bigrams that collide in a table row get different sign patterns, which reduces interference
    (record 83). ``factors`` as of :func:`sign_rows`.
    """
    with jax.threefry_partitionable(True):  # part of the model, so of no setting of JAX
        table = jax.random.bits(key_of(0), (SIGN_ROWS, -(-width // 32)), jnp.uint32)
    words_BTW = table[sign_rows(tokens_BT, factors)]
    bits = (words_BTW[..., None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, None]) & 1
    bits_BTD = bits.reshape(*tokens_BT.shape, -1)[..., :width].astype(jnp.int32)
    return (1 - 2 * bits_BTD).astype(dtype)
