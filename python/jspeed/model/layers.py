"""Small parts of a block: embedding lookup, normalisation, rotary positions, squared ReLU,
dropout."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers

from jspeed.model.kv_cache import active_cache


def lookup(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Return rows ``tokens_BT`` (integers below V) of ``table_VD``: ``[B, T, D]`` in the table's
    dtype.

    The gradient is summed in fp32 and cast to the table's dtype once. JAX's own adds bf16 to bf16:
    the sum of a frequent token stops growing, and colliding bf16 additions are some 20 times slower
    on GPUs (openxla/xla issue 26371).
    """
    return look_up_each(table_VD, [tokens_BT])[0]


@jax.custom_vjp
def look_up_each(table_VD: jax.Array, ids: list[jax.Array]) -> list[jax.Array]:
    """Return :func:`lookup` of each array of ``ids``; the gradients of all add up in one fp32
    table."""
    return [table_VD[ids_BT] for ids_BT in ids]


def _look_up_each_backward(saved: tuple[jax.Array, list[jax.Array]], grads: list[jax.Array]):
    table_VD, ids = saved
    sum_VD = jnp.zeros(table_VD.shape, jnp.float32)
    for ids_BT, grad_BTD in zip(ids, grads, strict=True):
        sum_VD = sum_VD.at[ids_BT].add(grad_BTD.astype(jnp.float32))
    return sum_VD.astype(table_VD.dtype), None


# The table is saved for its shape and dtype only.
look_up_each.defvjp(
    lambda table_VD, ids: (look_up_each(table_VD, ids), (table_VD, ids)), _look_up_each_backward
)


class Fp32Accumulated(NamedTuple):
    """N tables side by side, ``[V, N, D]``, and fp32 sums of their gradients in earlier steps."""

    tables_VND: jax.Array
    sums_VND: jax.Array


def look_up_all(tables: jax.Array | Fp32Accumulated, tokens_BT: jax.Array) -> list[jax.Array]:
    """Return rows ``tokens_BT`` of each of N tables side by side, ``[V, N, D]``, as :func:`lookup`
    does.

    Of :class:`Fp32Accumulated` tables the sums have the gradient, which is these sums with the rows
    of this step's gradients added, in place: no pass over whole tables. They can be read once in a
    program.
    """
    if not isinstance(tables, Fp32Accumulated):
        return [lookup(tables[:, number], tokens_BT) for number in range(tables.shape[1])]
    return _look_up_all(tables.sums_VND, jax.lax.stop_gradient(tables.tables_VND), tokens_BT)


@jax.custom_vjp
def _look_up_all(
    sums_VND: jax.Array, tables_VND: jax.Array, tokens_BT: jax.Array
) -> list[jax.Array]:
    return [tables_VND[tokens_BT, number] for number in range(tables_VND.shape[1])]


def _look_up_all_backward(saved: tuple[jax.Array, jax.Array], grads: list[jax.Array]):
    sums_VND, tokens_BT = saved
    for number, grad_BTD in enumerate(grads):
        sums_VND = sums_VND.at[tokens_BT, number].add(grad_BTD.astype(jnp.float32))
    return sums_VND, None, None


_look_up_all.defvjp(
    lambda sums_VND, tables_VND, tokens_BT: (
        _look_up_all(sums_VND, tables_VND, tokens_BT),
        (sums_VND, tokens_BT),
    ),
    _look_up_all_backward,
)


def rms_norm(x: jax.Array) -> jax.Array:
    """Divide by the root mean square over the last axis; no gain. fp32 inside, ``x``'s shape and
    dtype out.

    Used before every sub-layer, before the head, and on queries and keys (QK-norm), as in
    modded-nanogpt. The epsilon under the root is that of fp32, PyTorch's default in ``F.rms_norm``.
    """
    x32 = x.astype(jnp.float32)
    return (x32 * inverse_rms(x32)).astype(x.dtype)


def inverse_rms(x: jax.Array) -> jax.Array:
    """Return by what :func:`rms_norm` multiplies: fp32, ``[..., 1]``."""
    squares = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return jax.lax.rsqrt(squares + jnp.finfo(jnp.float32).eps)


