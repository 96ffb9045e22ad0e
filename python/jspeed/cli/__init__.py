"""The command ``jspeed``: its flags, ``run`` and ``bench``; ``scripts/*.py`` call the same."""

import sys
from pathlib import Path

import jspeed


def repository() -> Path | None:
    """Return the repository that the running script, the package, or the current folder is in; None
    for none of them.

    A script of the repository may run an installed package; the package may be the repository's
    own.
    """
    script, package = Path(sys.argv[0]).absolute(), Path(jspeed.__file__)
    for folder in (*script.parents[1:2], package.parents[2], Path.cwd()):
        if (folder / "scripts" / "benches").is_dir() and (folder / "records").is_dir():
            return folder
    return None
