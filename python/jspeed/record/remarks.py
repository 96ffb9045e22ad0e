"""Notes on a run whose data are not its track's, or whose recipe has the name of another."""

import hashlib
from pathlib import Path

from jspeed.errors import BadInput
from jspeed.record.same_data import DataSet, shards_of
from jspeed.record.schema import Unsealed
from jspeed.record.track import NAME, read_track

RECORDS = Path(__file__).parents[3] / "records"  # of a checkout; an installed package has none
RECIPES = Path(__file__).parents[1] / "recipes"


def remarks(run: Unsealed, records: Path = RECORDS) -> list[str]:
    """Return sentences on ``run``, the content of a run.json, as the files in the ``records`` folder have it.

    Only what its track pins can be compared (``data.val_sha256``, ``data.train_sha256`` of track.toml).
    """
    name, track = str(run.get("recipe", "")), str(run.get("track", ""))
    sha = run.get("recipe_sha256")
    return [said for said in (other_data(run, records), sha and taken_name(name, track, sha, records)) if said]


def other_data(run: Unsealed, records: Path) -> str | None:
    """Return how the data of ``run`` differ from those that its track pins; None where they do not, or none are."""
    shards = shards_of(run)
    path = records / str(run.get("track", "")) / NAME
    if shards is None or not path.is_file():
        return None
    try:
        track = read_track(path, run["track"])
    except BadInput:  # that is for leaderboard.py verify to say
        return None
    train = track.rules.get("data.train_sha256")
    pinned = DataSet(track.rules.get("data.val_sha256") or run["data"]["val_sha256"], (train,) if train else ())
    difference = pinned.difference(DataSet(run["data"]["val_sha256"], shards))
    return difference and (
        f"{difference} ({track.rules['data.name']}): its loss and target do not compare, and on the board of "
        f"{run['track']} this run does not count"
    )


def taken_name(name: str, track: str, sha: str, records: Path = RECORDS) -> str | None:
    """Return that recipes called ``name`` of another source than that of SHA-256 ``sha`` are known, on the board's
    ``track`` or in the package; None where there are none, or this is one of them."""
    folder = records / track / name
    known = {path.stem.removeprefix("recipe-") for path in folder.glob("recipe-*.py")}
    own = RECIPES / f"{name.replace('-', '_')}.py"
    if own.is_file():
        known.add(hashlib.sha256(own.read_bytes()).hexdigest()[:8])
    if not known or sha[:8] in known:
        return None
    return (
        f"the recipe is called '{name}', as one of another source is; the board shows both under that name, so give a "
        "recipe of your own another: RECIPE = Recipe(name=...)"
    )
