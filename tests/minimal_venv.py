"""An environment with some packages and nothing else: a venv of links to what is installed here,
made in no time."""

import os
import sys
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(requirements: list[str]) -> dict[str, Distribution]:
    """The distributions that ``requirements`` bring, of those installed here, by name.

    What is not installed (CUDA's wheels on a machine without a GPU) is left out: no test here could
    import it.
    """
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        asked = todo.pop()
        name = canonicalize_name(asked.name)
        try:
            one = distribution(name)
        except PackageNotFoundError:
            continue
        found[name] = one
        for extra in ("", *asked.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                rows = [Requirement(text) for text in one.requires or ()]
                todo += [
                    row
                    for row in rows
                    if row.marker is None or row.marker.evaluate({"extra": extra})
                ]
    return found


def tops(one: Distribution) -> set[str]:
    """The files and folders that a distribution puts into site-packages, by name."""
    return {path.parts[0] for path in one.files or () if path.parts[0] != ".."}


def minimal_venv(folder: Path, requirements: list[str]) -> Path:
    """Make a venv in ``folder`` that holds ``requirements`` and what they require, and return its
    Python."""
    venv.create(folder, symlinks=True, with_pip=False)
    kept = closure(requirements)
    others = {
        top
        for one in distributions()
        if canonicalize_name(one.name) not in kept
        for top in tops(one)
    }
    site = (
        folder
        / "lib"
        / f"python{sys.version_info.major}.{sys.version_info.minor}"
        / "site-packages"
    )
    for one in kept.values():
        for top in tops(one) - others:
            if not (site / top).exists():
                (site / top).symlink_to(one.locate_file(top))
        # of a folder that is shared with a package that stays out, only its own files
        for path in one.files or ():
            if path.parts[0] in others:
                (site / path).parent.mkdir(parents=True, exist_ok=True)
                (site / path).symlink_to(one.locate_file(path))
    return folder / "bin" / "python"


def variables(*path: Path) -> dict[str, str]:
    """An environment for that Python: ``path`` to import from, and none of this one's packages."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV", "XLA_FLAGS")
    }
    own = dict(
        JAX_PLATFORMS="cpu", PYTHONPATH=os.pathsep.join(map(str, path)), PYTHONDONTWRITEBYTECODE="1"
    )
    return kept | own
