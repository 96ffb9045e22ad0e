"""The content of leaderboard.json: tracks with their entries, as typed plain data.

Losses are nats per token, times are seconds. An entry is one recipe by hash, on the same data and
one kind of devices.
"""

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any, Literal, TypedDict

from jspeed.board.records.track import Rules
from jspeed.board.records.weights import Weights
from jspeed.board.stats import Test
from jspeed.record.schema import Devices, Git, Status, Versions


class Spread(TypedDict):
    """How some numbers are distributed."""

    n: int
    mean: float
    sd: float | None  # null for one
    least: float
    most: float


class TestResult(TypedDict):
    """A statistic and its one-sided p."""

    statistic: float
    p: float


class Tests(TypedDict):
    """Tests that the mean loss is below the target; null where there are too few runs, or no
    sigma."""

    t: TestResult | None
    z: TestResult | None


class RunLine(TypedDict):
    """One run of an entry."""

    seed: int
    status: Status
    val_loss: float | None
    holdout: float | None  # the loss on the second validation range
    timed_seconds: float
    wall_seconds: float
    steps: int
    started: str
    file: str  # of the run.json, in the records folder
    commit: str | None
    plan: str | None  # start of the hash of its plan.json
    weights: Weights | None  # where the parameters that it ended with are kept
    machine: str | None
    carried: bool  # it says what its programs carried: its trainer computed the score
    audited: bool  # its parameters were scored again


Level = Literal["reported", "audited", "reproduced"]


class Others(TypedDict):
    """Machines other than an entry's own on which its recipe ran again later."""

    agree: int  # whose losses, and seconds where they are ranked, are the entry's
    differ: int


class EntryData(TypedDict):
    """Which data the runs of an entry used."""

    val_sha256: str | None
    train_sha256: str | None  # of the first training shard
    number: int  # equal for entries of a track on the same data
    of_track: bool


class Better(TypedDict):
    """The comparison with the parent; ratios are time over the parent's time, with a 95 %
    interval."""

    parent: str
    parent_hash: str
    parent_sha256: str
    how: Literal["in turn", "apart"]
    ratio: float
    low: float | None
    high: float | None
    n: int  # rounds, or runs of the smaller side
    steps_saved: int
    price_per_step: float | None  # loss that one more step of the parent is worth
    price_from: str | None
    pairwise: TestResult | None  # that the loss is better at as many steps
    seconds_saved: float
    verdict: Literal["yes", "no", "not shown"]


class Anchored(TypedDict):
    """Seconds on the track's hardware: the parent's x the ratio of a race elsewhere."""

    seconds: float
    low: float | None
    high: float | None


class Facts(TypedDict):
    """Runs of one recipe that count together, as their files describe them."""

    recipe: str
    recipe_hash: str
    overrides: dict[str, Any]
    parent: str | None
    recipe_sha256: str
    card: dict[str, str]  # title and paragraphs of the recipe's docstring
    devices: Devices
    mesh: dict[str, int]
    layout: str
    date: str  # of the last run's end
    git: Git
    versions: Versions
    steps: int
    tokens: int
    parameters: int
    active_parameters: int | None  # that a token meets; null for runs from before it was written
    flops_per_token: float
    target_loss: float
    seconds: Spread | None  # of the runs that converged
    compile_seconds: float
    wall_seconds: float
    dollars: float | None  # of wall_seconds on these devices; null where they have no price
    # (step, timed seconds, validation loss) of the first that converged
    curve: list[tuple[int, float, float | None]]
    curve_seed: int
    runs: list[RunLine]
    again: list[RunLine]  # of plans that landed once it was valid: they move no number
    data: EntryData
    planned: int  # runs of this recipe in all plans of the entry
    missing: int
    extra: int
    loss: Spread | None  # of the first run of each seed
    holdout: Spread | None  # of their losses on the second validation range
    # reasons against validity; in an entry all, before it is judged those apart from the mean loss
    why_not: list[str]
    cut_short: bool  # stopped before the end of the schedule, above the target
    counted: bool  # its losses tell how far losses vary


class Judged(Facts):
    """An entry with what its track's rules say of it."""

    tests: Tests
    more_runs: int | None  # that would make the test significant
    valid: bool
    level: Level  # how far its numbers were checked
    others: Others


class Entry(Judged):
    """An entry of the board, compared with the others of its track."""

    # among valid entries; where seconds are ranked, among those on its kind and number of devices
    rank: int | None
    better: Better | None
    anchored: Anchored | None
    id: str


class BoardTrack(Rules):
    """A track with its rules, which a track without track.toml lacks but for title, rank, target
    and data's name."""

    track: str
    ruled: bool  # whether there is a track.toml
    sigma: float | None  # standard deviation of one run's loss over seeds
    val_sha256: str | None
    hardware: str
    entries: list[Entry]  # valid ones first, by rank


class HistoryRow(TypedDict):
    """A result by others; null or empty for what was not published."""

    record: int
    date: str
    seconds: float
    steps: int | None
    tokens_per_step: list[int]  # of each stage
    tokens: int | None
    step_ms: float | None
    loss: float | None
    n: int | None
    what: str


Histories = dict[str, list[HistoryRow]]  # by the name that a track gives


def spread(values: Sequence[float]) -> Spread | None:
    """Return number, mean, standard deviation (None for one), least and most of ``values``; None
    for none."""
    if not values:
        return None
    return {
        "n": len(values),
        "mean": fmean(values),
        "sd": stdev(values) if len(values) > 1 else None,
        "least": min(values),
        "most": max(values),
    }


def result(test: Test) -> TestResult:
    """Return ``test`` as leaderboard.json has it."""
    return {"statistic": test.statistic, "p": test.p}


def best(track: BoardTrack) -> Entry | None:
    """Return the best valid entry of ``track``."""
    return next((entry for entry in track["entries"] if entry["valid"]), None)


def mean_of(spread: Spread | None) -> float:
    """Return the mean of a spread that is there, such as seconds and loss of an entry with a run
    that converged."""
    assert spread
    return spread["mean"]


def kind_of(devices: Devices) -> tuple[str, int]:
    """Return kind and number of devices: seconds compare between runs that have both in common."""
    return devices["kind"], devices["count"]


def times(runs: Sequence[RunLine]) -> list[float]:
    """Return the timed seconds of all ``runs`` that converged."""
    return [run["timed_seconds"] for run in runs if run["val_loss"] is not None]


def losses(runs: Sequence[RunLine], of: Literal["val_loss", "holdout"] = "val_loss") -> list[float]:
    """Return the final losses of ``runs``, one for each seed; or those on the second validation
    range."""
    return [loss for run in by_seed(runs).values() if (loss := run[of]) is not None]


def by_seed(runs: Sequence[RunLine]) -> dict[int, RunLine]:
    """Return those of ``runs`` that converged by seed: the first of each, for the same seed is no
    second sample."""
    first: dict[int, RunLine] = {}
    for run in runs:
        if run["val_loss"] is not None:
            first.setdefault(run["seed"], run)
    return first
