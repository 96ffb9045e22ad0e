"""What a run.json says: its fields, by schema, and whether one is well-formed.

Units are the same everywhere: losses are nats per token, times are seconds, sizes are bytes. Schema 2 added the
evidence: what the data, the recipe's file, the packages and the GPUs were. A file of schema 1 is read as it is.
"""

import math
import reprlib
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple

from jspeed.errors import BadInput

SCHEMA = 2
STATUSES = ("finished", "stopped", "interrupted", "diverged")


class Field(NamedTuple):
    """One line of the schema: a key of :data:`KINDS`, what the value means, its unit, the schema that brought it."""

    kind: str
    meaning: str
    unit: str = ""
    since: int = 1


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
    # What schema 2 brought.
    "recipe_sha256": Field("text", "SHA-256 of the recipe's file", since=2),
    "asked_steps": Field("positive or null", "steps that --steps asked for; null for the whole schedule", since=2),
    "ended": Field("moment", "when the run ended, UTC", since=2),
    "resumed": Field("list", "steps after which the run was resumed", since=2),
    "resumed[]": Field("count", "optimizer steps made before it", since=2),
    "plan": Field("object or null", "the plan that this run belongs to", since=2),
    "plan.sha256": Field("text", "the plan's own hash", since=2),
    "plan.folder": Field("text", "which of the plan's runs this is", since=2),
    "initial_state": Field("text", "checksum of parameters and optimizer state before step 1", since=2),
    "data.val_sha256": Field("text or null", "SHA-256 of the evaluated ids and the one after them, as uint16", since=2),
    "data.train_shards": Field("list", "shards that the run read from, in order", since=2),
    "data.train_shards[]": Field("object", "one shard", since=2),
    "data.train_shards[].name": Field("text", "name of the file", since=2),
    "data.train_shards[].sha256": Field("text or null", "SHA-256 of the file; null if interrupted", since=2),
    "data.train_shards[].first": Field("count", "index of the first token in reach", "tokens", since=2),
    "data.train_shards[].end": Field("count", "index after the last token in reach", "tokens", since=2),
    "data.position": Field("object", "where the loader's stream stood at the end", since=2),
    "machine": Field("text or null", "hash of the machine's boot id: equal for runs between two starts", since=2),
    "gpus": Field("object or null", "what nvidia-smi says of the GPUs of process 0's machine", since=2),
    "gpus.driver": Field("text", "version of the driver", since=2),
    "gpus.cuda": Field("text or null", "newest version of CUDA that the driver takes", since=2),
    "gpus.links": Field("list", "kinds of connection between the GPUs, as nvidia-smi topo calls them", since=2),
    "gpus.before": Field("list", "every GPU before the clock started", since=2),
    "gpus.after": Field("list", "every GPU after it stopped", since=2),
    "container": Field("text or null", "JSPEED_CONTAINER, the image's digest if whoever started it says so", since=2),
    "environment": Field("text", "SHA-256 of the names and versions of all installed packages", since=2),
    "digests": Field("object", "hash of every other field by name, to say which was changed", since=2),
    "digests.*": Field("text", "16 hexadecimal digits", since=2),
    "sha256": Field("text", "SHA-256 of all other fields as canonical JSON", since=2),
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
    "positive or null": ("an integer of at least 1 or null", lambda v: v is None or (_is_integer(v) and v >= 1)),
    "number": ("a finite number", _is_number),
    "number or null": ("a finite number or null", lambda v: v is None or _is_number(v)),
    "amount": ("a finite number of at least 0", lambda v: _is_number(v) and v >= 0),
    "object": ("an object", lambda v: isinstance(v, dict)),
    "object or null": ("an object or null", lambda v: v is None or isinstance(v, dict)),
    "list": ("a list", lambda v: isinstance(v, list)),
    "status": (f"one of {', '.join(STATUSES)}", lambda v: isinstance(v, str) and v in STATUSES),
    "moment": ("a UTC time such as 2026-01-31T12:00:00+00:00", _is_moment),
}


class _Node:
    """What is expected at one place of a run: a field, how to tell whether it is one, and what is expected under it."""

    def __init__(self) -> None:
        self.field: Field | None = None
        self.matches: Callable[[Any], bool] = lambda value: True
        self.children: dict[str, _Node] = {}


@cache
def _tree(schema: int) -> _Node:
    root = _Node()
    for name, field in FIELDS.items():
        if field.since <= schema:
            node = root
            for part in name.replace("[]", ".[]").split("."):
                node = node.children.setdefault(part, _Node())
            node.field, node.matches = field, KINDS[field.kind][1]
    return root


def validate(run: Any) -> None:
    """Raise BadInput naming the first field of ``run`` that is missing or of a wrong kind, or that JSON cannot hold."""
    check_kinds(run)
    check_plain(run)


def check_kinds(run: Any) -> None:
    """Raise BadInput naming the first field of ``run`` that is missing or of a wrong kind for its schema."""
    if not isinstance(run, dict):
        raise BadInput(f"expected an object with the fields of a run, found {found(run)}")
    schema: Any = run.get("schema")
    if not _is_integer(schema):
        schema = SCHEMA
    if not 1 <= schema <= SCHEMA:
        raise BadInput(f"field 'schema': expected 1 to {SCHEMA}, found {schema}; use the jspeed that wrote this schema")
    _check(run, _tree(schema), ())


def place_name(where: tuple[str | int, ...]) -> str:
    """Return a place in a run as ``ledger[1].seconds``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")


def _check(value: Any, node: _Node, where: tuple[str | int, ...]) -> None:
    for part, child in node.children.items():
        if part == "[]":
            inner: Any = enumerate(value)
        elif part == "*":
            inner = value.items()
        else:
            inner = ((part, value.get(part, _MISSING)),)
        for key, item in inner:
            if not child.matches(item):
                assert child.field
                expected, unit = KINDS[child.field.kind][0], child.field.unit and f" ({child.field.unit})"
                raise BadInput(f"field '{place_name((*where, key))}': expected {expected}{unit}, found {found(item)}")
            if child.children and item is not None:
                _check(item, child, (*where, key))


_MISSING = object()


def found(value: Any) -> str:
    """Return what a sentence says was found: the value and its type."""
    if value is _MISSING:
        return "no such field"
    return "null" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"


def check_plain(value: Any, where: tuple[str | int, ...] = ()) -> None:
    """Raise BadInput naming what JSON cannot hold, also in fields that the table leaves free."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise BadInput(f"field '{place_name(where)}': expected text as key, found {found(key)}")
            check_plain(item, (*where, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_plain(item, (*where, index))
    elif not (value is None or isinstance(value, (str, bool)) or _is_number(value)):
        expected = "text, a finite number, true, false or null"
        raise BadInput(f"field '{place_name(where)}': expected {expected}, found {found(value)}")
