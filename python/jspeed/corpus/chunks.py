"""Split input files into pieces of about 4 MB at document borders, for parallel tokenisation.

A document is UTF-8 text as ``bytes``; empty ones are skipped, and so is a byte order mark at the start of a file. The
split is deterministic.
"""

import codecs
import io
import json
import lzma
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from jspeed.errors import BadInput
from jspeed.files import open_regular

SEPARATOR = b"<|endoftext|>"
BLOCK_BYTES = 1 << 20  # read at once
PIECE_BYTES = 4 << 20  # enough to be worth sending, little enough to hold


class Segment(NamedTuple):
    """Part of one file. ``content`` is text of a .txt or .jsonl file, or the number of a .parquet file's row group.

    ``line`` (from 1) and ``offset`` (bytes, decompressed) are where the text starts. ``whole`` says that it is a
    whole file without a separator, so one document, to the byte.
    """

    path: Path
    content: bytes | int
    line: int = 1
    offset: int = 0
    whole: bool = False


Piece = list[Segment]


def pieces(paths: Iterable[Path], read: Callable[[int], None] = lambda count: None) -> Iterator[Piece]:
    """Yield the pieces of the files in order. ``read`` is told the bytes of input (compressed) just used up.

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
    if path.name.endswith(".parquet"):
        yield from _row_groups(path, read)
        return
    cut = _cut_lines if path.name.removesuffix(".xz").endswith(".jsonl") else _cut_texts
    try:
        with open_regular(path) as raw, _xz(raw) if path.suffix == ".xz" else raw as file:
            done, start = 0, len(codecs.BOM_UTF8) if file.peek().startswith(codecs.BOM_UTF8) else 0
            file.read(start)  # a byte order mark is no text
            for segment in cut(path, file, start):
                yield segment
                read(raw.tell() - done)
                done = raw.tell()
            read(os.fstat(raw.fileno()).st_size - done)
    except (lzma.LZMAError, EOFError) as error:
        raise BadInput(f"{path} is corrupt or not xz ({error}); fetch or compress it again") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror or error})") from None


def documents(segment: Segment) -> Iterator[bytes]:
    """Yield the documents of one segment.

    ``.jsonl``: the string field ``text`` of each line; blank lines are skipped. ``.parquet``: the string column
    ``text``. ``.txt``: the whole file is one document, to the byte; but if it holds ``<|endoftext|>``, the documents
    are what lies between these, without surrounding white space. ``.jsonl`` and ``.txt`` may be compressed (``.xz``).
    Raises BadInput with the line, the row or the byte offset (in the decompressed text) of what cannot be read.
    """
    if isinstance(segment.content, int):
        found = _rows(segment.path, segment.content)
    elif segment.path.name.removesuffix(".xz").endswith(".jsonl"):
        found = _lines(segment.path, segment.content, segment.line, segment.offset)
    else:
        found = _texts(segment)
    for document in found:
        if document:
            yield document


class _XzStreams(io.RawIOBase):
    """All streams of an .xz file, and the padding of zeros that may follow each. What is neither raises LZMAError, and
    an end within a stream EOFError: ``lzma.open`` leaves out what follows a stream and cannot be read."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._rest = raw, b""
        self._stream: lzma.LZMADecompressor | None = None
        self._begun = False  # whether a stream was read

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        found = b""
        while not found:
            if self._stream is None and not self._open():
                return 0
            assert self._stream
            found = self._stream.decompress(self._rest, len(into))
            self._rest = self._stream.unused_data if self._stream.eof else b""
            if self._stream.eof:
                self._stream = None
            elif self._stream.needs_input and not (found or self._fill()):
                raise EOFError("it ends within a stream")
        into[: len(found)] = found
        return len(found)

    def _fill(self) -> bool:
        self._rest += (more := self._raw.read(BLOCK_BYTES))
        return bool(more)

    def _open(self) -> bool:
        """Begin the next stream; return whether there is one."""
        zeros = 0
        while True:
            kept = self._rest.lstrip(b"\0") if self._begun else self._rest
            zeros, self._rest = zeros + len(self._rest) - len(kept), kept
            if kept or not self._fill():
                break
        if zeros % 4:
            raise lzma.LZMAError("padding of a stream that is no multiple of 4 bytes")
        if not self._rest and self._begun:
            return False
        self._stream, self._begun = lzma.LZMADecompressor(), True
        return True


def _xz(raw: IO[bytes]) -> io.BufferedReader:
    return io.BufferedReader(_XzStreams(raw), BLOCK_BYTES)


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
                raise BadInput(f"{where} is not JSON ({error}); expected one object a line") from None
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
        raise BadInput(f"{path} is not UTF-8 at byte {offset + error.start}; convert it to UTF-8") from None


def _parquet(path: Path):
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise BadInput(f"{path} needs pyarrow to be read; pip install '.[parquet]', or give .jsonl or .txt") from None
    try:
        return parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise BadInput(f"{path} is corrupt or not parquet ({str(error).splitlines()[0]}); fetch it again") from None


def _row_groups(path: Path, read: Callable[[int], None]) -> Iterator[Segment]:
    with _parquet(path) as file:
        schema = file.schema_arrow
        if "text" not in schema.names or str(schema.field("text").type) not in ("string", "large_string"):
            raise BadInput(f'{path} lacks the string column "text"; its columns are {", ".join(schema.names)}')
        size, count = path.stat().st_size, file.num_row_groups
    for number in range(count):
        yield Segment(path, number)
        read(size * (number + 1) // count - size * number // count)


def _rows(path: Path, number: int) -> Iterator[bytes]:
    from pyarrow import ArrowException

    with _parquet(path) as file:
        try:
            column = file.read_row_group(number, columns=["text"]).column("text")
        except (ArrowException, OSError) as error:
            raise BadInput(f"row group {number} of {path} is corrupt ({str(error).splitlines()[0]})") from None
    for row, value in enumerate(column):
        text = value.as_buffer()
        if text is None:
            raise BadInput(f'row {row} of row group {number} of {path} has no "text"; drop such rows')
        document = text.to_pybytes()
        _checked(path, document, 0)
        yield document
