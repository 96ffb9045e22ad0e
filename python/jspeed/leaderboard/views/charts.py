"""Figures of the page as inline SVG: records over time, loss over seconds, seeds against the target, time saved.

Each is a pure function of the board's data, drawn 360 units wide to stay legible on phones, in the page's CSS colours,
with an aria label.
"""

import math
from collections import Counter
from collections.abc import Sequence
from datetime import date

from markupsafe import Markup

from jspeed.leaderboard import formatting
from jspeed.leaderboard.board import BoardTrack, Entry, HistoryRow, best, kind_of, mean_of
from jspeed.standard_streams import printable

WIDTH, LEFT, RIGHT, TOP = 360.0, 46.0, 8.0, 10.0
BOTTOM = 210.0  # of the plots with a legend under them
GUTTER = 136.0  # room for a recipe's name
NAME = 21  # letters that fit there
LINES = 6  # curves that can be told apart


def figure(title: str, label: str, height: float, parts: Sequence[str]) -> str:
    """Return a figure with a caption, ``height`` SVG units high; ``label`` is the text for screen readers."""
    return Markup(
        '<figure><figcaption>{}</figcaption><svg role="img" viewBox="0 0 {:g} {:g}" aria-label="{}">{}</svg></figure>'
    ).format(printable(title), WIDTH, height, printable(label), Markup("".join(parts)))


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Return a straight line of CSS class ``kind``."""
    return f'<path class="{kind}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def word(x: float, y: float, what: str, kind: str = "", anchor: str = "start") -> str:
    """Return text at a point; ``anchor`` is start, middle or end."""
    attributes = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return Markup('<text x="{:.1f}" y="{:.1f}"{}>{}</text>').format(x, y, Markup(attributes), printable(what))


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return at most ``most`` + 1 round numbers from ``low`` to ``high``."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(step * n, 10) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between two positive numbers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [factor * 10.0**power for power in powers for factor in (1, 2, 5) if low <= factor * 10.0**power <= high]


class Axes:
    """A plot's place on the page and its two scales; ``log`` is of the upright one."""

    def __init__(
        self, xs: tuple[float, float], ys: tuple[float, float], height: float, log: bool = False, left: float = LEFT
    ) -> None:
        self.xs, self.ys, self.bottom, self.log, self.left = xs, ys, height - 22.0, log, left

    def x(self, value: float) -> float:
        low, high = self.xs
        return self.left + (WIDTH - RIGHT - self.left) * (value - low) / ((high - low) or 1.0)

    def y(self, value: float) -> float:
        low, high = (math.log(end) if self.log else end for end in self.ys)
        share = ((math.log(value) if self.log else value) - low) / ((high - low) or 1.0)
        return self.bottom - (self.bottom - TOP) * share

    def grid(self, x_labels: Sequence[tuple[float, str]], y_labels: Sequence[tuple[float, str]]) -> list[str]:
        """Return the lines of the upright scale and both scales' labels."""
        parts = []
        for value, label in y_labels:
            parts.append(line(self.left, self.y(value), WIDTH - RIGHT, self.y(value), "grid"))
            parts.append(word(self.left - 5, self.y(value) + 3.5, label, "dim", "end"))
        parts.append(line(self.left, self.bottom, WIDTH - RIGHT, self.bottom, "axis"))
        for value, label in x_labels:
            half = 3.0 * len(label)
            at = min(max(self.x(value), half), WIDTH - half)
            parts.append(word(at, self.bottom + 14, label, "dim", "middle"))
        return parts


def path(points: Sequence[tuple[float, float]], kind: str, steps: bool = False) -> str:
    """Return a polyline through points of the page, as a staircase if ``steps``."""
    if not points:
        return ""
    moves = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x, y), (_, before) in zip(points[1:], points[:-1], strict=True):
        moves.append(f"L{x:.1f} {before:.1f}L{x:.1f} {y:.1f}" if steps else f"L{x:.1f} {y:.1f}")
    return f'<path class="{kind}" d="{"".join(moves)}"/>'


def days(when: str) -> float:
    """Return a date as a number of days."""
    return float(date.fromisoformat(when[:10]).toordinal())


