"""Split input files into pieces of about 4 MB at document borders, for parallel tokenisation.

A document is UTF-8 text as ``bytes``; empty ones are skipped, and so is a byte order mark at the
start of a file. The split is deterministic.
"""

import codecs
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from jspeed.base.files import open_regular, what_instead
from jspeed.corpus.compressed import BLOCK_BYTES, FORMATS, open_input
from jspeed.errors import BadInput

SEPARATOR = b"<|endoftext|>"
# Endings, in any case. What ends in .json is a configuration or one list as often as it is
# documents.
TEXTS, LINES, TABLES = (".txt", ".text", ".md"), (".jsonl", ".ndjson"), (".parquet",)
STRINGS = {f"{size}{kind}" for kind in ("string", "binary") for size in ("", "large_")} | {
    "string_view",
    "binary_view",
}
PIECE_BYTES = 4 << 20  # enough to be worth sending, little enough to hold


class Segment(NamedTuple):
    """Part of one file. ``content`` is text of a file, or the number of a .parquet file's row
    group.

    ``line`` (from 1) and ``offset`` (bytes, decompressed) are where the text starts. ``whole`` says
    that it is a whole file without a separator, so one document, to the byte.
    """

    path: Path
    content: bytes | int
    line: int = 1
    offset: int = 0
    whole: bool = False


Piece = list[Segment]


def pieces(
    paths: Iterable[Path], read: Callable[[int], None] = lambda count: None
) -> Iterator[Piece]:
    """Yield the pieces of the files in order. ``read`` is told the bytes of input (compressed) just
    used up.

    Raises BadInput for a file that cannot be read; its content is checked by :func:`documents`.
    """
    piece: Piece = []
    size = 0
    for path in paths:
        for segment in segments(path, read):
            piece.append(segment)
            size += len(segment.content) if isinstance(segment.content, bytes) else PIECE_BYTES
            if size >= PIECE_BYTES:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece


def segments(path: Path, read: Callable[[int], None] = lambda count: None) -> Iterator[Segment]:
    """Yield one file in segments that end where a document does."""
    kind = ending(path.name)
    if kind in TABLES:
        yield from _row_groups(path, read)
        return
    cut = _cut_lines if kind in LINES else _cut_texts
    with open_input(path) as (file, raw):
        done, start = 0, len(codecs.BOM_UTF8) if file.peek().startswith(codecs.BOM_UTF8) else 0
        if (head := file.peek()) and not head.strip(b"\0"):
            raise BadInput(f"{path} cannot be read ({what_instead(path)}); fetch it again")
        file.read(start)  # a byte order mark is no text
        for segment in cut(path, file, start):
            yield segment
            read(raw.tell() - done)
            done = raw.tell()
        read(os.fstat(raw.fileno()).st_size - done)


def ending(name: str) -> str:
    """Return the ending that tells how a file is read, in lower case and without that of its
    compression, or ""."""
    stem, last = os.path.splitext(name.lower())
    if last in FORMATS:
        last = os.path.splitext(stem)[1]
        return last if last in TEXTS + LINES else ""
    return last if last in TEXTS + LINES + TABLES else ""


def documents(segment: Segment) -> Iterator[bytes]:
    """Yield the documents of one segment.

    ``LINES``: the string field ``text`` of each line; blank lines are skipped. ``TABLES``: the
    column ``text``, of strings or bytes. ``TEXTS``: the whole file is one document, to the byte;
    but if it holds ``<|endoftext|>``, the documents are what lies between these, without
    surrounding white space. Lines and texts may be compressed (``FORMATS``). Raises BadInput with
    the line, the row or the byte offset (in the decompressed text) of what cannot be read.
    """
    if isinstance(segment.content, int):
        texts = _rows(segment.path, segment.content)
    elif ending(segment.path.name) in LINES:
        texts = _lines(segment.path, segment.content, segment.line, segment.offset)
    else:
        texts = _texts(segment)
    for document in texts:
        if document:
            yield document


def _cut_lines(path: Path, file: IO[bytes], offset: int) -> Iterator[Segment]:
    line = 1
    while content := b"".join(file.readlines(PIECE_BYTES)):
        yield Segment(path, content, line, offset)
        line += content.count(b"\n")
        offset += len(content)


