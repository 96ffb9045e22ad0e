"""Write a folder of token shards and its manifest atomically.

Shards (:func:`jspeed.data.open_shards`) hold uint16, or uint32 where that is what tokens are, as in
llm.c. Documents may span shards. Output is deterministic.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jspeed._dataloader import HEADER_BYTES, header
from jspeed.base.files import sha256_of, sync, write_whole
from jspeed.corpus.shards.output_folder import atomic_folder, require_empty
from jspeed.data.manifest import (
    SPLITS,
    Description,
    Shard,
    Split,
    complete_manifest,
    manifest_of,
    matches,
)
from jspeed.errors import BadInput

SHARD_TOKENS = 100_000_000  # as FineWeb's shards
# tokens that a user may ask for; a header counts them as int32
LEAST_SHARD, MOST_SHARD = 1000, 2**31 - 1
MOST_SHARDS = 999_999  # of a split, in whose names six digits are their order
# of ids stored as uint16, 65,535 kept free as in llm.c; larger ones use uint32
MAX_UINT16_VOCAB = 65_535


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return how shards hold ids below ``vocab_size``: little-endian uint16 or uint32."""
    return np.dtype("<u2" if vocab_size <= MAX_UINT16_VOCAB else "<u4")


class EncodedDocuments(NamedTuple):
    """Documents of one split: their tokens (uint16 or uint32) joined, separators included; and the
    tokens of each."""

    split: Split
    tokens: NDArray[np.unsignedinteger]
    lengths: NDArray[np.int64]

    @classmethod
    def one(cls, split: Split, tokens: NDArray[np.unsignedinteger]) -> "EncodedDocuments":
        """Return a single document."""
        return cls(split, tokens, np.array([tokens.size]))


def write_folder(
    out: Path,
    batches: Iterable[EncodedDocuments],
    description: Description,
    name: str,
    shard_tokens: int = SHARD_TOKENS,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write documents as shards of at most ``shard_tokens`` tokens.

    Shards are ``NAME_<train|val>_<index>.bin``; ``manifest.json``, with ``description`` in it, and
    ``extra_files`` (name -> content) are written beside them. Nothing is done when :func:`is_made`
    says so, and if an equal preparation gets there first, its result stands; ``out`` appears only
    when complete. Raises BadInput as :func:`is_made` does, when ``out`` cannot be written, or a
    split would be empty, and NoRoom on a full disk.
    """
    if is_made(out, description):
        return
    # A name that itself says train or val would make every shard match a search for that split.
    plain = re.fullmatch(r"(?!.*_(train|val)(_|$))[A-Za-z0-9][A-Za-z0-9._-]*", name)
    stem = name if plain else "text"
    # Equal manifests hold equal hashes, so an equal folder is as good as ours.
    with atomic_folder(
        out, lambda ours, theirs: complete_manifest(ours) == complete_manifest(theirs)
    ) as folder:
        shards: dict[Split, list[_OpenShard]] = {split: [] for split in SPLITS}
        for split, tokens, lengths in batches:
            _extend(folder / f"{stem}_{split}", shards[split], tokens, lengths, shard_tokens)
        for split, written in shards.items():
            if not written:
                raise BadInput(
                    f"the {split} split of {out} would have no documents; give more documents"
                )
        files = [_sealed(split, shard) for split, written in shards.items() for shard in written]
        for extra, content in (extra_files or {}).items():
            write_whole(folder / extra, content)
        write_whole(
            folder / "manifest.json", json.dumps(manifest_of(files, description), indent=1) + "\n"
        )


def is_made(out: Path, description: Description) -> bool:
    """Whether ``out`` is complete as ``description`` says. Raises BadInput unless it is, or is
    absent or empty."""
    try:
        require_empty(out)
    except BadInput:
        if matches(out, description):
            return True
        raise
    return False


@dataclass
class _OpenShard:
    """A shard that is being written; ``documents`` are those that begin in it."""

    path: Path
    wide: bool
    tokens: int = 0
    documents: int = 0


def _extend(
    prefix: Path,
    shards: list[_OpenShard],
    tokens: NDArray[np.unsignedinteger],
    lengths: NDArray[np.int64],
    limit: int,
) -> None:
    """Append tokens to a split's last shard, starting new ones when full."""
    starts = np.cumsum(lengths) - lengths
    while tokens.size:
        if not shards or shards[-1].tokens == limit:
            first = 0 if prefix.name.endswith("_val") else 1  # FineWeb's numbers
            if len(shards) == MOST_SHARDS:
                raise BadInput(
                    f"shards of {limit:,} tokens are more than {MOST_SHARDS:,} files; give larger"
                    " ones"
                )
            path = prefix.with_name(f"{prefix.name}_{first + len(shards):06d}.bin")
            path.write_bytes(bytes(HEADER_BYTES))  # not a shard until it is sealed
            shards.append(_OpenShard(path, tokens.dtype.itemsize == 4))
        shard = shards[-1]
        piece, tokens = np.split(tokens, [limit - shard.tokens])
        with open(shard.path, "ab") as file:
            file.write(piece.astype("<u4" if shard.wide else "<u2", copy=False).tobytes())
        shard.tokens += piece.size
        begun = int(np.searchsorted(starts, piece.size))
        shard.documents += begun
        starts = starts[begun:] - piece.size


def _sealed(split: Split, shard: _OpenShard) -> Shard:
    """Write the header of a shard now that its length is known, and return its record in the
    manifest."""
    path = shard.path
    with open(path, "r+b") as file:
        file.write(header(shard.tokens, shard.wide))
        file.flush()
        sync(file)
    return {
        "name": path.name,
        "split": split,
        "bytes": path.stat().st_size,
        "sha256": sha256_of(path),
        "tokens": shard.tokens,
        "documents": shard.documents,
    }
