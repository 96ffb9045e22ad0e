"""Figures of the page as inline SVG: records over time, loss over seconds, seeds against the
target, time saved.

Each is a pure function of the board's data, with an aria label. It is drawn 360 units wide, to stay
legible on phones, in the page's CSS colours.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date
from typing import TYPE_CHECKING

from markupsafe import Markup

from jspeed.base.plots import BLUE, EDGE, GREEN, INK, ORANGE, PALE, PINK, RED, SKY, svg
from jspeed.base.standard_streams import printable
from jspeed.board import formatting
from jspeed.board.board import BoardTrack, Entry, HistoryRow, best, kind_of, mean_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = list[tuple[date, float]]

WIDTH, PLOT = 360.0, 210.0  # units; a plot's height without the legend under it
LINE = 16  # units of a legend's line
NAME = 21  # letters of a recipe's name
LINES = (BLUE, RED, GREEN, PINK, ORANGE, SKY)  # curves that can be told apart
BAD, SOFT = "#b3261e", "#c9d7e6"
CSS = {colour: f"c{place}" for place, colour in enumerate(LINES)}
CSS |= {INK.lower(): "ink", EDGE: "dim", PALE: "line", BAD: "bad", SOFT: "soft"}
# What a browser does not need of matplotlib's SVG, and what would be there twice in a page of
# several.
UNUSED = re.compile(
    r'<metadata>.*?</metadata>|<style.*?</style>|<clipPath.*?</clipPath>| clip-path="[^"]*"'
    r'| id="(?!m[0-9a-f]{10}")[^"]*"|<!--.*?-->|<defs>\s*</defs>',
    re.DOTALL,
)


def figure(title: str, label: str, height: float, draw: Callable[["Axes"], None]) -> str:
    """Return what ``draw`` puts on axes, ``height`` units high, under a caption; ``label`` is for
    screen readers."""

    def on(whole: "Figure") -> None:
        whole.patch.set_visible(False)
        draw(whole.add_subplot(facecolor="none"))

    text = svg((WIDTH / 72, height / 72), on)
    inside = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")].replace(
        "xlink:href", "href"
    )
    inside = re.sub(
        r"(font: [\d.]+px|font-family:)[^;\"]*", r"\1 system-ui, sans-serif", UNUSED.sub("", inside)
    )
    for colour, name in CSS.items():
        inside = inside.replace(colour.lower(), f"var(--{name})")
    return Markup(
        '<figure><figcaption>{}</figcaption><svg role="img" viewBox="0 0 {:g} {:g}"'
        ' aria-label="{}">{}</svg></figure>'
    ).format(printable(title), WIDTH, height, printable(label), Markup(" ".join(inside.split())))


def legend(axes: "Axes") -> None:
    """List the lines of ``axes`` that have a label, under the plot."""
    whole = axes.get_figure()
    whole.legend(loc="outside lower left", frameon=False, fontsize=11)  # type: ignore[union-attr]


def best_so_far(points: Points) -> Points:
    """Return those of (day, value) that are lower than all on earlier days."""
    best: Points = []
    for day, value in sorted(points):
        if not best or value < best[-1][1]:
            best.append((day, value))
    return best


def staircase(track: BoardTrack, history: Sequence[HistoryRow], reference: str) -> str:
    """Return our records over time beside the ``history`` of ``reference``; empty if all are of one
    day."""
    unit = "steps" if track["rank"] == "steps" else "seconds"
    value = (lambda e: float(e["steps"])) if unit == "steps" else (lambda e: mean_of(e["seconds"]))
    valid = [e for e in track["entries"] if e["valid"]]
    if unit == "seconds":  # compared on one kind and number of devices only
        valid = [e for e in valid if kind_of(e["devices"]) == kind_of(valid[0]["devices"])]
    ours = [(date.fromisoformat(e["date"]), value(e)) for e in valid]
    theirs = [(date.fromisoformat(row["date"]), row["seconds"]) for row in history]
    days = {day for day, _ in ours + theirs}
    if len(days) < 2:
        return ""
    names, stairs = [], []
    for name, points, style in (
        (reference, theirs, {"color": EDGE, "linestyle": "--"}),
        ("jspeed", ours, {}),
    ):
        if stair := best_so_far(points):
            now = (
                f"{stair[-1][1]:,.0f} steps"
                if unit == "steps"
                else formatting.seconds(stair[-1][1])
            )
            names.append(f"{name}: {now}")
            stairs.append(
                (
                    [*stair, (max(days), stair[-1][1])],
                    {"color": BLUE, "label": f" {printable(names[-1])}", **style},
                )
            )

    def draw(axes: "Axes") -> None:
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
        from matplotlib.ticker import LogLocator, NullLocator

        axes.set_yscale("log")
        for corners, style in stairs:
            times, values = zip(*corners, strict=True)
            axes.step(times, values, where="post", linewidth=1.8, **style)  # type: ignore[arg-type]
        for day, mean in ours:
            axes.plot([day], [mean], "o", color=BLUE, alpha=0.65)  # type: ignore[arg-type]
        axes.xaxis.set_major_locator(locator := AutoDateLocator(maxticks=6))
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}" + " s" * (unit == "seconds"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(axis="y")
        legend(axes)

    label = f"Best {unit} over time. {'; '.join(names)}"
    return figure(f"Best {unit} over time", label, PLOT + LINE * len(names), draw)


def labels(entries: Sequence[Entry]) -> list[str]:
    """Return what to call each of ``entries``: its recipe, with the start of its hash where several
    share that."""
    names = Counter(entry["recipe"] for entry in entries)
    hashes = (
        f" {entry['recipe_hash'][:4]}" if names[entry["recipe"]] > 1 else "" for entry in entries
    )
    return [
        printable(entry["recipe"], NAME - len(end)) + end
        for entry, end in zip(entries, hashes, strict=True)
    ]


def curves(track: BoardTrack) -> str:
    """Return validation loss over timed seconds of the best entries, one run of each: the first
    that reached the target."""
    shown = [entry for entry in track["entries"] if entry["data"]["of_track"] and entry["seconds"]]
    shown = [entry for entry in shown if len(entry["curve"]) > 1 and not entry["cut_short"]][
        : len(LINES)
    ]
    if not shown:
        return ""
    target = track["target_loss"]
    points = [[(s, loss) for _, s, loss in entry["curve"] if loss is not None] for entry in shown]
    # The initial drop is cut off at the top.
    top = max(
        [loss for curve in points for s, loss in curve if s >= 0.25 * curve[-1][0]], default=target
    )
    low = min([target, *(loss for curve in points for _, loss in curve)])
    ends = [
        f"{name}, seed {entry['curve_seed']}: {formatting.loss(entry['curve'][-1][2])} in"
        f" {formatting.seconds(entry['curve'][-1][1])}"
        for name, entry in zip(labels(shown), shown, strict=True)
    ]

    def draw(axes: "Axes") -> None:
        for curve, end, colour in zip(points, ends, LINES, strict=False):
            axes.plot(*zip(*curve, strict=True), color=colour, linewidth=1.8, label=f" {end}")
        axes.axhline(target, color=BAD, linewidth=1.2, linestyle="--")
        axes.set(xlim=(0, None), ylim=(low - 0.05 * (top - low or 1), top))
        axes.set_ylabel("nats per token")
        axes.xaxis.set_major_formatter("{x:g} s")
        axes.grid(axis="y")
        legend(axes)

    label = f"Validation loss over timed seconds, one run of each recipe. {'; '.join(ends)}"
    return figure(
        f"Validation loss of one run of each, target {target:g}",
        label,
        PLOT + LINE * len(ends),
        draw,
    )


def dots(track: BoardTrack) -> str:
    """Return the final loss of every run of the best entries, a row each, against the target."""
    shown = [entry for entry in track["entries"] if entry["loss"] and entry["data"]["of_track"]]
    shown = [entry for entry in shown if not entry["cut_short"]][:10]
    if not shown:
        return ""
    target, names = track["target_loss"], labels(shown)

    def draw(axes: "Axes") -> None:
        for row, entry in enumerate(shown):
            ended = [run["val_loss"] for run in entry["runs"] if run["val_loss"] is not None][:40]
            axes.plot(ended, [row] * len(ended), "o", color=BLUE, alpha=0.65)
            axes.plot(mean_of(entry["loss"]), row, "|", color=INK, markersize=12, markeredgewidth=2)
        axes.axvline(target, color=BAD, linewidth=1.2, linestyle="--")
        axes.set_yticks(range(len(shown)), names)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.ticklabel_format(axis="x", useOffset=False)
        axes.locator_params(axis="x", nbins=4)
        axes.set_xlabel("nats per token")

    label = f"Final loss of every run against the target {target:g}: " + "; ".join(
        f"{name} mean {formatting.loss(mean_of(entry['loss']))} of"
        f" {entry['loss']['n'] if entry['loss'] else 0}"
        for name, entry in zip(names, shown, strict=True)
    )
    return figure(
        f"Final loss of every run, target {target:g}", label, 56 + 20.0 * len(shown), draw
    )


def chain(track: BoardTrack) -> list[Entry]:
    """Return the best valid entry and its parents, eldest first."""
    by_hash: dict[str, Entry] = {}
    for each in track["entries"]:  # of several entries of a recipe the valid one, which comes first
        if each["seconds"]:
            by_hash.setdefault(each["recipe_hash"], each)
    ancestors: list[Entry] = []
    entry = best(track)
    while entry is not None and entry not in ancestors:
        ancestors.insert(0, entry)
        entry = by_hash.get(entry["better"]["parent_hash"]) if entry["better"] else None
    return ancestors


def waterfall(track: BoardTrack) -> str:
    """Return the mean seconds of the best entry and its ancestors, and what each saved of its
    parent's."""
    line_of = chain(track)[-10:]
    if len(line_of) < 2:
        return ""
    means = [mean_of(entry["seconds"]) for entry in line_of]

    def draw(axes: "Axes") -> None:
        for row, (entry, mean, before) in enumerate(
            zip(line_of, means, [means[0], *means], strict=False)
        ):
            word = "saved" if before >= mean else "lost"
            note = f", {formatting.seconds(abs(before - mean))} {word}" if row else ""
            axes.text(
                0, row - 0.1, f"{printable(entry['recipe'], 26)}: {formatting.seconds(mean)}{note}"
            )
            axes.barh(row + 0.15, mean, 0.3, color=BLUE)
            if row:
                colour = SOFT if mean < before else BAD
                axes.barh(row + 0.15, abs(before - mean), 0.3, left=min(mean, before), color=colour)
        axes.set_ylim(len(line_of) - 0.5, -0.5)
        axes.axis("off")

    label = "Seconds saved, parent by parent: " + "; ".join(
        f"{entry['recipe']} {formatting.seconds(mean)}"
        for entry, mean in zip(line_of, means, strict=True)
    )
    return figure("Seconds saved, parent by parent", label, 16 + 34.0 * len(line_of), draw)
