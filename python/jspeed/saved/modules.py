"""Which modules were there when programs were made, and whether they are what they were.

A list that *travels* to other installations names a file by what follows an entry of ``sys.path``,
and knows it by its content alone; any other by its path, and an installed package's by size and
time of change.
"""

import os
import site
import sys
import sysconfig
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from jspeed.base.files import sha256_of

EXTENSION = "jspeed._dataloader"  # gives batches and no program; each clone builds its own


def seen(travels: bool) -> dict[str, str]:
    """Return what is known of the file of each module that is loaded now, by name."""
    return {name: facts(path, travels) for name, path in files(travels).items()}


def changed(before: Mapping[str, str], travels: bool) -> str | None:
    """Return the path of a module that is not what it was ``before``; or that is loaded now, was
    not then, and is of no package."""
    packages = f"{Path(__file__).parents[1]}{os.sep}", *installed()
    others = (path for name, what in before.items() if facts(path := here(name), travels) != what)
    more = (
        path
        for name, path in files(travels).items()
        if name not in before and not path.startswith(packages)
    )
    return next(others, None) or next(more, None)


def files(travels: bool) -> dict[str, str]:
    """Return the files of all modules that are loaded now, but of the one that started the
    command, by name."""
    without = ("__main__", EXTENSION) if travels else ("__main__",)
    loaded = [module for name, module in list(sys.modules.items()) if name not in without]
    paths = sorted({path for module in loaded if (path := getattr(module, "__file__", None))})
    if not travels:
        return {path: path for path in paths}
    roots = sorted((os.path.join(os.path.abspath(each), "") for each in sys.path), key=len)
    return {
        next((path.removeprefix(root) for root in reversed(roots) if path.startswith(root)), path):
        path for path in paths
    }  # fmt: skip


def here(name: str) -> str:
    """Return the path of a file by its name, as an import would find it."""
    there = (os.path.join(each, name) for each in sys.path if not os.path.isabs(name))
    return next(filter(os.path.exists, there), name)


def facts(path: str, travels: bool) -> str:
    """Return the SHA-256 of a file; of an installed package's its size and time of change, where
    that is enough; "" of one that is gone."""
    try:
        if not travels and path.startswith(installed()):
            status = os.stat(path)
            return f"{status.st_size} {status.st_mtime_ns}"
        return sha256_of(Path(path))
    except OSError:
        return ""


@cache
def installed() -> tuple[str, ...]:
    """Return the folders of Python's own and of installed modules."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {sysconfig.get_paths()[name] for name in names} | {site.getusersitepackages()}
    return tuple(f"{path}{os.sep}" for path in paths)
