"""Finding shards: a pattern, a list of files, or the split of a data folder."""

import glob
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from jspeed._dataloader import HEADER_BYTES, Shards, header
from jspeed.data.errors import ShardError
from jspeed.errors import BadInput

__all__ = ["HEADER_BYTES", "find_split", "header", "map_tokens", "open_shards"]

_MAKE = "make some with `jspeed prepare text FILES --out DIR`"
_NAMES = {"train": "training", "val": "validation"}


def open_shards(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Shards:
    """Validate token shards and return them sorted by file name.

    A shard is a header of 256 little-endian int32 (magic 20240520, version 1, number of tokens) followed by
    that many uint16 token ids, or the same with magic 20240801, version 7 and uint32 ids; one set has one kind.
    Every header and file size is checked here; the tokens are not read.

    Args:
        files: A path, a glob pattern such as ``"dir/fineweb_train_*.bin"``, or any number of paths.

    Raises:
        ShardError: No file matches the pattern, or a file cannot be read.
        ShardFormatError: A file is not a valid shard.
        BadInput: An empty list was given, or shards of both kinds.
    """
    if not isinstance(files, str | os.PathLike):
        return Shards([os.fspath(path) for path in files])
    pattern = os.fspath(files)
    if os.path.isfile(pattern) or not glob.has_magic(pattern):
        return Shards([pattern])
    paths = glob.glob(pattern)
    if not paths:
        raise ShardError(f"no shard matches the pattern {pattern}, at least one was expected; {_MAKE}")
    return Shards(paths)


def find_split(folder: str | os.PathLike[str], split: Literal["train", "val"]) -> Shards:
    """Open the shards of one split of a data folder: its files ``*_train_*.bin`` or ``*_val_*.bin``.

    Raises:
        BadInput: The folder is missing, or has no shard at all, or none of this split.
        ShardError: As :func:`open_shards`.
    """
    folder = Path(folder)
    if split not in _NAMES:
        raise BadInput(f'split should be "train" or "val" but is "{split}"; choose one of the two')
    if not folder.is_dir():
        found = "is not a folder" if folder.exists() else "does not exist"
        raise BadInput(f"the data folder {folder} {found}, a folder of .bin shards was expected; {_MAKE}")
    names = sorted(path for path in folder.iterdir() if path.suffix == ".bin")
    if not names:
        raise BadInput(f"the data folder {folder} has no .bin shard in it; {_MAKE}")
    paths = [path for path in names if path.match(f"*_{split}_*.bin")]
    if not paths:
        raise BadInput(
            f"the data folder {folder} has {len(names)} .bin file(s) but no {_NAMES[split]} shards, which "
            f"are named NAME_{split}_000000.bin; {_MAKE}"
        )
    return open_shards(paths)


def map_tokens(path: str | os.PathLike[str], dtype: Any = "<u2") -> NDArray[Any]:
    """Return the tokens of a shard, mapped read-only. Open it with :func:`open_shards` first, which checks it."""
    return np.memmap(path, dtype, "r", HEADER_BYTES)
