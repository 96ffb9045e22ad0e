"""Check that a folder's tokens are those that a recipe expects, before anything is compiled."""

from collections.abc import Sequence
from pathlib import Path

from jspeed._dataloader import Shards
from jspeed.data.errors import TokenRangeError
from jspeed.data.find_shards import map_tokens
from jspeed.data.manifest import Manifest
from jspeed.errors import BadInput

CHECKED_TOKENS = 1 << 20  # at the start of a split; the loader checks each token when it reads it


def check_compatible(
    folder: Path,
    manifest: Manifest | None,
    splits: Sequence[Shards],
    recipe: str,
    vocab_size: int,
    bos_id: int,
    starts_at_documents: bool,
    tokenizer: str | None,
) -> None:
    """Raise BadInput where the ids of ``splits``, or what the manifest of ``folder`` says, do not
    fit a recipe.

    Args:
        folder: Data folder, for messages.
        manifest: What :func:`jspeed.data.manifest.read_manifest` returned.
        splits: Shards; the first million ids of each are looked at.
        recipe: Recipe name.
        vocab_size: The recipe's vocabulary size.
        bos_id: The recipe's id of the document separator.
        starts_at_documents: Whether lanes (rows of a batch) start at documents.
        tokenizer: Tokenizer the recipe expects, or None for any.

    Raises:
        TokenRangeError: A shard holds an id that is not below the manifest's or the recipe's number
            of ids.
    """
    if manifest is not None:
        where = f"the data folder {folder} holds tokens of {manifest['tokenizer']}"
        asked = vocab_size, bos_id if starts_at_documents else None, tokenizer
        _check_manifest(where, manifest, recipe, *asked)
    limit, limit_source = (vocab_size, f"recipe {recipe} has room for")
    if manifest is not None and manifest["vocab_size"] <= limit:
        limit, limit_source = (manifest["vocab_size"], "its manifest.json says")
    for shards in splits:
        path = shards.paths[0]
        tokens = map_tokens(path, shards.dtype)[:CHECKED_TOKENS]
        if (largest := int(tokens.max())) >= limit:
            raise TokenRangeError(
                f"shard {path} holds token id {largest} at token position {int(tokens.argmax())}"
                f" but {limit_source} {limit:,} ids; use the recipe and the manifest the shard was"
                " made for, or make it again with `jspeed prepare`"
            )


def _check_manifest(
    what: str,
    manifest: Manifest,
    recipe: str,
    vocab_size: int,
    bos_id: int | None,
    tokenizer: str | None,
) -> None:
    """Raise BadInput where a manifest does not fit; ``bos_id`` is None where lanes need none."""
    its, count, separator = manifest["tokenizer"], manifest["vocab_size"], manifest["bos_id"]
    if tokenizer is not None and its != tokenizer:
        raise BadInput(
            f"{what} but recipe {recipe} expects {tokenizer} tokens; give another --data,"
            f" prepare your text with {tokenizer}, or copy the recipe and give its data another"
            " name"
        )
    if count > vocab_size:
        raise BadInput(
            f"{what} with {count:,} ids but recipe {recipe} has room for {vocab_size:,}; give"
            " another --data, or a recipe with a field VOCAB, which is made to fit"
        )
    if bos_id is not None and separator is None:
        raise BadInput(
            f"{what} without a document separator but the lanes of recipe {recipe} start at"
            " documents; prepare your text with --end-of-text before"
        )
    if bos_id is not None and separator != bos_id:
        raise BadInput(
            f"{what} whose document separator is {separator}, but recipe {recipe} uses"
            f" {bos_id}; give another --data, or set it in the recipe (--set BOS={separator},"
            " where it has that field)"
        )
