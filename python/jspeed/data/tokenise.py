"""Documents become token shards and their manifest: the whole folder appears at once, or not at all.

A shard is 256 little-endian int32 (20240520, 1, number of tokens, zeros) and then the tokens as little-endian
uint16, as in llm.c and modded-nanogpt. Every document begins with the tokenizer's start id; a document may go
on in the next shard. The same input gives the same bytes.
"""

import errno
import fcntl
import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jspeed.data import sources
from jspeed.errors import BadInput, writable_folder
from jspeed.files import cache_folder, sha256_of, write_whole

FORMAT_VERSION = 1
MAGIC, SHARD_VERSION, HEADER_BYTES = 20240520, 1, 1024
SHARD_TOKENS = 100_000_000  # as FineWeb's shards
SUMMED = ("bytes", "tokens", "documents")  # what the manifest adds up for each split
BATCH_BYTES = 4 << 20  # of text: enough to keep every core busy, little enough to hold

Progress = Callable[[int, int | None], None]
"""Is called with the documents done and, where known, the documents in all."""


@dataclass(frozen=True)
class Tokenizer:
    """``encode`` maps documents to their token ids (uint16), each led by ``bos_id``."""

    name: str
    vocab_size: int
    bos_id: int
    encode: Callable[[Sequence[bytes]], list[NDArray[np.uint16]]]


def bytes_tokenizer() -> Tokenizer:
    """Return the tokenizer whose ids 0-255 are bytes and whose document start is 256."""

    def encode(documents: Sequence[bytes]) -> list[NDArray[np.uint16]]:
        return [_led_by(256, np.frombuffer(document, np.uint8)) for document in documents]

    return Tokenizer("bytes", 257, 256, encode)


def gpt2_tokenizer() -> Tokenizer:
    """Return GPT-2's byte-pair encoding with document start 50256; text never encodes to a special token.

    Raises BadInput when tiktoken can neither find nor fetch the vocabulary.
    """
    import tiktoken

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:
        raise BadInput(
            f"tiktoken cannot fetch GPT-2's vocabulary ({type(error).__name__}); connect to the network,"
            " set TIKTOKEN_CACHE_DIR to a folder that holds it, or use --tokenizer bytes"
        ) from None
    threads = os.cpu_count() or 1

    def encode(documents: Sequence[bytes]) -> list[NDArray[np.uint16]]:
        texts = [document.decode() for document in documents]
        return [_led_by(50256, ids) for ids in encoding.encode_ordinary_batch(texts, num_threads=threads)]

    return Tokenizer("gpt2", 50257, 50256, encode)


def _led_by(bos_id: int, ids: Sequence[int] | NDArray[np.uint8]) -> NDArray[np.uint16]:
    tokens = np.empty(len(ids) + 1, dtype="<u2")
    tokens[0] = bos_id
    tokens[1:] = ids
    return tokens


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"gpt2": gpt2_tokenizer, "bytes": bytes_tokenizer}


def stdlib_folder() -> Path:
    """Return where this Python's standard library is kept as tokens, prepared or not."""
    return cache_folder() / "data" / f"stdlib-{sources.stdlib_key(sources.stdlib_files())}"


def prepare_stdlib(out: Path | None = None, progress: Progress | None = None) -> Path:
    """Return a folder with this Python's standard library as byte tokens, preparing it if it is not there.

    ``out`` is :func:`stdlib_folder` unless given. Raises BadInput when ``out`` holds anything else.
    """
    files = sources.stdlib_files()
    source = {
        "kind": "stdlib",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "key": sources.stdlib_key(files),
    }
    folder = stdlib_folder() if out is None else out

    def ready() -> bool:
        manifest = complete_manifest(folder)
        return manifest is not None and manifest.get("source") == source

    if not ready():
        documents = sources.stdlib_documents(files)
        try:
            tokenizer = bytes_tokenizer()
            write_folder(folder, documents, tokenizer, source, "stdlib", len(files), progress=progress)
        except BadInput:
            if not ready():  # else another process finished it just now
                raise
    return folder


