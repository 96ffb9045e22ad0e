"""Text to token ids and back: tiktoken's encodings, a tokenizer.json, bytes, or a list of
symbols."""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jspeed.base.files import read_input, what_instead
from jspeed.corpus.shards.folder import id_dtype
from jspeed.data.manifest import TokenizerFacts
from jspeed.data.tokens import GPT2, TOKENIZER_FILE, file_name
from jspeed.errors import BadInput, nearest

MAX_VOCAB = 2**31 - 1  # ids are int32 on devices


# Special tokens that separate documents where none is named; the first present is used, as llm.c
# does for Llama 3.
SEPARATORS = (
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<bos>",
    "<s>",
    "[CLS]",
    "<|end_of_text|>",
    "<eos>",
    "</s>",
)
SHOWN = 20  # special tokens that a message lists


@dataclass(frozen=True)
class Tokenizer:
    """``encode`` maps UTF-8 to ids (``dtype``); ``decode`` maps ids to UTF-8 and drops special
    tokens and padding.

    ``bos_id`` is the id that separates documents, or None. ``symbols`` are the texts of the ids
    from 0 on, for a tokenizer that is a list of symbols, else empty; ``content`` is that of a
    tokenizer.json, else empty; ``special`` holds the id of each special token that has a name.
    """

    name: str
    vocab_size: int
    bos_id: int | None
    encode: Callable[[bytes], NDArray[np.unsignedinteger]]
    decode: Callable[[Iterable[int]], bytes]
    symbols: tuple[str, ...] = ()
    content: bytes = b""
    special: Mapping[str, int] = field(default_factory=dict)

    @property
    def dtype(self) -> np.dtype[Any]:
        """How shards hold its ids: little-endian uint16 or uint32."""
        return id_dtype(self.vocab_size)

    @property
    def facts(self) -> TokenizerFacts:
        """What :func:`tokenizer_of` makes this tokenizer from, ready for JSON."""
        facts: TokenizerFacts = {
            "tokenizer": self.name,
            "vocab_size": self.vocab_size,
            "bos_id": self.bos_id,
        }
        if self.symbols:
            facts["symbols"] = list(self.symbols)
        return facts

    @property
    def files(self) -> dict[str, bytes]:
        """The files (name -> content) that its tokens need beside them: a tokenizer.json, or
        none."""
        return {TOKENIZER_FILE: self.content} if self.content else {}

    def separated_by(self, token: str) -> "Tokenizer":
        """Return this tokenizer with another separator of documents. Raises BadInput for what is no
        special token."""
        if token not in self.special:
            raise BadInput(
                f"--separator-token {token} is no special token of tokenizer"
                f" {self.name}{nearest(token, self.special)}; it has {self.special_names()}"
            )
        return replace(self, bos_id=self.special[token])

    def special_names(self) -> str:
        """Return the names of its special tokens, of many the first, for a message."""
        names = sorted(self.special, key=self.special.__getitem__)
        more = [f"{len(names) - SHOWN} more"] if len(names) > SHOWN else []
        return ", ".join(names[:SHOWN] + more) or "no special ones"

    def byte_lengths(self) -> NDArray[np.int64]:
        """Return the bytes of text that each id stands for: int64 ``[vocab_size]``."""
        return np.array([len(self.decode([token])) for token in range(self.vocab_size)], np.int64)


def tokenizer_of(facts: Mapping[str, Any], folder: Path | None = None) -> Tokenizer:
    """Return the tokenizer of a manifest; one that is a file lies in ``folder``.

    Raises BadInput for one that is not known, cannot be fetched, or is not the file that it was.
    """
    name = facts["tokenizer"]
    if "symbols" in facts:
        return symbols_tokenizer(name, facts["symbols"], facts["vocab_size"], facts["bos_id"])
    if not name.startswith(f"{TOKENIZER_FILE}@"):
        return named_tokenizer(name)
    path = (folder or Path()) / TOKENIZER_FILE
    tokenizer = named_tokenizer(str(path))
    if tokenizer.name != name:
        raise BadInput(
            f"{path} is {tokenizer.name}, but the text was tokenised with {name}; copy that one"
            " there"
        )
    return tokenizer


