"""Where the parameters that a run ended with are kept: weights-HASH.json beside its record, for
whoever asks.

The parameters themselves, which may be gigabytes, are not among the records. Whoever has fetched
them compares the SHA-256, and ``jspeed evaluate`` gives the record's loss again.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import TypedDict

from jspeed.base.files import sha256_of
from jspeed.errors import BadInput
from jspeed.fields import Whole, check_json, parse_json, shown
from jspeed.record.schema import Run

NAME = re.compile(r"weights-[0-9a-f]{8}\.json")
FILE = "model.safetensors"


class Weights(TypedDict):
    """The content of weights-HASH.json."""

    run: str  # sha256 of the run.json
    kept: str  # address or path of the file
    bytes: Whole
    sha256: str


def weights_name(content: bytes) -> str:
    """Return the file name of a weights-HASH.json with that content."""
    return f"weights-{hashlib.sha256(content).hexdigest()[:8]}.json"


def weights_of(run: Run, run_dir: Path, kept: str, folder: Path) -> tuple[Path, bytes]:
    """Return path and content of the weights-HASH.json of ``run`` in ``folder``.

    It says that the file in ``run_dir`` is kept as KEPT/RUN_DIR/FILE.

    Raises BadInput where there is no such file, or ``kept`` is not one line of text.
    """
    if not kept.strip() or not kept.isprintable():
        raise BadInput(
            f"--weights {shown(kept)}: expected one line, the address or path where the run's"
            " folder is kept"
        )
    path = run_dir.resolve() / FILE
    try:
        size, digest = path.stat().st_size, sha256_of(path)
    except OSError as error:
        raise BadInput(
            f"{path} cannot be read ({error.strerror}); restore it, or leave out --weights"
        ) from None
    weights: Weights = {
        "run": run["sha256"],
        "kept": f"{kept.rstrip('/')}/{path.parent.name}/{FILE}",
        "bytes": size,
        "sha256": digest,
    }
    content = (json.dumps(weights, indent=2) + "\n").encode()
    return folder / weights_name(content), content


def parse_weights(content: bytes, path: Path) -> Weights:
    """Return what a weights-HASH.json holds, checked; ``path`` names it in error messages."""
    return parse_json(
        content, path, lambda found: check_json(found, Weights), "restore it, or remove it"
    )
