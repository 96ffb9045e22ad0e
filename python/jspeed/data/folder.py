"""Write a folder of token shards and its manifest atomically.

Shards (:func:`jspeed.data.open_shards`) hold uint16, or uint32 where that is what tokens are, as in llm.c. A document
may go on in the next shard. The same tokens give the same bytes.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jspeed.data.find_shards import HEADER_BYTES, header
from jspeed.data.manifest import SPLITS, complete_manifest, manifest_of
from jspeed.errors import BadInput, writable_folder
from jspeed.files import sha256_of, write_whole

SHARD_TOKENS = 100_000_000  # as FineWeb's shards


class Batch(NamedTuple):
    """Documents of one split: their tokens (uint16 or uint32) joined, marks included; and the tokens of each."""

    split: str
    tokens: NDArray[np.unsignedinteger]
    lengths: NDArray[np.int64]


def check_vacant(out: Path) -> None:
    """Raise BadInput unless ``out`` is absent or an empty folder that can be replaced."""
    try:
        if out.exists() and not out.is_dir():
            raise BadInput(f"output {out} is a file; expected a folder that is absent or empty")
        if out.is_dir() and any(out.iterdir()):
            raise BadInput(f"output folder {out} is there and not empty; remove it or choose another --out")
        if out.is_mount():
            raise BadInput(f"output folder {out} is a mount point, not replaceable; choose a folder in it")
    except OSError as error:
        raise BadInput(f"output folder {out} cannot be used ({error.strerror}); choose another") from None


def write_folder(
    out: Path,
    batches: Iterable[Batch],
    facts: dict[str, Any],
    name: str,
    shard_tokens: int = SHARD_TOKENS,
    beside: Mapping[str, bytes] | None = None,
) -> dict[str, Any]:
    """Write batches as shards of at most ``shard_tokens`` tokens and return the manifest.

    Shards are ``NAME_<train|val>_<index>.bin``, and ``manifest.json``, with ``facts`` in it, lies beside them, as do
    files of the names and contents of ``beside``. ``out``
    must be vacant and appears only when whole; if an equal preparation gets there first, its result stands. Raises
    BadInput when ``out`` is not vacant or cannot be written, or a split would be empty.
    """
    check_vacant(out)
    # A name that itself says train or val would make every shard match a search for that split.
    plain = re.fullmatch(r"(?!.*_(train|val)(_|$))[A-Za-z0-9][A-Za-z0-9._-]*", name)
    stem = name if plain else "text"
    with staged(out) as folder:
        shards: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
        for split, tokens, lengths in batches:
            _extend(folder / f"{stem}_{split}", shards[split], tokens, lengths, shard_tokens)
        for split, written in shards.items():
            if not written:
                raise BadInput(f"the {split} split of {out} would have no documents; give more documents")
        files = [_sealed(folder, split, shard) for split, written in shards.items() for shard in written]
        for other, content in (beside or {}).items():
            write_whole(folder / other, content)
        manifest = manifest_of(files, facts)
        write_whole(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    return manifest


def _extend(
    prefix: Path,
    shards: list[dict[str, Any]],
    tokens: NDArray[np.unsignedinteger],
    lengths: NDArray[np.int64],
    limit: int,
) -> None:
    """Append tokens to a split's last shard, beginning others as they fill up."""
    starts = np.cumsum(lengths) - lengths
    while tokens.size:
        if not shards or shards[-1]["tokens"] == limit:
            first = 0 if prefix.name.endswith("_val") else 1  # FineWeb's numbers
            path = prefix.with_name(f"{prefix.name}_{first + len(shards):06d}.bin")
            path.write_bytes(bytes(HEADER_BYTES))  # not a shard until it is sealed
            shards.append({"name": path.name, "tokens": 0, "documents": 0, "wide": tokens.dtype.itemsize == 4})
        shard = shards[-1]
        piece, tokens = np.split(tokens, [limit - shard["tokens"]])
        with open(prefix.with_name(shard["name"]), "ab") as file:
            file.write(piece.astype("<u4" if shard["wide"] else "<u2", copy=False).tobytes())
        shard["tokens"] += piece.size
        begun = int(np.searchsorted(starts, piece.size))
        shard["documents"] += begun  # those that begin in it
        starts = starts[begun:] - piece.size


def _sealed(folder: Path, split: str, shard: dict[str, Any]) -> dict[str, Any]:
    """Write the header of a shard now that its length is known, and return its record in the manifest."""
    path = folder / shard["name"]
    with open(path, "r+b") as file:
        file.write(header(shard["tokens"], shard["wide"]))
        file.flush()
        os.fsync(file.fileno())
    record = {"name": path.name, "split": split, "bytes": path.stat().st_size, "sha256": sha256_of(path)}
    return record | {what: shard[what] for what in ("tokens", "documents")}


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield a hidden folder beside ``out`` that becomes ``out`` when the block ends, or goes if it fails.

    A killed process leaves its own behind but loses its lock on it, and the next one for the same ``out``
    removes what nobody has locked. The lock on the parent keeps that one away from a folder just made.
    """
    out = Path(os.path.realpath(out))
    made = [folder for folder in out.parents if not folder.exists()]
    staging = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    lock = None
    try:
        writable_folder(out.parent, "the output folder's parent")
        with _locked(out.parent):
            remove_leftovers(out, ".partial")
            staging.mkdir()
            lock = lock_folder(staging)
        yield staging
        publish(staging, out)
    except OSError as error:
        raise BadInput(f"output folder {out} cannot be written ({error.strerror}); choose another") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        if not out.exists():
            for folder in made:
                with suppress(OSError):
                    folder.rmdir()


def publish(staging: Path, out: Path) -> None:
    """Rename ``staging`` to ``out``. Raises BadInput when something else, with another manifest, is there by now."""
    try:
        os.rename(staging, out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        # Somebody else was first. Equal manifests hold equal hashes, so an equal one is as good as ours.
        if complete_manifest(out) != complete_manifest(staging):
            raise BadInput(f"output folder {out} was filled by something else; choose another") from None


def remove_leftovers(out: Path, ending: str, keep: str = "") -> None:
    """Remove hidden folders for ``out`` that end in ``ending``, unless a process has locked them or it is ``keep``."""
    for leftover in out.parent.iterdir():
        if leftover.name.startswith(f".{out.name}.") and leftover.name.endswith(ending) and leftover.name != keep:
            with suppress(OSError):
                if (handle := lock_folder(leftover)) is not None:
                    shutil.rmtree(leftover, ignore_errors=True)
                    os.close(handle)


def lock_folder(folder: Path, wait: bool = False) -> int | None:
    """Return an open, locked handle of ``folder``, or None if it is locked already or cannot be."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(handle)
        return None
    return handle


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = lock_folder(folder, wait=True)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
