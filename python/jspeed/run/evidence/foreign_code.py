"""Whether a folder's recipe.py may run here: a model from somebody else brings Python code along.

jspeed's own recipes may, by the hash of their file, and so may each that was trained on this
machine. Of any other a person is asked, or says ``--trust``.
"""

import hashlib
import sys
from contextlib import suppress
from pathlib import Path

from jspeed.base.files import cache_folder, read_input
from jspeed.base.standard_streams import printable
from jspeed.errors import BadInput
from jspeed.recipes import FOLDER

LIST = "recipes_run_here"


def allow(path: Path, trust: bool = False) -> None:
    """Return where the recipe at ``path`` may run; ask on a terminal.

    Raises :class:`BadInput` where the answer is no, and where there is nobody to ask.
    """
    content = read_input(path, "copy the folder again")
    if trust or known(content):
        return
    where = printable(str(path))
    says = (
        f"{where} is Python code that came with the model and would run on this machine; it is none"
        " of jspeed's recipes, and was not trained here"
    )
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(f"{says}. Run it? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            remember(content)
            return
        raise BadInput(f"{where} was not run; answer y, or give --trust")
    raise BadInput(f"{says}; read it, then give --trust")


def known(content: bytes) -> bool:
    """Whether a recipe file with this ``content`` is jspeed's own, or was trained on this
    machine."""
    digest = hashlib.sha256(content).hexdigest()
    if any(hashlib.sha256(path.read_bytes()).hexdigest() == digest for path in FOLDER.glob("*.py")):
        return True
    with suppress(OSError, BadInput):
        return digest in (cache_folder() / LIST).read_text().split()
    return False


def remember(content: bytes) -> None:
    """Note that a recipe file with this ``content`` is run on this machine; where there is no room
    for the note, it will be asked about."""
    if not known(content):
        with suppress(OSError, BadInput):
            cache_folder().mkdir(parents=True, exist_ok=True)
            with (cache_folder() / LIST).open("a") as notes:
                notes.write(f"{hashlib.sha256(content).hexdigest()}\n")