def prepare_text(
    inputs: Sequence[Path],
    out: Path,
    tokenizer: str = "gpt2",
    val_fraction: float | None = None,
    progress: Progress | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> Path:
    """Tokenise text files (:func:`jspeed.data.sources.text_documents`) into ``out`` and return it.

    The text is read twice: once to check all of it and to split it (by
    :func:`jspeed.data.sources.text_threshold`), once to tokenise it. Raises BadInput for whatever cannot
    work, and then leaves nothing behind.
    """
    if val_fraction is not None and not 0 < val_fraction < 1:
        raise BadInput(f"--val-fraction is {val_fraction}; expected a number between 0 and 1")
    files = sources.text_files(inputs)
    check_vacant(out)
    chosen = TOKENIZERS[tokenizer]()
    hashes = sources.text_hashes(files)
    threshold = sources.text_threshold(hashes, val_fraction)
    source = {"kind": "text", "val_fraction": val_fraction} | sources.text_fingerprint(files)

    def documents() -> Iterator[tuple[str, bytes]]:
        seen = 0
        for _, path in files:
            for document in sources.text_documents(path):
                value = sources.hash_of(document)
                if seen >= len(hashes) or value != hashes[seen]:
                    raise BadInput(f"input {path} changed while it was read; try again when it is whole")
                seen += 1
                yield "val" if value <= threshold else "train", document

    # A name that itself says train or val would make every shard match a search for that split.
    plain = re.fullmatch(r"(?!.*_(train|val)(_|$))[A-Za-z0-9][A-Za-z0-9._-]*", out.name)
    stem = out.name if plain else "text"
    write_folder(out, documents(), chosen, source, stem, len(hashes), shard_tokens, progress)
    return out


def complete_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of ``folder`` if every shard it lists is there with its size, else None."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        whole = all((folder / file["name"]).stat().st_size == file["bytes"] for file in manifest["files"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return manifest if whole else None


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
    documents: Iterable[tuple[str, bytes]],
    tokenizer: Tokenizer,
    source: dict[str, Any],
    stem: str,
    total: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write (split, document) pairs as shards of at most ``shard_tokens`` tokens and return the manifest.

    Shards are ``<stem>_<train|val>_<index>.bin``, and ``manifest.json`` lies beside them. ``out`` must be
    vacant and appears only when whole; if an equal preparation gets there first, its result stands. Raises
    BadInput when ``out`` is not vacant or cannot be written, or a split would be empty.
    """
    check_vacant(out)
    with _staged(out) as folder:
        shards: dict[str, list[dict[str, Any]]] = {"train": [], "val": []}
        done = 0
        for batch in _batches(documents):
            encoded = tokenizer.encode([document for _, document in batch])
            for split in shards:
                chosen = [tokens for (its, _), tokens in zip(batch, encoded, strict=True) if its == split]
                if chosen:
                    prefix = folder / f"{stem}_{split}"
                    _extend(prefix, shards[split], np.concatenate(chosen), shard_tokens, tokenizer.bos_id)
            done += len(batch)
            if progress:
                progress(done, total)
        for split, written in shards.items():
            if not written:
                raise BadInput(f"the {split} split of {out} would have no documents; give more documents")
        files = [_sealed(folder, split, shard) for split, written in shards.items() for shard in written]
        manifest = {
            "format_version": FORMAT_VERSION,
            "tokenizer": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "splits": {
                split: {"files": len(written)}
                | {what: sum(file[what] for file in files if file["split"] == split) for what in SUMMED}
                for split, written in shards.items()
            },
            "files": files,
            "source": source,
        }
        write_whole(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    return manifest


def _batches(documents: Iterable[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    batch, size = [], 0
    for split, document in documents:
        batch.append((split, document))
        size += len(document)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _extend(prefix: Path, shards: list[dict[str, Any]], tokens: NDArray[np.uint16], limit: int, bos_id: int) -> None:
    """Append tokens to a split's last shard, beginning others as they fill up."""
    while tokens.size:
        if not shards or shards[-1]["tokens"] == limit:
            first = 0 if prefix.name.endswith("_val") else 1  # FineWeb's numbers
            path = prefix.with_name(f"{prefix.name}_{first + len(shards):06d}.bin")
            path.write_bytes(bytes(HEADER_BYTES))  # not a shard until it is sealed
            shards.append({"name": path.name, "tokens": 0, "documents": 0})
        shard = shards[-1]
        piece, tokens = np.split(tokens, [limit - shard["tokens"]])
        with open(prefix.with_name(shard["name"]), "ab") as file:
            file.write(piece.astype("<u2", copy=False).tobytes())
        shard["tokens"] += piece.size
        shard["documents"] += int(np.count_nonzero(piece == bos_id))  # those that begin in it


def _sealed(folder: Path, split: str, shard: dict[str, Any]) -> dict[str, Any]:
    """Write the header of a shard now that its length is known, and return its record in the manifest."""
    path = folder / shard["name"]
    with open(path, "r+b") as file:
        file.write(np.array([MAGIC, SHARD_VERSION, shard["tokens"]], dtype="<i4").tobytes())
        file.flush()
        os.fsync(file.fileno())
    record = {"name": path.name, "split": split, "bytes": path.stat().st_size, "sha256": sha256_of(path)}
    return record | {what: shard[what] for what in ("tokens", "documents")}


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
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
            for leftover in out.parent.iterdir():
                if leftover.name.startswith(f".{out.name}.") and leftover.name.endswith(".partial"):
                    _remove_unless_locked(leftover)
            staging.mkdir()
            lock = _lock(staging)
        yield staging
        _publish(staging, out)
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


def _publish(staging: Path, out: Path) -> None:
    try:
        os.rename(staging, out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        # Somebody else was first. Equal manifests hold equal hashes, so an equal one is as good as ours.
        if complete_manifest(out) != complete_manifest(staging):
            raise BadInput(f"output folder {out} was filled by something else; choose another") from None


def _lock(folder: Path, wait: bool = False) -> int | None:
    """Return an open, locked handle of ``folder``, or None if it is locked already or cannot be."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(handle)
        return None
    return handle


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = _lock(folder, wait=True)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _remove_unless_locked(folder: Path) -> None:
    with suppress(OSError):
        if (handle := _lock(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)
