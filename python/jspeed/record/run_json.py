"""Write run.json atomically with hashes of its content; read and check it, of any schema.

Only the trainer writes one. The hashes detect edits and corruption, not forgery: for that see the checks between fields
(consistent.py) and between files (verify.py), and ``jspeed leaderboard reproduce``.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from jspeed.errors import BadInput, writable_folder
from jspeed.files import read_regular, write_whole
from jspeed.record import consistent
from jspeed.record.schema import SCHEMA, Run, Unsealed, check_kinds, check_plain, validate

SEALS = ("digests", "sha256")
# A number that is not finite is written as null in these, where null is allowed, and refused anywhere else.
NULLABLE = ("val_loss", "curve", "holdout", "fields", "overrides", "loader", "probes", "gpus")


def write_run(folder: Path, run: Unsealed) -> Path:
    """Seal and check ``run``, write it whole as ``folder/run.json``, and return that path.

    ``digests`` and ``sha256`` are added here. Raises :class:`BadInput`, with nothing written, for a run that is not of
    the newest schema, not well-formed, or contradicts itself.
    """
    path = folder / "run.json"
    plain = {name: finite_or_null(value) if name in NULLABLE else value for name, value in run.items()}
    try:
        if run.get("schema") != SCHEMA:
            raise BadInput(f"field 'schema': expected {SCHEMA}, found {run.get('schema')}; older ones are only read")
        validate(plain | {"digests": {}, "sha256": ""})
        sealed = plain | seals(plain)
        consistent.check(cast(Run, sealed))
    except BadInput as error:
        raise BadInput(f"{path} was not written: {error}") from None
    order = [name for name in Run.__annotations__ if name in sealed]
    order += sorted(sealed.keys() - set(order))
    text = json.dumps({name: sealed[name] for name in order}, indent=2, allow_nan=False)
    writable_folder(folder, "the run folder")
    write_whole(path, text + "\n")
    return path


def read_run(path: Path) -> Run:
    """Return the run in the run.json at ``path`` (or in the folder ``path``), checked, or raise BadInput."""
    return parse_run(*read_content(path))


def read_content(path: Path) -> tuple[bytes, Path]:
    """Return the bytes, unchecked, of the run.json at ``path`` (or in the folder ``path``), and its path."""
    path = path / "run.json" if path.is_dir() else path
    try:
        return read_regular(path), path
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist; give a run directory that holds a run.json") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); give a readable run.json") from None


def parse_run(content: bytes, path: Path) -> Run:
    """Return the run that ``content`` holds, checked; ``path`` names it in error messages."""
    remedy = "a run.json comes from the trainer and is not edited: copy it again, or make the run again"
    run = parse_json(content, path, remedy)
    try:
        check_kinds(run)
        consistent.check(run)
        if run["schema"] >= 2:
            check_seals(run)
        else:
            check_plain(run)
    except BadInput as error:
        raise BadInput(f"{path}: {error}; {remedy}") from None
    return run


def parse_json(content: bytes, path: Path, remedy: str) -> Any:
    """Return what the JSON text ``content`` holds; BadInput, ending in ``remedy``, says where it stops being one."""
    try:
        text = content.decode()
        return json.loads(text)
    except json.JSONDecodeError as error:
        ended = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        what = "is cut short" if ended else f"is not JSON ({error.msg})"
        raise BadInput(f"{path} {what} at line {error.lineno}, column {error.colno}; {remedy}") from None
    except (ValueError, RecursionError):
        raise BadInput(f"{path} is not JSON text; {remedy}") from None


def seals(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``digests`` and ``sha256`` of everything else in ``run``."""
    body = {name: value for name, value in run.items() if name not in SEALS}
    digests = {name: _sha256(body[name])[:16] for name in sorted(body)}
    return {"digests": digests, "sha256": content_hash(body | {"digests": digests})}


def content_hash(fields: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all ``fields`` but ``sha256`` itself, as JSON without spaces and with sorted keys."""
    return _sha256({name: value for name, value in fields.items() if name != "sha256"})


def check_seals(run: Mapping[str, Any]) -> None:
    """Raise BadInput naming the fields of ``run`` that are not what the trainer wrote."""
    try:
        if content_hash(run) == run["sha256"]:
            return
    except ValueError:  # a number that is not finite, somewhere
        check_plain(run)
    names = sorted((run.keys() | run["digests"].keys()) - set(SEALS))
    changed = [name for name in names if name not in run or _sha256(run[name])[:16] != run["digests"].get(name)]
    field = changed[0] if changed else "sha256"
    others = f" (and of {', '.join(changed[1:])})" if changed[1:] else ""
    raise BadInput(
        f"field '{field}': expected the content that the trainer hashed{others}, found another; it was changed after "
        "the run"
    )


def _sha256(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def finite_or_null(value: Any) -> Any:
    """Return ``value`` with None for every number in it that is not finite."""
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
