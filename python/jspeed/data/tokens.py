"""What a run knows of the tokens it reads: by a manifest, or by the name of well-known data. How
text becomes tokens is :mod:`jspeed.corpus`'s."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspeed.base.files import read_input, write_whole
from jspeed.data.manifest import TokenizerFacts
from jspeed.errors import BadInput

# beside the shards, and in the run directory, of a tokenizer that is a file
TOKENIZER_FILE = "tokenizer.json"
SYMBOLS = "symbols"  # the name of every tokenizer that is a list of characters
TOKENIZERS = {  # of each named data set of ``jspeed prepare``
    "fineweb": "gpt2",
    "shakespeare": "gpt2",
    "tinystories": "gpt2",
    "openwebtext": "gpt2",
    "names": SYMBOLS,
    "shakespeare-char": SYMBOLS,
    "stdlib": "bytes",
}
GPT2_BOS = 50_256  # <|endoftext|>
GPT2: TokenizerFacts = {"tokenizer": "gpt2", "vocab_size": GPT2_BOS + 1, "bos_id": GPT2_BOS}


def unit_of(facts: Mapping[str, Any]) -> str:
    """Return the unit of a loss per token: ``byte``, ``character`` or, for pieces of words,
    ``token``."""
    return (
        "byte"
        if facts.get("tokenizer") == "bytes"
        else "character"
        if facts.get("symbols")
        else "token"
    )


def file_name(content: bytes) -> str:
    """Return the name of the tokenizer that is a file of this ``content``: it holds its hash."""
    return f"{TOKENIZER_FILE}@{hashlib.sha256(content).hexdigest()[:16]}"


def copy_tokenizer(folder: Path, to: Path, facts: Mapping[str, Any] | None) -> None:
    """Copy the file of a tokenizer that is one. Raises BadInput where it is missing, or not the one
    of ``facts``."""
    if not facts or not facts["tokenizer"].startswith(f"{TOKENIZER_FILE}@"):
        return
    path = folder / TOKENIZER_FILE
    content = read_input(path, "give a tokenizer.json")
    if (found := file_name(content)) != facts["tokenizer"]:
        raise BadInput(
            f"{path} is {found}, but the text was tokenised with {facts['tokenizer']}; copy that"
            " one there"
        )
    write_whole(to / TOKENIZER_FILE, content)
