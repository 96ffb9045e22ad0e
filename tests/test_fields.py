"""Checks of values against type annotations: what is accepted, and where error messages locate the
rest."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from jspeed.fields import (
    Count,
    CountOrZero,
    FolderName,
    FolderPath,
    NotNegative,
    Positive,
    check_json,
    misfits,
)

from .refusals import refused


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [0, -1, 10**400], [1.0, True, "1", None]),
        (float, [0.5, 3, -1.0], [math.nan, math.inf, -math.inf, 10**400, True, "1", None]),
        (Count, [1, 2**31 - 1], [0, -3, 64.0, 2**31, True, 10**10_000]),
        (CountOrZero, [0, 1], [-1, None]),
        (Positive, [1e-9, 3], [0, -1.0, math.nan, math.inf]),
        (NotNegative, [0, 0.8], [-0.1, math.nan]),
        (Count | None, [None, 1], [0, "x"]),
        (tuple[Count, ...], [(), (1, 2)], [[1], (0,), (1, None), 1]),
        (Literal["bos"] | None, ["bos", None], ["eos", 0]),
        (Callable[..., Any], [len], ["len", None]),
        (Mapping[str, Any], [{}, {"a": 1}], [[], None]),
        (bool, [True], [1, 0]),
        (
            FolderName,
            ["stdlib", "r21", "a" * 100],
            ["", "../../evil", "<script>", ".", "..", "a/b", "a" * 101, "é", 7],
        ),
        (FolderPath, ["stdlib/cpu", "a"], ["/a", "a//b", "a/../b", "", "a/"]),
    ],
)
def test_what_fits(hint, good, bad):
    for value in good:
        assert not list(misfits(value, hint)), value
    for value in bad:
        assert list(misfits(value, hint)), value


@dataclass(frozen=True)
class Inner:
    sizes: tuple[Count, ...]


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    rate: float | None = None


def test_where_and_what():
    assert not list(misfits(Outer("x", Inner((1,)), 2), Outer))
    assert list(misfits(Outer(7, Inner((1, 0.5)), math.nan), Outer)) == [
        ("name", "text", "7 (int)"),
        ("inner.sizes[1]", "a whole number from 1 to 2147483647", "0.5 (float)"),
        ("rate", "a finite number or None", "nan (float)"),
    ]
    assert list(misfits(Outer("x", None), Outer)) == [("inner", "a Inner", "None")]


class Line(TypedDict):
    seconds: Annotated[NotNegative, "seconds"]
    timed: NotRequired[bool | None]


class File(TypedDict):
    lines: list[Line]
    sizes: dict[str, Count]
    line: Line | None


def test_json_is_checked_against_a_typed_dict():
    good = dict(lines=[{"seconds": 1, "timed": None}], sizes={"data": 1}, line=None, newer=object())
    check_json(good, File)
    seconds = "a finite number of 0 or more (seconds)"
    for change, sentence in (
        ({"lines": [{"seconds": 1.0}, {}]}, f"lines[1].seconds: {seconds}: no such field"),
        ({"lines": [{"seconds": -0.5}]}, f"lines[0].seconds: {seconds}: -0.5 (float)"),
        (
            {"lines": [{"seconds": 1.0, "timed": 1}]},
            "lines[0].timed: true or false or null: 1 (int)",
        ),
        ({"sizes": {"data": 0}}, "sizes.data: a whole number from 1 to 2147483647: 0 (int)"),
        ({"line": {"seconds": "x"}}, f"line.seconds: {seconds}: 'x' (str)"),
        ({"line": 3}, "line: an object or null: 3 (int)"),
    ):
        where, expected, found = sentence.split(": ")
        whole = f"field '{where}': expected {expected}, found {found}"
        assert refused("", check_json, good | change, File) == whole
    refused(r"^expected an object .* found \[\] \(list\)$", check_json, [], File)
