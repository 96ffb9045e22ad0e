"""What this room adds to a run: the default text, and GPT-2's vocabulary."""

from dataclasses import replace
from pathlib import Path

from jspeed.corpus.tokenise import prepare_stdlib
from jspeed.corpus.tokenizers import gpt2_byte_pairs
from jspeed.run.hooks import Hooks


def text(name: str) -> Path | None:
    """Return the folder of the standard library's text, prepared if needed; None for other data."""
    return prepare_stdlib() if name == "stdlib" else None


def add(hooks: Hooks) -> Hooks:
    """Return ``hooks`` with this room's."""
    return replace(hooks, text=text, gpt2_byte_pairs=gpt2_byte_pairs)
