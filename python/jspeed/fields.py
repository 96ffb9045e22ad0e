"""Values checked against annotations: type, range, finite numbers; no jax in here.

``lanes: Count`` in a dataclass says what ``lanes`` may be, once; :func:`misfits` reads it.
"""

import re
import reprlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

# What may name a folder: never hidden, never "..", the same on every file system.
FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")
MOST = 2**31 - 1


@dataclass(frozen=True)
class Rule:
    """What a value must be besides its type: in words, and how to tell."""

    expected: str
    holds: Callable[[Any], object]


def whole(least: int, most: int = MOST) -> Rule:
    """Return the rule of whole numbers from ``least`` to ``most``."""
    return Rule(f"a whole number from {least} to {most}", lambda value: least <= value <= most)


Count = Annotated[int, whole(1)]
CountOrZero = Annotated[int, whole(0)]
Positive = Annotated[float, Rule("a finite number above 0", lambda value: value > 0)]
NotNegative = Annotated[float, Rule("a finite number of 0 or more", lambda value: value >= 0)]
FolderName = Annotated[
    str, Rule("1 to 100 of the letters A-Z a-z, digits and . _ + - (it names a folder)", FOLDER.fullmatch)
]
FolderPath = Annotated[
    str,
    Rule(
        "names of letters, digits and . _ + - joined by /, such as stdlib/cpu",
        lambda value: all(map(FOLDER.fullmatch, value.split("/"))),
    ),
]

WORDS = {int: "a whole number", float: "a finite number", str: "text", bool: "True or False", tuple: "a tuple"}
WORDS |= {dict: "a dict", list: "a list", type(None): "None"}


def misfits(value: Any, hint: Any, where: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (where, what was expected, what was found) for all in ``value`` that is not as its type ``hint`` says.

    ``hint`` is a type, a dataclass (all of its fields are looked at), ``X | None``, ``tuple[X, ...]``, a Callable, a
    Mapping or a Literal, perhaps Annotated with :class:`Rule`. Every float must be finite; a bool is no number.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        if any(misfits(value, args[0])) or not all(rule.holds(value) for rule in args[1:]):
            yield where, expected(hint), shown(value)
    elif origin is tuple and isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from misfits(item, args[0], f"{where}[{index}]")
    elif isinstance(hint, type) and is_dataclass(hint) and isinstance(value, hint):
        hints = _hints(hint)
        for field in fields(hint):
            yield from misfits(getattr(value, field.name), hints[field.name], f"{where}.{field.name}".lstrip("."))
    elif not _is_a(value, hint, origin, args):
        yield where, expected(hint), shown(value)


def _is_a(value: Any, hint: Any, origin: Any, args: tuple[Any, ...]) -> bool:
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(not any(misfits(value, each)) for each in args)
    if origin is Literal:
        return value in args
    if origin is Callable:
        return callable(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        # Neither NaN nor a whole number of hundreds of digits is at most the largest float.
        return isinstance(value, float | int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, origin or hint)


@cache
def _hints(of: type) -> Mapping[str, Any]:
    return get_type_hints(of, include_extras=True)


def expected(hint: Any) -> str:
    """Return what ``hint`` asks for, in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return args[1].expected
    if origin in (Union, types.UnionType):
        return " or ".join(map(expected, args))
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is Callable:
        return "a function"
    kind = origin or hint
    return WORDS.get(kind, f"a {kind.__name__}")


def shown(value: Any) -> str:
    """Return ``value`` as a sentence can hold it, shortened, with its type where it is no plain value."""
    try:
        text = reprlib.repr(value)
    except Exception:  # a whole number of more digits than Python prints, an object that cannot say what it is
        text = "something unprintable"
    return text if value is None or isinstance(value, bool | str) else f"{text} ({type(value).__name__})"
