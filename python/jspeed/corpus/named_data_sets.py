"""Prepare well-known data sets (names, Shakespeare, TinyStories, OpenWebText), downloaded or from a file."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jspeed.corpus import Progress, download, no_progress, split
from jspeed.corpus.parallel_tokenise import SPLITS, Separator
from jspeed.corpus.sources import hash_of
from jspeed.corpus.tokenise import describe, prepare_text
from jspeed.corpus.tokenizers import SYMBOLS, named_tokenizer, symbols_tokenizer
from jspeed.data.folder import EncodedDocuments, write_folder
from jspeed.data.manifest import Description, matches
from jspeed.errors import BadInput
from jspeed.files import cache_folder, read_regular, sha256_of


class Download(NamedTuple):
    """A file on a web server."""

    url: str
    sha256: str


GITHUB = "https://raw.githubusercontent.com/karpathy"
NAMES = Download(
    f"{GITHUB}/makemore/988aa59e4d8fefa526d06f3b453ad116258398d4/names.txt",
    "0a30b5557f192f32ab962680889aac5f6fda0f4cecf40a6d0b5694f58ea8cc4d",
)
SHAKESPEARE = Download(
    f"{GITHUB}/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
TINYSTORIES = "roneneldan/TinyStories", ("TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt")
OPENWEBTEXT = "Skylion007/openwebtext"
OPENWEBTEXT_VAL_FRACTION, OPENWEBTEXT_SEED = 0.0005, 2357  # nanoGPT's
SHAKESPEARE_TRAIN = 0.9  # of the characters, nanoGPT's
NAMES_ROW = 32  # tokens: the block of microgpt
MOST_ROW = 4096  # all rows are made in memory


def prepare_names(out: Path, given: Path | None = None, row: int = NAMES_ROW, progress: Progress = no_progress) -> Path:
    """Prepare names, one a line, as rows of ``row`` tokens: BOS, characters, BOS, then PAD to the end.

    Ids are the characters in order, then BOS, then PAD. The token after a row is the BOS of the next, so a name of
    ``row - 1`` characters still ends where it should; of a longer one the first ``row - 2`` characters are kept, and
    the manifest counts these as ``truncated``. Splits by :func:`jspeed.corpus.split.by_content_hash`. ``progress`` is
    told the bytes downloaded; returns ``out``. Raises BadInput for a failed download, a bad text or row, and an ``out``
    that is not empty.
    """
    if not 3 <= row <= MOST_ROW:
        raise BadInput(f"--row {row}: a row holds BOS, a character and BOS; give 3 to {MOST_ROW:,} tokens")
    path = given or _fetched(NAMES, "names.txt", progress)
    names = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    symbols = sorted(set("".join(names)))
    bos, pad = len(symbols), len(symbols) + 1
    tokenizer = symbols_tokenizer(SYMBOLS, symbols, len(symbols) + 2, bos)
    source = {"kind": "names", "sha256": sha256_of(path), "row": row}
    truncated = sum(len(name) > row - 1 for name in names)
    description: Description = {**describe(tokenizer, "both", source), "pad_id": pad, "truncated": truncated}
    if matches(out, description):
        return out
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
        for part, val in SPLITS:
            chosen = rows[is_val == val]
            lengths = np.full(len(chosen), row)
            lengths[-1] += 1  # what the last row's last token is followed by, as all others
            yield EncodedDocuments(part, np.append(chosen.reshape(-1), chosen[-1:, 0]), lengths)

    write_folder(out, batches(), description, "names")
    return out


def prepare_shakespeare(
    out: Path, characters: bool, given: Path | None = None, progress: Progress = no_progress
) -> Path:
    """Prepare one text as nanoGPT does Shakespeare: the first nine tenths of its characters for training, no separator.

    Tokens are ``characters`` (ids in the order of the text's sorted characters) or GPT-2's. Arguments, result and
    errors as of :func:`prepare_names`.
    """
    path = given or _fetched(SHAKESPEARE, "tinyshakespeare.txt", progress)
    text = read_text(path)
    symbols = sorted(set(text))
    tokenizer = symbols_tokenizer(SYMBOLS, symbols, len(symbols), None) if characters else named_tokenizer("gpt2")
    source = {"kind": "text", "sha256": sha256_of(path), "train": SHAKESPEARE_TRAIN}
    description = describe(tokenizer, "none", source)
    if matches(out, description):
        return out
    cut = int(SHAKESPEARE_TRAIN * len(text))

    def batches() -> Iterator[EncodedDocuments]:
        for part, val in SPLITS:
            tokens = tokenizer.encode((text[cut:] if val else text[:cut]).encode())
            if tokens.size:
                yield EncodedDocuments(part, tokens, np.array([tokens.size]))

    write_folder(out, batches(), description, "shakespeare")
    return out


def prepare_tinystories(
    out: Path,
    inputs: Sequence[Path] = (),
    val_inputs: Sequence[Path] = (),
    progress: Progress = no_progress,
    separator: Separator = "after",
    processes: int | None = None,
) -> Path:
    """Prepare TinyStories (its second version, by GPT-4) with GPT-2's tokens, downloaded unless ``inputs`` are given.

    Arguments, result and errors as of :func:`jspeed.corpus.tokenise.prepare_text`.
    """
    if val_inputs and not inputs:
        raise BadInput("--val-input needs --input: without it, both splits are downloaded")
    if not inputs:
        inputs, val_inputs = ([path] for path in _from_hub(*TINYSTORIES, progress))
    return prepare_text(inputs, out, val_inputs=val_inputs, separator=separator, processes=processes, progress=progress)


def prepare_openwebtext(
    out: Path,
    inputs: Sequence[Path] = (),
    progress: Progress = no_progress,
    separator: Separator = "after",
    val_fraction: float = OPENWEBTEXT_VAL_FRACTION,
    seed: int = OPENWEBTEXT_SEED,
    processes: int | None = None,
) -> Path:
    """Prepare OpenWebText with GPT-2's tokens, split by rows as nanoGPT does, downloaded unless ``inputs`` are given.

    Arguments, result and errors as of :func:`jspeed.corpus.tokenise.prepare_text`.
    """
    if not inputs:
        with _suggest_input():
            revision, names = download.list_hub(OPENWEBTEXT, ".parquet")
        inputs = _from_hub(OPENWEBTEXT, names, progress, revision)
    return prepare_text(
        inputs,
        out,
        val_fraction=val_fraction,
        seed=seed,
        separator=separator,
        processes=processes,
        rows=True,
        progress=progress,
    )


def read_text(path: Path) -> str:
    """Read a whole file. Raises BadInput when it is missing, empty or not UTF-8."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise BadInput(f"input {path} cannot be read ({error.strerror}); give a text file") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 at byte {error.start}; convert it to UTF-8") from None
    if not text.strip():
        raise BadInput(f"{path} holds no text, some was expected; give another file")
    return text


def downloads() -> Path:
    """Return the folder where fetched files stay."""
    return cache_folder() / "downloads"


def _fetched(source: Download, name: str, progress: Progress) -> Path:
    instead = "fetch it yourself, or take a text of yours, and give it with --input FILE"
    return download.fetch(source.url, downloads() / name, source.sha256, progress, instead=instead)


def _from_hub(repository: str, names: Sequence[str], progress: Progress, revision: str = "main") -> list[Path]:
    folder = downloads() / repository.replace("/", "--")
    with _suggest_input():
        return download.fetch_set(repository, names, folder, progress, revision)


@contextmanager
def _suggest_input() -> Iterator[None]:
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{error}; or give files that you have with --input") from None
