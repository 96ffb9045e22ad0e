"""FineWeb as GPT-2 tokens, from the public data set of the speedrun: complete shards, checked by
the hub's hashes."""

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jspeed.base.files import sha256_of, write_whole
from jspeed.corpus import Progress, download, no_progress
from jspeed.corpus.shards.output_folder import locked, writing_to
from jspeed.data.find_shards import map_tokens, open_shards
from jspeed.data.manifest import Shard, complete_manifest, manifest_of, read_manifest
from jspeed.data.tokens import GPT2, GPT2_BOS
from jspeed.errors import BadInput


class Version(NamedTuple):
    """A data set of the hub, and its training shards of 100 M tokens (the last has fewer)."""

    repository: str
    training_shards: int


VERSIONS = {
    "10B": Version("kjj0/fineweb10B-gpt2", 103),
    "100B": Version("kjj0/fineweb100B-gpt2", 1030),
}


def shard_names(version: str, shards: int | None) -> list[str]:
    """Return the validation shard and the first ``shards`` training shards (None: all).

    Raises BadInput for a number that the data set does not have.
    """
    most = VERSIONS[version].training_shards
    count = most if shards is None else shards
    if not 1 <= count <= most:
        raise BadInput(
            f"--shards {count}: FineWeb {version} has {most} training shards of 100 M tokens; give"
            f" 1 to {most}"
        )
    return ["fineweb_val_000000.bin"] + [
        f"fineweb_train_{number:06d}.bin" for number in range(1, count + 1)
    ]


def prepare_fineweb(
    out: Path, version: str = "10B", shards: int | None = None, progress: Progress = no_progress
) -> Path:
    """Download the shards that ``out`` lacks, write a manifest of all, and return ``out``.

    They arrive in a hidden folder beside ``out``, are checked there, and are then renamed: whoever
    opens ``out`` sees complete shards only. Interrupted downloads resume. ``progress`` is told
    bytes. Raises BadInput when ``out`` holds other data, shards are missing without a network, or a
    file always has the wrong size or hash. Raises NoRoom on a full disk.
    """
    names, repository = shard_names(version, shards), VERSIONS[version].repository
    existing = _existing(out, version)
    listed = {shard["name"] for shard in existing}
    # training would read them
    names += sorted({path.name for path in out.glob("*.bin")} - listed - set(names))
    if set(names) <= listed and complete_manifest(out):
        return out
    commit, files = download.describe_hub(repository, names)
    with writing_to(out) as out:
        partial = out.parent / f".{out.name}.download"
        partial.mkdir(exist_ok=True)
        with locked(partial) as ours:
            if ours is False:
                raise BadInput(
                    f"another process is downloading to {out}; wait for it, or choose another --out"
                )
            missing = [file for file in files if not download.is_intact(out / file.name, file)]
            download.fetch_hub(repository, commit, missing, partial, progress)
            source = {
                "kind": "fineweb",
                "version": version,
                "repository": repository,
                "commit": commit,
            }
            records = [
                _shard_of((partial if file in missing else out) / file.name, file) for file in files
            ]
            others = [
                shard
                for shard in existing
                if shard["name"] not in names and (out / shard["name"]).is_file()
            ]
            manifest = manifest_of(records + others, {**GPT2, "mark": "before", "source": source})
            text = json.dumps(manifest, indent=1) + "\n"
            if not out.exists():
                shutil.rmtree(partial / ".cache", ignore_errors=True)
                write_whole(partial / "manifest.json", text)
                os.rename(partial, out)
            else:
                for file in missing:
                    os.replace(partial / file.name, out / file.name)
                write_whole(out / "manifest.json", text)
                shutil.rmtree(partial)
    return out


def _existing(out: Path, version: str) -> list[Shard]:
    """Return the shards that the manifest of ``out`` lists. Raises BadInput where ``out`` holds
    other data."""
    others = BadInput(
        f"output folder {out} holds other data than FineWeb {version}; choose another --out"
    )
    if out.exists() and not out.is_dir():
        raise BadInput(f"output {out} is a file; expected a folder")
    if not {path.name for path in out.glob("*.bin")} <= set(shard_names(version, None)):
        raise others
    if (manifest := read_manifest(out)) is None:
        return []
    if manifest["source"].get("repository") != VERSIONS[version].repository:
        raise others
    return manifest["files"]


def _shard_of(path: Path, file: download.Remote) -> Shard:
    """Return what the manifest says of a shard that was checked; raises BadInput for one that is
    not a shard."""
    return {
        "name": path.name,
        "split": "val" if "_val_" in path.name else "train",
        "bytes": path.stat().st_size,
        "sha256": file.sha256 or sha256_of(path),
        "tokens": open_shards([path]).num_tokens,
        "documents": int(np.count_nonzero(map_tokens(path) == GPT2_BOS)),
    }
