"""From sources to a folder of shards: the standard library as bytes, any text files as tokens."""

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jspeed.cores import cores
from jspeed.corpus import Progress, no_progress, parallel_tokenise, sources, split
from jspeed.corpus.chunks import PIECE_BYTES, pieces
from jspeed.corpus.parallel_tokenise import Separator
from jspeed.corpus.process_pool import MAX_WORKERS
from jspeed.corpus.tokenizers import TOKENIZER_FILE, Tokenizer, bytes_tokenizer, named_tokenizer
from jspeed.data.folder import SHARD_TOKENS, EncodedDocuments, write_folder
from jspeed.data.manifest import FORMAT_VERSION, Description, Split, matches
from jspeed.errors import BadInput
from jspeed.files import cache_folder
from jspeed.output_folder import require_empty

WORTH_PROCESSES = 32 << 20  # bytes of input; a process takes half a second to start
ONE_DOCUMENT_TOKENS = 20  # below this, a tenth of a document is too short for one input and target
ONE_DOCUMENT_VAL = 0.1  # of a single document's tokens, as in nanoGPT's Shakespeare


def stdlib_folder() -> Path:
    """Return where this Python's standard library is kept as tokens, prepared or not."""
    # 2: manifests that say where documents are separated; folders of earlier versions are left where they are.
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
    if not matches(folder, description):
        documents = with_progress(sources.stdlib_documents(files), len(files), progress)
        try:
            write_folder(folder, encoded(documents, tokenizer), description, "stdlib")
        except BadInput:
            if not matches(folder, description):  # else another process finished it just now
                raise
    return folder


def prepare_text(
    inputs: Sequence[Path],
    out: Path,
    tokenizer: str = "gpt2",
    val_fraction: float | None = None,
    seed: int = 0,
    val_inputs: Sequence[Path] = (),
    separator: Separator = "before",
    separator_token: str | None = None,
    processes: int | None = None,
    rows: bool = False,
    progress: Progress = no_progress,
    shard_tokens: int = SHARD_TOKENS,
) -> Path:
    """Tokenise text files (:func:`jspeed.corpus.chunks.documents`) into ``out`` and return it.

    An interrupted preparation resumes with the same inputs and ``out``.

    Args:
        inputs: Files and folders.
        out: Folder to make.
        tokenizer: Name or file (:func:`jspeed.corpus.tokenizers.named_tokenizer`).
        val_fraction: Part of the documents in the validation split; of a single document, its last part (None: 0.1).
        seed: Another one chooses other documents for it; a single document takes none.
        val_inputs: Files and folders whose documents form the validation split; without them it is chosen by
            :func:`jspeed.corpus.split.by_content_hash`.
        separator: Where the token that separates documents stands.
        separator_token: That token, a special one of the tokenizer; None: the tokenizer's choice.
        processes: Default: one for each usable core, or one for little text. The result does not depend on it.
        rows: Choose by :func:`jspeed.corpus.split.by_rows` instead.
        progress: Is told the bytes of input.
        shard_tokens: Most tokens of a shard; the manifest's source has another than the default.

    Raises:
        NoRoom: The disk is full, or a process was killed; finished work is kept.
        BadInput: For bad input or output; its files are removed.
    """
    split.check_choice(val_fraction, seed)
    if separator == "none" and separator_token is not None:
        raise BadInput("--end-of-text none leaves no token between documents; leave out --separator-token")
    if val_inputs and (val_fraction is not None or seed):
        raise BadInput("--val-input names the documents to validate on; leave out --val-fraction and --seed")
    if processes is not None and not 1 <= processes <= MAX_WORKERS:
        raise BadInput(f"--processes {processes}: must be from 1 to {MAX_WORKERS:,}")
    files = [sources.text_files(inputs), sources.text_files(val_inputs) if val_inputs else []]
    parallel_tokenise.tokenizer_of_process.cache_clear()  # a tokenizer.json may have changed
    chosen = named_tokenizer(tokenizer)
    if separator_token is not None:
        chosen = chosen.separated_by(separator_token)
    if separator != "none" and chosen.bos_id is None:
        raise BadInput(
            f"tokenizer {tokenizer} has none of the tokens that usually separate documents; name one with "
            f"--separator-token (it has {chosen.special_names()}), or give --end-of-text none"
        )
    stamps = [sources.text_stamps(its) for its in files]
    fingerprints = [sources.text_fingerprint(its) for its in files]
    source = {"kind": "text", "val_fraction": val_fraction, "seed": seed} | fingerprints[0]
    source |= ({"val": fingerprints[1]} if val_inputs else {}) | ({"split": "rows"} if rows else {})
    source |= {"shard_tokens": shard_tokens} if shard_tokens != SHARD_TOKENS else {}
    description = describe(chosen, separator, source)
    if matches(out, description):
        return out
    require_empty(out)
    identity = json.dumps([FORMAT_VERSION, PIECE_BYTES, chosen.name, separator, chosen.bos_id, fingerprints])
    total = sum(fingerprint["bytes"] for fingerprint in fingerprints)
    processes = processes or (cores() if total >= WORTH_PROCESSES else 1)
    with parallel_tokenise.work_folder(out, hashlib.sha256(identity.encode()).hexdigest()[:12]) as folder:
        parts = []
        for name, its in zip(("main", "val"), files, strict=True):
            (part := folder / name).mkdir(exist_ok=True)
            cut = pieces([path for _, path in its], lambda count: progress(count, total))
            parallel_tokenise.tokenise(part, cut, tokenizer, separator, chosen.bos_id, processes)
            parts.append(part)
        if [sources.text_stamps(its) for its in files] != stamps:
            raise BadInput(f"an input of {out} changed while it was read; try again when it is complete")
        batches: Iterator[EncodedDocuments]
        if val_inputs:
            batches = chain(*(_all_of(part, chosen, is_val) for part, is_val in zip(parts, (False, True), strict=True)))
        else:
            batches = _split(parts[0], chosen, separator, val_fraction, seed, rows)
        extra_files = {TOKENIZER_FILE: chosen.content} if chosen.content else {}
        write_folder(out, batches, description, out.name, shard_tokens, extra_files)
    return out


