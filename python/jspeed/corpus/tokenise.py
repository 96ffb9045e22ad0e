"""From sources to a folder of shards: the standard library as bytes, any text files as tokens."""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jspeed.corpus import parallel_tokenise, sources, split
from jspeed.corpus.chunks import PIECE_BYTES, pieces
from jspeed.corpus.process_pool import MOST as MOST_PROCESSES
from jspeed.corpus.tokenizers import TOKENIZER_FILE, Tokenizer, bytes_tokenizer, named_tokenizer
from jspeed.data.folder import SHARD_TOKENS, Batch, check_vacant, write_folder
from jspeed.data.manifest import FORMAT_VERSION, holds
from jspeed.errors import BadInput
from jspeed.files import cache_folder

MARKS = ("before", "after", "none")
WORTH_PROCESSES = 32 << 20  # bytes of input; a process takes half a second to start
ONE_DOCUMENT_TOKENS = 20  # of a single document of fewer, a tenth is not an input and its target
ONE_DOCUMENT_VAL = 0.1  # of a single document's tokens, as in nanoGPT's Shakespeare

Progress = Callable[[int, int | None], None]
"""Is called with what is done (files or bytes) and, where known, what there is in all."""


def stdlib_folder() -> Path:
    """Return where this Python's standard library is kept as tokens, prepared or not."""
    # 2: manifests that say where documents are marked; folders of earlier versions are left where they are.
    return cache_folder() / "data" / f"stdlib-2-{sources.stdlib_key(sources.stdlib_files())}"


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
    tokenizer = bytes_tokenizer()
    head = facts(tokenizer, "before", source)
    if not holds(folder, head):
        documents = counted(sources.stdlib_documents(files), len(files), progress)
        try:
            write_folder(folder, encoded(documents, tokenizer), head, "stdlib")
        except BadInput:
            if not holds(folder, head):  # else another process finished it just now
                raise
    return folder


