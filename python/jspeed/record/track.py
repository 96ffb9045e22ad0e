"""Tracks: what is competed in, one track.toml in each track's folder of the records."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jspeed.errors import BadInput
from jspeed.files import read_regular
from jspeed.record.schema import KINDS, found

NAME = "track.toml"
RANKS = ("timed_seconds", "steps")
TESTS = ("t", "z")

# kind (as in schema.py) of every key; those in OPTIONAL may be absent.
KEYS = {
    "title": "text",
    "order": "count",
    "rank": "text",
    "target_loss": "number",
    "tokens_per_step": "positive",
    "history": "text",
    "data.name": "text",
    "data.val_tokens": "positive",
    "data.val_sha256": "text",
    "data.train_sha256": "text",
    "hardware.platform": "text",
    "hardware.kind": "text",
    "hardware.count": "positive",
    "timing.text": "text",
    "timing.resumed": "flag",
    "significance.text": "text",
    "significance.test": "text",
    "significance.p": "amount",
    "significance.sigma": "amount",
    "significance.price_per_step": "amount",
    "significance.failures": "count",
    "significance.source": "text",
}
OPTIONAL = {
    "order", "tokens_per_step", "history", "data.val_tokens", "data.val_sha256", "data.train_sha256",
    "hardware.platform", "hardware.kind", "hardware.count", "significance.sigma", "significance.price_per_step",
}  # fmt: skip


@dataclass(frozen=True)
class Track:
    """The rules of a track; ``values`` holds the keys of :data:`KEYS` that its file has.

    ``ruled`` is False for a track without a file: its runs are shown, and none of them is valid.
    """

    name: str
    values: Mapping[str, Any]
    ruled: bool = True

    def __getitem__(self, key: str) -> Any:
        return self.values.get(key)

    def fits(self, devices: Mapping[str, Any]) -> bool:
        """Whether ``devices`` of a run.json are what the hardware rule asks for."""
        platform, kind, count = (self[f"hardware.{key}"] for key in ("platform", "kind", "count"))
        return (
            (platform is None or devices["platform"] == platform)
            and (kind is None or kind in devices["kind"])
            and (count is None or devices["count"] == count)
        )

    def hardware(self) -> str:
        """Return the hardware rule in words."""
        platform, kind, count = (self[f"hardware.{key}"] for key in ("platform", "kind", "count"))
        what = kind or {"gpu": "GPU", "cpu": "CPU"}.get(platform, platform)
        return "any hardware" if what is None else f"{count} x {what}" if count else f"any {what}"


def read_track(path: Path, name: str) -> Track:
    """Return the track called ``name`` whose file is ``path``; BadInput names the first wrong key."""
    remedy = "mend the track's file"
    try:
        tree = tomllib.loads(read_regular(path).decode())
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); {remedy}") from None
    except ValueError as error:
        raise BadInput(f"{path} cannot be read as TOML ({error}); {remedy}") from None
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= {f"{key}.{inner}": item for inner, item in value.items()} if isinstance(value, dict) else {key: value}
    for key, kind in KEYS.items():
        expected, matches = KINDS[kind]
        if key in values and not matches(values[key]):
            raise BadInput(f"{path}: key '{key}': expected {expected}, found {found(values[key])}; {remedy}")
        if key not in values and key not in OPTIONAL:
            raise BadInput(f"{path}: key '{key}': expected {expected}, found no such key; {remedy}")
    for key, known in (("rank", RANKS), ("significance.test", TESTS)):
        if values[key] not in known:
            raise BadInput(f"{path}: key '{key}': expected one of {', '.join(known)}, found {values[key]!r}; {remedy}")
    for key in values:
        if key not in KEYS:
            raise BadInput(f"{path}: key '{key}': expected one of {', '.join(KEYS)}; {remedy}")
    return Track(name, values)


def track_without_rules(name: str, run: Mapping[str, Any]) -> Track:
    """Return the track of ``run`` where there is no file called ``name/track.toml``: its own target, and no rules."""
    values = {
        "title": name,
        "rank": "timed_seconds",
        "target_loss": run["target_loss"],
        "data.name": run["data"]["name"],
    }
    return Track(name, values, ruled=False)


def track_of(run: Mapping[str, Any], tracks: Mapping[str, Track]) -> str:
    """Return the name of the track that ``run`` enters: its recipe's, or a sibling that its hardware fits.

    A recipe for eight H100s that ran on one GPU enters fineweb/1xGPU. Siblings share the name before the last slash
    and what is ranked; where none fits either, the recipe's track shows the run as one of other hardware.
    """
    declared = run["track"]
    own = tracks.get(declared)
    if own is None or own.fits(run["devices"]):
        return declared
    family = declared.rpartition("/")[0]
    for name in sorted(tracks):
        track = tracks[name]
        same = (
            name.rpartition("/")[0] == family
            and track["rank"] == own["rank"]
            and track["data.name"] == own["data.name"]
        )
        if same and track.fits(run["devices"]):
            return name
    return declared
