"""Plots of the loss against the training clock, as SVG files whose bytes depend on the run
alone."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jspeed.base.files import write_whole
from jspeed.base.plots import BLUE, EDGE, GREEN, INK, ORANGE, PINK, RED, SKY, loss_limits, svg
from jspeed.base.standard_streams import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# (timed seconds, loss in nats per token); a loss that was not finite is None or NaN.
Points = Sequence[tuple[float, float | None]]
Line = tuple[str, Any, Any, dict[str, Any]]  # label, seconds, losses, matplotlib's style

COLOURS = (BLUE, RED, GREEN, PINK, ORANGE, SKY, "#000000")  # yellow would be too pale on white
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
LONGEST_PARENT = 1.5  # times the run's own seconds; a longer one would flatten it
TRAIN_POINTS = 400  # more cannot be told apart at the width of the plot


def loss_svg(
    path: Path,
    *,
    train: Points,
    val: Points,
    target: float | None,
    title: str,
    unit: str = "token",
    stages: Sequence[float] = (),
    parent: tuple[str, Points] | None = None,
) -> None:
    """Draw one run to ``path``: training loss (thin), validation loss (points) and the target
    (dashed).

    ``train`` and ``val`` are (timed seconds, nats per ``unit``) in order of time and may be empty;
    None or NaN, as a diverged run leaves them, breaks the line. Long training curves are averaged
    over neighbouring steps, and the legend says over how many. High initial losses are cut off at
    the top: see :func:`loss_limits`. ``stages`` are the seconds at which the second stage began,
    the third and so on: dotted lines. ``parent`` is a label and the validation losses of another
    run; a longer curve is cut off at the right.

    Raises BadInput when ``path`` cannot be written.
    """
    lines: list[Line] = []
    if len(train):
        seconds, losses, group = _averaged(*_arrays(train))
        label = f"train, mean of {group} steps" if group > 1 else "train"
        lines.append(
            (label, seconds, losses, {"color": COLOURS[0], "linewidth": 0.8, "alpha": 0.45})
        )
    if len(val):
        seconds, losses = _arrays(val)
        style = {"color": COLOURS[0], "linewidth": 1.6, "marker": "o", "markersize": 4.0}
        lines.append((f"validation, {_last(losses)}", seconds, losses, style))
    if parent and len(val):
        end = LONGEST_PARENT * max(float(seconds) for seconds, _ in val)
        seconds, losses = _arrays([point for point in parent[1] if point[0] <= end])
        style = {"color": COLOURS[1], "linewidth": 1.0, "marker": "o", "markersize": 2.5}
        lines.append((parent[0], seconds, losses, style))
    _draw(path, lines, target, title, unit=unit, stages=stages)


def curves_svg(
    path: Path,
    runs: Mapping[str, Points],
    target: float | None,
    title: str,
    across: str = "timed seconds",
) -> None:
    """Draw the validation curves of several runs, label -> points as in :func:`loss_svg`, as one
    plot.

    ``across`` names what the first number of a point is.
    """
    lines: list[Line] = []
    for index, (label, points) in enumerate(runs.items()):
        seconds, losses = _arrays(points)
        turn, colour = divmod(index, len(COLOURS))
        style = {
            "color": COLOURS[colour],
            "linestyle": DASHES[turn % len(DASHES)],
            "linewidth": 1.4,
        }
        style |= {"marker": "o", "markersize": 3.0}
        lines.append((f"{label}, {_last(losses)}", seconds, losses, style))
    _draw(path, lines, target, title, across)


def _draw(
    path: Path,
    lines: list[Line],
    target: float | None,
    title: str,
    across: str = "timed seconds",
    unit: str = "token",
    stages: Sequence[float] = (),
) -> None:
    right = max((float(t) for _, times, _, _ in lines for t in times), default=0.0) or 1.0
    low, high = loss_limits([(times, losses) for _, times, losses, _ in lines], target)
    highest = max(
        (float(x) for _, _, losses, _ in lines for x in losses if math.isfinite(x)), default=low
    )

    def draw(figure: "Figure") -> None:
        axes = figure.add_subplot(
            title=printable(title), xlabel=across, ylabel=f"loss (nats per {unit})"
        )
        # room for half a marker at either end
        axes.set(xlim=(-0.01 * right, 1.02 * right), ylim=(low, high))
        axes.grid(axis="y")
        for label, seconds, losses, style in lines:
            # matplotlib would drop a label that begins with an underscore.
            axes.plot(
                seconds,
                losses,
                label=f" {printable(label)}",
                zorder=3 if "marker" in style else 2,
                **style,
            )
        offset = "offset points"
        if target is not None:
            axes.axhline(target, color=INK, linewidth=1.0, linestyle=(0, (5, 3)), zorder=1)
            # At the left the curves are still high above the target, so nothing is under its label.
            axes.annotate(
                f"target {target:g}",
                (0, target),
                (6, 3),
                ("axes fraction", "data"),
                offset,
                fontsize=9,
            )
        for number, start in enumerate(stages, 2):
            axes.axvline(start, color=EDGE, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
            at = ("data", "axes fraction")
            axes.annotate(f"stage {number}", (start, 0), (3, 3), at, offset, color=EDGE, fontsize=8)
        if lines:
            hidden = f"not shown: losses up to {highest:.4g}" if highest > high else None
            axes.legend(loc="upper right", title=hidden, title_fontsize=8, alignment="left")

    write_whole(path, svg((7.2, 4.2), draw))


def _arrays(points: Points) -> tuple[Any, Any]:
    """Return times and losses as float64 arrays, with NaN for a missing loss."""
    pairs = [(seconds, math.nan if loss is None else loss) for seconds, loss in points]
    seconds, losses = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return seconds, np.where(np.isfinite(losses), losses, math.nan)


def _averaged(seconds: Any, losses: Any) -> tuple[Any, Any, int]:
    """Return means over neighbours so that at most TRAIN_POINTS remain, and over how many points
    each is."""
    group = max(1, math.ceil(len(losses) / TRAIN_POINTS))
    starts = range(0, len(losses), group)
    return (
        np.array([seconds[i : i + group].mean() for i in starts]),
        # NaN in a group makes the group NaN: a gap
        np.array([losses[i : i + group].mean() for i in starts]),
        group,
    )


def _last(losses: Any) -> str:
    if not len(losses):
        return "no points"
    return f"last {losses[-1]:.3f}" if math.isfinite(losses[-1]) else "diverged"
