"""Remarks on a run: its data or size are not its track's, or its recipe's name belongs to another
recipe."""

from contextlib import suppress
from pathlib import Path

from jspeed.base.files import sha256_of
from jspeed.board.records.same_data import DataSet
from jspeed.board.records.store import source_name
from jspeed.board.records.track import NAME, Track, read_track, track_of
from jspeed.errors import BadInput
from jspeed.recipes import packaged
from jspeed.record.schema import Unsealed, shards_of

RECORDS = Path(__file__).parents[4] / "records"  # of a checkout; an installed package has none


def remarks(run: Unsealed, records: Path = RECORDS) -> list[str]:
    """Return notes on ``run``, the content of a run.json, by comparison with the files in the
    ``records`` folder.

    Only what its track says can be compared (``data.val_sha256``, ``data.train_sha256``, and the
    rules on models of track.toml).
    """
    tracks = family(run["track"], records)
    track = track_of(run, tracks)
    data = other_data(run, tracks[track]) if track in tracks else None
    broken = [tracks[track].too_large(run), tracks[track].retrieves(run)] if track in tracks else []
    rules = [f"{phrase}: the run does not count on track {track}" for phrase in broken if phrase]
    clash = name_clash(run["recipe"], track, run["recipe_sha256"], records)
    return [note for note in (data, *rules, clash) if note]


def family(track: str, records: Path) -> dict[str, Track]:
    """Return ``track`` and its siblings by name; one that cannot be read is left to ``leaderboard
    verify``."""
    tracks = {}
    for path in Path(records, track).parent.glob(f"*/{NAME}"):
        with suppress(BadInput):
            name = path.parent.relative_to(records).as_posix()
            tracks[name] = read_track(path, name)
    return tracks


def other_data(run: Unsealed, track: Track) -> str | None:
    """Return how the data of ``run`` differ from those that ``track`` pins; None where they do not,
    or none are.

    Another Python's standard library is as good to train on, and cannot be ranked with the track's.
    """
    if (shards := shards_of(run)) is None:
        return None
    train = track.rules.get("data.train_sha256")
    pinned = DataSet(
        track.rules.get("data.val_sha256") or run["data"]["val_sha256"], (train,) if train else ()
    )
    difference = pinned.difference(DataSet(run["data"]["val_sha256"], shards))
    python, ranked = run["data"].get("python"), track.rules.get("data.python")
    tokens, wanted = run["data"]["val_tokens"], track.rules.get("data.val_tokens")
    if difference and wanted and tokens != wanted:
        return (
            f"validation is on {tokens:,} tokens and the track's on {wanted:,}: the run does not"
            f" count on track {track.name}"
        )
    if difference and python and ranked:
        begins = f"reached {run['target_loss']:g}" if run["reached"] else "a run"
        return (
            f"{begins} on your {python}'s library; times are ranked on that of {ranked}, whose text"
            " differs"
        )
    return difference and (
        f"{difference} ({track.rules['data.name']}): its loss is not comparable with the target,"
        f" and the run does not count on track {track.name}"
    )


def name_clash(name: str, track: str, sha: str, records: Path = RECORDS) -> str | None:
    """Return a note if all recipes known as ``name`` have another source than that of SHA-256
    ``sha``.

    Known are those on the board's ``track`` and in the package.
    """
    known = {path.name for path in Path(records, track, name).glob("recipe-*.py")}
    if packaged(name).is_file():
        known.add(source_name(sha256_of(packaged(name))))
    if not known or source_name(sha) in known:
        return None
    return (
        f"another recipe with a different source is named '{name}' too, and the board shows both"
        " under that name; rename yours: RECIPE = Recipe(name=...)"
    )