def _cut_texts(path: Path, file: IO[bytes], offset: int) -> Iterator[Segment]:
    """Cut after separators; what was searched for one is not searched again."""
    buffer = bytearray()
    searched = 0
    separated = False
    while block := file.read(BLOCK_BYTES):
        buffer += block
        last = buffer.rfind(SEPARATOR, searched)
        searched = max(0, len(buffer) - len(SEPARATOR) + 1)
        if last >= 0:
            separated = True
            end = last + len(SEPARATOR)
            if end >= PIECE_BYTES:
                yield Segment(path, bytes(buffer[:end]), offset=offset)
                del buffer[:end]
                offset += end
                searched = 0
    if buffer:
        yield Segment(path, bytes(buffer), offset=offset, whole=not separated)


def _lines(path: Path, content: bytes, first: int, offset: int) -> Iterator[bytes]:
    for number, line in enumerate(content.split(b"\n"), start=first):
        if line.strip():
            where = f"line {number} of {path}"
            text = _checked(path, line, offset)
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise BadInput(
                    f"{where} is not JSON ({error}); expected one object a line"
                ) from None
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                raise BadInput(f'{where} lacks the string field "text"; expected {{"text": "..."}}')
            try:
                yield record["text"].encode()
            except UnicodeEncodeError:
                raise BadInput(f'{where} has half a surrogate pair in "text"') from None
        offset += len(line) + 1


def _texts(segment: Segment) -> Iterator[bytes]:
    assert isinstance(segment.content, bytes)
    offset = segment.offset
    for document in segment.content.split(SEPARATOR):
        _checked(segment.path, document, offset)
        yield document if segment.whole else document.strip()
        offset += len(document) + len(SEPARATOR)


def _checked(path: Path, content: bytes, offset: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path} is not UTF-8 at byte {offset + error.start}; convert it to UTF-8"
        ) from None


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise BadInput(
            f"{path} needs pyarrow to be read; pip install '.[parquet]', or give .jsonl or .txt"
        ) from None
    try:
        # of a path it takes UTF-8 only
        with open_regular(path) as raw, parquet.ParquetFile(raw) as file:
            yield file
    except (ArrowException, OSError) as error:
        raise BadInput(
            f"{path} is corrupt or not parquet"
            f" ({what_instead(path) or str(error).splitlines()[0]}); fetch it again"
        ) from None


def _row_groups(path: Path, read: Callable[[int], None]) -> Iterator[Segment]:
    with _parquet(path) as file:
        _check_column(path, file.schema_arrow)
        size, count = path.stat().st_size, file.num_row_groups
    for number in range(count):
        yield Segment(path, number)
        read(size * (number + 1) // count - size * number // count)


def _check_column(path: Path, schema: Any) -> None:
    """Raise BadInput unless a table has one column ``text``, of strings or bytes."""
    from pyarrow.types import is_dictionary

    kinds = [field.type for field in schema if field.name == "text"]
    if not kinds:
        raise BadInput(f'{path} lacks the column "text"; its columns are {", ".join(schema.names)}')
    if len(kinds) > 1:
        raise BadInput(f'{path} has {len(kinds)} columns called "text"; rename all but one')
    if str(kinds[0].value_type if is_dictionary(kinds[0]) else kinds[0]) not in STRINGS:
        raise BadInput(
            f'column "text" of {path} holds {kinds[0]}; expected strings, or bytes in UTF-8'
        )


def _rows(path: Path, number: int) -> Iterator[bytes]:
    from pyarrow import ArrowException, DictionaryArray

    with _parquet(path) as file:
        try:
            column = file.read_row_group(number, columns=["text"]).column("text")
        except (ArrowException, OSError) as error:
            raise BadInput(
                f"row group {number} of {path} is corrupt ({str(error).splitlines()[0]})"
            ) from None
    arrays = (
        each.dictionary_decode() if isinstance(each, DictionaryArray) else each
        for each in column.chunks
    )
    for row, value in enumerate(chain.from_iterable(arrays)):
        text = value.as_buffer()
        if text is None:
            raise BadInput(
                f'row {row} of row group {number} of {path} has no "text"; drop such rows'
            )
        document = text.to_pybytes()
        _checked(path, document, 0)
        yield document
