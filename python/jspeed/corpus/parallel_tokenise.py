"""Resumable tokenisation in several processes: results on disk in input order, with a journal.

The work folder holds ``tokens`` (uint16, or uint32 of a large vocabulary), ``documents`` (two
uint64 for each: tokens, hash of the contents) and ``journal``: a JSON line for each piece done,
with the documents and tokens so far. Data after its last complete line are discarded.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jspeed.base.files import Lines
from jspeed.corpus.chunks import Piece, documents
from jspeed.corpus.process_pool import in_order
from jspeed.corpus.shards.folder import EncodedDocuments
from jspeed.corpus.shards.output_folder import leftovers, locked, writing_to
from jspeed.corpus.sources import hash_of
from jspeed.corpus.tokenizers import named_tokenizer
from jspeed.data.manifest import SPLITS
from jspeed.errors import BadInput, NoRoom, say

RECORD = np.dtype([("tokens", "<u8"), ("hash", "<u8")])

Separator = Literal["before", "after", "none"]
"""Where the token that separates documents stands: before or after each of them, or nowhere."""

tokenizer_of_process = cache(named_tokenizer)


class Encoded(NamedTuple):
    """The documents of one piece: their tokens joined, as the tokenizer gives them, and a
    ``RECORD`` of each."""

    tokens: NDArray[np.unsignedinteger]
    records: NDArray[Any]


class Done(NamedTuple):
    """A line of the journal: documents and tokens that are done, all pieces so far together."""

    documents: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        return json.dumps(self._asdict())


def encode(tokenizer: str, separator: Separator, bos_id: int | None, piece: Piece) -> Encoded:
    """Tokenise one piece, with ``bos_id`` before or after each document.

    Raises BadInput for a document that cannot be read or encoded.
    """
    chosen = tokenizer_of_process(tokenizer)
    bos = np.array([bos_id] if separator != "none" else [], chosen.dtype)
    parts: list[NDArray[np.unsignedinteger]] = []
    records = []
    for segment in piece:
        for document in documents(segment):
            ids = chosen.encode(document)
            parts += (ids, bos) if separator == "after" else (bos, ids)
            records.append((ids.size + bos.size, hash_of(document)))
    return Encoded(np.concatenate(parts) if parts else bos[:0], np.array(records, RECORD))


def tokenise(
    folder: Path,
    pieces: Iterable[Piece],
    tokenizer: str,
    separator: Separator,
    bos_id: int | None,
    processes: int,
) -> int:
    """Tokenise ``pieces`` into ``folder`` after those already done; returns how many pieces those
    were.

    Raises BadInput for the first piece that cannot be read, and NoRoom on a full disk, which loses
    nothing.
    """
    itemsize = tokenizer_of_process(tokenizer).dtype.itemsize
    done = journal(folder, itemsize)
    total = done[-1] if done else Done()
    with (
        Lines(folder / "tokens") as tokens,
        Lines(folder / "documents") as records,
        Lines(folder / "journal") as lines,
    ):
        tokens.file.truncate(itemsize * total.tokens)
        records.file.truncate(RECORD.itemsize * total.documents)
        lines.file.truncate(sum(len(f"{line}\n") for line in done))
        encode_one = partial(encode, tokenizer, separator, bos_id)
        with closing(in_order(encode_one, islice(pieces, len(done), None), processes)) as work:
            for encoded in work:
                try:
                    tokens.append(encoded.tokens.tobytes(), to_disk=True)
                    records.append(encoded.records.tobytes(), to_disk=True)
                    after = Done(
                        total.documents + len(encoded.records), total.tokens + len(encoded.tokens)
                    )
                    lines.write(str(after))
                except NoRoom as error:
                    raise NoRoom(
                        f"{error}; the same command resumes after {total.documents:,} documents"
                    ) from None
                total = after
    return len(done)


def journal(folder: Path, itemsize: int) -> list[Done]:
    """Return the journal entries whose tokens, of ``itemsize`` bytes, and documents are completely
    on disk."""
    done: list[Done] = []
    with suppress(OSError, ValueError, TypeError):
        sizes = {name: (folder / name).stat().st_size for name in ("tokens", "documents")}
        for text in (folder / "journal").read_text().splitlines(keepends=True):
            line = Done(**json.loads(text))
            complete = text == f"{line}\n"  # else cut, or by another hand
            if not complete or itemsize * line.tokens > sizes["tokens"]:
                break
            if RECORD.itemsize * line.documents > sizes["documents"]:
                break
            done.append(line)
    return done


def records(folder: Path) -> NDArray[Any]:
    """Return tokens and hash of every document, in order: ``[documents]`` of ``RECORD``."""
    return np.fromfile(folder / "documents", RECORD)


def batches(
    folder: Path, is_val: NDArray[np.bool_], dtype: np.dtype[Any]
) -> Iterator[EncodedDocuments]:
    """Yield the documents of a finished work folder in order, a piece at a time, each in its
    split."""
    lengths = records(folder)["tokens"].astype(np.int64)
    first = Done()
    for line in journal(folder, dtype.itemsize):
        if count := line.tokens - first.tokens:
            tokens = np.fromfile(
                folder / "tokens", dtype, count, offset=dtype.itemsize * first.tokens
            )
            part = slice(first.documents, line.documents)
            for split in SPLITS:
                chosen = is_val[part] == (split == "val")
                if chosen.any():
                    yield EncodedDocuments(
                        split, tokens[np.repeat(chosen, lengths[part])], lengths[part][chosen]
                    )
        first = line


@contextmanager
def work_folder(out: Path, key: str) -> Iterator[Path]:
    """Yield a hidden folder beside ``out`` for the work with this ``key``, the one left by an
    interrupted process.

    It is removed when the work is done or the input is at fault; it stays when anything else ends
    the work. Work of other keys for the same ``out`` is another command's: a line names it. Raises
    BadInput while another process works in the folder.
    """
    with writing_to(out) as out:
        folder = out.parent / f".{out.name}.{key}.work"
        for other in leftovers(out, ".work"):
            if other != folder:
                say(
                    f"note: {other} is unfinished work of other inputs or flags for {out}; the same"
                    " command resumes it, or remove it"
                )
        folder.mkdir(exist_ok=True)
        with locked(folder) as ours:
            if ours is False:
                raise BadInput(
                    f"another process is preparing {out}; wait for it, or choose another --out"
                )
            try:
                yield folder
            except NoRoom:
                raise
            except BadInput:  # which another key has when it is mended
                shutil.rmtree(folder, ignore_errors=True)
                raise
            shutil.rmtree(folder, ignore_errors=True)
