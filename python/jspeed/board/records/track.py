"""Read track.toml, the rules of a track: target loss, data, model, hardware, timing and
significance."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

from jspeed.base.files import read_input
from jspeed.errors import BadInput
from jspeed.fields import AtLeastOne, NotNegative, Whole, check_json
from jspeed.record.schema import Devices, Tokens, Unsealed

NAME = "track.toml"


class Index(TypedDict):
    """What run.json says of retrieval: what a run was told of earlier steps."""

    lengths: list[AtLeastOne]  # of contexts, in tokens
    recent: AtLeastOne  # occurrences of a context that count, the latest
    top: AtLeastOne  # tokens that are told
    tokens: Tokens  # in the index at the end: those of all rows so far, with each row's last target


# Every key of a track's file; one in a table as "table.key".
Rules = TypedDict(
    "Rules",
    {
        "title": str,
        "order": NotRequired[Whole],
        "rank": Literal["timed_seconds", "steps"],
        "target_loss": float,
        "tokens_per_step": NotRequired[AtLeastOne],
        "history": NotRequired[str],
        "data.name": str,
        "data.val_tokens": NotRequired[AtLeastOne],
        "data.python": NotRequired[str],
        "data.val_sha256": NotRequired[str],
        "data.train_sha256": NotRequired[str],  # of the file of the first training shard
        "data.val_shard_sha256": NotRequired[str],  # of that of the validation shard
        "holdout.first": NotRequired[AtLeastOne],
        "holdout.sha256": NotRequired[str],
        "holdout.unread": NotRequired[bool],
        "holdout.most_above": NotRequired[NotNegative],
        "holdout.reason": NotRequired[str],
        "model.most_parameters": NotRequired[AtLeastOne],
        "model.retrieval": NotRequired[bool],
        "hardware.platform": NotRequired[str],
        "hardware.kind": NotRequired[str],
        "hardware.count": NotRequired[AtLeastOne],
        "timing.text": str,
        "timing.resumed": bool,
        "significance.text": str,
        "significance.test": Literal["t", "z"],
        "significance.p": NotNegative,
        "significance.sigma": NotRequired[NotNegative],
        "significance.price_per_step": NotRequired[NotNegative],
        "significance.failures": Whole,
        "significance.source": str,
        "references.text": NotRequired[str],  # results of others, with their sources
    },
)


@dataclass(frozen=True)
class Track:
    """A track's name and its rules.

    ``ruled`` is False for a track without a track.toml: its runs are listed and never valid.
    """

    name: str
    rules: Rules
    ruled: bool = True

    def _asked(self) -> tuple[str | None, str | None, int | None]:
        rules = self.rules
        return (
            rules.get("hardware.platform"),
            rules.get("hardware.kind"),
            rules.get("hardware.count"),
        )

    def admits(self, devices: Devices) -> bool:
        """Whether ``devices`` of a run.json are what the hardware rule asks for; a GH200 is no
        H200."""
        platform, kind, count = self._asked()
        return (
            (platform is None or devices["platform"] == platform)
            and (kind is None or re.search(rf"\b{re.escape(kind)}\b", devices["kind"]) is not None)
            and (count is None or devices["count"] == count)
        )

    def too_large(self, run: Unsealed) -> str | None:
        """Return how the parameters of ``run`` break the track's limit, as a phrase; None where
        they do not. Constants of its programs count as parameters."""
        most, total = self.rules.get("model.most_parameters"), run["parameters"]
        total += sum(run["carried"]["numbers"].values()) if "carried" in run else 0
        if most and "parameter_table" not in run:
            return "its parameters are not listed, and the track limits them"
        return (
            f"{total:,} parameters, more than the track's {most:,}"
            if most and total > most
            else None
        )

    def retrieves(self, run: Unsealed) -> str | None:
        """Return that ``run`` has retrieval where the track does not allow it, as a phrase; None
        where it may."""
        if "retrieval" not in run or self.rules.get("model.retrieval"):
            return None
        return "uses an index of trained tokens, which only a track with retrieval allows"

    def no_holdout(self, run: Unsealed) -> str | None:
        """Return that a ``run`` with a loss lacks the one on the track's second validation range;
        None where not."""
        first, sha256 = self.rules.get("holdout.first"), self.rules.get("holdout.sha256")
        if first is None or run["val_loss"] is None:
            return None
        holdout = run.get("holdout")
        if holdout and (holdout["first"], holdout["tokens"]) == (first, run["data"]["val_tokens"]):
            return (
                "another second validation range than the track's"
                if sha256 not in (None, holdout["sha256"])
                else None
            )
        return f"not evaluated on the track's second validation range, from token {first:,} on"

    def hardware(self) -> str:
        """Return the hardware rule in words."""
        platform, kind, count = self._asked()
        what = kind or (platform and {"gpu": "GPU", "cpu": "CPU"}.get(platform, platform))
        return f"{count} x {what or 'device'}" if count else f"any {what or 'hardware'}"


def read_track(path: Path, name: str) -> Track:
    """Return the track called ``name`` whose file is ``path``; BadInput names the first wrong
    key."""
    remedy = "correct the track's file"
    try:
        tree = tomllib.loads(read_input(path, remedy).decode())
    except ValueError as error:
        raise BadInput(f"{path} cannot be read as TOML ({error}); {remedy}") from None
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values |= (
            {f"{key}.{inner}": item for inner, item in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
    try:
        check_json(values, Rules)
    except BadInput as error:
        raise BadInput(f"{path}: {error}; {remedy}") from None
    for key in values:
        if key not in Rules.__annotations__:
            raise BadInput(
                f"{path}: field '{key}': expected one of {', '.join(Rules.__annotations__)};"
                f" {remedy}"
            )
    return Track(name, cast(Rules, values))


def track_without_rules(name: str, run: Unsealed) -> Track:
    """Return the track of ``run`` where there is no file called ``name/track.toml``: its own
    target, and no rules."""
    target, data = run["target_loss"], run["data"]["name"]
    rules = {"title": name, "rank": "timed_seconds", "target_loss": target, "data.name": data}
    return Track(name, cast(Rules, rules), ruled=False)


def track_of(run: Unsealed, tracks: Mapping[str, Track]) -> str:
    """Return the name of the track that ``run`` enters: its recipe's, or a sibling that its
    hardware fits.

    A recipe for eight H100s that ran on one enters fineweb/1xH100, and on one L40S fineweb/1xGPU.
    Siblings share the name before the last slash, what is ranked, a limit on parameters and whether
    there is retrieval; of those that fit, the first that names a kind of device is taken. Where
    none fits either, the recipe's track shows the run as one of other hardware.
    """
    declared = run["track"]
    own = tracks.get(declared)
    if own is None or own.admits(run["devices"]):
        return declared
    family = declared.rpartition("/")[0]
    for name in sorted(tracks, key=lambda name: ("hardware.kind" not in tracks[name].rules, name)):
        track = tracks[name]
        same = name.rpartition("/")[0] == family and all(
            track.rules.get(key) == own.rules.get(key)
            for key in ("rank", "data.name", "model.most_parameters", "model.retrieval")
        )
        if same and track.admits(run["devices"]):
            return name
    return declared
