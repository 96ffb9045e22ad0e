"""From sources to a folder of shards: the standard library as bytes, any text files as tokens."""

import hashlib
import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from jspeed.base.cores import cores
from jspeed.base.files import cache_folder
from jspeed.corpus import Progress, no_progress, parallel_tokenise, sources, split
from jspeed.corpus.chunks import PIECE_BYTES, pieces
from jspeed.corpus.parallel_tokenise import Separator
from jspeed.corpus.process_pool import MAX_WORKERS
from jspeed.corpus.shards.folder import (
    LEAST_SHARD,
    MOST_SHARD,
    SHARD_TOKENS,
    EncodedDocuments,
    is_made,
    write_folder,
)
from jspeed.corpus.tokenizers import Tokenizer, bytes_tokenizer, named_tokenizer
from jspeed.data.manifest import FORMAT_VERSION, Description
from jspeed.errors import BadInput
from jspeed.fields import Rule, Wants, Whole, integer

WORTH_PROCESSES = 32 << 20  # bytes of input; a process takes half a second to start
ONE_DOCUMENT_TOKENS = 20  # below this, a tenth of a document is too short for one input and target
ONE_DOCUMENT_VAL = 0.1  # of a single document's tokens, as in nanoGPT's Shakespeare

Files = Annotated[tuple[Path, ...], Wants("FILE|FOLDER")]
Fraction = Annotated[float, Rule("a number between 0 and 1", lambda value: 0 < value < 1)]
Processes = Annotated[int, integer(1, MAX_WORKERS)]


def stdlib_folder() -> Path:
    """Return where this Python's standard library is kept as tokens, prepared or not."""
    # 2: manifests that say where documents are separated; folders of earlier versions are left
    # where they are.
    return cache_folder() / "data" / f"stdlib-2-{sources.stdlib_key(sources.stdlib_files())}"


def prepare_stdlib(out: Path | None = None, progress: Progress = no_progress) -> Path:
    """Return a folder with this Python's standard library as byte tokens, preparing it if needed.

    ``out`` is :func:`stdlib_folder` unless given. Raises BadInput when ``out`` holds anything else.
    """
    files = sources.stdlib_files()
    source = {
        "kind": "stdlib",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "key": sources.stdlib_key(files),
    }
    folder = stdlib_folder() if out is None else out
    tokenizer = bytes_tokenizer()
    description = describe(tokenizer, "before", source)
    bos = np.array([tokenizer.bos_id], tokenizer.dtype)

    def batches() -> Iterator[EncodedDocuments]:
        for part, document in sources.stdlib_documents(files):
            yield EncodedDocuments.one(part, np.append(bos, tokenizer.encode(document)))
            progress(1, len(files))

    write_folder(folder, batches(), description, "stdlib")
    return folder


