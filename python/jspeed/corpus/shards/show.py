"""``python -m jspeed.data``: describe a folder of token shards, and verify it against its
manifest."""

import sys
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from jspeed.cli.flags import Command
from jspeed.corpus.tokenizers import tokenizer_of
from jspeed.data.find_shards import find_split, map_tokens
from jspeed.data.manifest import SPLITS, Manifest, read_folder, read_manifest, split_of, verify
from jspeed.data.tokens import GPT2, GPT2_BOS
from jspeed.errors import BadInput, escaped
from jspeed.fields import Wants

SHOWN = 24  # tokens of the first document


def first_words(path: Path, dtype: np.dtype, manifest: Manifest | None) -> str:
    """Return the start of the first whole document of a shard as text, or in brackets why it cannot
    be shown."""
    tokens = map_tokens(path, dtype)
    facts = manifest or GPT2  # as FineWeb's shards, which have no manifest
    bos_id, first = facts["bos_id"], 0
    if bos_id is not None:
        starts = np.flatnonzero(tokens[: 1 << 20] == bos_id)
        if not starts.size:
            return f"[no document starts in the first {min(len(tokens), 1 << 20):,} tokens]"
        first = starts[0] + 1
    ids = tokens[first : first + SHOWN].tolist()
    ids = ids[: ids.index(bos_id)] if bos_id in ids else ids
    if dtype != np.uint16 and manifest is None:
        return f"[tokens of an unknown tokenizer: {ids}]"
    try:
        return tokenizer_of(facts, path.parent).decode(ids).decode(errors="replace")
    except BadInput:
        return f"[the vocabulary of {facts['tokenizer']} is not available; tokens {ids}]"


def describe(folder: Path) -> None:
    """Print, for each split: shards, tokens, documents, fingerprint and the first words of a
    document."""
    manifest = read_manifest(folder) if folder.is_dir() else None
    said = {split_of(path) for path in folder.glob("*.bin")}
    present = [split for split in SPLITS if split in said]
    console = Console(highlight=False, markup=False)
    for split in present or SPLITS[:1]:  # without any, find_split says what is wrong
        shards = find_split(folder, split)
        if manifest:
            documents = sum(
                file["documents"] for file in manifest["files"] if file["split"] == split
            )
        else:
            starts = (
                np.count_nonzero(map_tokens(path, shards.dtype) == GPT2_BOS)
                for path in shards.paths
            )
            documents = int(sum(starts))
        words = first_words(shards.paths[0], shards.dtype, manifest)
        facts = {
            "shards": (
                f"{len(shards):,} ({shards.paths[0].name} .. {shards.paths[-1].name}),"
                f" {shards.dtype}"
            ),
            "tokens": f"{shards.num_tokens:,}",
            "documents": f"{documents:,}",
            "fingerprint": shards.fingerprint,
            "begins": repr(words) if not words.startswith("[") else words,
        }
        console.print(split)
        for name, value in facts.items():
            console.print(f"  {name:<12}{escaped(value)}", soft_wrap=True)
    named = (
        manifest["tokenizer"]
        if manifest
        else f"not known without manifest.json; documents counted by id {GPT2_BOS}"
    )
    console.print(f"tokenizer: {escaped(named)}", soft_wrap=True)


def show(folder: Annotated[Path, Wants("DIR", positional=True)], verify_: bool = False) -> None:
    """Describe a folder of token shards.

    Exit code: 0, or 2 with an error message when something is wrong.

    Args:
        folder: Folder of NAME_train_NUMBER.bin and NAME_val_NUMBER.bin files, or NAME_train.bin and
            NAME_val.bin.
        verify_: Also compare every byte with the hashes of manifest.json.
    """
    describe(folder)
    read_folder(folder)
    if not verify_:
        return
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True
    ) as bar:
        task = bar.add_task("bytes", total=None)
        total = verify(folder, lambda done, total: bar.update(task, advance=done, total=total))
    print(f"verified: all {total:,} bytes are as the manifest says")


COMMAND = Command(show)
