"""Text to token ids and back: GPT-2's byte pairs, bytes, or a list of symbols."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jspeed.errors import BadInput, nearest

MOST_IDS = 65_535  # a shard holds uint16, and 65,535 is kept free as in llm.c
WIDE = {"cl100k_base": 100_277, "o200k_base": 200_019, "o200k_harmony": 201_088}  # refused before they are fetched

SYMBOLS = "symbols"  # the name of every tokenizer that is a list of characters
TOKENIZERS = {  # of the data that ``jspeed prepare`` calls so; ``text`` has the one it is told
    "fineweb": "gpt2",
    "shakespeare": "gpt2",
    "tinystories": "gpt2",
    "openwebtext": "gpt2",
    "names": SYMBOLS,
    "shakespeare-char": SYMBOLS,
    "stdlib": "bytes",
}


@dataclass(frozen=True)
class Tokenizer:
    """``encode`` maps UTF-8 to ids (uint16) without any mark; ``decode`` maps ids back, marks and padding to nothing.

    ``bos_id`` marks where documents meet; None: nothing does. ``symbols`` are the texts of the ids from 0 on, for a
    tokenizer that is a list of symbols, else empty.
    """

    name: str
    vocab_size: int
    bos_id: int | None
    encode: Callable[[bytes], NDArray[np.uint16]]
    decode: Callable[[Iterable[int]], bytes]
    symbols: tuple[str, ...] = ()

    def described(self) -> dict[str, Any]:
        """Return what :func:`tokenizer_of` makes this tokenizer from, ready for JSON."""
        facts = {"tokenizer": self.name, "vocab_size": self.vocab_size, "bos_id": self.bos_id}
        return facts | ({"symbols": list(self.symbols)} if self.symbols else {})

    def byte_lengths(self) -> NDArray[np.int64]:
        """Return the bytes of text that each id stands for: int64 ``[vocab_size]``."""
        return np.array([len(self.decode([token])) for token in range(self.vocab_size)], np.int64)


def tokenizer_of(facts: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a manifest. Raises BadInput for one that is not known, or cannot be fetched."""
    if "symbols" in facts:
        return symbols_tokenizer(facts["tokenizer"], facts["symbols"], facts["vocab_size"], facts["bos_id"])
    return named_tokenizer(facts["tokenizer"])


def unit_of(facts: Mapping[str, Any]) -> str:
    """Return what a token of a manifest stands for: ``byte``, ``character`` or, for pieces of words, ``token``."""
    return "byte" if facts.get("tokenizer") == "bytes" else "character" if facts.get("symbols") else "token"


def named_tokenizer(name: str) -> Tokenizer:
    """Return ``gpt2``, ``bytes`` or another encoding of tiktoken.

    Raises BadInput for an unknown name, ids that uint16 does not hold, and a vocabulary that cannot be fetched.
    """
    return bytes_tokenizer() if name == "bytes" else tiktoken_tokenizer(name)


def bytes_tokenizer() -> Tokenizer:
    """Return the tokenizer whose ids 0-255 are bytes and whose mark is 256."""

    def decode(ids: Iterable[int]) -> bytes:
        return bytes(token for token in ids if token < 256)

    return Tokenizer("bytes", 257, 256, lambda text: np.frombuffer(text, np.uint8).astype("<u2"), decode)


def tiktoken_tokenizer(name: str) -> Tokenizer:
    """Return an encoding of tiktoken, marked by its ``<|endoftext|>`` (gpt2: 50256); text never encodes to a mark."""
    import tiktoken

    known = tiktoken.list_encoding_names()
    if name not in known:
        raise BadInput(
            f"tokenizer '{name}' is unknown{nearest(name, ('bytes', *known))}; known are bytes, {', '.join(known)}"
        )
    check_size(name, WIDE.get(name, 0))
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:
        whose = "GPT-2's" if name == "gpt2" else f"{name}'s"
        raise BadInput(
            f"tiktoken cannot fetch {whose} vocabulary ({type(error).__name__}); connect to the network,"
            " set TIKTOKEN_CACHE_DIR to a folder that holds it, or use --tokenizer bytes"
        ) from None
    check_size(name, encoding.n_vocab)
    special = {encoding.encode_single_token(text) for text in encoding.special_tokens_set}

    def encode(text: bytes) -> NDArray[np.uint16]:
        return encoding.encode_to_numpy(text.decode(), disallowed_special=()).astype("<u2")

    def decode(ids: Iterable[int]) -> bytes:
        return encoding.decode_bytes([token for token in ids if token < encoding.n_vocab and token not in special])

    return Tokenizer(name, encoding.n_vocab, encoding.eot_token, encode, decode)


def symbols_tokenizer(name: str, symbols: Sequence[str], vocab_size: int, bos_id: int | None) -> Tokenizer:
    """Return the tokenizer whose id i is the character ``symbols[i]``; ids from ``len(symbols)`` on have no text.

    Its ``encode`` raises BadInput for a character that is not among them.
    """
    check_size(name, vocab_size)
    points = np.array([ord(symbol) for symbol in symbols], "<u4")
    order = np.argsort(points)

    def encode(text: bytes) -> NDArray[np.uint16]:
        found = np.frombuffer(text.decode().encode("utf-32-le"), "<u4")
        places = order[np.minimum(np.searchsorted(points, found, sorter=order), len(points) - 1)]
        strange = np.flatnonzero(points[places] != found)
        if strange.size:
            raise BadInput(
                f"character {chr(found[strange[0]])!r} is not among the {len(symbols)} symbols of tokenizer '{name}'; "
                "leave it out"
            )
        return places.astype("<u2")

    def decode(ids: Iterable[int]) -> bytes:
        return "".join(symbols[token] for token in ids if token < len(symbols)).encode()

    return Tokenizer(name, vocab_size, bos_id, encode, decode, tuple(symbols))


def check_size(name: str, vocab_size: int) -> None:
    """Raise BadInput for a vocabulary that two bytes a token cannot hold."""
    if vocab_size > MOST_IDS:
        raise BadInput(
            f"tokenizer '{name}' has {vocab_size:,} ids but a shard holds at most {MOST_IDS:,} (uint16); choose gpt2 "
            "or bytes"
        )
