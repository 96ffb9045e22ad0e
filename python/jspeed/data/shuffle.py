"""The random orders that the token loader can take tokens in."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Shuffle:
    """A seeded order of blocks or windows, another one for every epoch; it needs ``align=None``.

    ``unit="block"`` takes all whole blocks of all shards: block ``i`` of a shard is its tokens
    ``[i * block_tokens, (i + 1) * block_tokens)`` and needs one more token after it.
    ``block_tokens`` must be a multiple of the ``lane_len`` of every stage; None takes the smallest
    such number.

    ``unit="window"`` is nanoGPT's sampling: every lane starts at any token of any shard that has
    ``lane_len`` more after it in its shard, drawn with replacement. It needs ``epochs=None``.
    """

    seed: int = 0
    block_tokens: int | None = None
    unit: Literal["block", "window"] = "block"
