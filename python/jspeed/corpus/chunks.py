"""Split input files into pieces of about 4 MB at document borders, for parallel tokenisation.

A document is UTF-8 text as ``bytes``; empty ones are skipped, and so is a byte order mark at the
start of a file. The split is deterministic.
"""

import codecs
import json
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from jspeed.base.files import open_regular, what_instead
from jspeed.corpus.compressed import BLOCK_BYTES, FORMATS, open_input
from jspeed.errors import BadInput
from jspeed.fields import shown

SEPARATOR = b"<|endoftext|>"
# Endings, in any case. What ends in .json is a configuration or one list as often as it is
# documents.
TEXTS, LINES, TABLES = (".txt", ".text", ".md"), (".jsonl", ".ndjson"), (".parquet", ".arrow")
SHOWN_FIELDS = 8
ESCAPED_RETURN = rb"(?<!\\)(\\\\)*\\r"  # in JSON
STRINGS = {f"{size}{kind}" for kind in ("string", "binary") for size in ("", "large_")} | {
    "string_view",
    "binary_view",
}
PIECE_BYTES = 4 << 20  # enough to be worth sending, little enough to hold
MOST_RATIO = 100  # text is compressed to a tenth, and logs to a fiftieth; zeros to a thousandth
LEAST_BOMB = 64 << 20  # bytes that are held whatever they were compressed to


class Segment(NamedTuple):
    """Part of one file. ``content`` is text of a file, or the number of a .parquet file's row
    group.

    ``line`` (from 1) and ``offset`` (bytes, decompressed) are where the text starts. ``whole`` says
    that it is a whole file without a separator, so one document, to the byte. ``field`` of a
    line, or the column of a table, is the text.
    """

    path: Path
    content: bytes | int
    line: int = 1
    offset: int = 0
    whole: bool = False
    field: str = "text"


Piece = list[Segment]


def pieces(
    paths: Iterable[Path],
    read: Callable[[int], None] = lambda count: None,
    field: str = "text",
) -> Iterator[Piece]:
    """Yield the pieces of the files in order. ``read`` is told the bytes of input (compressed) just
    used up.

    Raises BadInput for a file that cannot be read; its content is checked by :func:`documents`.
    """
    piece: Piece = []
    size = 0
    for path in paths:
        for segment in segments(path, read, field):
            piece.append(segment)
            size += len(segment.content) if isinstance(segment.content, bytes) else PIECE_BYTES
            if size >= PIECE_BYTES:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece


def segments(
    path: Path, read: Callable[[int], None] = lambda count: None, field: str = "text"
) -> Iterator[Segment]:
    """Yield one file in segments that end where a document does."""
    kind = ending(path.name)
    if kind in TABLES:
        yield from _row_groups(path, read, field)
        return
    cut = _cut_lines if kind in LINES else _cut_texts
    with open_input(path) as (file, raw):
        done, start = 0, len(codecs.BOM_UTF8) if file.peek().startswith(codecs.BOM_UTF8) else 0
        if (head := file.peek()) and not head.strip(b"\0"):
            raise BadInput(f"{path} cannot be read ({what_instead(path)}); fetch it again")
        file.read(start)  # a byte order mark is no text
        blocks = iter(lambda: file.read(BLOCK_BYTES), b"")
        if file is not raw:
            blocks = _no_bomb(path, blocks, raw)
        for segment in cut(path, blocks, start):
            yield segment._replace(field=field)
            read(raw.tell() - done)
            done = raw.tell()
        read(os.fstat(raw.fileno()).st_size - done)


def _no_bomb(path: Path, blocks: Iterable[bytes], raw: IO[bytes]) -> Iterator[bytes]:
    """Yield ``blocks``, which ``raw`` holds compressed. A line or text is held whole, so BadInput
    ends what grows beyond all text: memory is bounded by the size of the file."""
    size = 0
    for block in blocks:
        size += len(block)
        if size > LEAST_BOMB and size > MOST_RATIO * raw.tell():
            raise BadInput(
                f"{path} holds more than {MOST_RATIO} times as much as its {raw.tell():,} bytes"
                " that were read; that is no text: decompress it and look at it"
            )
        yield block


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
        texts = _rows(segment.path, segment.content, segment.field)
    elif ending(segment.path.name) in LINES:
        texts = _lines(segment)
    else:
        texts = _texts(segment)
    for document in texts:
        if document:
            yield document


def _cut_lines(path: Path, blocks: Iterable[bytes], offset: int) -> Iterator[Segment]:
    """Cut after the first line that ends beyond ``PIECE_BYTES``."""
    buffer, line = bytearray(), 1
    searched = PIECE_BYTES
    for block in blocks:
        buffer += block
        while (end := buffer.find(b"\n", searched) + 1) > 0:
            content = bytes(buffer[:end])
            yield Segment(path, content, line, offset)
            del buffer[:end]
            line += content.count(b"\n")
            offset += end
            searched = PIECE_BYTES
        searched = max(PIECE_BYTES, len(buffer))
    if buffer:
        yield Segment(path, bytes(buffer), line, offset)


