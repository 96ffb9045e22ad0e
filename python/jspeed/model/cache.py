"""The key-value cache for generating text: each token runs through the model once.

Recipes need no code for it. While a cache is open, the primitives that look across positions (attention, rotary,
positions, token_before, find_documents) treat their tokens as the next ones of each row, and append them. A recipe that
looks across positions in another way cannot generate token by token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Cache(NamedTuple):
    """Tokens, documents, keys and values of each row, with room for S tokens.

    ``tokens_BS`` and ``documents_BS`` are int32; ``keys`` and ``values`` hold an array ``[B, S, H, K]`` for each call
    of attention, in order.
    """

    tokens_BS: jax.Array
    documents_BS: jax.Array
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


class Open:
    """A cache while a model is traced: it reads and replaces arrays, in the order in which primitives are called."""

    def __init__(self, cache: Cache, start_B: jax.Array, shapes: list[Any] | None = None) -> None:
        self.cache, self.start_B, self.calls, self.shapes = cache, start_B, 0, shapes

    def positions_BT(self, length: int) -> jax.Array:
        """Where the next ``length`` tokens of each row lie: int32 ``[B, T]``."""
        return self.start_B[:, None] + jnp.arange(length, dtype=jnp.int32)[None]

    def kept(self, k_BTHK: jax.Array, v_BTHK: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Remember the keys and values of one call of attention; returns all, ``[B, S, H, K]``."""
        call, self.calls = self.calls, self.calls + 1
        if self.shapes is not None:  # only asked what it would have to hold
            self.shapes.append((k_BTHK, v_BTHK))
            return k_BTHK, v_BTHK
        keys, values = list(self.cache.keys), list(self.cache.values)
        keys[call] = written(keys[call], k_BTHK, self.start_B)
        values[call] = written(values[call], v_BTHK, self.start_B)
        self.cache = self.cache._replace(keys=tuple(keys), values=tuple(values))
        return keys[call], values[call]


_open: ContextVar[Open | None] = ContextVar("open cache", default=None)


def opened() -> Open | None:
    """Return the cache that is open, or None in training and evaluation."""
    return _open.get()


@contextmanager
def caching(cache: Open) -> Iterator[Open]:
    """Let primitives use ``cache`` inside the block."""
    token = _open.set(cache)
    try:
        yield cache
    finally:
        _open.reset(token)


def empty(forward: Callable[[jax.Array], jax.Array], rows: int, size: int) -> Cache:
    """Return an empty cache for ``size`` tokens of ``forward`` of int32 tokens ``[rows, T]``."""
    nothing = jnp.zeros((rows, size), jnp.int32)
    shapes: list[Any] = []

    def trace(tokens_BT: jax.Array) -> list[Any]:
        start_B = jnp.zeros(rows, jnp.int32)
        with caching(Open(Cache(tokens_BT, tokens_BT, (), ()), start_B, shapes)):
            forward(tokens_BT)
        return shapes

    pairs = jax.eval_shape(trace, jax.ShapeDtypeStruct((rows, 1), jnp.int32))
    keys, values = (tuple(jnp.zeros((rows, size, *pair[n].shape[2:]), pair[n].dtype) for pair in pairs) for n in (0, 1))
    return Cache(nothing, nothing, keys, values)


def advance(
    forward: Callable[[jax.Array], jax.Array], cache: Cache, start_B: jax.Array, tokens_BT: jax.Array
) -> tuple[Cache, jax.Array]:
    """Return the cache with ``tokens_BT`` (int32) at ``start_B`` (int32 ``[B]``) of each row, and ``forward`` of them.

    All ``start_B`` + T must be at most S. What lies behind a row's last token does not matter.
    """
    cache = cache._replace(tokens_BS=written(cache.tokens_BS, tokens_BT, start_B))
    with caching(Open(cache, start_B)) as now:
        result = forward(tokens_BT)
    return now.cache, result


def written(x_BS: jax.Array, new_BT: jax.Array, start_B: jax.Array) -> jax.Array:
    """Put ``new_BT`` into ``x_BS`` from ``start_B`` of each row on."""
    return jax.vmap(lambda row, new, start: jax.lax.dynamic_update_slice_in_dim(row, new, start, 0))(
        x_BS, new_BT.astype(x_BS.dtype), start_B
    )