def best_so_far(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return those of (day, seconds) that are lower than all on earlier days."""
    best: list[tuple[float, float]] = []
    for day, value in sorted(points):
        if not best or value < best[-1][1]:
            best.append((day, value))
    return best


def staircase(track: BoardTrack, history: Sequence[HistoryRow], reference: str) -> str:
    """Return our records over time beside the ``history`` of ``reference``; empty if all are of one day."""
    unit = "steps" if track["rank"] == "steps" else "seconds"
    value = (lambda e: float(e["steps"])) if unit == "steps" else (lambda e: mean_of(e["seconds"]))
    valid = [e for e in track["entries"] if e["valid"]]
    if unit == "seconds":  # compared on one kind and number of devices only
        valid = [e for e in valid if kind_of(e["devices"]) == kind_of(valid[0]["devices"])]
    ours = [(days(e["date"]), value(e)) for e in valid]
    theirs = [(days(row["date"]), row["seconds"]) for row in history]
    everything = ours + theirs
    if len({day for day, _ in everything}) < 2:
        return ""
    low, high = min(v for _, v in everything), max(v for _, v in everything)
    first, last = min(d for d, _ in everything), max(d for d, _ in everything)
    margin = max(5.0, 0.03 * (last - first))
    axes = Axes((first - margin, last + margin), (low / 1.15, high * 1.15), BOTTOM, log=True)
    marks = log_ticks(*axes.ys) or [float(f"{low:.4g}")]
    parts = axes.grid(date_labels(*axes.xs), [(mark, f"{mark:g}") for mark in marks])
    names = []
    for kind, points, name in (("reference", theirs, reference), ("ours", ours, "jspeed")):
        if best := best_so_far(points):
            corners = [*best, (axes.xs[1], best[-1][1])]
            parts.append(path([(axes.x(d), axes.y(v)) for d, v in corners], f"line {kind}", steps=True))
            now = f"{best[-1][1]:,.0f} steps" if unit == "steps" else formatting.seconds(best[-1][1])
            names.append((f"line {kind}", f"{name}: {now}"))
    parts += [f'<circle class="dot" cx="{axes.x(d):.1f}" cy="{axes.y(v):.1f}" r="3.5"/>' for d, v in ours]
    label = f"Best {unit} over time. {'; '.join(name for _, name in names)}"
    return figure(f"Best {unit} over time", label, BOTTOM + 14 * len(names), [*parts, *legend(names)])


def legend(names: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each (CSS class, name), under a plot."""
    parts = []
    for place, (kind, name) in enumerate(names):
        y = BOTTOM + 14 * place + 8
        parts += [line(LEFT, y, LEFT + 18, y, kind), word(LEFT + 24, y + 3.5, name)]
    return parts


def date_labels(first: float, last: float) -> list[tuple[float, str]]:
    """Return months for the axis, or days when all is within a few weeks."""
    start, end = date.fromordinal(math.ceil(first)), date.fromordinal(math.floor(last))
    months = [(y, m) for y in range(start.year, end.year + 1) for m in range(1, 13)]
    firsts = [date(y, m, 1) for y, m in months if start <= date(y, m, 1) <= end]
    if len(firsts) < 2:
        shown = [start, end] if (end - start).days > 1 else [start]
        return [(float(day.toordinal()), day.isoformat()) for day in shown]
    every = math.ceil(len(firsts) / 5)
    return [(float(day.toordinal()), f"{day:%Y-%m}") for day in firsts[::-1][::every][::-1]]


def labels(entries: Sequence[Entry]) -> list[str]:
    """Return what to call each of ``entries``: its recipe, with the start of its hash where several share that."""
    names = Counter(entry["recipe"] for entry in entries)
    hashes = (f" {entry['recipe_hash'][:4]}" if names[entry["recipe"]] > 1 else "" for entry in entries)
    return [printable(entry["recipe"], NAME - len(end)) + end for entry, end in zip(entries, hashes, strict=True)]


def curves(track: BoardTrack) -> str:
    """Return validation loss over timed seconds of the best entries."""
    shown = [entry for entry in track["entries"] if entry["data"]["of_track"] and entry["seconds"]]
    shown = [entry for entry in shown if len(entry["curve"]) > 1 and not entry["cut_short"]][:LINES]
    if not shown:
        return ""
    target = track["target_loss"]
    points = [[(s, loss) for _, s, loss in entry["curve"] if loss is not None] for entry in shown]
    # The initial drop is cut off at the top.
    late = [loss for curve in points for s, loss in curve if s >= 0.25 * curve[-1][0]] or [target]
    top, low = max(late), min([target, *(loss for curve in points for _, loss in curve)])
    right = max(curve[-1][0] for curve in points) or 1.0
    axes = Axes((0.0, right), (low - 0.05 * (top - low or 1), top), BOTTOM)
    parts = axes.grid([(v, f"{v:g} s") for v in ticks(0, right, 4)], [(v, f"{v:g}") for v in ticks(*axes.ys, 4)])
    parts.append(line(LEFT, axes.y(target), WIDTH - RIGHT, axes.y(target), "target"))
    parts += [path([(axes.x(s), axes.y(v)) for s, v in curve], f"line c{n}") for n, curve in enumerate(points)]
    ends = [
        f"{name}: {formatting.loss(entry['curve'][-1][2])}" for name, entry in zip(labels(shown), shown, strict=True)
    ]
    names = [(f"line c{place}", end) for place, end in enumerate(ends)]
    label = f"Validation loss over timed seconds. {'; '.join(ends)}"
    title = f"Validation loss over seconds, target {target:g}"
    return figure(title, label, BOTTOM + 14 * len(names), [*parts, *legend(names)])


def dots(track: BoardTrack) -> str:
    """Return the final loss of every run of the best entries, a row each, against the target."""
    shown = [entry for entry in track["entries"] if entry["loss"] and entry["data"]["of_track"]]
    shown = [entry for entry in shown if not entry["cut_short"]][:10]
    if not shown:
        return ""
    target, height = track["target_loss"], TOP + 20.0 * len(shown) + 30
    found = [[run["val_loss"] for run in entry["runs"] if run["val_loss"] is not None][:40] for entry in shown]
    low, high = min([target, *(min(f) for f in found)]), max([target, *(max(f) for f in found)])
    edge = 0.06 * (high - low or 0.01)
    axes = Axes((low - edge, high + edge), (0, 1), height, left=GUTTER)
    names, parts = labels(shown), axes.grid([(v, f"{v:g}") for v in ticks(*axes.xs, 4)], [])
    parts.append(line(axes.x(target), TOP, axes.x(target), axes.bottom, "target"))
    for place, (name, entry, losses) in enumerate(zip(names, shown, found, strict=True)):
        y = TOP + 20.0 * place + 14
        parts.append(word(GUTTER - 8, y + 3.5, name, "", "end"))
        parts += [f'<circle class="dot" cx="{axes.x(loss):.1f}" cy="{y:.1f}" r="3"/>' for loss in losses]
        mean = axes.x(mean_of(entry["loss"]))
        parts.append(line(mean, y - 6, mean, y + 6, "mean"))
    label = f"Final loss of every run against the target {target:g}: " + "; ".join(
        f"{name} mean {formatting.loss(mean_of(entry['loss']))} of {entry['loss']['n'] if entry['loss'] else 0}"
        for name, entry in zip(names, shown, strict=True)
    )
    return figure(f"Final loss of every run, target {target:g}", label, height, parts)


def chain(track: BoardTrack) -> list[Entry]:
    """Return the best valid entry and its parents, eldest first."""
    by_hash: dict[str, Entry] = {}
    for each in track["entries"]:  # of several entries of a recipe the valid one, which comes first
        if each["seconds"]:
            by_hash.setdefault(each["recipe_hash"], each)
    found: list[Entry] = []
    entry = best(track)
    while entry is not None and entry not in found:
        found.insert(0, entry)
        entry = by_hash.get(entry["better"]["parent_hash"]) if entry["better"] else None
    return found


def waterfall(track: BoardTrack) -> str:
    """Return the mean seconds of the best entry and its ancestors, and what each saved of its parent's."""
    line_of = chain(track)[-10:]
    if len(line_of) < 2:
        return ""
    height, most = TOP + 34.0 * len(line_of) + 6, max(mean_of(entry["seconds"]) for entry in line_of)
    scale, parts = (WIDTH - 2 * RIGHT) / most, []
    for place, entry in enumerate(line_of):
        y, mean = TOP + 34.0 * place, mean_of(entry["seconds"])
        before = mean_of(line_of[place - 1]["seconds"]) if place else mean
        saved = before - mean
        note = "" if not place else f", {formatting.seconds(abs(saved))} {'saved' if saved >= 0 else 'lost'}"
        parts.append(word(RIGHT, y + 10, f"{printable(entry['recipe'], 26)}: {formatting.seconds(mean)}{note}"))
        parts.append(f'<rect class="bar" x="{RIGHT:g}" y="{y + 15:.1f}" width="{scale * mean:.1f}" height="9"/>')
        x, width = RIGHT + scale * min(mean, before), scale * abs(saved)
        if place and width >= 0.5:
            kind = "saved" if saved > 0 else "lost"
            parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{y + 15:.1f}" width="{width:.1f}" height="9"/>')
    label = "Seconds saved, parent by parent: " + "; ".join(
        f"{e['recipe']} {formatting.seconds(mean_of(e['seconds']))}" for e in line_of
    )
    return figure("Seconds saved, parent by parent", label, height, parts)
