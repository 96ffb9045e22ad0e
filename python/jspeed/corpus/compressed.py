"""Open input files, decompressed by their ending: all that an .xz, .gz or .zst file holds is read, or it is refused."""

import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from jspeed.errors import BadInput
from jspeed.files import open_regular

BLOCK_BYTES = 1 << 20  # read at once


@contextmanager
def open_input(path: Path) -> Iterator[tuple[Any, IO[bytes]]]:
    """Yield the content of a file, decompressed, and the file itself, whose position tells what was read of it.

    Raises BadInput, also in the block, for a file that cannot be read, ends early, or holds what it should not, after
    its last stream (xz), member (gzip) or frame (zstd) too.
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
            raise BadInput(f"{path} cannot be read ({error.strerror or error})") from None
        raise BadInput(f"{path} is corrupt or not {name} ({error}); fetch or compress it again") from None
    except ModuleNotFoundError as error:
        raise BadInput(f"{path} needs {error.name} to be read; pip install '.[parquet]', or decompress it") from None


def _zstd(raw: IO[bytes]) -> Any:
    from pyarrow import CompressedInputStream

    return CompressedInputStream(raw, "zstd")


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


# By ending: the name, and what makes a file's content of the file.
FORMATS: dict[str, tuple[str, Callable[[IO[bytes]], Any]]] = {
    ".gz": ("gzip", lambda raw: gzip.GzipFile(fileobj=raw, mode="rb")),
    ".xz": ("xz", _XzStreams),
    ".zst": ("zstd", _zstd),
}
