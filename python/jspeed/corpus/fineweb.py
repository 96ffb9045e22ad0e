"""FineWeb as GPT-2 tokens, from the public data set of the speedrun: whole shards, each with the hub's hash."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from jspeed.corpus import download
from jspeed.corpus.tokenise import Progress
from jspeed.data.find_shards import map_tokens, open_shards
from jspeed.data.folder import lock_folder
from jspeed.data.manifest import complete_manifest, manifest_of
from jspeed.errors import BadInput, writable_folder
from jspeed.files import sha256_of, write_whole

# Version -> data set, training shards in it. Shards hold 100 M tokens, 50256 before each document; the last fewer.
VERSIONS = {"10B": ("kjj0/fineweb10B-gpt2", 103), "100B": ("kjj0/fineweb100B-gpt2", 1030)}
BOS = 50_256


def shard_names(version: str, shards: int | None) -> list[str]:
    """Return the validation shard and the first ``shards`` training shards (None: all).

    Raises BadInput for a number that the data set does not have.
    """
    most = VERSIONS[version][1]
    count = most if shards is None else shards
    if not 1 <= count <= most:
        raise BadInput(f"--shards {count}: FineWeb {version} has 1 to {most} training shards of 100 M tokens")
    return ["fineweb_val_000000.bin"] + [f"fineweb_train_{number:06d}.bin" for number in range(1, count + 1)]


def prepare_fineweb(
    out: Path, version: str = "10B", shards: int | None = None, progress: Progress | None = None
) -> Path:
    """Download shards into ``out``, those that are not there yet, and write a manifest of all; returns ``out``.

    They arrive in a hidden folder beside ``out``, are checked there, and are then renamed: whoever opens ``out`` sees
    whole shards only. A killed or cut download goes on where it was. Raises BadInput when there is no network and
    shards are missing, no room, or twice another size or hash than the hub's.
    """
    names = shard_names(version, shards)
    repository = VERSIONS[version][0]
    held = complete_manifest(out)
    if held and held["source"].get("repository") != repository:
        raise BadInput(f"output folder {out} holds something else than FineWeb {version}; choose another --out")
    if held and set(names) <= {file["name"] for file in held["files"]}:
        return out
    out = Path(os.path.realpath(out))
    writable_folder(out.parent, "the output folder's parent")
    commit, files = download.describe_hub(repository, names)
    arriving = out.parent / f".{out.name}.download"
    arriving.mkdir(exist_ok=True)
    lock = lock_folder(arriving)
    if lock is None:
        raise BadInput(f"another process is downloading to {out}; wait for it, or choose another --out")
    try:
        missing = [file for file in files if not download.is_right(out / file.name, file)]
        total = sum(file.size for file in missing)
        download.fetch_hub(repository, commit, missing, arriving, download.summed(progress, total))
        source = {"kind": "fineweb", "version": version, "repository": repository, "commit": commit}
        folders = {file.name: arriving if file in missing else out for file in files}
        others = [file for file in held["files"] if file["name"] not in names] if held else []
        records = [_record(folders[file.name], file) for file in files]
        text = json.dumps(manifest_of(records + others, _facts(source)), indent=1) + "\n"
        if not out.exists():
            shutil.rmtree(arriving / ".cache", ignore_errors=True)
            write_whole(arriving / "manifest.json", text)
            os.rename(arriving, out)
        else:
            for file in missing:
                os.replace(arriving / file.name, out / file.name)
            write_whole(out / "manifest.json", text)
            shutil.rmtree(arriving)
    except OSError as error:
        raise BadInput(f"output folder {out} cannot be written ({error.strerror or error}); choose another") from None
    finally:
        os.close(lock)
    return out


def _facts(source: dict[str, Any]) -> dict[str, Any]:
    return {"tokenizer": "gpt2", "vocab_size": BOS + 1, "bos_id": BOS, "mark": "before", "source": source}


def _record(folder: Path, file: download.Remote) -> dict[str, Any]:
    """Return what the manifest says of a shard that was checked; raises BadInput for one that is not a shard."""
    path = folder / file.name
    tokens = open_shards([path]).num_tokens
    documents = int(np.count_nonzero(map_tokens(path) == BOS))
    split = "val" if "_val_" in path.name else "train"
    record: dict[str, Any] = {"name": path.name, "split": split, "bytes": path.stat().st_size}
    return record | {"sha256": file.sha256 or sha256_of(path), "tokens": tokens, "documents": documents}