def named_tokenizer(name: str) -> Tokenizer:
    """Return ``gpt2``, ``bytes``, another encoding of tiktoken, or the tokenizer in a file
    ``*.json``.

    Raises BadInput for an unknown name, a file that is no tokenizer, and a vocabulary that cannot
    be fetched.
    """
    if name.endswith(".json"):
        return file_tokenizer(Path(name))
    return bytes_tokenizer() if name == "bytes" else tiktoken_tokenizer(name)


def named_facts(name: str) -> tuple[TokenizerFacts, dict[str, bytes]]:
    """Return what a manifest says of :func:`named_tokenizer`, and the files beside it; gpt2 needs
    no vocabulary."""
    if name == GPT2["tokenizer"]:
        return GPT2, {}
    chosen = named_tokenizer(name)
    return chosen.facts, chosen.files


def bytes_tokenizer() -> Tokenizer:
    """Return the tokenizer whose ids 0-255 are bytes and whose mark is 256."""

    def decode(ids: Iterable[int]) -> bytes:
        return bytes(token for token in ids if token < 256)

    return Tokenizer(
        "bytes", 257, 256, lambda text: np.frombuffer(text, np.uint8).astype("<u2"), decode
    )


def tiktoken_encoding(name: str) -> Any:
    """Return ``tiktoken.get_encoding(name)``. Raises BadInput for an unknown one, and where it
    cannot be fetched."""
    import tiktoken

    known = tiktoken.list_encoding_names()
    if name not in known:
        raise BadInput(
            f"tokenizer '{name}' is unknown{nearest(name, ('bytes', *known))}; known are bytes, "
            f"{', '.join(known)}, and any tokenizer.json"
        )
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:
        whose = "GPT-2's" if name == "gpt2" else f"{name}'s"
        raise BadInput(
            f"tiktoken cannot fetch {whose} vocabulary ({type(error).__name__}); connect to the"
            " network, set TIKTOKEN_CACHE_DIR to a folder that holds it, or use --tokenizer bytes"
        ) from None


def tiktoken_tokenizer(name: str) -> Tokenizer:
    """Return an encoding of tiktoken; its ``<|endoftext|>`` (gpt2: 50256), which no text gives,
    separates documents."""
    encoding = tiktoken_encoding(name)
    special = {text: encoding.encode_single_token(text) for text in encoding.special_tokens_set}
    hidden = frozenset(special.values())
    dtype = id_dtype(encoding.n_vocab)

    @cache
    def known_to(token: int) -> bool:  # vocabularies have gaps, o200k_base for one
        try:
            encoding.decode_single_token_bytes(token)
        except KeyError:
            return False
        return token not in hidden

    def encode(text: bytes) -> NDArray[np.unsignedinteger]:
        return encoding.encode_to_numpy(text.decode(), disallowed_special=()).astype(dtype)

    def decode(ids: Iterable[int]) -> bytes:
        return encoding.decode_bytes([token for token in ids if known_to(token)])

    return Tokenizer(name, encoding.n_vocab, encoding.eot_token, encode, decode, special=special)


def gpt2_byte_pairs() -> list[bytes]:
    """Return GPT-2's tokens by id, empty for ``<|endoftext|>``. Raises BadInput where they cannot
    be fetched."""
    gpt2 = tiktoken_tokenizer("gpt2")
    return [gpt2.decode([token]) for token in range(gpt2.vocab_size)]