def _all_of(part: Path, tokenizer: Tokenizer, is_val: bool) -> Iterator[EncodedDocuments]:
    """Yield all documents of one work folder, in one split."""
    chosen = np.full(parallel_tokenise.records(part).size, is_val)
    return parallel_tokenise.batches(part, chosen, tokenizer.dtype)


def _split(
    part: Path, tokenizer: Tokenizer, separator: Separator, fraction: float | None, seed: int, rows: bool
) -> Iterator[EncodedDocuments]:
    """Yield the documents of one work folder, divided into two splits."""
    records = parallel_tokenise.records(part)
    if not rows and records.size == 1 and records["tokens"][0] >= ONE_DOCUMENT_TOKENS:
        if seed:
            raise BadInput(f"--seed {seed}: the input is one document, whose last part validates; leave --seed out")
        ((_, only, _),) = _all_of(part, tokenizer, False)
        return _cut(only, fraction or ONE_DOCUMENT_VAL, [tokenizer.bos_id] if separator == "before" else [])
    if rows:
        is_val = split.by_rows(records.size, fraction or split.VAL_FRACTION, seed)
    else:
        is_val = split.by_content_hash(records["hash"], fraction, seed)
    return parallel_tokenise.batches(part, is_val, tokenizer.dtype)


def _cut(
    tokens: NDArray[np.unsignedinteger], fraction: float, before: Sequence[int | None]
) -> Iterator[EncodedDocuments]:
    """Cut the only document in two; ``before`` also leads the second part."""
    cut = round((1 - fraction) * tokens.size)
    if cut:
        yield EncodedDocuments("train", tokens[:cut], np.array([cut]))
    if cut < tokens.size:
        val = np.concatenate([np.array(before, tokens.dtype), tokens[cut:]])
        yield EncodedDocuments("val", val, np.array([val.size]))


def describe(tokenizer: Tokenizer, mark: Any, source: dict[str, Any]) -> Description:
    """Return what a manifest says of the whole folder: ``bos_id`` is None where no token separates documents.

    ``mark`` is the manifest's word for where that token stands: before, after, both or none.
    """
    facts = tokenizer.described()
    return {**facts, "bos_id": None if mark == "none" else facts["bos_id"], "mark": mark, "source": source}


def encoded(documents: Iterable[tuple[Split, bytes]], tokenizer: Tokenizer) -> Iterator[EncodedDocuments]:
    """Tokenise (split, document) pairs, the tokenizer's ``bos_id`` before each."""
    for name, document in documents:
        tokens = np.concatenate([np.array([tokenizer.bos_id], tokenizer.dtype), tokenizer.encode(document)])
        yield EncodedDocuments(name, tokens, np.array([tokens.size]))


def with_progress(items: Iterable[Any], total: int, progress: Progress) -> Iterator[Any]:
    """Pass on ``items``, of which there are ``total``, and tell ``progress`` of each."""
    for item in items:
        yield item
        progress(1, total)
