"""Compare two recipes: ratio of times with its interval, losses, and the differences between their
sources."""

import ast
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jspeed.base.files import read_text
from jspeed.board import formatting, stats
from jspeed.board.board import BoardTrack, Entry, losses, mean_of, times
from jspeed.board.parents import Rounds
from jspeed.errors import BadInput, nearest
from jspeed.recipes import FOLDER, packaged

STATES = ("changed", "new", "gone")


@dataclass(frozen=True)
class Side:
    """One of the two: its name, its track and entry on the board if it has runs, and its source."""

    name: str
    track: BoardTrack | None
    entry: Entry | None
    source: str


def find_side(text: str, tracks: Sequence[BoardTrack], sources: Mapping[str, str]) -> Side:
    """Return what ``text`` means: RECIPE, RECIPE@HASH or FILE.py; of several entries the newest
    valid, else the newest.

    ``sources`` are those of the records by SHA-256; a recipe without runs is taken from those that
    come with jspeed. Raises BadInput when nothing is called so.
    """
    name, _, digest = text.partition("@")
    is_path = text.endswith(".py")
    file = Path(text) if is_path else packaged(name)
    source = None
    if os.path.isfile(file):  # Path.is_file raises for a name that is too long
        source = read_text(file, "give a recipe file")
    elif is_path:
        raise BadInput(
            f"recipe file {file} does not exist; give a recipe file or the name of a recipe"
        )

    def matches(entry: Entry) -> bool:
        if is_path:
            return sources.get(entry["recipe_sha256"]) == source
        return entry["recipe"] == name and entry["recipe_hash"].startswith(digest)

    entries = [(track, entry) for track in tracks for entry in track["entries"] if matches(entry)]
    if entries:
        track, entry = max(
            entries,
            key=lambda each: (
                each[1]["recipe_sha256"] in sources,
                each[1]["valid"],
                each[1]["date"],
            ),
        )
        stored = sources.get(entry["recipe_sha256"], source)
        return Side(file.stem if is_path else text, track, entry, stored or "")
    if source is not None and (is_path or not digest):
        return Side(file.stem if is_path else text, None, None, source)
    known = sorted({entry["recipe"] for track in tracks for entry in track["entries"]})
    raise BadInput(
        f"no recipe '{text}' is on the board or in {FOLDER}{nearest(name, known)}; known:"
        f" {', '.join(known)}"
    )


def speed(a: Side, b: Side, raced: Rounds) -> list[str]:
    """Return lines that say whether A is faster than B, by how much, with what interval; and the
    same of its loss."""
    if a.entry is None or b.entry is None:
        without = [side.name for side in (a, b) if side.entry is None]
        return [f"Not comparable: {' and '.join(without)} has no runs among the records."]
    assert a.track and b.track
    if (
        a.track["track"] != b.track["track"]
        or a.entry["data"]["number"] != b.entry["data"]["number"]
    ):
        tracks = " and ".join(dict.fromkeys(side.track["track"] for side in (a, b) if side.track))
        return [f"Not comparable: they ran for different targets or on different data ({tracks})."]
    for side, entry in ((a, a.entry), (b, b.entry)):
        if entry["cut_short"]:
            return [
                f"Not comparable: the runs of {side.name} were stopped early and did not reach the"
                " target."
            ]
    if a.entry["seconds"] is None or b.entry["seconds"] is None:
        return ["Not comparable: not both have a run that converged."]
    rounds = raced.get((b.entry["recipe_hash"], a.entry["recipe_hash"]), [])
    same = a.entry["devices"] == b.entry["devices"]
    if not rounds and not same:
        return [
            "Not comparable: they ran on different devices,"
            f" {formatting.devices(a.entry['devices'])} and"
            f" {formatting.devices(b.entry['devices'])}, and never interleaved. Race them: jspeed"
            f" leaderboard race {b.name} {a.name}"
        ]
    ratio = (
        stats.paired_ratio(rounds)
        if rounds
        else stats.unpaired_ratio(times(b.entry["runs"]), times(a.entry["runs"]))
    )
    mean = [formatting.seconds(mean_of(side.entry["seconds"])) for side in (a, b) if side.entry]
    how = f"in {ratio.n} interleaved rounds" if rounds else "in separate runs"
    lines = [
        f"{verdict(a.name, b.name, ratio)} It takes {formatting.ratio(*ratio[:3])} of {b.name}'s"
        f" time, {how}."
    ]
    steps = f"{a.entry['steps']:,} and {b.entry['steps']:,}"
    lines.append(f"Mean times on the board: {mean[0]} and {mean[1]}; steps: {steps}.")
    return lines + loss(a, b)


