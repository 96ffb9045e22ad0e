"""The key-value cache for generating text: each token runs through the model once.

Recipes need no code for it. While a cache is open, the primitives of ``jspeed.model`` that look across positions
(attention, alone, in pairs and composed; rotary, rotate, positions, places, token_before, shift_right, find_documents)
treat their tokens as the next ones of each row, and append them. A recipe that looks across positions in another way
cannot generate token by token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Cache(NamedTuple):
    """Tokens and documents of each row, and what primitives keep of them, with room for S tokens.

    ``tokens_BS`` and ``documents_BS`` are int32; ``kept`` holds an array ``[B, S, ...]`` for each call that keeps
    something, in order: keys and values of attention, what is shifted by a token.
    """

    tokens_BS: jax.Array
    documents_BS: jax.Array
    kept: tuple[jax.Array, ...]


class Open:
    """A cache while ``tokens`` tokens a row run through a model that is traced: it reads and replaces arrays, in the
    order in which primitives are called.

    Where a primitive lays a token out over several places (heads in pairs), its arrays are a multiple of ``tokens``
    long, and so are those kept of it.
    """

    def __init__(self, cache: Cache, start_B: jax.Array, tokens: int, shapes: list[Any] | None = None) -> None:
        self.cache, self.start_B, self.tokens, self.calls, self.shapes = cache, start_B, tokens, 0, shapes

    def first_B(self, length: int) -> jax.Array:
        """Where the first of the next ``length`` places of each row lies: int32 ``[B]``."""
        return length // self.tokens * self.start_B

    def positions_BT(self, length: int) -> jax.Array:
        """Where the next ``length`` places of each row lie: int32 ``[B, length]``."""
        return self.first_B(length)[:, None] + jnp.arange(length, dtype=jnp.int32)[None]

    def keep(self, x_BT: jax.Array) -> jax.Array:
        """Remember ``[B, T, ...]`` of the next places; returns what is kept of all, ``[B, S, ...]``."""
        call, self.calls = self.calls, self.calls + 1
        if self.shapes is not None:  # only asked what it would have to hold
            self.shapes.append(x_BT)
            return x_BT
        kept = list(self.cache.kept)
        kept[call] = written(kept[call], x_BT, self.first_B(x_BT.shape[1]))
        self.cache = self.cache._replace(kept=tuple(kept))
        return kept[call]


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
        with caching(Open(Cache(tokens_BT, tokens_BT, ()), start_B, 1, shapes)):
            forward(tokens_BT)
        return shapes

    of_one = jax.eval_shape(trace, jax.ShapeDtypeStruct((rows, 1), jnp.int32))
    kept = (jnp.zeros((rows, size * x.shape[1], *x.shape[2:]), x.dtype) for x in of_one)
    return Cache(nothing, nothing, tuple(kept))


def advance(
    forward: Callable[[jax.Array], jax.Array], cache: Cache, start_B: jax.Array, tokens_BT: jax.Array
) -> tuple[Cache, jax.Array]:
    """Return the cache with ``tokens_BT`` (int32) at ``start_B`` (int32 ``[B]``) of each row, and ``forward`` of them.

    All ``start_B`` + T must be at most S. What lies behind a row's last token does not matter.
    """
    cache = cache._replace(tokens_BS=written(cache.tokens_BS, tokens_BT, start_B))
    with caching(Open(cache, start_B, tokens_BT.shape[1])) as now:
        result = forward(tokens_BT)
    return now.cache, result


def written(x_BS: jax.Array, new_BT: jax.Array, start_B: jax.Array) -> jax.Array:
    """Put ``new_BT`` into ``x_BS`` from ``start_B`` of each row on."""
    return jax.vmap(lambda row, new, start: jax.lax.dynamic_update_slice_in_dim(row, new, start, 0))(
        x_BS, new_BT.astype(x_BS.dtype), start_B
    )