@dataclass(frozen=True)
class Tokenising:
    """How text files become shards: the flags of ``jspeed prepare text``, whose values are checked
    there.

    Args:
        tokenizer: gpt2 (GPT-2's byte pairs), bytes, another encoding of tiktoken (o200k_base), or a
            tokenizer.json of Hugging Face's (it needs the extra tokenizers), of which a copy comes
            with the shards.
        val_fraction: Part of the documents that is for validation; default: 1 %, at least 32
            documents but at most a tenth. Of a single document it is the last part, by default a
            tenth.
        seed: Another one chooses other documents for validation.
        val_input: Files and folders whose documents are for validation, instead of a part of the
            others.
        end_of_text: Where the token that separates documents goes: before each document, after it,
            or nowhere.
        separator_token: That token, one of the tokenizer's special ones, such as '<|bos|>';
            default: <|endoftext|>, or the first there is of <|begin_of_text|>, <bos>, <s>, [CLS],
            <|end_of_text|>, <eos>, </s>.
        text_field: The field of a .jsonl line, or the column of a table, that is the text.
        shard_tokens: Most tokens of a shard, which is a file of twice as many bytes (four times, of
            a vocabulary above 65,535). A recipe that packs documents drops what is left of a shard
            when it is less than a batch.
        processes: Processes that tokenise; default: one for each usable core, or one for little
            text. The result does not depend on it.
    """

    tokenizer: str = "gpt2"
    val_fraction: Fraction | None = None
    seed: Whole = 0
    val_input: Files = ()
    end_of_text: Separator = "before"
    separator_token: Annotated[str | None, Wants("TOKEN")] = None
    text_field: Annotated[str, Wants("NAME")] = "text"
    shard_tokens: Annotated[int, integer(LEAST_SHARD, MOST_SHARD)] = SHARD_TOKENS
    processes: Processes | None = None

    def make_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, with ``separator_token``. Raises BadInput where nothing can
        separate documents."""
        if self.end_of_text == "none" and self.separator_token is not None:
            raise BadInput(
                "--end-of-text none leaves no token between documents; leave out --separator-token"
            )
        tokenizer = named_tokenizer(self.tokenizer)
        if self.separator_token is not None:
            tokenizer = tokenizer.separated_by(self.separator_token)
        if self.end_of_text != "none" and tokenizer.bos_id is None:
            raise BadInput(
                f"tokenizer {self.tokenizer} has none of the tokens that usually separate"
                f" documents; name one with --separator-token (it has {tokenizer.special_names()}),"
                " or give --end-of-text none"
            )
        return tokenizer


def prepare_text(
    inputs: Sequence[Path],
    out: Path,
    options: Tokenising = Tokenising(),
    progress: Progress = no_progress,
    permuted: bool = False,
) -> Path:
    """Tokenise the text files ``inputs`` (:func:`jspeed.corpus.chunks.documents`) into ``out`` and
    return it.

    The validation split is chosen by :func:`jspeed.corpus.split.by_content_hash`, when ``permuted``
    by :func:`jspeed.corpus.split.by_permutation`. ``progress`` is told the bytes of input. An
    interrupted preparation resumes with the same inputs and ``out``. Raises BadInput for bad input
    or output, whose files are removed; and NoRoom on a full disk, or when a process was killed:
    finished work is kept.
    """
    if options.val_input and (options.val_fraction is not None or options.seed):
        raise BadInput(
            "--val-input names the documents to validate on; leave out --val-fraction and --seed"
        )
    files = [
        sources.text_files(inputs),
        sources.text_files(options.val_input) if options.val_input else [],
    ]
    parallel_tokenise.tokenizer_of_process.cache_clear()  # a tokenizer.json may have changed
    tokenizer = options.make_tokenizer()
    stamps = [sources.text_stamps(its) for its in files]
    fingerprints = [sources.text_fingerprint(its) for its in files]
    description = describe(tokenizer, options.end_of_text, _source(options, fingerprints, permuted))
    if is_made(out, description):
        return out
    separator, bos_id = options.end_of_text, tokenizer.bos_id
    identity = json.dumps(
        [FORMAT_VERSION, PIECE_BYTES, tokenizer.name, separator, bos_id, fingerprints]
        + [options.text_field] * (options.text_field != "text")
    )
    total = sum(fingerprint["bytes"] for fingerprint in fingerprints)
    processes = options.processes or (cores() if total >= WORTH_PROCESSES else 1)
    with parallel_tokenise.work_folder(
        out, hashlib.sha256(identity.encode()).hexdigest()[:12]
    ) as folder:
        parts = [folder / "main", folder / "val"]
        for part, its in zip(parts, files, strict=True):
            part.mkdir(exist_ok=True)
            cut = pieces(
                [path for _, path in its], lambda count: progress(count, total), options.text_field
            )
            parallel_tokenise.tokenise(part, cut, options.tokenizer, separator, bos_id, processes)
        if [sources.text_stamps(its) for its in files] != stamps:
            raise BadInput(
                f"an input of {out} changed while it was read; try again when it is complete"
            )
        batches = _split(parts, tokenizer, options, permuted)
        write_folder(out, batches, description, out.name, options.shard_tokens, tokenizer.files)
    return out


def _source(
    options: Tokenising, fingerprints: Sequence[dict[str, Any]], permuted: bool
) -> dict[str, Any]:
    """Return what the manifest says of the files and of how they are split; of what is usual it
    says nothing."""
    source = {
        "kind": "text",
        "val_fraction": options.val_fraction,
        "seed": options.seed,
    } | fingerprints[0]
    source |= ({"val": fingerprints[1]} if options.val_input else {}) | (
        {"split": "rows"} if permuted else {}
    )
    source |= {"text_field": options.text_field} if options.text_field != "text" else {}
    return source | (
        {"shard_tokens": options.shard_tokens} if options.shard_tokens != SHARD_TOKENS else {}
    )


def _all_of(part: Path, tokenizer: Tokenizer, is_val: bool) -> Iterator[EncodedDocuments]:
    """Yield all documents of one work folder, in one split."""
    chosen = np.full(parallel_tokenise.records(part).size, is_val)
    return parallel_tokenise.batches(part, chosen, tokenizer.dtype)


def _split(
    parts: Sequence[Path], tokenizer: Tokenizer, options: Tokenising, permuted: bool
) -> Iterator[EncodedDocuments]:
    """Yield the documents of both work folders, each in its split; without ``val_input`` the second
    is empty."""
    if options.val_input:
        return chain(_all_of(parts[0], tokenizer, False), _all_of(parts[1], tokenizer, True))
    records, fraction, seed = (
        parallel_tokenise.records(parts[0]),
        options.val_fraction,
        options.seed,
    )
    if not permuted and records.size == 1 and records["tokens"][0] >= ONE_DOCUMENT_TOKENS:
        if seed:
            raise BadInput(
                f"--seed {seed}: the input is one document, whose last part validates; leave"
                " --seed out"
            )
        ((_, only, _),) = _all_of(parts[0], tokenizer, False)
        return _cut(
            only,
            fraction or ONE_DOCUMENT_VAL,
            [tokenizer.bos_id] if options.end_of_text == "before" else [],
        )
    if permuted:
        is_val = split.by_permutation(records.size, fraction or split.VAL_FRACTION, seed)
    else:
        is_val = split.by_content_hash(records["hash"], fraction, seed)
    return parallel_tokenise.batches(parts[0], is_val, tokenizer.dtype)


def _cut(
    tokens: NDArray[np.unsignedinteger], fraction: float, before: Sequence[int | None]
) -> Iterator[EncodedDocuments]:
    """Cut the only document in two; ``before`` also leads the second part."""
    cut = round((1 - fraction) * tokens.size)
    if cut:
        yield EncodedDocuments.one("train", tokens[:cut])
    if cut < tokens.size:
        yield EncodedDocuments.one(
            "val", np.concatenate([np.array(before, tokens.dtype), tokens[cut:]])
        )


def describe(tokenizer: Tokenizer, mark: Any, source: dict[str, Any]) -> Description:
    """Return what a manifest says of the whole folder: ``bos_id`` is None where no token separates
    documents.

    ``mark`` is the manifest's word for where that token stands: before, after, both or none.
    """
    bos_id = None if mark == "none" else tokenizer.bos_id
    return {**tokenizer.facts, "bos_id": bos_id, "mark": mark, "source": source}