def verdict(a: str, b: str, ratio: stats.Ratio) -> str:
    """Return one line that says whether A is faster."""
    percent = f"{abs(1 - ratio.ratio):.1%}"
    word = "faster" if ratio.ratio < 1 else "slower"
    if ratio.low is None or ratio.high is None:
        return f"{a} was {word} than {b} by {percent}, in one comparison, too few to tell."
    if ratio.low <= 1 <= ratio.high:
        return (
            f"{a} is not shown to be faster or slower than {b}: {percent} {word} so far, and the 95"
            " % interval holds 1."
        )
    return f"{a} is {word} than {b} by {percent}, and the 95 % interval is all on that side."


def loss(a: Side, b: Side) -> list[str]:
    """Return the comparison of final losses as lines."""
    assert a.entry and b.entry and a.track and a.entry["loss"] and b.entry["loss"]
    one, two = a.entry["loss"], b.entry["loss"]
    means = [f"{formatting.loss(each['mean'])} (n = {each['n']})" for each in (one, two)]
    if a.track["sigma"] is None:
        return [f"Mean losses: {means[0]} and {means[1]}."]
    difference = one["mean"] - two["mean"]
    test = stats.better_than(losses(a.entry["runs"]), losses(b.entry["runs"]), a.track["sigma"])
    p = min(test.p, 1 - test.p)
    return [
        f"Its mean loss is {means[0]} against {means[1]}: {abs(difference):.4f} "
        f"{'lower' if difference < 0 else 'higher'}, one-sided {formatting.chance(p)} with sigma = "
        f"{a.track['sigma']:.4f}, the standard deviation of a run's loss over seeds. "
        f"Target: {a.track['target_loss']:g}."
    ]


class Changes(NamedTuple):
    """What turns one source into another: ``phrases`` by state (changed, new, gone) and kind
    (fields, functions, other names), numbers of lines, and the unified diff as lines."""

    phrases: dict[str, dict[str, list[str]]]
    added: int
    removed: int
    diff: list[str]


def changes(a: str, b: str) -> Changes:
    """Return what turns source ``b`` into ``a``."""
    after, before = _parts(a), _parts(b)
    phrases: dict[str, dict[str, list[str]]] = {
        state: {kind: [] for kind in after} for state in STATES
    }
    for kind, have in after.items():
        had = before[kind]
        for name in [*have, *(name for name in had if name not in have)]:
            shown = f"{name} = {have.get(name, had.get(name))}" if kind == "fields" else name
            if name not in had:
                phrases["new"][kind].append(shown)
            elif name not in have:
                phrases["gone"][kind].append(shown)
            elif have[name] != had[name]:
                phrases["changed"][kind].append(
                    f"{name} from {had[name]} to {have[name]}" if kind == "fields" else name
                )
    diff = list(
        difflib.unified_diff(b.splitlines(), a.splitlines(), "before", "after", lineterm="", n=2)
    )
    # after the two lines of names
    count = {sign: sum(line.startswith(sign) for line in diff[2:]) for sign in "+-"}
    return Changes(phrases, count["+"], count["-"], diff)


def change_lines(changed: Changes) -> list[str]:
    """Return :func:`changes` as lines, without the diff."""
    lines = [f"{changed.added} lines added, {changed.removed} removed."]
    for state in STATES:
        for kind, names in changed.phrases[state].items():
            if names:
                lines.append(f"{state.capitalize()} {kind}: {', '.join(names)}.")
    return lines


def _parts(source: str) -> dict[str, dict[str, str]]:
    """Return literal upper-case assignments, functions, and other top-level names, each as
    canonical source."""
    parts: dict[str, dict[str, str]] = {"fields": {}, "functions": {}, "names": {}}
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return parts
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            parts["functions"][node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            value = ast.unparse(node.value)
            try:
                ast.literal_eval(node.value)
                parts["fields" if name.isupper() else "names"][name] = value
            except ValueError:
                parts["names"][name] = value
    return parts
