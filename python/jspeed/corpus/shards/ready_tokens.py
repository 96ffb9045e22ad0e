"""Ids of tokens that other programs have written become shards: nanoGPT's train.bin, NumPy's .npy
files."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jspeed.base.files import sha256_of
from jspeed.corpus.shards.folder import EncodedDocuments, id_dtype, is_made, write_folder
from jspeed.data.errors import ShardFormatError, TokenRangeError
from jspeed.data.find_shards import open_shards, split_of
from jspeed.data.manifest import Description, TokenizerFacts
from jspeed.errors import BadInput, first_line

CHUNK = 1 << 24  # tokens


def convert_tokens(
    folder: Path,
    out: Path,
    facts: TokenizerFacts,
    extra_files: Mapping[str, bytes],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write the ids of ``folder`` as shards into ``out`` and return it, ``extra_files`` (name ->
    content) beside them.

    A ``.bin`` file is uint16 ids from its first byte on, a ``.npy`` file one array of integers;
    :func:`jspeed.data.find_shards.split_of` says which split each is, ``facts`` are of the
    tokenizer that made them. A document starts at each ``bos_id``, but for one that ends a file.
    ``progress`` is called with the bytes just written and those in all. Raises BadInput for other
    files, and TokenRangeError for an id that the tokenizer does not have.
    """
    try:
        files = [
            path
            for path in sorted(folder.iterdir())
            if path.suffix in (".bin", ".npy") and split_of(path)
        ]
    except OSError as error:
        raise BadInput(
            f"input folder {folder} cannot be read ({error.strerror}); give the one of train.bin"
            " and val.bin"
        ) from None
    if not files:
        raise BadInput(
            f"input folder {folder} holds no tokens, train.bin and val.bin or NAME_train_NUMBER.npy"
            " and NAME_val_NUMBER.npy were expected; give another"
        )
    if (folder / "meta.pkl").exists():
        raise BadInput(
            f"the ids in {folder} are of characters, which nanoGPT's meta.pkl lists; prepare their"
            " text with `jspeed prepare shakespeare-char --input FILE`"
        )
    try:
        hashes = {path.name: sha256_of(path) for path in files}
    except OSError as error:
        raise BadInput(
            f"{error.filename} cannot be read ({error.strerror}); give a folder of files of tokens"
        ) from None
    description: Description = {**facts, "source": {"kind": "tokens", "files": hashes}}
    if is_made(out, description):
        return out
    dtype = id_dtype(facts["vocab_size"])
    arrays = {path: _array(path) for path in files}
    total = sum(array.nbytes for array in arrays.values())

    def batches() -> Iterator[EncodedDocuments]:
        for path, array in arrays.items():
            split, at = split_of(path), 0
            assert split
            lengths = _lengths(path, array, facts)
            for its in np.split(
                lengths, np.searchsorted(np.cumsum(lengths), np.arange(CHUNK, array.size, CHUNK))
            ):
                tokens = array[at : at + its.sum()]
                yield EncodedDocuments(split, tokens.astype(dtype), its)
                progress(tokens.nbytes, total)
                at += tokens.size

    write_folder(out, batches(), description, out.name, extra_files=extra_files)
    return out


def _array(path: Path) -> NDArray[np.integer]:
    """Map the ids of a file, ``[tokens]``, read-only. Raises BadInput for a shard, and for what
    holds no ids."""
    try:
        open_shards([path])
    except ShardFormatError:
        pass
    else:
        raise BadInput(
            f"{path} is a shard already, nothing is to convert; train on its folder with --data"
            f" {path.parent}"
        )
    try:
        array = (
            np.lib.format.open_memmap(path, mode="r")
            if path.suffix == ".npy"
            else np.memmap(path, "<u2", "r")
        )
    except (OSError, ValueError) as error:
        raise BadInput(
            f"{path} holds no ids of tokens ({first_line(error)}); give the file as it was written"
        ) from None
    if array.ndim != 1 or array.dtype.kind not in "iu" or not array.size:
        raise BadInput(
            f"{path} holds an array {array.shape} of {array.dtype}; expected ids of tokens in a row"
        )
    return array


def _lengths(path: Path, array: NDArray[np.integer], facts: TokenizerFacts) -> NDArray[np.int64]:
    """Return the tokens of each document. Raises TokenRangeError for an id that its tokenizer does
    not have."""
    starts = [np.zeros(1, np.int64)]
    for at in range(0, array.size, CHUNK):
        part = array[at : at + CHUNK]
        strange = np.flatnonzero((part < 0) | (part >= facts["vocab_size"]))
        if strange.size:
            raise TokenRangeError(
                f"{path} holds token id {part[strange[0]]} at token position {at + strange[0]} but"
                f" tokenizer {facts['tokenizer']} has {facts['vocab_size']:,} ids; give the"
                " --tokenizer that made it"
            )
        starts.append(at + np.flatnonzero(part == facts["bos_id"]))
    borders = np.unique(np.concatenate(starts))
    return np.diff(borders[(borders == 0) | (borders < array.size - 1)], append=array.size)
