"""A softmax over each lane's candidates: all its targets, and some other ids."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

STRIDE = 20_011
"""A prime: its multiples modulo a smaller vocabulary are a permutation, unless it is one of them.
"""


def candidates(
    targets_T: jax.Array, vocabulary: int, count: int, start: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Return (``count`` ascending ids: all of ``targets_T`` and others, the place of each id of the
    vocabulary there).

    The others are the first that are no targets in the order 20011 k modulo V, k from ``start`` on.
    A place means something for candidates alone. A softmax over these ids, each counted once, is
    the loss of record 92: rare tokens have fewer negatives, and no gradient is scaled up. Where
    there are more targets than ``count``, the first candidate is -1.
    """
    order_V = STRIDE * ((start + jnp.arange(vocabulary, dtype=jnp.int32)) % vocabulary) % vocabulary
    target_V = jnp.zeros(vocabulary, bool).at[targets_T].set(True)
    free_V = ~target_V[order_V]
    room = count - jnp.sum(target_V, dtype=jnp.int32)
    chosen_V = free_V & (jnp.cumsum(free_V, dtype=jnp.int32) <= room)
    member_V = target_V | jnp.zeros(vocabulary, bool).at[order_V].set(chosen_V, unique_indices=True)
    place_V = jnp.cumsum(member_V, dtype=jnp.int32) - 1
    ids_C = jnp.searchsorted(
        place_V, jnp.arange(count, dtype=jnp.int32), method="scan_unrolled"
    ).astype(jnp.int32)
    return jnp.where((jnp.arange(count) == 0) & (room < 0), -1, ids_C), place_V


def over_candidates(
    score: Callable[..., tuple[jax.Array, jax.Array]],
    rows_of_lanes: Sequence[jax.Array],
    chosen: Sequence[tuple[jax.Array, jax.Array]],
    x_BTD: jax.Array,
    targets_NBT: jax.Array,
    weights_NBT: jax.Array,
    *beside_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return (weighted sum, loss of every token) where each lane has its own :func:`candidates`,
    ``chosen``.

    ``score`` is :func:`jspeed.model.losses.cross_entropy` of a head. It is called for each lane
    with its candidates' rows, the targets' places among them, and what ``beside_BT`` have of it. A
    target that is no candidate (a few of those further ahead) counts nothing; where a lane has more
    next tokens than candidates the sum is NaN.
    """
    parts = []
    for lane, (ids_C, place_V) in enumerate(chosen):
        targets_N1T, weights_N1T = targets_NBT[:, lane, None], weights_NBT[:, lane, None]
        places_N1T = place_V[targets_N1T].clip(0)
        weights_N1T *= jnp.where(ids_C[0] < 0, jnp.nan, ids_C[places_N1T] == targets_N1T)
        arrays_1T = (places_N1T, weights_N1T, *(a_BT[lane, None] for a_BT in beside_BT))
        parts.append(score(rows_of_lanes[lane], x_BTD[lane, None], *arrays_1T))
    totals, losses = zip(*parts, strict=True)
    return jnp.sum(jnp.stack(totals)), jnp.concatenate(losses)
