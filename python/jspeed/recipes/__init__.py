"""The recipes that come with jspeed: their names, and where their files are; no jax in here."""

import os
from pathlib import Path

from jspeed.errors import BadInput, nearest

FOLDER = Path(__file__).parent


def known_recipes() -> list[str]:
    """Names of the recipes that come with jspeed."""
    return sorted(path.stem.replace("_", "-") for path in FOLDER.glob("[!_]*.py"))


def packaged(name: str) -> Path:
    """Return the path of the file that a recipe called ``name`` has if it comes with jspeed."""
    return FOLDER / f"{name.replace('-', '_')}.py"


def locate(name_or_path: str) -> Path:
    """Return the file of a recipe. Raises :class:`BadInput` for an unknown name or a path without a
    file."""
    if name_or_path.endswith(".py") or "/" in name_or_path:
        path = Path(name_or_path)
        if not os.path.isfile(path):
            raise BadInput(
                f"recipe file {path} does not exist; give the path of a recipe file or one of the"
                f" names {', '.join(known_recipes())}"
            )
        return path
    if name_or_path not in known_recipes():
        raise BadInput(
            f"recipe '{name_or_path}' is unknown{nearest(name_or_path, known_recipes())}; known"
            f" recipes: {', '.join(known_recipes())}; a file is given by its path, ending in .py"
        )
    return packaged(name_or_path)