def scaled(weights: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Return ``weights`` x ``scale``, an fp32 scalar, in the dtype of ``weights``.

    The same as scaling activations, without another pass over them or their gradients. The gradient
    of ``scale`` is a sum over weights instead of activations.
    """
    return weights if scale is None else (weights.astype(jnp.float32) * scale).astype(weights.dtype)


def scaled_bank(bank_NIO: jax.Array, scales_n: jax.Array) -> jax.Array:
    """Return :func:`scaled` of the first n matrices of a bank, each with its own scale, and the
    others as they are.

    At once: the scale of one matrix, and its gradient, are kernels of one number."""
    scales_N = jnp.pad(
        scales_n.astype(jnp.float32), (0, len(bank_NIO) - len(scales_n)), constant_values=1
    )
    return scaled(bank_NIO, scales_N[:, None, None])


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    """Subtract the mean over the last axis, divide by the standard deviation, then ``gain`` and
    ``bias`` ``[D]``.

    fp32 inside, ``x``'s shape and dtype out; 1e-5 is added to the variance, as in GPT-2.
    """
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + 1e-5)
    gain, bias = (jnp.broadcast_to(a.astype(jnp.float32), x.shape) for a in (gain, bias))
    return (centred * scale * gain + bias).astype(x.dtype)


def rotary(x_BTHK: jax.Array, base: float = 1024.0) -> jax.Array:
    """Rotate the first half of each head by position (RoPE), channel c paired with channel c + K/2.

    Half-truncated as in modded-nanogpt: of K/2 frequencies the first K/4 fall from 1 to 1/``base``,
    the others are 0, so half of the channels carry no position. Same shape and dtype out.
    """
    cache = active_cache()
    _, length, _, width = x_BTHK.shape
    turning = width // 4
    frequency = (1.0 / base) ** jnp.linspace(0.0, 1.0, turning, dtype=jnp.float32)
    frequency = jnp.concatenate([frequency, jnp.zeros(width // 2 - turning, jnp.float32)])
    if cache is None:
        angle = jnp.outer(jnp.arange(length, dtype=jnp.float32), frequency)
        cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    else:
        angle_BTK = (
            cache.positions_BT(length).astype(jnp.float32)[..., None] * frequency[None, None]
        )
        cos, sin = jnp.cos(angle_BTK)[:, :, None, :], jnp.sin(angle_BTK)[:, :, None, :]
    first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)
    return turned.astype(x_BTHK.dtype)


def positions(table_PD: jax.Array, length: int) -> jax.Array:
    """Return the rows of a table of positions for ``length`` tokens: ``[1, T, D]``; with a KV cache
    ``[B, T, D]``."""
    cache = active_cache()
    return table_PD[None, :length] if cache is None else table_PD[cache.positions_BT(length)]


def position_ids(length: int) -> jax.Array:
    """Return the position of each of ``length`` tokens in its lane: int32 ``[1, T]``, or with a KV
    cache ``[B, T]``."""
    cache = active_cache()
    return (
        jnp.arange(length, dtype=jnp.int32)[None] if cache is None else cache.positions_BT(length)
    )


def token_before(tokens_BT: jax.Array, back: int, fill: int) -> jax.Array:
    """Return the token ``back`` positions before each, ``fill`` where there is none: ``[B, T]`` in
    the same dtype.

    With a KV cache: in int32.
    """
    cache = active_cache()
    if cache is None:
        return jnp.pad(tokens_BT, ((0, 0), (back, 0)), constant_values=fill)[
            :, : tokens_BT.shape[1]
        ]
    position_BT = cache.positions_BT(tokens_BT.shape[1]) - back
    found_BT = jnp.take_along_axis(cache.cache.tokens_BS, jnp.maximum(position_BT, 0), axis=1)
    return jnp.where(position_BT < 0, fill, found_BT)


def in_blocks(x_BT: jax.Array, size: int, fill: int = 0) -> jax.Array:
    """Cut ``[B, T, ...]`` into blocks of ``size`` tokens, the last one filled up: ``[B, N, size,
    ...]``."""
    padding = [(0, 0), (0, -x_BT.shape[1] % size)] + [(0, 0)] * (x_BT.ndim - 2)
    return jnp.pad(x_BT, padding, constant_values=fill).reshape(
        x_BT.shape[0], -1, size, *x_BT.shape[2:]
    )


def with_block_before(x_BNS: jax.Array, fill: int = 0) -> jax.Array:
    """Put before each block the one before it, ``fill`` before the first: ``[B, N, 2S, ...]``."""
    before = jnp.full_like(x_BNS[:, :1], fill)
    return jnp.concatenate([jnp.concatenate([before, x_BNS[:, :-1]], axis=1), x_BNS], axis=2)


def sparse_gate(x_BTD: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the sigmoid of the first n channels @ ``weights`` (``[n]`` or ``[n, H]``): ``[B, T]``
    or ``[B, T, H]`` (modded-nanogpt, record 28)."""
    return jax.nn.sigmoid(x_BTD[..., : weights.shape[0]] @ weights)


def relu_squared(x: jax.Array) -> jax.Array:
    """Return ``max(x, 0) ** 2`` (So et al. 2021, Primer)."""
    return jnp.square(jnp.maximum(x, 0))


def key_of(seed: int | jax.Array) -> jax.Array:
    """Return the Threefry key of a seed (its lowest 32 bits), whatever JAX_DEFAULT_PRNG_IMPL and
    JAX_RANDOM_SEED_OFFSET say: ``jax.random.key(seed)`` where they say nothing."""
    low = jnp.asarray(seed & 0xFFFFFFFF if isinstance(seed, int) else seed, jnp.uint32)
    return jax.random.wrap_key_data(jnp.stack([jnp.zeros_like(low), low]), impl="threefry2x32")


def lane_keys(
    seed: int, step: jax.Array | int, first_lane: jax.Array | int, lanes: int
) -> jax.Array:
    """Return random keys for ``lanes`` lanes of a batch from ``first_lane`` (int32 scalar) on:
    uint32 ``[B, 2]``.

    A key depends only on ``seed``, ``step`` and the lane's index in the global batch
    (``Context.step``, ``Context.first_lane``). So it is the same on any mesh and with any
    micro-batch.
    """
    at_step = jax.random.fold_in(key_of(seed), step)
    numbers_B = first_lane + jnp.arange(lanes, dtype=jnp.int32)
    return jax.vmap(lambda number: jax.random.key_data(jax.random.fold_in(at_step, number)))(
        numbers_B
    )


def dropout(x_BTD: jax.Array, keys_B2: jax.Array, rate: float) -> tuple[jax.Array, jax.Array]:
    """Return ``x_BTD`` with each element zero with probability ``rate`` and else divided by ``1 -
    rate`` (Srivastava et al. 2014), and the keys for the next call: passed on from layer to layer,
    each has its own.

    ``keys_B2`` come from :func:`lane_keys`. With ``rate`` 0 nothing is drawn.
    """
    if not rate:
        return x_BTD, keys_B2

    def kept(key_2: jax.Array) -> tuple[jax.Array, jax.Array]:
        now, later = jax.random.split(jax.random.wrap_key_data(key_2, impl="threefry2x32"))
        return jax.random.bernoulli(now, 1 - rate, x_BTD.shape[1:]), jax.random.key_data(later)

    kept_BTD, keys_B2 = jax.vmap(kept)(keys_B2)
    return jnp.where(kept_BTD, x_BTD.astype(jnp.float32) / (1 - rate), 0).astype(
        x_BTD.dtype
    ), keys_B2


def mix(
    x: jax.Array, y: jax.Array | float, x_scale: jax.Array | float, y_scale: jax.Array | float
) -> jax.Array:
    """Return ``x_scale x + y_scale y`` in the dtype of ``x``; the scales are scalars, fp32 where
    they are learned."""
    return (x_scale * x + y_scale * y).astype(x.dtype)


def uniform(scale: float) -> initializers.Initializer:
    """Draw banks ``[n, in, out]`` uniformly around zero, with standard deviation ``scale`` /
    sqrt(in)."""
    return initializers.variance_scaling(
        scale**2, "fan_in", "uniform", in_axis=-2, out_axis=-1, batch_axis=(0,)
    )


def zero_every(n: int, init: Callable[..., jax.Array]) -> initializers.Initializer:
    """Like ``init`` on a bank ``[matrices, ...]``, but with every ``n``-th matrix zero: the
    projections that write to the residual stream, so that a block starts as the identity
    (modded-nanogpt, record 5)."""

    def draw(
        key: jax.Array, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None
    ) -> jax.Array:
        drawn = (np.arange(shape[0]) % n != n - 1).astype(dtype)
        return init(key, shape, dtype) * drawn.reshape(-1, *[1] * (len(shape) - 1))

    return draw
