"""Tokenising in several processes, in the order of the input, kept on disk so that it can be taken up again.

The work folder holds ``tokens`` (uint16, or uint32 of a large vocabulary), ``documents`` (two uint64 for each: tokens,
hash of the contents) and ``journal``: a JSON line for each piece done, with the documents and tokens so far. What is
behind its last whole line does not count.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jspeed.corpus.chunks import Piece, documents
from jspeed.corpus.process_pool import NoRoom, in_order
from jspeed.corpus.sources import hash_of
from jspeed.corpus.tokenizers import named_tokenizer
from jspeed.data.folder import Batch, lock_folder, remove_leftovers
from jspeed.errors import BadInput, writable_folder
from jspeed.files import write_whole

RECORD = np.dtype([("tokens", "<u8"), ("hash", "<u8")])

tokenizer_of_process = cache(named_tokenizer)


class Encoded(NamedTuple):
    """The documents of one piece: their tokens joined, as the tokenizer gives them, and a ``RECORD`` of each."""

    tokens: NDArray[np.unsignedinteger]
    records: NDArray[Any]


def encode(tokenizer: str, mark: str, piece: Piece) -> Encoded:
    """Tokenise one piece, the tokenizer's mark ``before`` or ``after`` each document, or ``none``."""
    chosen = tokenizer_of_process(tokenizer)
    bos = np.array([chosen.bos_id] if mark != "none" else [], chosen.dtype)
    parts: list[NDArray[np.unsignedinteger]] = []
    records = []
    for segment in piece:
        for document in documents(segment):
            ids = chosen.encode(document)
            parts += (ids, bos) if mark == "after" else (bos, ids)
            records.append((ids.size + bos.size, hash_of(document)))
    return Encoded(np.concatenate(parts) if parts else bos[:0], np.array(records, RECORD))


def tokenise(folder: Path, pieces: Iterable[Piece], tokenizer: str, mark: str, processes: int) -> int:
    """Tokenise ``pieces`` into ``folder``, going on after those that are done; returns how many were.

    Raises BadInput for the first of them that cannot be read, and when there is no room, which loses nothing.
    """
    itemsize = tokenizer_of_process(tokenizer).dtype.itemsize
    done = journal(folder, itemsize)
    write_whole(folder / "journal", "".join(json.dumps(line) + "\n" for line in done))  # without what does not count
    with open(folder / "tokens", "ab") as tokens, open(folder / "documents", "ab") as records:
        with open(folder / "journal", "a") as lines:
            total = dict(done[-1]) if done else {"documents": 0, "tokens": 0}
            tokens.truncate(itemsize * total["tokens"])
            records.truncate(RECORD.itemsize * total["documents"])
            work = in_order(partial(encode, tokenizer, mark), islice(pieces, len(done), None), processes)
            with closing(work):
                for encoded in work:
                    try:
                        for file, array in ((tokens, encoded.tokens), (records, encoded.records)):
                            file.write(array.tobytes())
                            file.flush()
                            os.fsync(file.fileno())
                        total["documents"] += len(encoded.records)
                        total["tokens"] += len(encoded.tokens)
                        lines.write(json.dumps(total) + "\n")
                        lines.flush()
                    except OSError as error:
                        raise NoRoom(
                            f"{folder} cannot be written ({error.strerror}); make room and run the same command again, "
                            f"which goes on after the {total['documents']:,} documents done"
                        ) from None
    return len(done)


def journal(folder: Path, itemsize: int) -> list[dict[str, int]]:
    """Return the lines of the journal that what is on disk bears out, tokens of ``itemsize`` bytes."""
    done: list[dict[str, int]] = []
    with suppress(OSError, ValueError, TypeError, KeyError):
        sizes = {name: (folder / name).stat().st_size for name in ("tokens", "documents")}
        for text in (folder / "journal").read_text().splitlines():
            line = json.loads(text)
            if itemsize * line["tokens"] > sizes["tokens"] or RECORD.itemsize * line["documents"] > sizes["documents"]:
                break
            done.append(line)
    return done


def records(folder: Path) -> NDArray[Any]:
    """Return tokens and hash of every document, in order."""
    return np.fromfile(folder / "documents", RECORD)


def batches(folder: Path, validates: NDArray[np.bool_], dtype: np.dtype[Any]) -> Iterator[Batch]:
    """Yield the documents of a finished work folder in order, a piece at a time, each in its split; tokens are
    ``dtype``."""
    lengths = records(folder)["tokens"].astype(np.int64)
    first = {"documents": 0, "tokens": 0}
    for line in journal(folder, dtype.itemsize):
        if count := line["tokens"] - first["tokens"]:
            tokens = np.fromfile(folder / "tokens", dtype, count, offset=dtype.itemsize * first["tokens"])
            part = slice(first["documents"], line["documents"])
            for split, chosen in (("train", ~validates[part]), ("val", validates[part])):
                if chosen.any():
                    yield Batch(split, tokens[np.repeat(chosen, lengths[part])], lengths[part][chosen])
        first = line


@contextmanager
def work_folder(out: Path, key: str) -> Iterator[Path]:
    """Yield a hidden folder beside ``out`` for the work with this ``key``, the one left by an interrupted process.

    It goes when the work is done or its input is bad; it stays when the process is interrupted or there is no room.
    Folders of other keys for the same ``out`` go. Raises BadInput while another process works in it.
    """
    out = Path(os.path.realpath(out))
    made = [folder for folder in out.parents if not folder.exists()]
    writable_folder(out.parent, "the output folder's parent")
    folder = out.parent / f".{out.name}.{key}.work"
    try:
        remove_leftovers(out, ".work", keep=folder.name)
        folder.mkdir(exist_ok=True)
        lock = lock_folder(folder)
    except OSError as error:
        raise BadInput(f"output folder {out} cannot be written ({error.strerror}); choose another") from None
    if lock is None:
        raise BadInput(f"another process is preparing {out}; wait for it, or choose another --out")
    try:
        yield folder
    except (NoRoom, KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        _remove(folder, made)
        raise
    else:
        _remove(folder, [])
    finally:
        os.close(lock)


def _remove(folder: Path, parents: list[Path]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        for parent in parents:
            parent.rmdir()
