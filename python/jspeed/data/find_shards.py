"""Find and open shards: by a pattern, a list of files, or the split of a data folder."""

import glob
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from jspeed._dataloader import HEADER_BYTES, Shards
from jspeed.base.files import what_instead
from jspeed.data.errors import ShardError, ShardFormatError
from jspeed.data.manifest import Split, split_of
from jspeed.errors import BadInput

_REMEDY = "make some with `jspeed prepare text FILES --out DIR`"
_NAMES = {"train": "training", "val": "validation"}


def open_shards(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Shards:
    """Validate token shards and return them sorted by file name.

    A shard is a header of 256 little-endian int32 (magic 20240520, version 1, number of tokens),
    then that many uint16 token ids. Magic 20240801 and version 7 mean uint32 ids; one set has one
    kind. Every header and file size is checked here; the tokens are not read.

    Args:
        files: A path, a glob pattern such as ``"dir/fineweb_train_*.bin"``, or any number of paths.

    Raises:
        ShardError: No file matches the pattern, or a file cannot be read.
        ShardFormatError: A file is not a valid shard.
        BadInput: An empty list was given, or shards of both kinds.
    """
    if not isinstance(files, str | os.PathLike):
        return _open([os.fspath(path) for path in files])
    pattern = os.fspath(files)
    if os.path.isfile(pattern) or not glob.has_magic(pattern):
        return _open([pattern])
    paths = glob.glob(pattern)
    if not paths:
        raise ShardError(
            f"no shard matches the pattern {pattern}, at least one was expected; {_REMEDY}"
        )
    return _open(paths)


def _open(paths: list[str]) -> Shards:
    """Open shards; where one is none, say what it is instead."""
    try:
        return Shards(paths)
    except ShardError as error:
        for path in paths:
            if str(path) in str(error) and (what := what_instead(path)):
                raise type(error)(f"{error} ({what})") from None
        raise


def find_split(folder: str | os.PathLike[str], split: Split) -> Shards:
    """Open the shards of one split of a data folder: the ``.bin`` files of which :func:`split_of`
    says so.

    Raises:
        BadInput: The folder is missing, or has no shard at all, or none of this split.
        ShardError: As :func:`open_shards`; and for a folder that cannot be read.
    """
    folder = Path(folder)
    if split not in _NAMES:
        raise BadInput(f'split should be "train" or "val" but is "{split}"; choose one of the two')
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise BadInput(
            f"the data folder {folder} {what}, a folder of .bin shards was expected; {_REMEDY}"
        )
    convert = f"convert them with `jspeed prepare tokens {folder} --out DIR`"
    try:
        files = sorted(folder.iterdir())
    except OSError as error:
        raise ShardError(
            f"the data folder {folder} cannot be read ({error.strerror}); {_REMEDY}"
        ) from None
    names = [path for path in files if path.suffix == ".bin"]
    if not names:
        arrays = any(path.suffix == ".npy" and split_of(path) for path in files)
        remedy = f"build-nanogpt's .npy files of tokens are none; {convert}" if arrays else _REMEDY
        raise BadInput(f"the data folder {folder} has no .bin shard in it; {remedy}")
    paths = [path for path in names if split_of(path) == split]
    if not paths:
        raise BadInput(
            f"the data folder {folder} has {len(names)} .bin file(s) but no {_NAMES[split]} shards,"
            f" which are named NAME_{split}_000000.bin or NAME_{split}.bin; {_REMEDY}"
        )
    try:
        return open_shards(paths)
    except ShardFormatError as error:
        if f" {folder / split}.bin " not in str(error):
            raise
        raise ShardFormatError(
            f"{error}; nanoGPT's train.bin and val.bin have no header: {convert}"
        ) from None


def map_tokens(path: str | os.PathLike[str], dtype: DTypeLike = "<u2") -> NDArray[Any]:
    """Return the tokens of a shard, ``[tokens]``, mapped read-only; ``dtype`` is FineWeb's
    little-endian uint16.

    Open it with :func:`open_shards` first, which checks it. Unlike the loader, this has no guard
    against a file that is truncated later: touching what is gone ends the process by SIGBUS.
    """
    return np.memmap(path, dtype, "r", HEADER_BYTES)
