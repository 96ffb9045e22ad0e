"""KV cache for generation (prefill and decode): each token runs through the model once.

Recipes need no code for it. While a cache is active, the primitives of ``jspeed.model`` that look
across positions (attention, alone, in pairs and composed; rotary, rotate, positions, position_ids,
token_before, shift_right, find_documents) treat their tokens as the next ones of each lane, and
append them. A recipe that looks across positions in another way cannot decode token by token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Cache(NamedTuple):
    """Per lane: token ids, document ids, and the arrays that primitives cache; capacity S tokens.

    ``tokens_BS`` and ``documents_BS`` are int32; ``kept`` holds an array ``[B, S, ...]`` for each
    call of :meth:`CacheStep.append`, in order: keys and values of attention, arrays to be shifted
    by a token.
    """

    tokens_BS: jax.Array
    documents_BS: jax.Array
    kept: tuple[jax.Array, ...]


class CacheStep:
    """A cache while ``tokens`` tokens per lane are traced through a model: it reads and replaces
    arrays in the order in which primitives are called.

    Where a primitive has several positions per token (paired heads), its arrays, cached ones
    included, are a multiple of ``tokens`` long. With ``shapes`` nothing is stored: the list
    collects the shapes that would be.
    """

    def __init__(
        self,
        cache: Cache,
        start_B: jax.Array,
        tokens: int,
        shapes: list[jax.ShapeDtypeStruct] | None = None,
    ) -> None:
        self.cache = cache
        self.start_B = start_B
        self.tokens = tokens
        self.calls = 0
        self.shapes = shapes

    def start_of(self, length: int) -> jax.Array:
        """Start of the next ``length`` entries of each lane: int32 ``[B]``."""
        return length // self.tokens * self.start_B

    def positions_BT(self, length: int) -> jax.Array:
        """Positions of the next ``length`` entries of each lane: int32 ``[B, length]``."""
        return self.start_of(length)[:, None] + jnp.arange(length, dtype=jnp.int32)[None]

    def append(self, x_BT: jax.Array) -> jax.Array:
        """Append ``[B, T, ...]``, the next entries; returns the cached array, ``[B, S, ...]``."""
        call, self.calls = self.calls, self.calls + 1
        if self.shapes is not None:
            self.shapes.append(jax.ShapeDtypeStruct(x_BT.shape, x_BT.dtype))
            return x_BT
        kept = list(self.cache.kept)
        kept[call] = write_lanes(kept[call], x_BT, self.start_of(x_BT.shape[1]))
        self.cache = self.cache._replace(kept=tuple(kept))
        return kept[call]


_active: ContextVar[CacheStep | None] = ContextVar("active cache", default=None)


def active_cache() -> CacheStep | None:
    """Return the cache in use, or None in training and evaluation."""
    return _active.get()


@contextmanager
def use_cache(cache: CacheStep) -> Iterator[CacheStep]:
    """Let primitives use ``cache`` inside the block."""
    token = _active.set(cache)
    try:
        yield cache
    finally:
        _active.reset(token)


def empty(forward: Callable[[jax.Array], jax.Array], lanes: int, size: int) -> Cache:
    """Return an empty cache for ``size`` tokens of ``forward`` of int32 tokens ``[lanes, T]``."""
    nothing = jnp.zeros((lanes, size), jnp.int32)
    shapes: list[jax.ShapeDtypeStruct] = []

    def trace(tokens_BT: jax.Array) -> None:
        start_B = jnp.zeros(lanes, jnp.int32)
        with use_cache(CacheStep(Cache(tokens_BT, tokens_BT, ()), start_B, 1, shapes)):
            forward(tokens_BT)

    jax.eval_shape(trace, jax.ShapeDtypeStruct((lanes, 1), jnp.int32))
    kept = (jnp.zeros((lanes, size * x.shape[1], *x.shape[2:]), x.dtype) for x in shapes)
    return Cache(nothing, nothing, tuple(kept))


def advance(
    forward: Callable[[jax.Array], jax.Array],
    cache: Cache,
    start_B: jax.Array,
    tokens_BT: jax.Array,
) -> tuple[Cache, jax.Array]:
    """Return the cache with ``tokens_BT`` (int32) at ``start_B`` (int32 ``[B]``) of each lane, and
    ``forward`` of them.

    All ``start_B`` + T must be at most S. Entries after a lane's last token are ignored.
    """
    cache = cache._replace(tokens_BS=write_lanes(cache.tokens_BS, tokens_BT, start_B))
    with use_cache(CacheStep(cache, start_B, tokens_BT.shape[1])) as now:
        result = forward(tokens_BT)
    return now.cache, result


def write_lanes(x_BS: jax.Array, new_BT: jax.Array, start_B: jax.Array) -> jax.Array:
    """Write ``new_BT`` into ``x_BS``, each lane from its ``start_B`` on."""
    return jax.vmap(
        lambda lane, new, start: jax.lax.dynamic_update_slice_in_dim(lane, new, start, 0)
    )(x_BS, new_BT.astype(x_BS.dtype), start_B)
