"""Write run.json atomically with a hash of its content; read and check it.

Only the trainer writes one. The hash detects edits and corruption, not forgery: for that see the
checks between fields (consistent.py) and between files (verify.py), and ``jspeed leaderboard
reproduce``.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspeed.base.files import read_input, write_whole
from jspeed.errors import BadInput, writable_folder
from jspeed.fields import check_json, parse_json
from jspeed.record import consistent
from jspeed.record.schema import Run, Unsealed


def write_run(folder: Path, run: Unsealed) -> Path:
    """Seal and check ``run``, write it whole as ``folder/run.json``, and return that path.

    ``sha256`` is added here; a number that is not finite becomes null. Raises :class:`BadInput`,
    with nothing written, for a run that is not well-formed or contradicts itself.
    """
    path = folder / "run.json"
    plain = finite_or_null(run)
    try:
        check(plain | {"sha256": ""})
        sealed = plain | {"sha256": content_hash(plain)}
    except BadInput as error:
        raise BadInput(f"{path} was not written: {error}") from None
    order = [name for name in Run.__annotations__ if name in sealed]
    order += sorted(sealed.keys() - set(order))
    text = json.dumps({name: sealed[name] for name in order}, indent=2, allow_nan=False)
    writable_folder(folder, "the run folder")
    write_whole(path, text + "\n")
    return path


def read_run(path: Path) -> Run:
    """Return the run in the run.json at ``path`` (or in the folder ``path``), checked, or raise
    BadInput."""
    return parse_run(*read_content(path))


def read_content(path: Path) -> tuple[bytes, Path]:
    """Return the bytes, unchecked, of the run.json at ``path`` (or in the folder ``path``), and its
    path."""
    path = path / "run.json" if path.is_dir() else path
    return read_input(path, "give a run directory that holds a run.json"), path


def parse_run(content: bytes, path: Path) -> Run:
    """Return the run that ``content`` holds, checked; ``path`` names it in error messages."""

    def check_with_hash(run: Any) -> None:
        check(run)
        if content_hash(run) != run["sha256"]:
            raise BadInput(
                "field 'sha256': expected the hash of the other fields, found another: one was"
                " changed"
            )

    remedy = (
        "a run.json comes from the trainer and is not edited: copy it again, or make the run again"
    )
    return parse_json(content, path, check_with_hash, remedy)


def check(run: Any) -> None:
    """Raise BadInput naming the first field of ``run`` that is missing, of a wrong kind, or
    contradicts the others."""
    check_json(run, Run)
    consistent.check(run)


def content_hash(fields: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all ``fields`` but ``sha256`` itself, as JSON without spaces and with
    sorted keys.

    Raises BadInput for what JSON cannot hold, such as a number that is not finite."""
    others = {name: value for name, value in fields.items() if name != "sha256"}
    try:
        text = json.dumps(others, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"a field holds what JSON cannot ({error}); expected finite numbers, texts and lists"
        ) from None
    return hashlib.sha256(text.encode()).hexdigest()


def finite_or_null(value: Any) -> Any:
    """Return ``value`` with None for every number in it that is not finite."""
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
