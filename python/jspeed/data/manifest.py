"""``manifest.json`` of a folder of shards: how its tokens were made, and each file's size and hash. The only reader."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jspeed.data.find_shards import HEADER_BYTES
from jspeed.errors import BadInput
from jspeed.files import read_regular

FORMAT_VERSION = 1
SPLITS = ("train", "val")
SUMMED = ("bytes", "tokens", "documents")  # what the manifest adds up for each split
MAKE = "make the folder again with `jspeed prepare`, or remove manifest.json: shards need none"

Rule = tuple[Callable[[Any], bool], str]
"""Whether a value is right, and what was expected where it is not."""


def _whole(least: int) -> Rule:
    return lambda value: type(value) is int and least <= value < 2**63, f"a whole number of {least} or more"


def _optional(rule: Rule) -> Rule:
    return lambda value: value is None or rule[0](value), f"{rule[1]}, or null"


def _text(pattern: str, expected: str) -> Rule:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None, expected


def characters(value: Any) -> bool:
    """Whether ``value`` is a list of different characters, as the symbols of a tokenizer are."""
    if not isinstance(value, list) or not all(isinstance(each, str) and len(each) == 1 for each in value):
        return False
    return 0 < len(value) == len(set(value))


OBJECT: Rule = (lambda value: isinstance(value, dict), "an object")
LIST: Rule = (lambda value: isinstance(value, list) and len(value) > 0, "a list of one or more")
FIELDS: dict[str, Rule] = {
    "format_version": (lambda value: type(value) is int and value == FORMAT_VERSION, str(FORMAT_VERSION)),
    "tokenizer": _text(r".+", "a name"),
    "vocab_size": _whole(1),
    "bos_id": _optional(_whole(0)),
    "source": OBJECT,
    "files": LIST,
}
MORE_FIELDS: dict[str, Rule] = {  # that not every manifest has
    "pad_id": _optional(_whole(0)),
    "symbols": (characters, "a list of different characters"),
    "mark": _text("before|after|both|none", "before, after, both or none"),
    "truncated": _whole(0),
}
FILE_FIELDS: dict[str, Rule] = {
    "name": _text(r"[^/\0]+\.bin", "the name of a .bin file in the same folder"),
    "split": _text("|".join(SPLITS), " or ".join(SPLITS)),
    "bytes": _whole(HEADER_BYTES + 2),
    "sha256": _text("[0-9a-f]{64}", "64 hexadecimal digits"),
    "tokens": _whole(1),
    "documents": _whole(0),
}


def manifest_of(files: list[dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest: ``facts`` (tokenizer, bos_id, source, ...), the sums of each split, and ``files``."""
    return {"format_version": FORMAT_VERSION} | facts | {"splits": sums(files), "files": files}


def sums(files: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return how many files, bytes, tokens and documents each split has."""
    return {
        split: {"files": len(its)} | {what: sum(file[what] for file in its) for what in SUMMED}
        for split in SPLITS
        if (its := [file for file in files if file["split"] == split])
    }


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return ``manifest.json`` of ``folder``, or None if it has none. The files it lists are not looked at.

    Raises BadInput for one that is not a manifest of this format: every type and range is checked here.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(read_regular(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); {MAKE}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} should be the manifest of a data folder but is not JSON ({error}); {MAKE}") from None
    if not OBJECT[0](manifest):
        raise _wrong(path, "it", OBJECT[1], manifest)
    _check_fields(path, "", manifest, FIELDS)
    _check_fields(path, "", manifest, {name: rule for name, rule in MORE_FIELDS.items() if name in manifest})
    files, vocab_size = manifest["files"], manifest["vocab_size"]
    for number, file in enumerate(files):
        where = f"files[{number}]"
        if not OBJECT[0](file):
            raise _wrong(path, where, OBJECT[1], file)
        _check_fields(path, f"{where}.", file, FILE_FIELDS)
    for name in ("bos_id", "pad_id"):
        if (manifest.get(name) or 0) >= vocab_size:
            raise _wrong(path, name, f"below vocab_size, {vocab_size}", manifest[name])
    if (count := len(manifest.get("symbols", ()))) > vocab_size:
        raise _wrong(path, "the length of symbols", f"at most vocab_size, {vocab_size}", count)
    if len({file["name"] for file in files}) < len(files):
        raise _wrong(path, "files", "files of different names", [file["name"] for file in files])
    if "splits" in manifest and manifest["splits"] != (right := sums(files)):
        raise _wrong(path, "splits", f"the sums of files, {json.dumps(right)},", manifest.get("splits"))
    return dict(manifest)


def complete_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of ``folder`` if it is one and every shard it lists is there with its size, else None."""
    try:
        manifest = read_manifest(folder)
        if manifest and all((folder / file["name"]).stat().st_size == file["bytes"] for file in manifest["files"]):
            return manifest
    except (OSError, BadInput):
        pass
    return None


def holds(folder: Path, facts: dict[str, Any]) -> bool:
    """Whether ``folder`` is whole and its manifest says all of ``facts``."""
    manifest = complete_manifest(folder)
    return manifest is not None and manifest | json.loads(json.dumps(facts)) == manifest


def _check_fields(path: Path, where: str, found: dict[str, Any], rules: dict[str, Rule]) -> None:
    for name, (right, expected) in rules.items():
        if name not in found:
            raise BadInput(f"{path} is no manifest: {where}{name} is missing, {expected} was expected; {MAKE}")
        if not right(found[name]):
            raise _wrong(path, where + name, expected, found[name])


def _wrong(path: Path, where: str, expected: str, found: Any) -> BadInput:
    shown = json.dumps(found)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return BadInput(f"{path} is no manifest: {where} should be {expected} but is {shown}; {MAKE}")
