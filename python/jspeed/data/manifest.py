"""Read, check and summarise ``manifest.json`` of a data folder: how its tokens were made, each file's size and hash."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict, cast

from jspeed._dataloader import HEADER_BYTES
from jspeed.errors import BadInput
from jspeed.fields import Rule, check_json, found
from jspeed.files import read_json

FORMAT_VERSION = 1
Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")
TOTALS: tuple[Literal["bytes", "tokens", "documents"], ...] = ("bytes", "tokens", "documents")
REMEDY = "make the folder again with `jspeed prepare`, or remove manifest.json: shards need none"


def characters(value: Any) -> bool:
    """Whether ``value`` is a list of different characters, as the symbols of a tokenizer are."""
    return 0 < len(value) == len(set(value)) and all(len(each) == 1 for each in value)


def _text(pattern: str, expected: str) -> Rule:
    return Rule(expected, lambda value: re.fullmatch(pattern, value))


def _from(least: int) -> Rule:
    return Rule(f"a whole number of {least} or more", lambda value: least <= value < 2**63)


CountOrZero = Annotated[int, _from(0)]
Count = Annotated[int, _from(1)]


class TokenizerFacts(TypedDict):
    """What a tokenizer is made from again; ``bos_id`` separates documents, None: nothing does.

    ``end_ids`` end a text that a model writes, where it is not ``bos_id`` that does.
    """

    tokenizer: Annotated[str, _text(".+", "a name")]
    vocab_size: Count
    bos_id: CountOrZero | None
    symbols: NotRequired[Annotated[list[str], Rule("a list of different characters", characters)]]
    end_ids: NotRequired[list[CountOrZero]]


class Description(TokenizerFacts):
    """What a manifest says of a folder as a whole, besides its files."""

    source: dict[str, Any]
    mark: NotRequired[Literal["before", "after", "both", "none"]]  # where the separator of documents stands
    pad_id: NotRequired[CountOrZero | None]
    truncated: NotRequired[CountOrZero]


class Totals(TypedDict):
    """What all shards of a split have together."""

    files: int
    bytes: int
    tokens: int
    documents: int


class Shard(TypedDict):
    """One file."""

    name: Annotated[str, _text(r"[^/\0]+\.bin", "the name of a .bin file in the same folder")]
    split: Split
    bytes: Annotated[int, _from(HEADER_BYTES + 2)]
    sha256: Annotated[str, _text("[0-9a-f]{64}", "64 hexadecimal digits")]
    tokens: Count
    documents: CountOrZero


class Manifest(Description):
    """``manifest.json`` of a folder of shards."""

    format_version: Annotated[int, Rule(str(FORMAT_VERSION), lambda value: value == FORMAT_VERSION)]
    files: list[Shard]
    splits: NotRequired[dict[Split, Totals]]  # may lack in a file, but not in what read_manifest returns


def manifest_of(files: list[Shard], description: Description) -> Manifest:
    """Return a manifest: ``description``, the totals of each split, and ``files``."""
    made = {"format_version": FORMAT_VERSION} | description | {"splits": split_totals(files), "files": files}
    return cast(Manifest, made)


def split_totals(files: list[Shard]) -> dict[Split, Totals]:
    """Return how many files, bytes, tokens and documents each split has."""
    return {
        split: cast(Totals, {"files": len(its)} | {what: sum(file[what] for file in its) for what in TOTALS})
        for split in SPLITS
        if (its := [file for file in files if file["split"] == split])
    }


def read_manifest(folder: Path) -> Manifest | None:
    """Return ``manifest.json`` of ``folder``, or None if it has none. The files it lists are not looked at.

    Raises BadInput for one that is not a manifest of this format: every type and range is checked here.
    """
    path = folder / "manifest.json"
    try:
        manifest = read_json(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); {REMEDY}") from None
    except ValueError as error:
        raise BadInput(f"{path} should be the manifest of a data folder but is not JSON ({error}); {REMEDY}") from None
    try:
        check_json(manifest, Manifest)
        for field, expected, value in _contradictions(manifest):
            raise BadInput(f"field '{field}': expected {expected}, found {found(value)}")
    except BadInput as error:
        raise BadInput(f"{path} is not a valid manifest: {error}; {REMEDY}") from None
    return cast(Manifest, manifest | {"splits": split_totals(manifest["files"])})


def _contradictions(manifest: Manifest) -> Iterator[tuple[str, str, Any]]:
    """Yield (field, what was expected, what was found) where fields of right types do not fit each other."""
    files, vocab_size = manifest["files"], manifest["vocab_size"]
    if not files:
        yield "files", "a list of one or more", files
    for name, value in (("bos_id", manifest["bos_id"]), ("pad_id", manifest.get("pad_id"))):
        if (value or 0) >= vocab_size:
            yield name, f"a number below vocab_size, {vocab_size}", value
    if (count := len(manifest.get("symbols", ()))) > vocab_size:
        yield "symbols", f"at most vocab_size, {vocab_size}, characters", count
    if len(names := {file["name"] for file in files}) < len(files):
        yield "files", "files of different names", sorted(names)
    if manifest.get("splits", totals := split_totals(files)) != totals:
        yield "splits", f"the totals of files, {json.dumps(totals)}", manifest["splits"]


def complete_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of ``folder`` if it is valid and every shard it lists is there with its size, else None."""
    try:
        manifest = read_manifest(folder)
        if manifest and all((folder / file["name"]).stat().st_size == file["bytes"] for file in manifest["files"]):
            return manifest
    except (OSError, BadInput):
        pass
    return None


def matches(folder: Path, description: Description) -> bool:
    """Whether ``folder`` is complete and its manifest has all fields of ``description``."""
    manifest = complete_manifest(folder)
    return manifest is not None and {**manifest, **json.loads(json.dumps(description))} == manifest
