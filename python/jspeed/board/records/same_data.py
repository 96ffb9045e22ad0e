"""Group runs by the data they trained and validated on, compared by the SHA-256 sums in their
run.json.

Validation data are the same when the evaluated token ids are (``data.val_sha256``). Training data
are the same when the shards read were the same files in the same order (``data.train_shards``). For
sequential reading one list of shards may be a prefix of the other: a longer run is still the same
data. Runs that shuffled, or read on after an epoch, can have read all of their shards, which must
be equal. ``data.fingerprint`` is a hash of names, sizes and headers only, so it is used only for
runs without sums: interrupted ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jspeed.board.records.landing import landed
from jspeed.board.records.store import Records, Row
from jspeed.board.records.track import Track
from jspeed.record.schema import EVERY_SHARD, shards_of


@dataclass
class DataSet:
    """What some runs trained and validated on; ``shards`` is their longest list of SHA-256 sums."""

    val_sha256: str | None
    shards: tuple[str, ...]

    def same_shards(self, shards: Sequence[str]) -> bool:
        """Whether one list of shards is a prefix of the other; equal, where one of them ends in
        EVERY_SHARD."""
        if EVERY_SHARD in (*self.shards[-1:], *shards[-1:]):
            return [sha for sha in self.shards if sha != EVERY_SHARD] == [
                sha for sha in shards if sha != EVERY_SHARD
            ]
        return all(mine == other for mine, other in zip(self.shards, shards, strict=False))

    def difference(self, other: "DataSet") -> str | None:
        """Return how ``other`` differs from this one, a track's data, as a phrase; None where it
        does not."""
        if None not in (self.val_sha256, other.val_sha256) and (
            other.val_sha256 != self.val_sha256
        ):
            return "validated on other tokens than the track's"
        return (
            None if self.same_shards(other.shards) else "trained on other shards than the track's"
        )


def data_sets(rows: Iterable[Row]) -> dict[Path, DataSet]:
    """Return the data set of every run by the path of its record; runs on the same data share one
    object.

    Preregistered runs of a clean commit come first, then the earliest: a short list of shards that
    is a prefix of two sets' lists joins the set that came first.
    """
    by_path: dict[Path, DataSet] = {}
    by_val: dict[str | None, list[DataSet]] = {}
    by_fingerprint: dict[tuple[str, str], DataSet] = {}
    order = lambda row: (
        shards_of(row.run) is None,
        not row.planned_and_clean,
        row.run["started"],
    )
    for row in sorted(rows, key=order):
        data, shards = row.run["data"], shards_of(row.run)
        fingerprint = data["fingerprint"], data["val_fingerprint"]
        val = data["val_sha256"] if shards is not None else None
        if shards is None:
            same = by_fingerprint.get(fingerprint)
        else:
            same = next((each for each in by_val.get(val, ()) if each.same_shards(shards)), None)
        if same is None:
            same = DataSet(val, shards or ())
            by_val.setdefault(val, []).append(same)
        same.shards = max(same.shards, shards or (), key=len)
        by_fingerprint.setdefault(fingerprint, same)
        by_path[row.path] = same
    return by_path


def data_of_track(
    track: Track, rows: Iterable[Row], sets: Mapping[Path, DataSet], records: Records
) -> DataSet:
    """Return the data of ``track``: what its file pins, and for the rest those of its first run.

    The first run is the first to land, or the earliest where git does not say. It is of a complete
    plan and a clean commit, on the pinned data, and on the track's hardware and number of
    validation tokens; where there is none, the earliest of all.
    Without any run everything is the track's.
    """
    val, train = track.rules.get("data.val_sha256"), track.rules.get("data.train_sha256")

    def rank(row: Row) -> tuple[bool, float, str]:
        plan = row.plan and row.planned_and_clean and records.plans.get(row.plan["sha256"])
        tokens = None, row.run["data"]["val_tokens"]
        ruled = track.admits(row.run["devices"]) and track.rules.get("data.val_tokens") in tokens
        first = landed(records.folder, row.path)
        return not (plan and records.complete(plan.plan) and ruled), first, row.run["started"]

    for row in sorted(rows, key=rank):
        shards = shards_of(row.run)
        if (
            shards is None
            or val not in (None, row.run["data"]["val_sha256"])
            or train not in (None, *shards[:1])
        ):
            continue
        return DataSet(row.run["data"]["val_sha256"], sets[row.path].shards)
    return DataSet(val, (train,) if train else ())
