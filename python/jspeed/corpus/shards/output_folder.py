"""Output folders that appear whole or not at all: made under a hidden name beside their place, then
renamed."""

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from jspeed.base.files import NO_ROOM, named, try_lock
from jspeed.base.standard_streams import interruptible
from jspeed.errors import BadInput, NoRoom, writable_folder


def require_empty(out: Path) -> None:
    """Raise BadInput unless ``out`` is absent or an empty folder that can be replaced."""
    try:
        if out.exists() and not out.is_dir():
            raise BadInput(f"output {out} is a file; expected a folder that is absent or empty")
        if out.is_dir() and any(out.iterdir()):
            raise BadInput(
                f"output folder {out} is there and not empty; remove it or choose another --out"
            )
        if out.is_mount():
            raise BadInput(
                f"output folder {out} is a mount point, not replaceable; choose a folder in it"
            )
    except OSError as error:
        raise BadInput(
            f"output folder {out} cannot be used ({error.strerror}); choose another"
        ) from None


@contextmanager
def atomic_folder(
    out: Path, same: Callable[[Path, Path], bool] = lambda ours, theirs: False
) -> Iterator[Path]:
    """Yield a hidden folder beside ``out`` that becomes ``out`` when the block ends, and is removed
    if it fails.

    If another process makes ``out`` first, its result stands where ``same(ours, theirs)``. The next
    call removes what killed processes left, which is no longer locked; the parent is locked while
    the hidden folder is made, so that nobody removes that one before it is locked too. Raises
    BadInput, which is NoRoom on a full disk.
    """
    with writing_to(out) as out, ExitStack() as locks:
        staging = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
        try:
            with locked(out.parent, wait=True):
                for leftover in leftovers(out, ".partial"):
                    with suppress(OSError), locked(leftover) as free:
                        if free:
                            shutil.rmtree(leftover, ignore_errors=True)
                staging.mkdir()
                locks.enter_context(locked(staging))
            yield staging
            _publish(staging, out, same)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def writing_to(out: Path) -> Iterator[Path]:
    """Yield the real path of ``out`` with parents that are there, and remove those it made that are
    empty at the end.

    An OSError of the block becomes BadInput, or NoRoom.
    """
    out = Path(os.path.realpath(out))
    made = [folder for folder in out.parents if not folder.exists()]
    with interruptible():
        try:
            writable_folder(out.parent, "the output folder's parent")
            yield out
        except BadInput:  # some of them are OSErrors too
            raise
        except OSError as error:
            kind, advice = (
                (NoRoom, "make room there")
                if error.errno in NO_ROOM
                else (BadInput, "choose another")
            )
            code = f", {errno.errorcode.get(error.errno)}" if error.errno else ""
            raise kind(
                f"output folder {out} cannot be written ({error.strerror or error}{code}); {advice}"
            ) from None
        finally:
            with suppress(OSError):
                for folder in made:
                    folder.rmdir()


def _publish(staging: Path, out: Path, same: Callable[[Path, Path], bool]) -> None:
    try:
        with named("rename"):
            os.rename(staging, out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not same(staging, out):
            raise BadInput(
                f"output folder {out} was filled by something else; choose another"
            ) from None


def leftovers(out: Path, ending: str) -> list[Path]:
    """Return the hidden folders for ``out`` that end in ``ending``, sorted."""
    return sorted(
        path
        for path in out.parent.iterdir()
        if path.name.startswith(f".{out.name}.") and path.name.endswith(ending)
    )


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[bool | None]:
    """Hold the lock of ``folder`` during the block, if it can be had; yields what :func:`try_lock`
    returns."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield try_lock(handle, wait)
    finally:
        os.close(handle)