def prepare_text(
    inputs: Sequence[Path],
    out: Path,
    tokenizer: str = "gpt2",
    val_fraction: float | None = None,
    seed: int = 0,
    val_inputs: Sequence[Path] = (),
    mark: str = "before",
    processes: int | None = None,
    rows: bool = False,
    progress: Progress | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> Path:
    """Tokenise text files (:func:`jspeed.corpus.chunks.documents`) into ``out`` and return it.

    The documents of ``val_inputs`` validate. Without any, those that :func:`jspeed.corpus.split.by_contents` picks do,
    or with ``rows`` those of :func:`jspeed.corpus.split.by_rows`; of a single document, its last tenth, or
    ``val_fraction``. ``processes`` (default: one for each core, or one for little text) change the time alone. What
    an interrupted process has done is taken up by the next for the same inputs and ``out``. Raises BadInput for
    whatever cannot work, and then leaves nothing behind, except when there is no room.
    """
    split.check_choice(val_fraction, seed)
    if processes is not None and not 1 <= processes <= MOST_PROCESSES:
        raise BadInput(f"--processes {processes}: must be from 1 to {MOST_PROCESSES:,}")
    files = [sources.text_files(inputs), sources.text_files(val_inputs) if val_inputs else []]
    chosen = named_tokenizer(tokenizer)
    if mark != "none" and chosen.bos_id is None:
        raise BadInput(f"tokenizer {tokenizer} has no token that marks documents; give --end-of-text none")
    stamps = [sources.text_stamps(its) for its in files]
    prints = [sources.text_fingerprint(its) for its in files]
    source = {"kind": "text", "val_fraction": val_fraction, "seed": seed} | prints[0]
    source |= {"val": prints[1]} if val_inputs else {}
    head = facts(chosen, mark, source)
    if holds(out, head):
        return out
    check_vacant(out)
    identity = json.dumps([FORMAT_VERSION, PIECE_BYTES, chosen.name, mark, prints])
    total = sum(print["bytes"] for print in prints)
    processes = processes or (os.cpu_count() or 1 if total >= WORTH_PROCESSES else 1)
    read = 0

    def used(count: int) -> None:
        nonlocal read
        read += count
        if progress:
            progress(read, total)

    with parallel_tokenise.work_folder(out, hashlib.sha256(identity.encode()).hexdigest()[:12]) as folder:
        paths = [[path for _, path in its] for its in files]
        parts = []
        for name, its in zip(("main", "val"), paths, strict=True):
            (part := folder / name).mkdir(exist_ok=True)
            parallel_tokenise.tokenise(part, pieces(its, used), tokenizer, mark, processes)
            parts.append(part)
        if [sources.text_stamps(its) for its in files] != stamps:
            raise BadInput(f"an input of {out} changed while it was read; try again when it is whole")
        hashes, tokens_of = (
            parallel_tokenise.records(parts[0])["hash"],
            partial(parallel_tokenise.batches, dtype=chosen.dtype),
        )
        if val_inputs:
            none, all = np.zeros(hashes.size, np.bool_), np.ones(parallel_tokenise.records(parts[1]).size, np.bool_)
            batches: Iterator[Batch] = chain(tokens_of(parts[0], none), tokens_of(parts[1], all))
        elif rows:
            validates = split.by_rows(hashes.size, val_fraction or split.VAL_FRACTION, seed)
            batches = tokens_of(parts[0], validates)
        elif hashes.size == 1 and parallel_tokenise.records(parts[0])["tokens"][0] >= ONE_DOCUMENT_TOKENS:
            ((_, only, _),) = tokens_of(parts[0], np.zeros(1, np.bool_))
            batches = _cut(only, val_fraction or ONE_DOCUMENT_VAL, [chosen.bos_id] if mark == "before" else [])
        else:
            batches = tokens_of(parts[0], split.by_contents(hashes, val_fraction, seed))
        beside = {TOKENIZER_FILE: chosen.content} if chosen.content else {}
        write_folder(out, batches, head, out.name, shard_tokens, beside)
    return out


def _cut(tokens: NDArray[np.unsignedinteger], fraction: float, mark: Sequence[int | None]) -> Iterator[Batch]:
    """Cut the only document in two; ``mark`` also leads the second part."""
    cut = round((1 - fraction) * tokens.size)
    for name, piece in (("train", tokens[:cut]), ("val", tokens[cut:])):
        if piece.size:
            whole = piece if name == "train" else np.concatenate([np.array(mark, tokens.dtype), piece])
            yield Batch(name, whole, np.array([whole.size]))


def facts(tokenizer: Tokenizer, mark: str, source: dict[str, Any]) -> dict[str, Any]:
    """Return what a manifest says of the whole folder: ``bos_id`` is None where nothing marks documents."""
    unmarked = {"bos_id": None} if mark == "none" else {}
    return tokenizer.described() | unmarked | {"mark": mark, "source": source}


def encoded(documents: Iterable[tuple[str, bytes]], tokenizer: Tokenizer) -> Iterator[Batch]:
    """Tokenise (split, document) pairs, a few MB at a time, the tokenizer's mark before each."""
    held: dict[str, list[Any]] = {"train": [], "val": []}
    size = 0

    def batches() -> Iterator[Batch]:
        for name, parts in held.items():
            if parts:
                yield Batch(name, np.concatenate(parts), np.array([part.size for part in parts]))
                parts.clear()

    for name, document in documents:
        held[name].append(np.concatenate([np.array([tokenizer.bos_id], tokenizer.dtype), tokenizer.encode(document)]))
        size += len(document)
        if size >= PIECE_BYTES:
            yield from batches()
            size = 0
    yield from batches()


def counted(documents: Iterable[Any], total: int, progress: Progress | None) -> Iterator[Any]:
    """Pass documents on, and say how many there were."""
    for done, document in enumerate(documents, start=1):
        yield document
        if progress:
            progress(done, total)
