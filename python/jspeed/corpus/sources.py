"""Find source documents, in a fixed order: the standard library's own files, or text files on
disk."""

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jspeed.base.files import as_text, open_regular, read_input, sha256_of, what_instead
from jspeed.corpus.chunks import LINES, TABLES, TEXTS, ending
from jspeed.corpus.compressed import FORMATS
from jspeed.data.manifest import Split
from jspeed.errors import BadInput

# Test suites, and folders that some versions of Python do not have (lib2to3, distutils). Linux
# distributions put others in packages of their own, drop or move them (idlelib, tkinter,
# turtledemo, ensurepip, macholib).
EXCLUDED_FOLDERS = frozenset(
    "site-packages dist-packages __pycache__ test tests idle_test idlelib tkinter turtledemo"
    " ensurepip macholib lib2to3 distutils".split()
)
# Single files that are split off with tkinter (turtle), or made by one machine's build or its
# distribution.
EXCLUDED_FILES = frozenset(
    ["turtle.py", "sitecustomize.py", "usercustomize.py", "_distutils_system_mod.py"]
)
EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")

# About 1 file in 32 is for validation: 353,796 of 9.8 million tokens with CPython 3.11.7, more with
# 3.12 and 3.13.
STDLIB_VALIDATION_ONE_IN = 32

ENDINGS = f"{', '.join(TEXTS + LINES)} (also {', '.join(FORMATS)}) or {', '.join(TABLES)}"
NAMES_IN_MANIFEST = 20


def stdlib_root() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files() -> list[tuple[str, int]]:
    """Return (relative POSIX path, bytes) of the standard library's ``.py`` files, sorted by path.

    Empty files are skipped. So that the data of two distributions resemble each other, test suites
    are left out, and folders that distributions split off, drop or move (``EXCLUDED_FOLDERS``). So
    are files made for one machine or distribution (``EXCLUDED_FILES``, ``EXCLUDED_PREFIXES``).
    Raises BadInput when nothing is left, as for an interpreter that keeps its library in a zip
    file.
    """
    root = stdlib_root()
    sources = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            f for f in folders if f not in EXCLUDED_FOLDERS and not f.startswith(EXCLUDED_PREFIXES)
        ]
        for name in names:
            path = Path(folder, name)
            if (
                not name.endswith(".py")
                or name in EXCLUDED_FILES
                or name.startswith(EXCLUDED_PREFIXES)
            ):
                continue
            if path.is_file() and (size := path.stat().st_size):
                sources.append((path.relative_to(root).as_posix(), size))
    if not sources:
        raise BadInput(
            f"this Python's standard library {root} holds no .py sources; use another Python"
        )
    return sorted(sources)


def stdlib_key(files: Sequence[tuple[str, int]]) -> str:
    """Return 12 hexadecimal digits for this Python's version, its source files and how they are
    split."""
    identity = [
        platform.python_implementation(),
        platform.python_version(),
        STDLIB_VALIDATION_ONE_IN,
        files,
    ]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]


def stdlib_documents(files: Iterable[tuple[str, int]]) -> Iterator[tuple[Split, bytes]]:
    """Yield (split, document) for files that :func:`stdlib_files` listed, in their order; the split
    depends on the path alone. Raises BadInput."""
    for name, _ in files:
        is_val = hash_of(name.encode()) % STDLIB_VALIDATION_ONE_IN == 0
        yield "val" if is_val else "train", read_input(stdlib_root() / name, "use another Python")


def hash_of(content: bytes) -> int:
    """Return the first 64 bits of the SHA-256 of ``content``."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big")


def text_files(inputs: Sequence[Path]) -> list[tuple[str, Path]]:
    """Return (name, path) of each text file among ``inputs``, in their order, none twice.

    A folder stands for the files below it that :func:`jspeed.corpus.chunks.ending` knows, sorted by
    relative POSIX path, without :func:`passed_over`. The name is relative to the folder, or the
    file's own. Raises BadInput for a missing input, an unknown ending and a folder without text
    files.
    """
    by_path: dict[str, tuple[str, Path]] = {}
    for given in inputs:
        try:
            names = _names(given)
        except OSError as error:
            raise BadInput(
                f"input {given} cannot be read ({error.strerror}); make it readable, or give"
                " another"
            ) from None
        for name in names:
            path = given / name
            by_path.setdefault(os.path.realpath(path), (name or given.name, path))
    if not by_path:
        raise BadInput(f"no input was given; name a {ENDINGS} file or a folder of them")
    return list(by_path.values())


def passed_over(inputs: Iterable[Path]) -> list[str]:
    """Return the relative paths of what is not read of the folders among ``inputs``, sorted: files
    of other endings, hidden files and folders, and links to folders. A folder that cannot be read
    is left to :func:`text_files`."""
    names = set()
    for given in inputs:
        with suppress(OSError):
            names |= {name for name, is_read in _below(given) if not is_read}
    return sorted(names)


def _names(given: Path) -> list[str]:
    """Return the relative paths of the text files that ``given`` stands for; a file's own is
    empty."""
    if given.is_dir():
        names = sorted(name for name, is_read in _below(given) if is_read)
        if not names:
            raise BadInput(f"input folder {given} holds no {ENDINGS} file; give another")
        return names
    if not given.exists():
        if given.is_symlink():
            open_regular(given)  # raises: where the link leads to
        raise BadInput(f"input {given} does not exist; give a {ENDINGS} file or a folder of them")
    if not given.is_file():
        raise BadInput(f"input {given} is neither a file nor a folder; save it to a file first")
    if not ending(given.name):
        raise BadInput(f"input {given} has an unknown ending; expected {ENDINGS}")
    return [""]


def _below(root: Path) -> Iterator[tuple[str, bool]]:
    """Yield the relative path of each file, and of each folder that is not entered, and whether it
    is read."""

    def stop(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=stop):
        closed = [
            name for name in folders if name.startswith(".") or os.path.islink(Path(folder, name))
        ]
        folders[:] = [name for name in folders if name not in closed]
        below = Path(folder).relative_to(root)
        for name in closed:
            yield (below / name).as_posix(), False
        for name in names:
            # cache-*.arrow are what datasets' map() has made of the others
            other = name.startswith(".") or (name.startswith("cache-") and name.endswith(".arrow"))
            yield (below / name).as_posix(), bool(ending(name)) and not other


def text_fingerprint(files: Sequence[tuple[str, Path]]) -> dict[str, Any]:
    """Return the number of ``files``, their bytes, one SHA-256 of names and contents, and the first
    names.

    Raises BadInput for a file that cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    for name, path in files:
        try:
            digest.update(sha256_of(path).encode() + b"  " + os.fsencode(name) + b"\n")
            size += path.stat().st_size
        except OSError as error:
            raise BadInput(
                f"{path} cannot be read ({error.strerror}); make it readable, or leave it out"
            ) from None
    names = [as_text(name) for name, _ in files[:NAMES_IN_MANIFEST]]
    return {"files": len(files), "bytes": size, "sha256": digest.hexdigest(), "names": names}


def text_stamps(files: Sequence[tuple[str, Path]]) -> list[tuple[int, int]]:
    """Return size (bytes) and time of last change (ns) of each file, to tell whether one changed
    while it was read.

    Raises BadInput for a file that cannot be read.
    """
    try:
        stats = [os.stat(path) for _, path in files]
    except OSError as error:
        why = what_instead(error.filename) or error.strerror
        raise BadInput(f"{error.filename} cannot be read ({why}); give another") from None
    return [(stat.st_size, stat.st_mtime_ns) for stat in stats]
