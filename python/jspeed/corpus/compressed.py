"""Open input files, decompressed by their ending: all that an .xz, .gz or .zst file holds is read,
or it is refused."""

import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from jspeed.base.files import open_regular
from jspeed.errors import BadInput

BLOCK_BYTES = 1 << 20  # read at once
# What zstd says of a file that is whole, and what helps.
OTHERWISE = {
    "too much memory": "was compressed with a window of more than 128 MB (zstd --long=28 or more),"
    " which is not read; decompress it with zstd -d --long=31",
    "dictionary": "was compressed with a dictionary, which is not here; decompress it with zstd -d"
    " -D DICTIONARY",
}


@contextmanager
def open_input(path: Path) -> Iterator[tuple[Any, IO[bytes]]]:
    """Yield the content of a file, decompressed, and the file itself, whose position tells what was
    read of it.

    Raises BadInput, also in the block, for a file that cannot be read, ends early, or holds what it
    should not. This includes what follows its last stream (xz), member (gzip) or frame (zstd).
    """
    name, decompressed = FORMATS.get(path.suffix.lower(), ("", None))
    try:
        with open_regular(path) as raw:
            if decompressed is None:
                yield raw, raw
                return
            if not os.fstat(raw.fileno()).st_size:
                raise EOFError("it is empty")
            with io.BufferedReader(decompressed(raw), BLOCK_BYTES) as file:
                yield file, raw
    except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        if isinstance(error, OSError) and (error.errno or not name):
            raise BadInput(
                f"{path} cannot be read ({error.strerror or error}); make it readable, or"
                " give another"
            ) from None
        for word, needs in OTHERWISE.items():
            if name == "zstd" and word in str(error).lower():
                raise BadInput(f"{path} {needs}") from None
        raise BadInput(
            f"{path} is corrupt or not {name} ({error}); fetch or compress it again"
        ) from None
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{path} needs {error.name} to be read; pip install 'jspeed[parquet]', or decompress it"
        ) from None


def _zstd(raw: IO[bytes]) -> Any:
    from pyarrow import CompressedInputStream

    return CompressedInputStream(raw, "zstd")


def _xz(raw: IO[bytes]) -> Iterator[bytes]:
    """Yield what all streams of an .xz file hold; padding of zeros may follow each.

    Anything else raises LZMAError, and an end within a stream EOFError: ``lzma.open`` leaves out
    what follows a stream and cannot be read.
    """
    rest = raw.read(BLOCK_BYTES)
    while rest:
        stream = lzma.LZMADecompressor()
        while not stream.eof:
            if stream.needs_input and not (rest := rest or raw.read(BLOCK_BYTES)):
                raise EOFError("it ends within a stream")
            yield stream.decompress(rest, BLOCK_BYTES)
            rest = b""
        padding, rest = 0, stream.unused_data or raw.read(BLOCK_BYTES)
        while rest.startswith(b"\0"):
            kept = rest.lstrip(b"\0")
            padding, rest = padding + len(rest) - len(kept), kept or raw.read(BLOCK_BYTES)
        if padding % 4:
            raise lzma.LZMAError("padding of a stream that is no multiple of 4 bytes")


class _Joined(io.RawIOBase):
    """The parts of an iterator as one file to read."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts, self._rest = parts, b""

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self._rest and (part := next(self._parts, None)) is not None:
            self._rest = part
        count = min(len(into), len(self._rest))
        into[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


# By ending: the name, and what makes a file's content of the file.
FORMATS: dict[str, tuple[str, Callable[[IO[bytes]], Any]]] = {
    ".gz": ("gzip", lambda raw: gzip.GzipFile(fileobj=raw, mode="rb")),
    ".xz": ("xz", lambda raw: _Joined(_xz(raw))),
    ".zst": ("zstd", _zstd),
}
