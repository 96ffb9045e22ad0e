"""Atomic file writes, file hashes, and the cache folder."""

import codecs
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import platformdirs

from jspeed.errors import BadInput, NoRoom

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# of a file system that does not have a call, or not for everybody: CIFS, FUSE, object stores
REFUSED = (
    errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EPERM, errno.EACCES,
    errno.ENOTTY,
)  # fmt: skip

PROGRAMS = "programs"  # in the cache folder: what jspeed/saved keeps

UMASK = os.umask(0o077)  # it can only be read by setting it
os.umask(UMASK)


def cache_folder() -> Path:
    """Return the folder for prepared data and compiled programs, ``$JSPEED_CACHE`` or the user's;
    it need not exist.

    Raises BadInput where there is no home to have it in, as in a container with a user id of its
    own. So it does where it is missing and cannot be made.
    """
    remedy = "set JSPEED_CACHE to a folder you can write to"
    try:
        own = os.environ.get("JSPEED_CACHE")
        folder = Path(
            os.path.expanduser(own)
            if own
            else platformdirs.user_cache_dir("jspeed", appauthor=False)
        )
    except RuntimeError:
        own, folder = None, Path()
    if not own and not folder.is_absolute():
        home = os.environ.get("HOME")
        raise BadInput(
            f"no home folder is known to keep data and compiled programs in (HOME is {home!r});"
            f" {remedy}"
        )
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if there != folder and not (os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)):
        raise BadInput(
            f"the cache folder {folder} is missing and cannot be made in {there}; {remedy}"
        )
    return folder


