"""Check values against type annotations: types, ranges, finite numbers; and hash a recipe's fields.
No jax in here.

``lanes: Count`` in a dataclass, or in a TypedDict of what a JSON file holds, says what ``lanes``
may be, once; :func:`misfits` and :func:`check_json` read it. :class:`Wants` says how a command line
shows it as a flag.
"""

import hashlib
import json
import re
import reprlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)
from typing import is_typeddict as is_typed_dict

from jspeed.errors import BadInput

# What may name a folder: never hidden, never "..", the same on every file system.
FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")
MOST = 2**31 - 1


@dataclass(frozen=True)
class Rule:
    """A condition on a value besides its type: description and predicate."""

    expected: str
    holds: Callable[[Any], object]


def integer(least: int, most: int = MOST) -> Rule:
    """Return the rule of whole numbers from ``least`` to ``most``."""
    return Rule(f"a whole number from {least} to {most}", lambda value: least <= value <= most)


def at_least(least: int) -> Rule:
    """Return the rule of whole numbers from ``least`` on that fit into 64 bits, as files hold
    them."""
    return Rule(f"a whole number of {least} or more", lambda value: least <= value < 2**63)


def version(number: int) -> Rule:
    """Return the rule of the version of a file's format that this jspeed reads."""
    return Rule(f"{number}, the one that this jspeed reads", lambda value: value == number)


@dataclass(frozen=True)
class Wants:
    """How a parameter appears on the command line; ``help`` replaces ``Args``."""

    metavar: str
    positional: bool = False
    help: str | None = None


def flag(name: str) -> str:
    """Return the flag of a parameter."""
    return "--" + name.strip("_").replace("_", "-")


Count = Annotated[int, integer(1)]
CountOrZero = Annotated[int, integer(0)]
AtLeastOne = Annotated[int, at_least(1)]
Whole = Annotated[int, at_least(0)]
Positive = Annotated[float, Rule("a finite number above 0", lambda value: value > 0)]
NotNegative = Annotated[float, Rule("a finite number of 0 or more", lambda value: value >= 0)]
FolderName = Annotated[
    str,
    Rule(
        "1 to 100 of the letters A-Z a-z, digits and . _ + - (it names a folder)", FOLDER.fullmatch
    ),
]
FolderPath = Annotated[
    str,
    Rule(
        "names of letters, digits and . _ + - joined by /, such as stdlib/cpu",
        lambda value: all(map(FOLDER.fullmatch, value.split("/"))),
    ),
]

Folder = Annotated[Path, Wants("DIR")]
File = Annotated[Path, Wants("FILE")]
Fields = Annotated[tuple[str, ...], Wants("FIELD=VALUE")]
Axes = Annotated[str, Wants("AXIS=N,...")]

MISSING = object()  # the value of a missing key
WORDS = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    bool: "True or False",
    tuple: "a tuple",
}
WORDS |= {dict: "an object", list: "a list", type(None): "None"}
TESTS: dict[Any, Callable[[Any], bool]] = {
    int: lambda value: isinstance(value, int) and not isinstance(value, bool),
    # Neither NaN nor a whole number of hundreds of digits is at most the largest float.
    float: lambda v: (
        isinstance(v, float | int) and not isinstance(v, bool) and abs(v) <= sys.float_info.max
    ),
}


