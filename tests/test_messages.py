"""Every message of bad input says what to do, and the page on faults has a row that a search for it
finds.

Messages are read from the source: the text of each ``BadInput(...)``, and of each error of the
loader in Rust, with ``{}`` where it is filled in.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from .test_docs import sentences

ROOT = Path(__file__).parents[1]
RUST = sorted(ROOT.glob("rust/dataloader/**/src/*.rs"))
SOURCES = [*sorted(ROOT.glob("python/jspeed/**/*.py")), *RUST, ROOT / "Makefile"]
# Reasons that the preflight and the choice of a micro-batch put into a sentence of theirs.
REASONS = {"Refused", "DoesNotFit"}
OF_RUST = re.compile(
    r'Error::(?:argument|new)\(\s*(?:Kind::\w+,\s*)?(?:&?format!\(\s*)?"((?:[^"\\]|\\.)*)"', re.S
)
PIECES = re.compile(r'" *\n\s*f?"')  # the border of two pieces of a text


class Message(NamedTuple):
    """A message, where it is, and whether it reports another message that was caught."""

    text: str
    where: str
    passes_on: bool

    @property
    def own_words(self) -> int:
        return len(re.findall("[A-Za-z]{2,}", self.text.replace("{}", "")))


def text_of(node: ast.expr) -> str:
    """The text that an expression makes, with ``{}`` for what only a run knows."""
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(map(text_of, node.values))
        case ast.BinOp():
            return text_of(node.left) + text_of(node.right)
    return "{}"


def name_of(node: ast.expr | None) -> str:
    return getattr(node, "id", getattr(node, "attr", ""))


def messages_of(tree: ast.Module, kinds: set[str], path: str) -> Iterator[Message]:
    caught = {
        id(node)
        for handler in ast.walk(tree)
        if isinstance(handler, ast.ExceptHandler) and name_of(handler.type) == "BadInput"
        for node in ast.walk(handler)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) in kinds and node.args:
            yield Message(text_of(node.args[0]), f"{path}:{node.lineno}", id(node) in caught)


def messages_of_rust(text: str, path: str) -> Iterator[Message]:
    for literal in OF_RUST.findall(text.partition("#[cfg(test)]")[0]):
        said = re.sub(r"\\\n\s*", "", literal).replace('\\"', '"')
        yield Message(re.sub(r"\{[^}]*\}", "{}", said), path, False)


@functools.cache
def all_messages() -> list[Message]:
    trees = {path: ast.parse(path.read_text()) for path in SOURCES if path.suffix == ".py"}
    classes = [
        node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    kinds = {"BadInput"}
    kinds |= {one.name for one in classes if kinds & set(map(name_of, one.bases))} - REASONS
    found = [
        message
        for path, tree in trees.items()
        for message in messages_of(tree, kinds, str(path.relative_to(ROOT)))
    ]
    for path in RUST:
        found += messages_of_rust(path.read_text(), str(path.relative_to(ROOT)))
    # with fewer words of its own a message passes on another's
    return [message for message in found if message.own_words >= 3]


def has_remedy(message: Message) -> bool:
    """Whether the last clause says what to do, or the message what was expected."""
    last = message.text.rpartition(";")[2] if ";" in message.text else ""
    return message.passes_on or bool(last.strip()) or "expected" in message.text


def rows() -> list[tuple[list[str], str]]:
    """The pieces of messages that each row of the page names, and its remedy."""
    page = (ROOT / "docs" / "debug.md").read_text()
    found = re.findall(r"^\| (`.+?) \| (.+) \|$", page, re.M)
    return [(re.findall(r"`([^`]+)`", pieces), remedy) for pieces, remedy in found]


def is_in(piece: str, text: str) -> bool:
    """Whether ``text`` has ``piece``; `` ... `` stands for what only a run knows."""
    return all(part in text for part in piece.split(" ... "))


def test_every_message_says_what_to_do():
    assert (
        len(all_messages()) > 350
        and sum(each.where.endswith(".rs") for each in all_messages()) > 25
    )
    assert [message for message in all_messages() if not has_remedy(message)] == []


def test_no_sentence_of_a_message_has_more_than_25_words():
    counted = [(message, each) for message in all_messages() for each in sentences(message.text)]
    assert [(message, each) for message, each in counted if len(each.split()) > 25] == []


def test_a_search_for_any_message_finds_a_row():
    pieces = [piece for row, _ in rows() for piece in row]
    lost = [
        message
        for message in all_messages()
        if not any(is_in(piece, message.text) for piece in pieces)
    ]
    assert lost == [], "docs/debug.md has no row for these"


def test_every_row_is_of_a_message():
    """Word for word; Makefile and notes print some of them."""
    printed = "\n".join(PIECES.sub("", path.read_text()) for path in SOURCES)
    printed += "\n".join(message.text for message in all_messages())
    for pieces, remedy in rows():
        assert len(remedy) > 20, remedy
        assert [piece for piece in pieces if not is_in(piece, printed)] == []
    assert not is_in("no message says this of a fault", printed)


@pytest.mark.parametrize(
    ("code", "good"),
    [
        ('raise BadInput(f"{path} is too old; make it again")', True),
        ('raise BadInput("--number: " f"expected one, found {n}")', True),
        ('raise BadInput(f"{path} is too old for this")', False),
        ('raise BadInput(f"{path} is too old for this;")', False),
        ('try: f()\nexcept BadInput as e: raise BadInput(f"of the old kind: {e}")', True),
        ('try: f()\nexcept OSError as e: raise BadInput(f"of the old kind: {e}")', False),
    ],
)
def test_what_a_remedy_is(code, good):
    (message,) = messages_of(ast.parse(code), {"BadInput"}, "here")
    assert has_remedy(message) is good
