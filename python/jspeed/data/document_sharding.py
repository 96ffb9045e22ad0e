"""Divide in-memory documents among processes. (For token shards, the loader assigns lanes: rows of
a batch.)"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jspeed.errors import BadInput


def shard(
    *data: Sequence[Any] | np.ndarray,
    rank: int = 0,
    n: int = 1,
    shuffle: bool = False,
    seed: int | None = None,
    drop_last: bool = False,
) -> Any:
    """Return elements ``rank``, ``rank + n``, ``rank + 2n``, ... of ``data``, of the type it came
    in.

    The shares of all ``n`` ranks are disjoint, together they are everything, and their lengths
    differ by at most one. ``shuffle`` first puts the elements in the order that ``seed`` (default:
    0) gives, the same on every rank; ``drop_last`` leaves out the last ``len % n``, so that all
    shares are equally long. Several sequences of one length are shared alike and returned as a
    tuple. Lists, tuples and NumPy arrays (along the first axis) stay what they are; ``rank`` and
    ``n`` are those of ``jax.process_index()`` and ``jax.process_count()``; by default there is one
    process.

    Raises:
        BadInput: A rank outside of ``[0, n)``, no data, sequences of several lengths, or another
            type; a seed without ``shuffle``, or a negative one.
    """
    _check(data, rank, n, shuffle, seed)
    lengths = [len(one) for one in data]
    if len(set(lengths)) > 1:
        raise BadInput(
            f"sequences of {', '.join(map(str, lengths))} elements have different lengths; give"
            " sequences of one length"
        )
    count = lengths[0] - lengths[0] % n if drop_last else lengths[0]
    order = (
        np.random.default_rng(seed or 0).permutation(lengths[0])
        if shuffle
        else np.arange(lengths[0])
    )
    mine = order[rank:count:n]

    def share(one: Any) -> Any:
        if isinstance(one, np.ndarray):
            return one[mine]
        return (tuple if isinstance(one, tuple) else list)(one[i] for i in mine)

    return tuple(map(share, data)) if len(data) > 1 else share(data[0])


def _check(data: Sequence[Any], rank: int, n: int, shuffle: bool, seed: int | None) -> None:
    """Raise BadInput for arguments of :func:`shard` that say nothing, or no sequence."""
    if n < 1 or not 0 <= rank < n:
        raise BadInput(f"rank {rank} of {n} processes; give a rank from 0 to n - 1")
    if seed is not None and not shuffle:
        raise BadInput(
            f"seed={seed} without shuffle=True would have no effect; give both, or leave seed out"
        )
    if seed is not None and seed < 0:
        raise BadInput(f"seed={seed} is negative; give 0 or more")
    if not data:
        raise BadInput("no sequence was given; give one or more")
    for one in data:
        if (
            not isinstance(one, (list, tuple, np.ndarray))
            or isinstance(one, np.ndarray)
            and not one.ndim
        ):
            raise BadInput(
                f"cannot shard a {type(one).__name__}; give a list, a tuple or a NumPy array"
            )
