"""Prepare well-known data sets (names, Shakespeare, TinyStories, OpenWebText), downloaded or from a
file."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jspeed.base.files import read_text, sha256_of
from jspeed.corpus import Progress, download, no_progress, split
from jspeed.corpus.download import Download
from jspeed.corpus.shards.folder import EncodedDocuments, write_folder
from jspeed.corpus.shards.output_folder import locked
from jspeed.corpus.sources import hash_of
from jspeed.corpus.tokenise import Tokenising, describe, prepare_text
from jspeed.corpus.tokenizers import named_tokenizer, symbols_tokenizer
from jspeed.data.manifest import SPLITS, Description
from jspeed.data.tokens import SYMBOLS
from jspeed.errors import BadInput, writable_folder

GITHUB = "https://raw.githubusercontent.com/karpathy"
NAMES = Download(
    "names.txt",
    f"{GITHUB}/makemore/988aa59e4d8fefa526d06f3b453ad116258398d4/names.txt",
    "0a30b5557f192f32ab962680889aac5f6fda0f4cecf40a6d0b5694f58ea8cc4d",
)
SHAKESPEARE = Download(
    "tinyshakespeare.txt",
    f"{GITHUB}/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
INSTEAD = "fetch it yourself, or take a text of yours, and give it with --input FILE"


class HubText(NamedTuple):
    """Texts on Hugging Face: the files for training and for validation, or none for all
    ``.parquet`` files.

    ``permuted``: documents for validation are drawn by :func:`jspeed.corpus.split.by_permutation`.
    """

    repository: str
    files: tuple[str, ...] = ()
    permuted: bool = False


HUB_TEXTS = {
    "tinystories": HubText(  # its second version, by GPT-4
        "roneneldan/TinyStories", ("TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt")
    ),
    "openwebtext": HubText("Skylion007/openwebtext", permuted=True),
}
AFTER = Tokenising(end_of_text="after")
OPENWEBTEXT_VAL_FRACTION, OPENWEBTEXT_SEED = 0.0005, 2357  # nanoGPT's
SHAKESPEARE_TRAIN = 0.9  # of the characters, nanoGPT's
NAMES_ROW = 32  # tokens: the block of microgpt
MOST_ROW = 4096  # all rows are made in memory


def prepare_names(
    out: Path, given: Path | None = None, row: int = NAMES_ROW, progress: Progress = no_progress
) -> Path:
    """Prepare names, one a line, as rows of ``row`` tokens: BOS, characters, BOS, then PAD to the
    end.

    Ids are the characters in order, then BOS, then PAD. The token after a row is the BOS of the
    next, so a name of ``row - 1`` characters still ends where it should; of a longer one the first
    ``row - 2`` characters are kept, and the manifest counts these as ``truncated``. Splits by
    :func:`jspeed.corpus.split.by_content_hash`. ``progress`` is told the bytes downloaded; returns
    ``out``. Raises BadInput for a failed download, a bad text or row, and an ``out`` that is not
    empty.
    """
    if not 3 <= row <= MOST_ROW:
        raise BadInput(
            f"--row {row}: a row holds BOS, a character and BOS; give 3 to {MOST_ROW:,} tokens"
        )
    path = given or download.fetch(NAMES, progress=progress, instead=INSTEAD)
    names = [line.strip() for line in some_text(path).splitlines() if line.strip()]
    symbols = sorted(set("".join(names)))
    bos, pad = len(symbols), len(symbols) + 1
    tokenizer = symbols_tokenizer(SYMBOLS, symbols, len(symbols) + 2, bos)
    source = {"kind": "names", "sha256": sha256_of(path), "row": row}
    truncated = sum(len(name) > row - 1 for name in names)
    description: Description = {
        **describe(tokenizer, "both", source),
        "pad_id": pad,
        "truncated": truncated,
    }
    hashes = np.array([hash_of(name.encode()) for name in names], np.uint64)
    is_val = split.by_content_hash(hashes)
    rows = np.full((len(names), row), pad, tokenizer.dtype)
    rows[:, 0] = bos
    for tokens, name in zip(rows, names, strict=True):
        kept = name if len(name) < row else name[: row - 2]
        ids = tokenizer.encode(kept.encode())
        tokens[1 : 1 + ids.size] = ids
        if kept == name and ids.size < row - 1:
            tokens[1 + ids.size] = bos

    def batches() -> Iterator[EncodedDocuments]:
        for split_name in SPLITS:
            chosen = rows[is_val == (split_name == "val")]
            lengths = np.full(len(chosen), row)
            lengths[-1] += 1  # what the last row's last token is followed by, as all others
            yield EncodedDocuments(
                split_name, np.append(chosen.reshape(-1), chosen[-1:, 0]), lengths
            )

    write_folder(out, batches(), description, "names")
    return out


def prepare_shakespeare(
    out: Path, characters: bool, given: Path | None = None, progress: Progress = no_progress
) -> Path:
    """Prepare one text as nanoGPT does Shakespeare: the first nine tenths of its characters for
    training, no separator.

    Tokens are ``characters`` (ids in the order of the text's sorted characters) or GPT-2's.
    Arguments, result and errors as of :func:`prepare_names`.
    """
    path = given or download.fetch(SHAKESPEARE, progress=progress, instead=INSTEAD)
    text = some_text(path)
    symbols = sorted(set(text))
    tokenizer = (
        symbols_tokenizer(SYMBOLS, symbols, len(symbols), None)
        if characters
        else named_tokenizer("gpt2")
    )
    source = {"kind": "text", "sha256": sha256_of(path), "train": SHAKESPEARE_TRAIN}
    description = describe(tokenizer, "none", source)
    cut = int(SHAKESPEARE_TRAIN * len(text))

    def batches() -> Iterator[EncodedDocuments]:
        for split_name, part in zip(SPLITS, (text[:cut], text[cut:]), strict=True):
            if part:
                yield EncodedDocuments.one(split_name, tokenizer.encode(part.encode()))

    write_folder(out, batches(), description, "shakespeare")
    return out


def prepare_hub_text(
    name: str,
    out: Path,
    inputs: Sequence[Path] = (),
    options: Tokenising = AFTER,
    progress: Progress = no_progress,
) -> Path:
    """Prepare a text of ``HUB_TEXTS``, downloaded unless ``inputs`` are given.

    Arguments, result and errors as of :func:`jspeed.corpus.tokenise.prepare_text`.
    """
    repository, files, permuted = HUB_TEXTS[name]
    if options.val_input and not inputs:
        raise BadInput("--val-input needs --input, or both splits are downloaded; give both")
    if not inputs:
        folder = download.downloads() / repository.replace("/", "--")
        try:
            listed = (
                download.describe_hub(repository, files)
                if files
                else download.list_hub(repository, ".parquet")
            )
            commit, remote = listed
            writable_folder(folder, "the folder for downloads")
            with locked(folder, wait=True):
                download.fetch_hub(repository, commit, remote, folder, progress)
        except BadInput as error:
            raise BadInput(f"{error}; or give files that you have with --input") from None
        inputs = [folder / file.name for file in remote]
        if files:
            inputs, options = inputs[:1], replace(options, val_input=tuple(inputs[1:]))
    return prepare_text(inputs, out, options, progress, permuted)


def some_text(path: Path) -> str:
    """Return the text of a file. Raises BadInput when it is missing, empty or not UTF-8."""
    text = read_text(path, "give a text file")
    if not text.strip():
        raise BadInput(f"{path} holds no text, some was expected; give another file")
    return text
