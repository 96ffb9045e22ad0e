"""``manifest.json`` of a data folder: how its tokens were made, each file's size and hash, and
whether they are so."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict, cast

from jspeed._dataloader import HEADER_BYTES
from jspeed.base.cores import cores
from jspeed.base.files import open_regular, read_regular
from jspeed.data.errors import ShardFormatError
from jspeed.errors import BadInput
from jspeed.fields import AtLeastOne, Rule, Whole, at_least, check_json, parse_json, shown_json

FORMAT_VERSION = 1
READ_BYTES = 4 << 20  # at once, to verify
Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")
TOTALS: tuple[Literal["bytes", "tokens", "documents"], ...] = ("bytes", "tokens", "documents")
REMEDY = "make the folder again with `jspeed prepare`, or remove manifest.json: shards need none"


def characters(value: Any) -> bool:
    """Whether ``value`` is a list of different characters, as the symbols of a tokenizer are."""
    return 0 < len(value) == len(set(value)) and all(len(each) == 1 for each in value)


class TokenizerFacts(TypedDict):
    """What a tokenizer is made from again; ``bos_id`` separates documents, None: nothing does.

    ``end_ids`` end a text that a model writes, where it is not ``bos_id`` that does.
    """

    tokenizer: Annotated[str, Rule("a name", re.compile(".+").fullmatch)]
    vocab_size: AtLeastOne
    bos_id: Whole | None
    symbols: NotRequired[Annotated[list[str], Rule("a list of different characters", characters)]]
    end_ids: NotRequired[list[Whole]]


class Description(TokenizerFacts):
    """What a manifest says of a folder as a whole, besides its files."""

    source: dict[str, Any]
    # where the separator of documents stands
    mark: NotRequired[Literal["before", "after", "both", "none"]]
    pad_id: NotRequired[Whole | None]
    truncated: NotRequired[Whole]


class Totals(TypedDict):
    """What all shards of a split have together."""

    files: int
    bytes: int
    tokens: int
    documents: int


class Shard(TypedDict):
    """One file."""

    name: Annotated[
        str,
        Rule("the name of a .bin file in the same folder", re.compile(r"[^/\0]+\.bin").fullmatch),
    ]
    split: Split
    bytes: Annotated[int, at_least(HEADER_BYTES + 2)]
    sha256: Annotated[str, Rule("64 hexadecimal digits", re.compile("[0-9a-f]{64}").fullmatch)]
    tokens: AtLeastOne
    documents: Whole


class Manifest(Description):
    """``manifest.json`` of a folder of shards."""

    format_version: Annotated[int, Rule(str(FORMAT_VERSION), lambda value: value == FORMAT_VERSION)]
    files: list[Shard]
    # may lack in a file, but not in what read_manifest returns
    splits: NotRequired[dict[Split, Totals]]


def manifest_of(files: list[Shard], description: Description) -> Manifest:
    """Return a manifest: ``description``, the totals of each split, and ``files``."""
    made = (
        {"format_version": FORMAT_VERSION}
        | description
        | {"splits": split_totals(files), "files": files}
    )
    return cast(Manifest, made)


def split_totals(files: list[Shard]) -> dict[Split, Totals]:
    """Return how many files, bytes, tokens and documents each split has."""
    return {
        split: cast(
            Totals, {"files": len(its)} | {what: sum(file[what] for file in its) for what in TOTALS}
        )
        for split in SPLITS
        if (its := [file for file in files if file["split"] == split])
    }


def read_manifest(folder: Path) -> Manifest | None:
    """Return ``manifest.json`` of ``folder``, or None if it has none. The files it lists are not
    looked at.

    Raises BadInput for one that is not a manifest of this format: every type and range is checked
    here.
    """
    path = folder / "manifest.json"
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); {REMEDY}") from None
    manifest = parse_json(content, path, _check, REMEDY)
    return cast(Manifest, manifest | {"splits": split_totals(manifest["files"])})


def _check(manifest: Any) -> None:
    check_json(manifest, Manifest)
    for field, expected, value in _contradictions(manifest):
        raise BadInput(f"field '{field}': expected {expected}, found {shown_json(value)}")


def _contradictions(manifest: Manifest) -> Iterator[tuple[str, str, Any]]:
    """Yield (field, what was expected, what was found) where fields of right types do not fit each
    other."""
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


def read_folder(folder: Path, splits: Sequence[Split] = SPLITS) -> Manifest | None:
    """Return :func:`read_manifest` of ``folder``, whose shards of ``splits`` are those that it
    lists, with their names and sizes. Without one there is nothing to compare.

    Raises BadInput as it does, and :class:`ShardFormatError` for a shard that is missing, has
    another size or is not listed.
    """
    manifest = read_manifest(folder)
    if manifest:
        compare(folder, manifest, splits)
    return manifest


def compare(folder: Path, manifest: Manifest, splits: Sequence[Split] = SPLITS) -> None:
    """Raise :class:`ShardFormatError` where ``folder`` holds other shards of ``splits`` than
    ``manifest`` lists, by names and sizes."""
    listed = {file["name"]: file for file in manifest["files"]}
    faults = [_fault(folder, file) for file in listed.values() if file["split"] in splits]
    faults += [
        f"shard {path} is not listed in manifest.json, but would be read; remove it"
        for path in sorted(folder.glob("*.bin"))
        if path.name not in listed and split_of(path) in splits
    ]
    _raise_first([fault for fault in faults if fault])


def _fault(folder: Path, file: Shard) -> str | None:
    path = folder / file["name"]
    if split_of(path) != file["split"]:
        return (
            f"shard {path} is listed in manifest.json as {file['split']}, which its name does not"
            " say; rename it"
        )
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"shard {path} should be there but cannot be read ({error.strerror}); copy it again"
    if size != file["bytes"]:
        return f"shard {path} should have {file['bytes']} bytes but has {size}; copy it again"
    return None


def _raise_first(faults: Sequence[str]) -> None:
    if faults:
        wrong, _, advice = faults[0].rpartition("; ")
        more = f" (and {len(faults) - 1} more shards are wrong)" if len(faults) > 1 else ""
        raise ShardFormatError(f"{wrong}{more}; {advice}, or {REMEDY}")


def split_of(path: Path) -> Split | None:
    """Return the split that the name of a file says: the last ``train`` or ``val`` between
    underscores; or None.

    So do names of jspeed and FineWeb (``NAME_train_000001.bin``), of llm.c (``NAME_train.bin``),
    and of nanoGPT (``train.bin``).
    """
    said: list[Split] = re.findall(r"(?:^|_)(train|val)(?=_|$)", path.stem)
    return said[-1] if said else None


def complete_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of ``folder`` if it is valid and every shard it lists is there with its
    size, else None."""
    try:
        manifest = read_manifest(folder)
        if manifest and all(
            (folder / file["name"]).stat().st_size == file["bytes"] for file in manifest["files"]
        ):
            return manifest
    except (OSError, BadInput):
        pass
    return None


