"""What a run.json says (schema 1): its fields, how it is written, and how it is checked when read.

Units are the same everywhere: losses are nats per token, times are seconds, sizes are bytes. Only the trainer
writes a run.json. Whoever reads one gets the whole of it, checked, or one sentence that says what is wrong.
"""

import json
import math
import reprlib
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from jspeed.errors import BadInput, writable_folder
from jspeed.files import write_whole

SCHEMA = 1
STATUSES = ("finished", "stopped", "interrupted", "diverged")


class Field(NamedTuple):
    """One line of the schema: a key of :data:`KINDS`, what the value means, and its unit if it has one."""

    kind: str
    meaning: str
    unit: str = ""


# A dot steps into an object, "*" stands for each of its keys, "[]" for each item of a list. A parent comes
# before its children, because checking goes from top to bottom.
FIELDS: dict[str, Field] = {
    "schema": Field("count", "version of this table"),
    "recipe": Field("text", "name of the recipe"),
    "recipe_hash": Field("text", "hash of the recipe's resolved fields and source"),
    "recipe_source": Field("text", "name of the recipe's file"),
    "fields": Field("object", "every field of the recipe, overrides applied"),
    "overrides": Field("object", "the fields that --set changed"),
    "parent": Field("text or null", "recipe that this one was derived from"),
    "track": Field("text", "what it competes in, such as stdlib/cpu"),
    "seed": Field("integer", "seed of the initial weights and of the data order"),
    "status": Field("status", "finished; stopped: asked for fewer steps or minutes; interrupted; diverged"),
    "reached": Field("flag", "the final validation loss is at or below the target"),
    "target_loss": Field("number", "validation loss to reach", "nats per token"),
    "val_loss": Field("number or null", "final validation loss; null when not finite", "nats per token"),
    "timed_seconds": Field("amount", "time on the training clock", "seconds"),
    "compile_seconds": Field("amount", "compilation, beside the clock", "seconds"),
    "wall_seconds": Field("amount", "from start to end, everything included", "seconds"),
    "started": Field("moment", "when the run started, UTC"),
    "steps": Field("count", "optimizer steps made"),
    "planned_steps": Field("count", "optimizer steps of the recipe's whole schedule"),
    "tokens": Field("count", "tokens trained on", "tokens"),
    "parameters": Field("count", "number of trained parameters"),
    "flops_per_token": Field("amount", "training work per token", "FLOPs"),
    "devices": Field("object", "what it ran on"),
    "devices.kind": Field("text", "name of the device, as it reports itself"),
    "devices.count": Field("positive", "devices in all"),
    "devices.processes": Field("positive", "processes in all"),
    "devices.platform": Field("text", "cpu, gpu or tpu"),
    "mesh": Field("object", "mesh axis -> size"),
    "mesh.*": Field("positive", "size of a mesh axis"),
    "layout": Field("text", "how the state is laid out over the mesh"),
    "micro_batch": Field("positive", "micro-batch of one device", "tokens"),
    "data": Field("object", "what was trained and evaluated on"),
    "data.name": Field("text", "name of the data set"),
    "data.fingerprint": Field("text", "hash of the training tokens"),
    "data.val_fingerprint": Field("text", "hash of the validation tokens"),
    "data.train_tokens": Field("count", "tokens in the training shards", "tokens"),
    "data.val_tokens": Field("count", "tokens evaluated for val_loss", "tokens"),
    "data.tokenizer": Field("text or null", "name of the tokenizer; null for bytes"),
    "loader": Field("object", "statistics of the data loader"),
    "host": Field("object", "where the host spent its time"),
    "host.data_wait_seconds": Field("amount", "waiting for batches", "seconds"),
    "host.dispatch_seconds": Field("amount", "handing steps to the devices", "seconds"),
    "ledger": Field("list", "every interval of the run, in order"),
    "ledger[]": Field("object", "one interval"),
    "ledger[].name": Field("text", "what it was spent on"),
    "ledger[].seconds": Field("amount", "its length", "seconds"),
    "ledger[].timed": Field("flag", "whether it is on the training clock"),
    "curve": Field("list", "every validation, in order"),
    "curve[]": Field("object", "one validation"),
    "curve[].step": Field("count", "optimizer steps made before it"),
    "curve[].timed_seconds": Field("amount", "training clock at that step", "seconds"),
    "curve[].val_loss": Field("number or null", "validation loss; null when not finite", "nats per token"),
    "probes": Field("object", "validity probes of the trained model, by name"),
    "probes.*": Field("object", "one probe and what it measured"),
    "probes.*.passed": Field("flag", "whether the probe passed"),
    "versions": Field("object", "versions of what computed the result"),
    "versions.python": Field("text", "version of Python"),
    "versions.jax": Field("text", "version of jax"),
    "versions.jaxlib": Field("text", "version of jaxlib"),
    "versions.numpy": Field("text", "version of numpy"),
    "versions.optax": Field("text", "version of optax"),
    "versions.jspeed": Field("text", "version of jspeed"),
    "xla_flags": Field("text", "XLA_FLAGS of the process; may be empty"),
    "git": Field("object", "the code that ran"),
    "git.commit": Field("text or null", "commit; null outside a git checkout"),
    "git.dirty": Field("flag or null", "whether tracked files differed from the commit"),
}