def file_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a ``tokenizer.json``; its name contains the file's hash, and
    ``content`` is the file.

    Special tokens are never produced from text; one of ``SEPARATORS``, if there is any, separates
    documents. Raises BadInput for a file that is no tokenizer, and where the library is missing.
    """
    try:
        import tokenizers
    except ImportError:
        raise BadInput(
            f"{path} needs the package tokenizers to be read; pip install 'jspeed[tokenizers]'"
        ) from None
    content = read_input(path, "give a tokenizer.json").removeprefix(codecs.BOM_UTF8)
    try:
        made = tokenizers.Tokenizer.from_buffer(content)
        settings = json.loads(content)
    except Exception as error:  # the library raises nothing more precise
        raise BadInput(
            f"{path} is no tokenizer.json that tokenizers {tokenizers.__version__} reads"
            f" ({what_instead(path) if not content.strip().startswith(b'{') else error}); give"
            " another, or update that package"
        ) from None
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = True  # as text, whatever a document holds
    added = {token["content"]: token for token in settings.get("added_tokens") or ()}
    special = {text: token["id"] for text, token in added.items() if token.get("special")}
    hidden = frozenset(special.values())
    bos_id = next((special[text] for text in SEPARATORS if text in special), None)
    vocab_size = max(made.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    name = file_name(content)
    check_size(str(path), vocab_size)
    dtype, piece = (
        id_dtype(vocab_size),
        _pieces(made, settings.get("decoder"), frozenset(added) - {*special}),
    )

    def encode(text: bytes) -> NDArray[np.unsignedinteger]:
        try:
            return np.array(made.encode(text.decode(), add_special_tokens=False).ids, dtype)
        except Exception as error:
            raise BadInput(
                f"{path} cannot encode a document ({error}); use a tokenizer that covers all"
                " characters"
            ) from None

    def decode(ids: Iterable[int]) -> bytes:
        return b"".join(piece(token) for token in ids if token not in hidden)

    return Tokenizer(name, vocab_size, bos_id, encode, decode, content=content, special=special)


def _pieces(made: Any, decoder: Any, added: frozenset[str]) -> Callable[[int], bytes]:
    """Return what gives the bytes of one id, with the space that some tokenizers keep before a
    word."""
    kinds = set(re.findall(r'"type": "(\w+)"', json.dumps(decoder)))
    byte_of = {character: byte for byte, character in characters_of_bytes().items()}
    anchor = next(
        (n for n in range(made.get_vocab_size()) if _decoded(made, [n]).strip().isalnum()), None
    )

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


def characters_of_bytes() -> dict[int, str]:
    """Return the printable character that stands for each byte in byte-level vocabularies (Radford
    et al. 2019)."""
    shown = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {
        byte: chr(256 + n) for n, byte in enumerate(others)
    }


def symbols_tokenizer(
    name: str, symbols: Sequence[str], vocab_size: int, bos_id: int | None
) -> Tokenizer:
    """Return the tokenizer whose id i is the character ``symbols[i]``; ids from ``len(symbols)`` on
    have no text.

    Its ``encode`` raises BadInput for a character that is not among them.
    """
    check_size(name, vocab_size)
    points = np.array([ord(symbol) for symbol in symbols], "<u4")
    order = np.argsort(points)

    def encode(text: bytes) -> NDArray[np.unsignedinteger]:
        given = np.frombuffer(text.decode().encode("utf-32-le"), "<u4")
        places = order[np.minimum(np.searchsorted(points, given, sorter=order), len(points) - 1)]
        strange = np.flatnonzero(points[places] != given)
        if strange.size:
            raise BadInput(
                f"character {chr(given[strange[0]])!r} is not among the {len(symbols)} symbols of"
                f" tokenizer '{name}'; leave it out"
            )
        return places.astype(id_dtype(vocab_size))

    def decode(ids: Iterable[int]) -> bytes:
        return "".join(symbols[token] for token in ids if token < len(symbols)).encode()

    return Tokenizer(name, vocab_size, bos_id, encode, decode, tuple(symbols))


def check_size(name: str, vocab_size: int) -> None:
    """Raise BadInput for a vocabulary that is empty or that int32 cannot hold."""
    if not 0 < vocab_size <= MAX_VOCAB:
        raise BadInput(
            f"tokenizer '{name}' has {vocab_size:,} ids; expected 1 to {MAX_VOCAB:,}; choose"
            " another"
        )
