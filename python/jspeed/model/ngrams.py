"""Hash the last n tokens to rows of n-gram embedding tables."""

import jax
import jax.numpy as jnp

from jspeed.model.layers import token_before


def ngram_rows(tokens_BT: jax.Array, order: int, rows: int) -> jax.Array:
    """Hash every token with the ``order`` - 1 before it into ``rows`` rows: int32 ``[B, T]``.

    Multiplication by Knuth's 2654435769 (2^32 over the golden ratio) and a shift for each token, in
    uint32; each order has its own seed, so that one table can hold several. Missing tokens before
    the row hash as 0.
    """
    hashed_BT = jnp.full(tokens_BT.shape, order, jnp.uint32)
    for back in reversed(range(order)):
        token_BT = token_before(tokens_BT.astype(jnp.int32), back, -1) + 1
        hashed_BT = (hashed_BT ^ token_BT.astype(jnp.uint32)) * jnp.uint32(2654435769)
        hashed_BT ^= hashed_BT >> 15
    return (hashed_BT % rows).astype(jnp.int32)