def matches(folder: Path, description: Description) -> bool:
    """Whether ``folder`` is complete and its manifest has all fields of ``description``."""
    manifest = complete_manifest(folder)
    return manifest is not None and {**manifest, **json.loads(json.dumps(description))} == manifest


def verify(folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
    """Compare the SHA-256 of every shard with the manifest's, several at a time, and return the
    bytes read.

    ``progress`` is called from any thread with the bytes just read and the bytes in all.

    Raises:
        BadInput: There is no manifest to compare with.
        ShardFormatError: Shards are missing, differ or are not in the manifest; the text names the
            first of them.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise BadInput(
            f"{folder} has no manifest.json with the hashes to verify against, one was expected;"
            " copy it too, or make the folder again with `jspeed prepare`"
        )
    files = manifest["files"]
    total = sum(file["bytes"] for file in files)
    compare(folder, manifest)

    def fault(file: Shard) -> str | None:
        path = folder / file["name"]
        sha = hashlib.sha256()
        try:
            with open_regular(path) as opened:
                while chunk := opened.read(READ_BYTES):
                    sha.update(chunk)
                    progress(len(chunk), total)
        except OSError as error:
            return (
                f"shard {path} should be there but cannot be read ({error.strerror}); copy it again"
            )
        if sha.hexdigest() != file["sha256"]:
            return (
                f"shard {path} should have SHA-256 {file['sha256']} but has {sha.hexdigest()}; copy"
                " it again"
            )
        return None

    with ThreadPoolExecutor(cores()) as pool:
        _raise_first([wrong for wrong in pool.map(fault, files) if wrong])
    return total
