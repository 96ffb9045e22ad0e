"""Verify a data folder against its manifest: presence, size and SHA-256 of every shard, and no other shards."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jspeed.cores import cores
from jspeed.data.errors import ShardFormatError
from jspeed.data.manifest import REMEDY, Shard, read_manifest
from jspeed.errors import BadInput
from jspeed.files import open_regular

CHUNK = 4 << 20


def verify(folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
    """Compare the SHA-256 of every shard with the manifest's, several at a time, and return the bytes read.

    ``progress`` is called from any thread with the bytes just read and the bytes in all.

    Raises:
        BadInput: There is no manifest to compare with.
        ShardFormatError: Shards are missing, differ or are not in the manifest; the text names the first of them.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise BadInput(f"{folder} has no manifest.json with the hashes to verify against, one was expected; {REMEDY}")
    files = manifest["files"]
    total = sum(file["bytes"] for file in files)
    if others := {path.name for path in folder.glob("*.bin")} - {file["name"] for file in files}:
        raise ShardFormatError(
            f"shard {folder / min(others)} is not listed in manifest.json, but training would read it; remove it, or "
            f"{REMEDY}"
        )

    def fault(file: Shard) -> str | None:
        path = folder / file["name"]
        sha = hashlib.sha256()
        try:
            with open_regular(path) as opened:
                size = os.fstat(opened.fileno()).st_size
                if size != file["bytes"]:
                    return f"shard {path} should have {file['bytes']} bytes but has {size}"
                while chunk := opened.read(CHUNK):
                    sha.update(chunk)
                    progress(len(chunk), total)
        except OSError as error:
            return f"shard {path} should be there but cannot be read ({error.strerror})"
        if sha.hexdigest() != file["sha256"]:
            return f"shard {path} should have SHA-256 {file['sha256']} but has {sha.hexdigest()}"
        return None

    with ThreadPoolExecutor(cores()) as pool:
        faults = [found for found in pool.map(fault, files) if found]
    if faults:
        more = f" (and {len(faults) - 1} more shards are wrong)" if len(faults) > 1 else ""
        raise ShardFormatError(f"{faults[0]}{more}; copy it again or {REMEDY}")
    return total