def _is_integer(value: Any) -> bool:
    # In Python True is an int; in JSON it is not a number.
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _is_moment(value: Any) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).utcoffset() == timedelta(0)
    except ValueError:
        return False


# kind -> (how the sentence calls it, whether a value is one)
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("text", lambda v: isinstance(v, str)),
    "text or null": ("text or null", lambda v: v is None or isinstance(v, str)),
    "flag": ("true or false", lambda v: isinstance(v, bool)),
    "flag or null": ("true, false or null", lambda v: v is None or isinstance(v, bool)),
    "integer": ("an integer", _is_integer),
    "count": ("an integer of at least 0", lambda v: _is_integer(v) and v >= 0),
    "positive": ("an integer of at least 1", lambda v: _is_integer(v) and v >= 1),
    "number": ("a finite number", _is_number),
    "number or null": ("a finite number or null", lambda v: v is None or _is_number(v)),
    "amount": ("a finite number of at least 0", lambda v: _is_number(v) and v >= 0),
    "object": ("an object", lambda v: isinstance(v, dict)),
    "list": ("a list", lambda v: isinstance(v, list)),
    "status": (f"one of {', '.join(STATUSES)}", lambda v: isinstance(v, str) and v in STATUSES),
    "moment": ("a UTC time such as 2026-01-31T12:00:00+00:00", _is_moment),
}


def write_run(folder: Path, run: dict[str, Any]) -> Path:
    """Check ``run`` and write it whole as ``folder/run.json``; return that path.

    A number that is not finite is written as null where null is allowed: in losses, and inside ``fields``,
    ``overrides``, ``loader`` and ``probes``. Anywhere else it is refused, as is everything that
    :func:`validate` refuses, with :class:`BadInput`; then nothing is written.
    """
    path = folder / "run.json"
    nullable = ("val_loss", "curve", "fields", "overrides", "loader", "probes")
    run = {name: _finite_or_null(value) if name in nullable else value for name, value in run.items()}
    try:
        validate(run)
    except BadInput as error:
        raise BadInput(f"{path} was not written: {error}") from None
    order = [name for name in FIELDS if name in run]
    order += sorted(run.keys() - set(order))
    text = json.dumps({name: run[name] for name in order}, indent=2, allow_nan=False)
    writable_folder(folder, "the run folder")
    write_whole(path, text + "\n")
    return path


def read_run(path: Path) -> dict[str, Any]:
    """Return the run in the run.json at ``path`` (or in the folder ``path``), checked, or raise BadInput."""
    return parse_run(*read_content(path))


def read_content(path: Path) -> tuple[bytes, Path]:
    """Return the bytes, unchecked, of the run.json at ``path`` (or in the folder ``path``), and its path."""
    path = path / "run.json" if path.is_dir() else path
    try:
        return path.read_bytes(), path
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist; give a run directory that holds a run.json") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); give a readable run.json") from None


