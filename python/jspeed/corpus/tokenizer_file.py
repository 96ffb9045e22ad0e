"""Load a tokenizer from ``tokenizer.json``, the file of Hugging Face's library ``tokenizers``."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jspeed.corpus.tokenizers import TOKENIZER_FILE, Tokenizer, check_size
from jspeed.data.folder import id_dtype
from jspeed.errors import BadInput
from jspeed.files import read_regular

# Special tokens that separate documents; the first one present is used, as llm.c does for Llama 3.
SEPARATORS = ("<|endoftext|>", "<|begin_of_text|>", "<bos>", "<s>", "[CLS]", "<|end_of_text|>", "<eos>", "</s>")


def file_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a ``tokenizer.json``; its name contains the file's hash, and ``content`` is the file.

    Special tokens are never produced from text; one of ``SEPARATORS`` separates documents. Raises BadInput for a file
    that is no tokenizer, and where the library is missing.
    """
    try:
        import tokenizers
    except ImportError:
        raise BadInput(f"{path} needs the package tokenizers to be read; pip install '.[tokenizers]'") from None
    try:
        content = read_regular(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); give a tokenizer.json") from None
    try:
        made = tokenizers.Tokenizer.from_buffer(content)
        described = json.loads(content)
    except Exception as error:  # the library raises nothing more precise
        raise BadInput(
            f"{path} is no tokenizer.json that tokenizers {tokenizers.__version__} reads ({error})"
        ) from None
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = True  # as text, whatever a document holds
    added = {token["content"]: token for token in described.get("added_tokens") or ()}
    special = {token["id"]: text for text, token in added.items() if token.get("special")}
    bos_id = next((added[text]["id"] for text in SEPARATORS if text in special.values()), None)
    vocab_size = max(made.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    name = f"{TOKENIZER_FILE}@{hashlib.sha256(content).hexdigest()[:16]}"
    check_size(str(path), vocab_size)
    dtype, piece = id_dtype(vocab_size), _pieces(made, described.get("decoder"), frozenset(added) - {*special.values()})

    def encode(text: bytes) -> NDArray[np.unsignedinteger]:
        try:
            return np.array(made.encode(text.decode(), add_special_tokens=False).ids, dtype)
        except Exception as error:
            raise BadInput(
                f"{path} cannot encode a document ({error}); use a tokenizer that covers all characters"
            ) from None

    def decode(ids: Iterable[int]) -> bytes:
        return b"".join(piece(token) for token in ids if token not in special)

    return Tokenizer(name, vocab_size, bos_id, encode, decode, content=content)


def _pieces(made: Any, decoder: Any, added: frozenset[str]) -> Callable[[int], bytes]:
    """Return what gives the bytes of one id, with the space that some tokenizers keep before a word."""
    kinds = set(re.findall(r'"type": "(\w+)"', json.dumps(decoder)))
    byte_of = {character: byte for byte, character in _characters_of_bytes().items()}
    anchor = next((n for n in range(made.get_vocab_size()) if _decoded(made, [n]).strip().isalnum()), None)

    @cache
    def piece(token: int) -> bytes:
        text = made.id_to_token(token)
        if text is None:
            return b""
        if text in added:
            return text.encode()
        if "ByteLevel" in kinds:
            return b"".join(bytes([byte_of[c]]) if c in byte_of else c.encode() for c in text)
        if "ByteFallback" in kinds and (found := re.fullmatch(r"<0x([0-9A-F]{2})>", text)):
            return bytes([int(found[1], 16)])
        if anchor is None:
            return _decoded(made, [token]).encode()
        return _decoded(made, [anchor, token]).removeprefix(_decoded(made, [anchor])).encode()

    return piece


def _decoded(made: Any, ids: list[int]) -> str:
    return made.decode(ids, skip_special_tokens=False)


def _characters_of_bytes() -> dict[int, str]:
    """Return the printable character that stands for each byte in byte-level vocabularies (Radford et al. 2019)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + n) for n, byte in enumerate(others)}