def _cut_texts(path: Path, blocks: Iterable[bytes], offset: int) -> Iterator[Segment]:
    """Cut after separators; what was searched for one is not searched again."""
    buffer = bytearray()
    searched = 0
    separated = False
    for block in blocks:
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


def _lines(segment: Segment) -> Iterator[bytes]:
    path, content, first, offset, _, field = segment
    assert isinstance(content, bytes)
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
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                has = (
                    [name for name in record if isinstance(record[name], str)]
                    if isinstance(record, dict)
                    else []
                )
                raise BadInput(
                    f'{where} lacks the string field "{field}"; expected {{"{field}": "..."}}; '
                    f"{_name_it(has)}"
                )
            try:
                yield record[field].encode()
            except UnicodeEncodeError:
                raise BadInput(
                    f'{where} has half a surrogate pair in "{field}"; mend it, or drop the line'
                ) from None
        offset += len(line) + 1


def _name_it(names: Iterable[str]) -> str:
    has = ", ".join(sorted(map(shown, names))[:SHOWN_FIELDS])
    return f"it has {has}: name the text with --text-field" if has else "give another file"


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


class _Table(NamedTuple):
    """A table in ``groups`` of rows; ``column`` reads one column of one group, as chunks."""

    schema: Any
    groups: int
    column: Callable[[int, str], Any]


@contextmanager
def _table(path: Path) -> Iterator[_Table]:
    """Open a table: .parquet, or .arrow as datasets' ``save_to_disk`` writes it, a stream or a
    file."""
    try:
        from pyarrow import ArrowException, ArrowInvalid, chunked_array, ipc, parquet, py_buffer
    except ImportError:
        raise BadInput(
            f"{path} needs pyarrow to be read; pip install 'jspeed[parquet]', or give .jsonl or"
            " .txt"
        ) from None
    kind = ending(path.name).removeprefix(".")
    try:
        # of a path it takes UTF-8 only
        with open_regular(path) as raw:
            if kind == "parquet":
                with parquet.ParquetFile(raw) as file:
                    yield _Table(
                        file.schema_arrow,
                        file.num_row_groups,
                        lambda group, name: file.read_row_group(group, [name]).column(name),
                    )
                return
            # closed with the last array that is part of it
            buffer = py_buffer(mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ))
            try:
                whole = ipc.open_file(buffer)
                batches = [whole.get_batch(number) for number in range(whole.num_record_batches)]
            except ArrowInvalid:
                whole = ipc.open_stream(buffer)
                batches = list(whole)
            yield _Table(
                whole.schema,
                len(batches),
                lambda group, name: chunked_array([batches[group].column(name)]),
            )
    except (ArrowException, OSError, ValueError) as error:
        raise BadInput(
            f"{path} is corrupt or not {kind}"
            f" ({what_instead(path) or str(error).splitlines()[0]}); fetch it again"
        ) from None


def _row_groups(path: Path, read: Callable[[int], None], field: str) -> Iterator[Segment]:
    with _table(path) as file:
        _check_column(path, file.schema, field)
        size, count = path.stat().st_size, file.groups
    for number in range(count):
        yield Segment(path, number, field=field)
        read(size * (number + 1) // count - size * number // count)


def _check_column(path: Path, schema: Any, name: str) -> None:
    """Raise BadInput unless a table has one column ``name``, of strings or bytes."""
    from pyarrow.types import is_dictionary

    kinds = [field.type for field in schema if field.name == name]
    if not kinds:
        raise BadInput(f'{path} lacks the column "{name}"; {_name_it(schema.names)}')
    if len(kinds) > 1:
        raise BadInput(f'{path} has {len(kinds)} columns called "{name}"; rename all but one')
    if str(kinds[0].value_type if is_dictionary(kinds[0]) else kinds[0]) not in STRINGS:
        raise BadInput(
            f'column "{name}" of {path} holds {kinds[0]}; expected strings, or bytes in UTF-8'
        )


def _rows(path: Path, number: int, name: str) -> Iterator[bytes]:
    from pyarrow import ArrowException, DictionaryArray

    with _table(path) as file:
        try:
            column = file.column(number, name)
        except (ArrowException, OSError) as error:
            raise BadInput(
                f"row group {number} of {path} is corrupt ({str(error).splitlines()[0]}); fetch it"
                " again"
            ) from None
    arrays = (
        each.dictionary_decode() if isinstance(each, DictionaryArray) else each
        for each in column.chunks
    )
    for row, value in enumerate(chain.from_iterable(arrays)):
        text = value.as_buffer()
        if text is None:
            raise BadInput(
                f'row {row} of row group {number} of {path} has no "{name}"; drop such rows'
            )
        document = text.to_pybytes()
        _checked(path, document, 0)
        yield document


def holds_carriage_returns(path: Path) -> bool:
    """Whether the first megabyte of a file's text has line ends of Windows, or of an old Mac."""
    kind = ending(path.name)
    if kind in TABLES:
        return False
    with open_input(path) as (file, _):
        wanted = ESCAPED_RETURN if kind in LINES else b"\r"
        return re.search(wanted, file.read(BLOCK_BYTES)) is not None