def parse_run(content: bytes, path: Path) -> dict[str, Any]:
    """Return the run that ``content`` holds, checked; ``path`` is what a BadInput sentence calls it."""
    remedy = "a run.json comes from the trainer and is not edited: copy it again, or make the run again"
    try:
        text = content.decode()
        run = json.loads(text)
    except json.JSONDecodeError as error:
        ended = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        what = "is cut short" if ended else f"is not JSON ({error.msg})"
        raise BadInput(f"{path} {what} at line {error.lineno}, column {error.colno}; {remedy}") from None
    except (ValueError, RecursionError):
        raise BadInput(f"{path} is not JSON text; {remedy}") from None
    try:
        validate(run)
    except BadInput as error:
        raise BadInput(f"{path}: {error}; {remedy}") from None
    return run


def validate(run: Any) -> None:
    """Raise BadInput naming the first field of ``run`` that is missing, of a wrong kind or contradictory."""
    if not isinstance(run, dict):
        raise BadInput(f"expected an object with the fields of a run, found {_found(run)}")
    if _is_integer(run.get("schema")) and run["schema"] != SCHEMA:
        raise BadInput(
            f"field 'schema': expected {SCHEMA}, found {run['schema']}; use the jspeed that wrote this schema"
        )
    for name, field in FIELDS.items():
        expected, matches = KINDS[field.kind]
        for where, value in _values(run, name.replace("[]", ".[]").split("."), ""):
            if not matches(value):
                unit = f" ({field.unit})" if field.unit else ""
                raise BadInput(f"field '{where}': expected {expected}{unit}, found {_found(value)}")
    _check_plain(run, "")
    _check_consistent(run)


def _values(node: Any, parts: list[str], where: str) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) for everything under ``node`` that the schema path ``parts`` names."""
    if not parts:
        yield where, node
        return
    head, rest = parts[0], parts[1:]
    if head == "[]":
        for index, item in enumerate(node):
            yield from _values(item, rest, f"{where}[{index}]")
    elif head == "*":
        for key, item in node.items():
            yield from _values(item, rest, f"{where}.{key}")
    else:
        where = f"{where}.{head}".lstrip(".")
        yield from _values(node.get(head, _MISSING), rest, where)


_MISSING = object()


def _found(value: Any) -> str:
    if value is _MISSING:
        return "no such field"
    return "null" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"


def _finite_or_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite_or_null(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_or_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_plain(value: Any, where: str) -> None:
    """Refuse what JSON cannot hold, also in fields that the table leaves free."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise BadInput(f"field '{where}': expected text as key, found {_found(key)}")
            _check_plain(item, f"{where}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif not (value is None or isinstance(value, (str, bool)) or _is_number(value)):
        raise BadInput(f"field '{where}': expected text, a finite number, true, false or null, found {_found(value)}")


def _check_consistent(run: dict[str, Any]) -> None:
    """Refuse numbers that contradict each other: a run.json that was edited, or a bookkeeping bug."""
    timed, wall, loss = run["timed_seconds"], run["wall_seconds"], run["val_loss"]
    timed_entries = math.fsum(entry["seconds"] for entry in run["ledger"] if entry["timed"])
    if abs(timed_entries - timed) > 1e-3 + 1e-3 * timed:
        raise BadInput(
            f"field 'timed_seconds': expected the sum of the timed ledger entries, "
            f"{timed_entries:.3f}, found {timed:.3f}"
        )
    total = math.fsum(entry["seconds"] for entry in run["ledger"])
    if total > 1e-3 + 1.01 * wall:
        raise BadInput(
            f"field 'wall_seconds': expected at least the sum of all ledger entries, {total:.3f}, found {wall:.3f}"
        )
    if run["reached"] and (loss is None or loss > run["target_loss"]):
        raise BadInput(
            f"field 'reached': expected false, because val_loss is {_found(loss)} and target_loss "
            f"is {run['target_loss']}, found true"
        )
    for index in range(1, len(run["curve"])):
        before, point = run["curve"][index - 1 : index + 1]
        if point["step"] <= before["step"]:
            raise BadInput(
                f"field 'curve[{index}].step': expected more than {before['step']}, the step "
                f"before it, found {point['step']}"
            )
        if point["timed_seconds"] < before["timed_seconds"]:
            raise BadInput(
                f"field 'curve[{index}].timed_seconds': expected at least "
                f"{before['timed_seconds']}, the time before it, found {point['timed_seconds']}"
            )
