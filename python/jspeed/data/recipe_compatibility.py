"""Check that a folder's tokens are those that a recipe expects, before anything is compiled."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jspeed._dataloader import Shards
from jspeed.data.errors import TokenRangeError
from jspeed.data.find_shards import map_tokens
from jspeed.errors import BadInput

HEAD = 1 << 20  # tokens looked at; the loader checks each when it reads it


def check_fits(
    folder: Path,
    manifest: dict[str, Any] | None,
    splits: Sequence[Shards],
    recipe: str,
    vocab_size: int,
    bos_id: int,
    starts_at_documents: bool,
    tokenizer: str | None,
) -> None:
    """Raise BadInput where the ids of ``splits``, or what the manifest of ``folder`` says, do not fit a recipe.

    Args:
        folder: Where the shards lie, for the sentence.
        manifest: What :func:`jspeed.data.manifest.read_manifest` returned.
        splits: Shards; the first million ids of each are looked at.
        recipe: Its name.
        vocab_size: Ids that it has room for.
        bos_id: The id that it takes for the start of a document.
        starts_at_documents: Whether its lanes do.
        tokenizer: The one that its data are made with; None: any.

    Raises:
        TokenRangeError: A shard holds an id that is not below the manifest's or the recipe's number of ids.
    """
    if manifest is not None:
        its, count, mark = manifest["tokenizer"], manifest["vocab_size"], manifest["bos_id"]
        what = f"the data folder {folder} holds tokens of {its}"
        if tokenizer is not None and its != tokenizer:
            raise BadInput(
                f"{what} but recipe {recipe} reads those of {tokenizer}; give another --data, prepare your text with "
                f"{tokenizer}, or copy the recipe and give its data another name"
            )
        if count > vocab_size:
            raise BadInput(
                f"{what} with {count:,} ids but recipe {recipe} has room for {vocab_size:,}; give another --data, or a "
                f"recipe with room for them (--set VOCAB={count}, where it has that field)"
            )
        if starts_at_documents and mark is None:
            raise BadInput(
                f"{what} without a mark between documents but the lanes of recipe {recipe} start at documents; prepare "
                "your text with --end-of-text before"
            )
        if starts_at_documents and mark != bos_id:
            raise BadInput(
                f"{what} in which {mark} marks a document but recipe {recipe} takes {bos_id} for it; give another "
                f"--data, or the recipe that id (--set BOS={mark}, where it has that field)"
            )
    known, whose = (vocab_size, f"recipe {recipe} has room for")
    if manifest is not None and manifest["vocab_size"] < known:
        known, whose = (manifest["vocab_size"], "its manifest.json says")
    for shards in splits:
        path = shards.paths[0]
        tokens = map_tokens(path, shards.dtype)[:HEAD]
        if (largest := int(tokens.max())) >= known:
            raise TokenRangeError(
                f"shard {path} holds token id {largest} at token position {int(tokens.argmax())} but {whose} {known:,} "
                "ids; use the recipe and the manifest the shard was made for, or make it again with `jspeed "
                "prepare`"
            )
