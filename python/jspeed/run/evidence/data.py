"""The data fields of run.json: hashes of the tokens of a run, so that others can check that theirs are the same."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jspeed.cores import cores
from jspeed.data import Shards
from jspeed.data.find_shards import HEADER_BYTES
from jspeed.errors import BadInput
from jspeed.files import sha256_of
from jspeed.record.schema import Evidence, Holdout
from jspeed.run import evaluate
from jspeed.run.evidence.validation_overlap import TokenRange, overlap
from jspeed.run.setup import Setup


def of_data(setup: Setup, hashed: bool) -> Evidence:
    """Return the fields under ``data`` that identify the tokens; hashes are null unless ``hashed``.

    Hashes of shards that can no longer be read are null, so that the record is still written.
    """
    position = setup.loader.state_dict()
    ranges: list[TokenRange] = []
    hashes: list[str | None] = []
    val_sha256 = None
    with suppress(OSError, BadInput):
        ranges = trained_on(setup.shards, position)
        hashes = [None] * len(ranges)
        if hashed:
            with ThreadPoolExecutor(min(16, cores())) as pool:
                hashes = list(pool.map(lambda part: sha256_of(part.path), ranges))
            val_sha256 = sha256_of_ids(evaluated(setup), setup)
    return {
        "val_sha256": val_sha256,
        "train_shards": [
            {"name": part.path.name, "sha256": digest, "first": part.first, "end": part.end}
            for part, digest in zip(ranges, hashes, strict=True)
        ],
        "position": {name: position[name] for name in ("step", "epoch", "shard", "offset", "shuffle", "config_hash")},
    }


def evaluated(setup: Setup) -> NDArray[np.unsignedinteger]:
    """Return the ids that the validation loss is a mean over and the one after them, whatever the rows: ``[N + 1]``."""
    return ids_of(evaluate.read_rows(setup.val_shards, setup.recipe))


def ids_of(rows: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Return the ids in evaluation ``rows`` one after the other, and the one after them: ``[N + 1]``."""
    return np.append(rows[:, :-1].reshape(-1), rows[-1, -1])


def sha256_of_ids(ids: NDArray[np.unsignedinteger], setup: Setup) -> str:
    """Return the SHA-256 of evaluated ids, little-endian in the recipe's dtype."""
    return hashlib.sha256(ids.astype(setup.recipe.data.dtype.newbyteorder("<")).tobytes()).hexdigest()


def of_holdout(setup: Setup, holdout: evaluate.Holdout, params: Any) -> Holdout:
    """Evaluate the track's second range of the validation tokens by the program of the first; every process must."""
    first, rows = holdout
    validation = evaluate.to_devices(rows, setup.program.eval_rows, setup.recipe, setup.mesh)
    validation.impossible = setup.validation.impossible
    loss = evaluate.validation_loss(setup.program.evaluate, params, validation)
    sha256 = sha256_of_ids(ids_of(rows), setup)
    return {"first": first, "tokens": validation.tokens, "sha256": sha256, "val_loss": loss}


def overlap_of_run(setup: Setup) -> float:
    """Return the share of the validation tokens that occur in the tokens trained on (:func:`overlap`)."""
    ranges = trained_on(setup.shards, setup.loader.state_dict())
    return overlap(ranges, setup.shards.dtype, evaluated(setup))


def trained_on(shards: Shards, position: dict[str, Any]) -> list[TokenRange]:
    """Return the tokens that a stream at ``position`` can have read.

    A stream in order has read every shard up to the present one and that one up to its offset. After a whole epoch,
    or in a shuffled order, any token may have been read.
    """
    sizes = [(path.stat().st_size - HEADER_BYTES) // shards.dtype.itemsize for path in shards.paths]
    whole = [TokenRange(path, 0, size) for path, size in zip(shards.paths, sizes, strict=True)]
    if position["epoch"] or position["shuffle"] != "none":
        return whole
    before, present = whole[: position["shard"]], whole[position["shard"]]
    end = min(position["offset"] + 1, present.end)  # the last input's target
    return [*before, present._replace(end=end)] if position["step"] else []