def misfits(value: Any, hint: Any, where: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (where, what was expected, what was found) for all in ``value`` that does not match its
    type ``hint``.

    ``hint`` is a type, a dataclass (its fields are checked too), ``X | None``, ``tuple[X, ...]``, a
    Callable, a Mapping or a Literal. It may be Annotated with :class:`Rule`. Every float must be
    finite; a bool is no number.
    """
    for place, wanted, found in _misfits(value, check_of(hint), where):
        yield place, wanted, shown(found)


def check_json(value: Any, hint: Any) -> None:
    """Raise BadInput naming the first place in ``value``, parsed from JSON, that does not match its
    type ``hint``.

    ``hint`` is as of :func:`misfits`, a TypedDict (other keys are free), ``list[X]`` or ``dict[str,
    X]``; a text beside the rules of an Annotated is the unit.
    """
    for where, wanted, item in _misfits(value, check_of(hint), ""):
        for in_python, in_json in (("True or False", "true or false"), ("None", "null")):
            wanted = wanted.replace(in_python, in_json)
        place = f"field {where!r}: " if where else ""  # a key may have a line break
        fields = "" if where else f" with the fields of a {hint.__name__.lower()}"
        raise BadInput(f"{place}expected {wanted}{fields}, found {shown_json(item)}")


def parse_json(content: bytes, path: Path, check: Callable[[Any], None], remedy: str) -> Any:
    """Return what the JSON text ``content`` holds, once ``check`` has passed it.

    BadInput names ``path``, says where the text stops being JSON or what ``check`` says, and ends
    in ``remedy``.
    """
    try:
        text = content.decode("utf-8-sig")
        value = json.loads(text)
    except json.JSONDecodeError as error:
        ended = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        what = "is cut short" if ended else f"is not JSON ({error.msg})"
        raise BadInput(
            f"{path} {what} at line {error.lineno}, column {error.colno}; {remedy}"
        ) from None
    except (ValueError, RecursionError):
        raise BadInput(f"{path} is not JSON text; {remedy}") from None
    try:
        check(value)
    except BadInput as error:
        raise BadInput(f"{path}: {error}; {remedy}") from None
    return value


class Check(NamedTuple):
    """A type hint as a test: description, predicate, and the (key, value, check) of what is inside
    a value."""

    expected: str
    holds: Callable[[Any], object]
    inside: Callable[[Any], Iterable[tuple[str | int, Any, "Check"]]] | None = None


def _matches(value: Any, check: Check) -> bool:
    return not any(_misfits(value, check, ""))


def _misfits(value: Any, check: Check, where: str) -> Iterator[tuple[str, str, Any]]:
    if not check.holds(value):
        yield where, check.expected, value
    elif check.inside:
        for key, item, each in check.inside(value):
            if each.inside or not each.holds(item):  # skip the path of correct leaves
                place = f"{where}[{key}]" if isinstance(key, int) else f"{where}.{key}".lstrip(".")
                yield from _misfits(item, each, place)


@cache
def check_of(hint: Any) -> Check:
    """Return ``hint`` as a test; hints as in :func:`misfits` and :func:`check_json`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated(check_of(args[0]), args[1:])
    if origin in (Union, types.UnionType):
        return _union(
            [check_of(each) for each in args if each is not type(None)], type(None) in args
        )
    if origin in (list, tuple, dict) and args:
        of, each = origin, check_of(args[-1] if origin is dict else args[0])
        items: Any = dict.items if of is dict else enumerate
        return Check(
            WORDS[of],
            lambda v: isinstance(v, of),
            lambda v: ((key, item, each) for key, item in items(v)),
        )
    if is_typed_dict(hint):
        return _typed_dict(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        hints = [
            (f.name, check_of(get_type_hints(hint, include_extras=True)[f.name]))
            for f in fields(hint)
        ]
        inside = lambda v: ((name, getattr(v, name), each) for name, each in hints)
        return Check(f"a {hint.__name__}", lambda v: isinstance(v, hint), inside)
    if origin is Literal:
        return Check(" or ".join(map(repr, args)), lambda v: v in args)
    if hint is Any:
        return Check("anything", lambda v: v is not MISSING)
    if origin is Callable:
        return Check("a function", callable)
    return Check(
        WORDS.get(kind := origin or hint, f"a {kind.__name__}"),
        TESTS.get(kind) or (lambda v: isinstance(v, kind)),
    )


def _annotated(base: Check, extras: tuple[Any, ...]) -> Check:
    rules = [each for each in extras if isinstance(each, Rule)]
    unit = "".join(f" ({each})" for each in extras if isinstance(each, str))
    words = (rules[0].expected if rules else base.expected) + unit
    return Check(
        words, lambda v: _matches(v, base) and all(rule.holds(v) for rule in rules), base.inside
    )


def _union(shapes: list[Check], or_none: bool) -> Check:
    words = " or ".join([each.expected for each in shapes] + ["None"] * or_none)
    if len(shapes) == 1 and or_none:
        [one] = shapes
        inside = one.inside
        return Check(
            words,
            lambda v: v is None or one.holds(v),
            inside and (lambda v: () if v is None else inside(v)),
        )
    return Check(
        words, lambda v: (or_none and v is None) or any(_matches(v, each) for each in shapes)
    )


def _typed_dict(hint: Any) -> Check:
    @cache  # not before it is needed: a dict may hold others of its own type
    def checks() -> list[tuple[str, Check, bool]]:
        hints = get_type_hints(hint, include_extras=True)
        optional = {name for name, each in hints.items() if get_origin(each) is NotRequired}
        return [
            (name, check_of(get_args(h)[0] if name in optional else h), name in optional)
            for name, h in hints.items()
        ]

    def inside(value: dict) -> Iterator[tuple[str, Any, Check]]:
        for name, check, optional in checks():
            if name in value or not optional:
                yield name, value.get(name, MISSING), check

    return Check(WORDS[dict], lambda v: isinstance(v, dict), inside)


def expected(hint: Any) -> str:
    """Return the description of ``hint``."""
    return check_of(hint).expected


def shown(value: Any) -> str:
    """Return ``value`` for an error message, shortened, with its type unless it is text, a bool or
    None."""
    try:
        text = reprlib.repr(value)
    except Exception:  # a whole number of more digits than Python prints, a failing __repr__
        text = "something unprintable"
    return (
        text
        if value is None or isinstance(value, bool | str)
        else f"{text} ({type(value).__name__})"
    )


def shown_json(value: Any) -> str:
    """Return a value from a JSON file for an error message, with its type."""
    if value is MISSING:
        return "no such field"
    return "null" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"


def as_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields as JSON gives them back: tuples are lists, keys are text."""
    return json.loads(json.dumps(dict(fields)))


def recipe_hash(source: str, fields: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a recipe's source text and resolved fields: two runs with one hash ran
    one recipe."""
    text = json.dumps({"fields": as_json(fields), "source": source}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Stage:
    """Consecutive steps of the same array shapes, compiled once.

    ``lane_len``, the length of a lane, and ``max_doc_len`` are tokens. ``max_docs``
    caps the documents in one lane. ``windows`` holds one attention window per layer: how many
    tokens a query sees, itself included; an empty tuple means the whole lane before it. ``scored``
    is how many tokens of the vocabulary a training step scores, where that is a sample
    (:mod:`jspeed.model.sampled`): FLOPs are counted by it; None means all. ``every``: parameters
    are updated at least every so many steps, whatever their ``ParamSpec.every``; None: as that
    says. ``own`` is static data for the recipe's own functions.
    """

    steps: Count
    lane_len: Count
    max_doc_len: Count | None = None
    max_docs: Count | None = None
    windows: tuple[Count, ...] = ()
    scored: Count | None = None
    every: Count | None = None
    own: Any = None
