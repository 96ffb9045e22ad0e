"""Load a tokenizer from ``tokenizer.json``, the file of Hugging Face's library ``tokenizers``; know GPT-2's."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jspeed.corpus.tokenizers import GPT2, GPT2_BOS, TOKENIZER_FILE, Tokenizer, check_size
from jspeed.data.folder import id_dtype
from jspeed.data.manifest import TokenizerFacts
from jspeed.errors import BadInput
from jspeed.files import read_json, read_regular

# Special tokens that separate documents where none is named; the first present is used, as llm.c does for Llama 3.
SEPARATORS = ("<|endoftext|>", "<|begin_of_text|>", "<bos>", "<s>", "[CLS]", "<|end_of_text|>", "<eos>", "</s>")

GPT2_TEXTS = "534ddd4fbe9e583a0d441b92c4e42756d21971510b2a3f263cf96cc31abd2f43"  # SHA-256 of a line "ID TEXT" of each
PADDED_GPT2 = 50_304  # a multiple of 128: nanoGPT and llm.c make tables of this length for GPT-2's 50,257 ids
OLDER_FILES = ("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model")


def file_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a ``tokenizer.json``; its name contains the file's hash, and ``content`` is the file.

    Special tokens are never produced from text; one of ``SEPARATORS``, if there is any, separates documents. Raises
    BadInput for a file that is no tokenizer, and where the library is missing.
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
    special = {text: token["id"] for text, token in added.items() if token.get("special")}
    hidden = frozenset(special.values())
    bos_id = next((special[text] for text in SEPARATORS if text in special), None)
    vocab_size = max(made.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    name = f"{TOKENIZER_FILE}@{hashlib.sha256(content).hexdigest()[:16]}"
    check_size(str(path), vocab_size)
    dtype, piece = id_dtype(vocab_size), _pieces(made, described.get("decoder"), frozenset(added) - {*special})

    def encode(text: bytes) -> NDArray[np.unsignedinteger]:
        try:
            return np.array(made.encode(text.decode(), add_special_tokens=False).ids, dtype)
        except Exception as error:
            raise BadInput(
                f"{path} cannot encode a document ({error}); use a tokenizer that covers all characters"
            ) from None

    def decode(ids: Iterable[int]) -> bytes:
        return b"".join(piece(token) for token in ids if token not in hidden)

    return Tokenizer(name, vocab_size, bos_id, encode, decode, content=content, special=special)


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


def is_gpt2(path: Path) -> bool:
    """Whether a ``tokenizer.json`` or ``vocab.json`` makes the ids of text that GPT-2's tokenizer makes.

    It may have more special tokens, which no text gives. The ids say in what order pairs are merged.
    """
    try:
        described, special = read_json(path), {"<|endoftext|>"}
        if path.name == TOKENIZER_FILE:
            cut = described["pre_tokenizer"]
            if cut["type"] != "ByteLevel" or cut["add_prefix_space"] or cut.get("use_regex") is False:
                return False
            if described["normalizer"] or not all(token["special"] for token in described["added_tokens"]):
                return False
            special |= {token["content"] for token in described["added_tokens"]}
            described = described["model"]["vocab"]
        texts = sorted((number, text) for text, number in described.items() if text not in special)
        lines = "".join(f"{number} {text}\n" for number, text in texts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return hashlib.sha256(lines.encode()).hexdigest() == GPT2_TEXTS


def gpt2_facts(folder: Path, config: Mapping[str, Any]) -> TokenizerFacts:
    """Return the facts of the tokenizer of a GPT-2: those that our export wrote into its ``config``, or its files'.

    Without any, a table of GPT-2's length, or of that padded as nanoGPT does, is of GPT-2's ids. The config's ids that
    begin and end a text count where the table has them; of other tokenizers not 50,256, which transformers writes when
    nobody says another. Raises BadInput where nothing says how text becomes ids.
    """
    if facts := config.get("tokenizer"):
        return facts
    path, ids = folder / TOKENIZER_FILE, config["vocab_size"]
    older = [name for name in OLDER_FILES if (folder / name).exists()]
    if is_gpt2(path if path.exists() else folder / "vocab.json"):
        facts = GPT2
    elif path.exists():
        facts = file_tokenizer(path).described()
    elif older or ids not in (GPT2["vocab_size"], PADDED_GPT2):
        what = f"its {older[0]} is not GPT-2's" if older else f"it has {ids:,} ids, not GPT-2's 50,257 (padded: 50,304)"
        raise BadInput(
            f"{folder} has no {TOKENIZER_FILE} that says how text becomes ids, and {what}; "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes one"
        )
    else:
        facts = GPT2
    left_over = None if facts is GPT2 else GPT2_BOS
    named = [config.get("bos_token_id"), config.get("eos_token_id")]
    lists = [each if isinstance(each, list) else [each] for each in named]
    begin, end = ([n for n in each if n is not None and 0 <= n < ids and n != left_over] for each in lists)
    bos_id = begin[0] if begin else facts["bos_id"]
    count = max([facts["vocab_size"], *(n + 1 for n in begin + end)])
    found: TokenizerFacts = {"tokenizer": facts["tokenizer"], "vocab_size": count, "bos_id": bos_id}
    if end and end != [bos_id]:
        found["end_ids"] = end
    return found
