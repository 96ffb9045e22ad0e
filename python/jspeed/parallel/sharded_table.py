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
    return part_VD[ids_BT] if axis is None else look_up(part_VD, ids_BT, axis)[0]


def capacity(ids: int, part: int, owners: int) -> int:
    """Return how many rows a device may request of one owner, for so many ids of its own."""
    share = ids / owners
    return min(ids, part, math.ceil(share + CAPACITY_SIGMAS * math.sqrt(share)))


def look_up(part_VD: jax.Array, ids_BT: jax.Array, axis: str | None) -> tuple[jax.Array, Slots]:
    """Return rows ``[B, T, D]``, and where they came from."""
    slots, fits = requests(ids_BT.reshape(-1), part_VD.shape[0], _size(axis))
    received_ids = _all_to_all(slots.received_ids, axis)
    rows = part_VD.at[received_ids].get(mode="fill", fill_value=0)
    x_ND = delivered(rows, slots, fits, axis)
    return x_ND.reshape(*ids_BT.shape, -1), slots._replace(received_ids=received_ids)


def requests(ids_N: jax.Array, part: int, owners: int) -> tuple[Slots, jax.Array]:
    """Return where the rows ``ids_N`` will lie, and whether each owner of ``part`` of them has room
    for those that it is asked for.

    ``received_ids`` are those that this device asks each owner for, in ascending order.
    """
    tokens = ids_N.size
    room = capacity(tokens, part, owners)
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
    owner_N = sorted_N // part
    slot_N = owner_N * room + number_N - starts[owner_N]
    slot_N = jnp.zeros_like(slot_N).at[order_N].set(slot_N, unique_indices=True)
    # an unused slot starts where the next owner's do
    numbers = starts[:, None] + jnp.minimum(slots, counts[:, None])
    starts_S = first_N.at[numbers.reshape(-1)].get(mode="fill", fill_value=tokens)
    found = Slots(slot_N, order_N, jnp.append(starts_S, tokens), requested)
    return found, jnp.all(counts <= room)


def delivered(
    rows_ORD: jax.Array, slots: Slots, fits: jax.Array, axis: str | tuple[str, ...] | None
) -> jax.Array:
    """Send the rows that other devices have asked this one for, and return those that it has asked
    for itself, ``[N, D]``: NaN unless that ``fits``."""
    found = _all_to_all(rows_ORD, axis).reshape(-1, rows_ORD.shape[-1])
    return jnp.where(fits, found[slots.slot_N], jnp.nan).astype(rows_ORD.dtype)


def return_gradients(
    slots: Slots,
    grad_BTD: jax.Array,
    dtype: Any,
    axis: str | tuple[str, ...] | None,
    kernel: Kernel | None = None,
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


def _all_to_all(x: jax.Array, axis: str | tuple[str, ...] | None) -> jax.Array:
    """Send slice n of the first dimension to device n."""
    return (
        x if axis is None else jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)
    )
