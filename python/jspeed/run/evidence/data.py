"""What a record states about its data, so that others can check that theirs is the same."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jspeed.data import Shards
from jspeed.data.find_shards import HEADER_BYTES
from jspeed.errors import BadInput
from jspeed.files import sha256_of
from jspeed.record.schema import Evidence
from jspeed.run.evaluate import read_rows
from jspeed.run.evidence.validation_overlap import copied
from jspeed.run.setup import Setup

Reach = tuple[Path, int, int]


def of_data(setup: Setup, hashed: bool) -> Evidence:
    """Return the fields under ``data`` that identify the tokens; hashes are null unless ``hashed``.

    Of shards that are gone there is nothing to say: the record of a run is worth more than their hashes.
    """
    position = setup.loader.state_dict()
    reach: list[Reach] = []
    hashes: list[str | None] = []
    val_sha256 = None
    with suppress(OSError, BadInput):
        found = trained_on(setup.shards, position)
        reach, hashes = found, [None] * len(found)
        if hashed:
            with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
                hashes = list(pool.map(lambda piece: sha256_of(piece[0]), reach))
            ids = evaluated(setup).astype(setup.recipe.data.dtype.newbyteorder("<"))
            val_sha256 = hashlib.sha256(ids.tobytes()).hexdigest()
    return {
        "val_sha256": val_sha256,
        "train_shards": [
            {"name": path.name, "sha256": digest, "first": first, "end": end}
            for (path, first, end), digest in zip(reach, hashes, strict=True)
        ],
        "position": {name: position[name] for name in ("step", "epoch", "shard", "offset", "shuffle", "config_hash")},
    }


def evaluated(setup: Setup) -> NDArray[np.unsignedinteger]:
    """Return the ids that the validation loss is a mean over and the one after them, whatever the rows: ``[N + 1]``."""
    rows = read_rows(setup.val_shards, setup.recipe)
    return np.append(rows[:, :-1].reshape(-1), rows[-1, -1])


def overlap(setup: Setup) -> float:
    """Return the share of the validation tokens that occur in the tokens trained on (``copied``)."""
    reach = trained_on(setup.shards, setup.loader.state_dict())
    return copied(reach, setup.shards.dtype, evaluated(setup))


def trained_on(shards: Shards, position: dict[str, Any]) -> list[Reach]:
    """Return (path, first, end) of the tokens that a stream at ``position`` can have read.

    A stream in order has read every shard up to the present one and that one up to its offset. After a whole epoch,
    or in a shuffled order, any token may have been read.
    """
    sizes = [(path.stat().st_size - HEADER_BYTES) // shards.dtype.itemsize for path in shards.paths]
    whole = [(path, 0, size) for path, size in zip(shards.paths, sizes, strict=True)]
    if position["epoch"] or position["shuffle"] != "none":
        return whole
    before, (path, first, size) = whole[: position["shard"]], whole[position["shard"]]
    end = min(position["offset"] + 1, size)  # the last input's target
    return [*before, (path, first, end)] if position["step"] else []
