"""Lookup in a table sharded by rows: an all-to-all fetches each row from its owner and returns its
gradient."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspeed.model.custom_kernels import Kernel

CAPACITY_SIGMAS = 8
"""Capacity per owner beyond an equal share of all tokens, in standard deviations of uniformly
hashed ids."""


class Slots(NamedTuple):
    """Where a device's ids lie among the S = owners x capacity answers, of which some are unused;
    all are int32.

    Id n has the row of slot ``slot_N[n]``, and slot s is of the ids ``order_N[starts_S1[s] :
    starts_S1[s + 1]]``. ``received_ids`` ``[owners, capacity]`` are the rows that this device, as
    an owner, was asked for: the length of its part in unused slots.
    """

    slot_N: jax.Array
    order_N: jax.Array
    starts_S1: jax.Array
    received_ids: jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def fetch(
    part_VD: jax.Array, ids_BT: jax.Array, axis: str | None, kernel: Kernel | None = None
) -> jax.Array:
    """Return rows ``ids_BT`` of a table, ``[B, T, D]``; inside ``shard_map`` over mesh axis
    ``axis`` (None: no mesh).

    Device n of the axis holds ``part_VD``, the n-th of equal shards. Duplicate ids are communicated
    once, forward and backward (gradients are summed in fp32): at most about tokens x D elements per
    device and direction, instead of an all-gather of the table. Distinct ids must be spread over
    the owners like hashes: a device that requests more rows of one owner than its capacity gets
    NaN, not other rows. The gradient of a shard is summed over all devices, in the dtype of the
    shard.

    ``kernel`` ("sums of rows") sums gradients of equal ids: equal up to one rounding. It is for
    bf16, and raises BadInput for what it does not support.
    """
    return look_up(part_VD, ids_BT, axis)[0]


def capacity(ids: int, part: int, owners: int) -> int:
    """Return how many rows a device may request of one owner, for so many ids of its own."""
    share = ids / owners
    return min(ids, part, math.ceil(share + CAPACITY_SIGMAS * math.sqrt(share)))


def look_up(part_VD: jax.Array, ids_BT: jax.Array, axis: str | None) -> tuple[jax.Array, Slots]:
    """Return rows ``[B, T, D]``, and where they came from."""
    owners, part, tokens = _size(axis), part_VD.shape[0], ids_BT.size
    room = capacity(tokens, part, owners)
    ids_N = ids_BT.reshape(-1)
    order_N = jnp.argsort(ids_N)
    sorted_N = ids_N[order_N]
    # The first of every run of equal ids stands for all of it.
    number_N = jnp.cumsum(jnp.diff(sorted_N, prepend=-1) > 0, dtype=jnp.int32) - 1
    first_N = jnp.searchsorted(number_N, jnp.arange(tokens), method="scan_unrolled")
    distinct_N = jnp.where(
        first_N < tokens, sorted_N[jnp.minimum(first_N, tokens - 1)], owners * part
    )
    bounds = jnp.searchsorted(distinct_N, part * jnp.arange(owners + 1), method="scan_unrolled")
    starts, counts = bounds[:-1], jnp.diff(bounds)

    slots = jnp.arange(room)[None]
    requested = (
        distinct_N[jnp.minimum(starts[:, None] + slots, tokens - 1)]
        - part * jnp.arange(owners)[:, None]
    )
    requested = jnp.where(slots < counts[:, None], requested, part)
    received_ids = _all_to_all(requested, axis)
    rows = part_VD.at[received_ids].get(mode="fill", fill_value=0)
    found = _all_to_all(rows, axis).reshape(owners * room, -1)

    owner_N = sorted_N // part
    slot_N = owner_N * room + number_N - starts[owner_N]
    slot_N = jnp.zeros_like(slot_N).at[order_N].set(slot_N, unique_indices=True)
    x_BTD = jnp.where(jnp.any(counts > room), jnp.nan, found[slot_N]).astype(part_VD.dtype)
    # an unused slot starts where the next owner's do
    numbers = starts[:, None] + jnp.minimum(slots, counts[:, None])
    starts_S = first_N.at[numbers.reshape(-1)].get(mode="fill", fill_value=tokens)
    return x_BTD.reshape(*ids_BT.shape, -1), Slots(
        slot_N, order_N, jnp.append(starts_S, tokens), received_ids
    )


def return_gradients(
    slots: Slots, grad_BTD: jax.Array, dtype: Any, axis: str | None, kernel: Kernel | None = None
) -> jax.Array:
    """Sum gradients of equal ids in fp32 and send them to the owners: ``[owners, capacity, D]`` in
    ``dtype``."""
    grad_ND = grad_BTD.reshape(slots.slot_N.size, -1)
    if kernel:
        sums = kernel.run(grad_ND, slots.order_N, slots.starts_S1)
    else:
        zeros = jnp.zeros((slots.received_ids.size, grad_ND.shape[1]), jnp.float32)
        sums = zeros.at[slots.slot_N].add(grad_ND.astype(jnp.float32))
    return _all_to_all(sums.astype(dtype).reshape(*slots.received_ids.shape, -1), axis)


def _forward(part_VD: jax.Array, ids_BT: jax.Array, axis: str | None, kernel: Kernel | None):
    x_BTD, slots = look_up(part_VD, ids_BT, axis)
    # The shard is saved for its shape and dtype only.
    return x_BTD, (part_VD, slots)


def _backward(
    axis: str | None, kernel: Kernel | None, saved: tuple[jax.Array, Slots], grad_BTD: jax.Array
):
    part_VD, slots = saved
    sums = return_gradients(slots, grad_BTD, part_VD.dtype, axis, kernel)
    whole = (
        jnp.zeros(part_VD.shape, jnp.float32)
        .at[slots.received_ids]
        .add(sums.astype(jnp.float32), mode="drop")
    )
    return whole.astype(part_VD.dtype), None


fetch.defvjp(_forward, _backward)


def _size(axis: str | None) -> int:
    return 1 if axis is None else jax.lax.axis_size(axis)


def _all_to_all(x: jax.Array, axis: str | None) -> jax.Array:
    """Send slice n of the first dimension to device n."""
    return (
        x if axis is None else jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)
    )