def write_whole(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` so that a reader sees the old file or the new one, never a
    part.

    Raises :class:`NoRoom` on a full disk, and :class:`BadInput` for another reason why it cannot be
    written.
    """
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which becomes ``path`` at the end; raises as :func:`write_whole`
    does.

    The content is on disk before the name is, but the folder is not synced. An OSError inside
    counts as one of writing.
    """
    try:
        with named("mkstemp"):
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        try:
            yield Path(name)
            with open(name, "rb") as file:
                sync(file)
                with suppress_refused():
                    os.fchmod(file.fileno(), 0o666 & ~UMASK)
            replace(name, path)
        except HalfWritten:
            raise
        except BaseException:
            with suppress(OSError):
                Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unwritable(path, error) from None


def replace(source: str | os.PathLike[str], path: Path) -> None:
    """Give a whole file another name, in place of what has it. Where the file system cannot rename
    (over a file, or at all), the content is written there. Raises OSError."""
    try:
        os.replace(source, path)
    except OSError as error:
        # a link to where it may be, or another device
        if error.errno not in (*REFUSED, errno.EEXIST, errno.EXDEV) or os.path.isdir(path):
            raise OSError(error.errno, f"rename: {error.strerror}") from None
        there = os.path.exists(path)
        with named("rename is refused, and open"):
            file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb")
        with open(source, "rb") as new, file:
            try:
                with named("write"):
                    shutil.copyfileobj(new, file)
                    file.truncate()
                    file.flush()
                    sync(file)
            except OSError as problem:
                if not there:
                    os.unlink(path)
                    raise
                raise HalfWritten(problem.errno, f"{problem.strerror}; see {source}") from None
        os.unlink(source)


class HalfWritten(OSError):
    """A file was written over and is not whole; the one with the new content stays."""


def sync(file: IO[Any]) -> None:
    """Have what was written to ``file`` on the disk itself, where the file system can say so.
    Raises OSError where the disk has failed."""
    with suppress_refused(), named("fsync"):
        os.fsync(file.fileno())


@contextmanager
def suppress_refused() -> Iterator[None]:
    """Go on where the file system does not have a call."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSED:
            raise


@contextmanager
def named(call: str) -> Iterator[None]:
    """Name the ``call`` in an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{call}: {error.strerror or error}") from None


class Lines:
    """A file that grows by whole lines or records: one that does not fit is not begun. A context
    manager: closes it."""

    def __init__(self, path: Path) -> None:
        """Open ``path``, creating it if needed. Raises :class:`BadInput`."""
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self.file = os.fdopen(_if_regular(os.open(path, flags, 0o666), path), "ab", buffering=0)
        except OSError as error:
            raise _unwritable(path, error) from None

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, line: str) -> None:
        """Add ``line``, which has no line end. Raises :class:`NoRoom` when it does not fit."""
        self.append(line.encode() + b"\n")

    def append(self, data: bytes, to_disk: bool = False) -> None:
        """Add ``data``, with ``to_disk`` also to the disk itself. Raises :class:`NoRoom` when it
        does not fit."""
        size, rest = os.fstat(self.file.fileno()).st_size, memoryview(data)
        try:
            while rest:  # Linux writes at most 2 GiB at once, and a part where the disk fills up
                rest = rest[self.file.write(rest) :]
            if to_disk:
                sync(self.file)
        except OSError as error:
            with suppress(OSError):
                self.file.truncate(size)
            raise _unwritable(self._path, error) from None

    def clear(self) -> None:
        """Make the file empty. Raises :class:`BadInput`."""
        try:
            if os.fstat(self.file.fileno()).st_size:
                with named("truncate"):
                    self.file.truncate(0)
        except OSError as error:
            raise _unwritable(self._path, error) from None


def _unwritable(path: Path, error: OSError) -> BadInput:
    if error.errno in NO_ROOM:
        what = (error.strerror or str(error)).rpartition(": ")[2]
        return NoRoom(
            f"{path} cannot be written ({what}); make room there, or choose another folder"
        )
    number = errno.errorcode.get(error.errno or 0)
    what = f"{error.strerror or error}{f', {number}' if number else ''}"
    return BadInput(f"{path} cannot be written ({what}); choose another folder")


def try_lock(handle: int | IO[Any], wait: bool = False) -> bool | None:
    """Lock an open file or folder until it is closed: True, False if another process has it, None
    without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        # None: of the file system
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def as_text(path: str | os.PathLike[str]) -> str:
    r"""Return a file's name as text that every encoding of Unicode holds: its bytes that are not
    UTF-8 as ``\xe9``."""
    return os.fsencode(path).decode(errors="backslashreplace")


# How files begin that stand for another: what they are, and what fetches the content.
PLACEHOLDERS = {
    rb"version https://(git-lfs|hawser)\.github\.com/spec/": "a Git LFS pointer; git lfs pull",
    rb"(/|[./]*\.git/)annex/objects/": "a git-annex pointer; git annex get",
    rb"# xet version ": "a pointer of Hugging Face's Xet storage; hf download",
    rb'\{"url": ?"https://docs\.google\.com/': "a shortcut of Google Drive; export it there",
}
LONGEST_PLACEHOLDER = 1024  # bytes
# HellaSwag and MMLU; dev/data/data_common.py of karpathy/llm.c
EVALUATION_OF_LLM_C = (20240522).to_bytes(4, "little")


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file to read.

    Raises OSError for what is no regular file: a pipe is waited for, a device has no end. So it
    does for a link or a small text that stands for a content which is not here.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if not os.path.islink(path):
            raise
        target = os.readlink(path)
        what = "; git annex get fetches it" if b"annex/objects" in os.fsencode(target) else ""
        raise OSError(
            errno.EINVAL, f"a link to {as_text(target)}, which is not here{what}", os.fspath(path)
        ) from None
    file = os.fdopen(_if_regular(handle, path), "rb")
    if os.fstat(file.fileno()).st_size <= LONGEST_PLACEHOLDER:
        head = file.peek(LONGEST_PLACEHOLDER)
        for start, what in PLACEHOLDERS.items():
            if re.match(start, head):
                file.close()
                stands, _, fetch = what.partition("; ")
                raise OSError(
                    errno.EINVAL,
                    f"it is {stands}, not the file itself: `{fetch}` fetches that",
                    os.fspath(path),
                )
    return file


def what_instead(path: str | os.PathLike[str]) -> str | None:
    """Return what a file is that should be binary and is not: a placeholder, a web page, zeros, or
    the text that it begins with; None where that cannot be told."""
    try:
        with open_regular(path) as file:
            head = file.read(LONGEST_PLACEHOLDER)
    except OSError as error:
        return error.strerror
    if head.startswith(EVALUATION_OF_LLM_C):
        return (
            "it is an evaluation file of llm.c, no shard: keep it elsewhere; jspeed evaluate takes"
            " hellaswag_val.jsonl"
        )
    if head and not head.strip(b"\0"):
        return "it begins with zeros only: a stub of a cloud drive, or never written"
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if re.match(rb"<(!doctype|html|head|\?xml|error)\b", text, re.IGNORECASE):
        return "it is a web page, as of an error or a log-in: fetch the file again"
    try:
        line = text[:80].decode().splitlines()[0]
    except (UnicodeDecodeError, IndexError):
        return None
    return f"it begins with the text {line!r}" if line.isprintable() and len(line) > 3 else None


def _if_regular(handle: int, path: str | os.PathLike[str]) -> int:
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the contents of a regular file. Raises OSError as :func:`open_regular`."""
    with open_regular(path) as file:
        return file.read()


def read_input(path: Path, remedy: str) -> bytes:
    """Return the contents of a regular file. Raises BadInput, which ends in ``remedy``, where it
    cannot be read."""
    try:
        return read_regular(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); {remedy}") from None


def read_text(path: Path, remedy: str) -> str:
    """Return the UTF-8 text of a regular file, without a byte order mark. Raises BadInput as
    :func:`read_input`."""
    try:
        return read_input(path, remedy).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 at byte {error.start}; {remedy}") from None


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return what a regular file says in JSON. Raises OSError as :func:`open_regular`, ValueError
    for anything else."""
    try:
        return json.loads(read_regular(path))
    except RecursionError as error:
        raise ValueError(str(error)) from None


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of the file at ``path`` as lower-case hexadecimal. Raises OSError for no
    regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
