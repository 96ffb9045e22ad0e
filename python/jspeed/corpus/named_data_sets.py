"""Well-known data sets (names, Shakespeare, TinyStories, OpenWebText), from the network or a file."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jspeed.corpus import download, split
from jspeed.corpus.sources import hash_of
from jspeed.corpus.tokenise import Progress, counted, facts, prepare_text
from jspeed.corpus.tokenizers import SYMBOLS, named_tokenizer, symbols_tokenizer
from jspeed.data.folder import Batch, write_folder
from jspeed.data.manifest import holds
from jspeed.errors import BadInput
from jspeed.files import cache_folder, read_regular, sha256_of

GITHUB = "https://raw.githubusercontent.com/karpathy"
NAMES = (
    f"{GITHUB}/makemore/988aa59e4d8fefa526d06f3b453ad116258398d4/names.txt",
    "0a30b5557f192f32ab962680889aac5f6fda0f4cecf40a6d0b5694f58ea8cc4d",
)
SHAKESPEARE = (
    f"{GITHUB}/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
TINYSTORIES = "roneneldan/TinyStories", ("TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt")
OPENWEBTEXT = "Skylion007/openwebtext"
OPENWEBTEXT_SPLIT = {"val_fraction": 0.0005, "seed": 2357, "rows": True}  # nanoGPT's
SHAKESPEARE_TRAIN = 0.9  # of the characters, nanoGPT's
NAMES_ROW = 32  # tokens: the block of microgpt
MOST_ROW = 4096  # all rows are made in memory


def prepare_names(out: Path, given: Path | None = None, row: int = NAMES_ROW, progress: Progress | None = None) -> Path:
    """Prepare names, one a line, as rows of ``row`` tokens: BOS, characters, BOS, then PAD to the end.

    Ids are the characters in order, then BOS, then PAD. The token after a row is the BOS of the next, so a name of
    ``row - 1`` characters still ends where it should; of a longer one the first ``row - 2`` characters are kept, and
    the manifest counts these as ``truncated``. Splits by contents, as :func:`jspeed.corpus.split.by_contents` says.
    """
    if not 3 <= row <= MOST_ROW:
        raise BadInput(f"--row {row}: a row holds BOS, a character and BOS; give 3 to {MOST_ROW:,} tokens")
    path = given or _fetched(NAMES, "names.txt", progress)
    names = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    symbols = sorted(set("".join(names)))
    bos, pad = len(symbols), len(symbols) + 1
    tokenizer = symbols_tokenizer(SYMBOLS, symbols, len(symbols) + 2, bos)
    source = {"kind": "names", "sha256": sha256_of(path), "row": row}
    head = facts(tokenizer, "both", source) | {"pad_id": pad, "truncated": sum(len(name) > row - 1 for name in names)}
    if holds(out, head):
        return out
    hashes = np.array([hash_of(name.encode()) for name in names], np.uint64)
    validates = split.by_contents(hashes)
    rows = np.full((len(names), row), pad, tokenizer.dtype)
    rows[:, 0] = bos
    for place, name in zip(rows, names, strict=True):
        kept = name if len(name) < row else name[: row - 2]
        ids = tokenizer.encode(kept.encode())
        place[1 : 1 + ids.size] = ids
        if kept == name and ids.size < row - 1:
            place[1 + ids.size] = bos

    def batches() -> Iterator[Batch]:
        for part, chosen in (("train", rows[~validates]), ("val", rows[validates])):
            lengths = np.full(len(chosen), row)
            lengths[-1] += 1  # what the last row's last token is followed by, as all others
            yield Batch(part, np.append(chosen.reshape(-1), chosen[-1:, 0]), lengths)

    write_folder(out, counted(batches(), 2, progress), head, "names")
    return out


def prepare_shakespeare(
    out: Path, characters: bool, given: Path | None = None, progress: Progress | None = None
) -> Path:
    """Prepare one text as nanoGPT does Shakespeare: the first nine tenths of its characters train, nothing is marked.

    Tokens are ``characters`` (ids in the order of the text's sorted characters) or GPT-2's.
    """
    path = given or _fetched(SHAKESPEARE, "tinyshakespeare.txt", progress)
    text = read_text(path)
    symbols = sorted(set(text))
    tokenizer = symbols_tokenizer(SYMBOLS, symbols, len(symbols), None) if characters else named_tokenizer("gpt2")
    head = facts(tokenizer, "none", {"kind": "text", "sha256": sha256_of(path), "train": SHAKESPEARE_TRAIN})
    if holds(out, head):
        return out
    cut = int(SHAKESPEARE_TRAIN * len(text))

    def batches() -> Iterator[Batch]:
        for part, piece in (("train", text[:cut]), ("val", text[cut:])):
            tokens = tokenizer.encode(piece.encode())
            if tokens.size:
                yield Batch(part, tokens, np.array([tokens.size]))

    write_folder(out, counted(batches(), 2, progress), head, "shakespeare")
    return out


def prepare_tinystories(
    out: Path, inputs: Sequence[Path], val_inputs: Sequence[Path], progress: Progress | None, **options: Any
) -> Path:
    """Prepare TinyStories (its second version, by GPT-4) with GPT-2's tokens, an end-of-text after each story."""
    if not inputs:
        inputs, val_inputs = ([path] for path in _from_hub(*TINYSTORIES, progress))
    return prepare_text(inputs, out, val_inputs=val_inputs, progress=progress, **{"mark": "after"} | options)


def prepare_openwebtext(out: Path, inputs: Sequence[Path], progress: Progress | None, **options: Any) -> Path:
    """Prepare OpenWebText with GPT-2's tokens, an end-of-text after each document, split by rows as nanoGPT does."""
    if not inputs:
        with _input_instead():
            revision, names = download.list_hub(OPENWEBTEXT, ".parquet")
        inputs = _from_hub(OPENWEBTEXT, names, progress, revision)
    return prepare_text(inputs, out, progress=progress, **{"mark": "after"} | OPENWEBTEXT_SPLIT | options)


def read_text(path: Path) -> str:
    """Read a whole file. Raises BadInput when it is missing, empty or not UTF-8."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise BadInput(f"input {path} cannot be read ({error.strerror}); give a text file") from None
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 at byte {error.start}; convert it to UTF-8") from None
    if not text.strip():
        raise BadInput(f"{path} holds no text, some was expected; give another file")
    return text


def downloads() -> Path:
    """Return the folder where fetched files stay."""
    return cache_folder() / "downloads"


def _fetched(source: tuple[str, str], name: str, progress: Progress | None) -> Path:
    url, sha256 = source
    instead = "fetch it yourself, or take a text of yours, and give it with --input FILE"
    return download.fetch(url, downloads() / name, sha256, download.summed(progress), instead=instead)


def _from_hub(repository: str, names: Sequence[str], progress: Progress | None, revision: str = "main") -> list[Path]:
    folder = downloads() / repository.replace("/", "--")
    with _input_instead():
        return download.fetch_set(repository, names, folder, download.summed(progress), revision)


@contextmanager
def _input_instead() -> Iterator[None]:
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{error}; or give files that you have with --input") from None
