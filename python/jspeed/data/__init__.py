"""Token shards and the batches made of them. Never imports jax."""

from jspeed._dataloader import Batch, Shards, TokenLoader, canonical_mask
from jspeed.data.document_sharding import shard
from jspeed.data.errors import (
    DocOverflowError,
    LoaderForkedError,
    ShardError,
    ShardFormatError,
    ShardTruncatedError,
    StateMismatchError,
    TokenRangeError,
)
from jspeed.data.find_shards import find_split, open_shards
from jspeed.data.shuffle import Shuffle
from jspeed.fields import Stage

__all__ = [
    "Batch",
    "DocOverflowError",
    "LoaderForkedError",
    "ShardError",
    "ShardFormatError",
    "ShardTruncatedError",
    "Shards",
    "Shuffle",
    "Stage",
    "StateMismatchError",
    "TokenLoader",
    "TokenRangeError",
    "canonical_mask",
    "find_split",
    "open_shards",
    "shard",
]
