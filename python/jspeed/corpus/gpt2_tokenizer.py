"""GPT-2's tokenizer as a file, whether a model's files are it, and what a GPT-2's config says of
its tokens."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jspeed.base.files import read_json
from jspeed.corpus.tokenizers import characters_of_bytes, file_tokenizer, gpt2_byte_pairs
from jspeed.data.manifest import TokenizerFacts
from jspeed.data.tokens import GPT2, GPT2_BOS, TOKENIZER_FILE
from jspeed.errors import BadInput

# SHA-256 of a line "ID TEXT" of each
GPT2_TEXTS = "534ddd4fbe9e583a0d441b92c4e42756d21971510b2a3f263cf96cc31abd2f43"
# a multiple of 128: nanoGPT and llm.c make tables of this length for GPT-2's 50,257 ids
PADDED_GPT2 = 50_304
OLDER_FILES = (
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
)


def is_gpt2(path: Path) -> bool:
    """Whether a ``tokenizer.json`` or ``vocab.json`` makes the ids of text that GPT-2's tokenizer
    makes.

    It may have more special tokens, which no text gives. The ids say in what order pairs are
    merged.
    """
    try:
        vocabulary, special = read_json(path), {"<|endoftext|>"}
        if path.name == TOKENIZER_FILE:
            settings = vocabulary
            cut = settings["pre_tokenizer"]
            if (
                cut["type"] != "ByteLevel"
                or cut["add_prefix_space"]
                or cut.get("use_regex") is False
            ):
                return False
            if settings["normalizer"] or not all(
                token["special"] for token in settings["added_tokens"]
            ):
                return False
            special |= {token["content"] for token in settings["added_tokens"]}
            vocabulary = settings["model"]["vocab"]
        texts = sorted((number, text) for text, number in vocabulary.items() if text not in special)
        lines = "".join(f"{number} {text}\n" for number, text in texts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return hashlib.sha256(lines.encode()).hexdigest() == GPT2_TEXTS


def gpt2_tokenizer_file() -> str:
    """Return GPT-2's tokenizer as the ``tokenizer.json`` that transformers and tokenizers read.

    Raises BadInput where tiktoken has no vocabulary and cannot fetch it.
    """
    tokens, mark, letters = gpt2_byte_pairs(), "<|endoftext|>", characters_of_bytes()
    shown = {token: "".join(letters[byte] for byte in token) for token in tokens}
    added = {"id": GPT2_BOS, "content": mark, "special": True, "normalized": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model = {
        "type": "BPE",
        "vocab": {shown[token] or mark: number for number, token in enumerate(tokens)},
        "merges": [[shown[half] for half in halves] for halves in _merges(tokens)],
    }
    parts = dict.fromkeys(("pre_tokenizer", "post_processor", "decoder"), by_bytes)
    file = {"version": "1.0", "added_tokens": [added], "normalizer": None} | parts
    return json.dumps(file | {"model": model}, ensure_ascii=False) + "\n"


def _merges(tokens: Sequence[bytes]) -> list[list[bytes]]:
    """Return the two tokens that each token of several bytes is merged from; earlier ones merge
    first."""
    rank = {token: number for number, token in enumerate(tokens)}
    found = []
    for token in tokens:
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [rank.get(a + b, math.inf) for a, b in zip(parts, parts[1:], strict=False)]
            first = pairs.index(min(pairs))
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        if len(parts) == 2:
            found.append(parts)
    return found


def gpt2_facts(folder: Path, config: Mapping[str, Any]) -> TokenizerFacts:
    """Return the facts of the tokenizer of a GPT-2: those that our export wrote into its
    ``config``, or its files'.

    Without any, a table of GPT-2's length, or of that padded as nanoGPT does, is of GPT-2's ids.
    The config's ids that begin and end a text count where the table has them; of other tokenizers
    not 50,256, which transformers writes when nobody says another. Raises BadInput where nothing
    says how text becomes ids.
    """
    if facts := config.get("tokenizer"):
        return facts
    path, ids = folder / TOKENIZER_FILE, config["vocab_size"]
    older = [name for name in OLDER_FILES if (folder / name).exists()]
    if is_gpt2(path if path.exists() else folder / "vocab.json"):
        facts = GPT2
    elif path.exists():
        facts = file_tokenizer(path).facts
    elif older or ids not in (GPT2["vocab_size"], PADDED_GPT2):
        what = (
            f"its {older[0]} is not GPT-2's"
            if older
            else f"it has {ids:,} ids, not GPT-2's 50,257 (padded: 50,304)"
        )
        raise BadInput(
            f"{folder} has no {TOKENIZER_FILE} that says how text becomes ids, and {what};"
            " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers"
            " writes one"
        )
    else:
        facts = GPT2
    left_over = None if facts is GPT2 else GPT2_BOS
    named = [config.get("bos_token_id"), config.get("eos_token_id")]
    lists = [each if isinstance(each, list) else [each] for each in named]
    begin, end = (
        [n for n in each if n is not None and 0 <= n < ids and n != left_over] for each in lists
    )
    bos_id = begin[0] if begin else facts["bos_id"]
    count = max([facts["vocab_size"], *(n + 1 for n in begin + end)])
    its_facts: TokenizerFacts = {
        "tokenizer": facts["tokenizer"],
        "vocab_size": count,
        "bos_id": bos_id,
    }
    if end and end != [bos_id]:
        its_facts["end_ids"] = end
    return its_facts
