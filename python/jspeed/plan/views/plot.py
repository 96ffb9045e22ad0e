"""Plot of a plan (SVG): the time of every stage, and the memory of a device by kind.

The same plan gives the same bytes.
"""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from jspeed.base.files import write_whole
from jspeed.base.numbers import size
from jspeed.base.plots import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY, svg
from jspeed.base.standard_streams import printable
from jspeed.plan.schema import Plan, StagePlan
from jspeed.plan.views.tables import fullest, memory_by_kind, range_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (BLUE, ORANGE, GREEN, RED, PINK, SKY)
MARKS = (":", (0, (4, 2)), "-")  # dotted, dashed and whole lines
TIMES = {  # end to end
    "compute": BLUE,
    "memory": ORANGE,
    "exposed_communication": RED,
    "launches": PINK,
    "empty_blocks": SKY,
}
ALL_COMMUNICATION = GREEN  # hidden or not
MIB = 2**20  # bytes; the legend leaves out what is smaller


def write_svg(path: Path, plan: Plan) -> None:
    """Draw ``plan`` to ``path``, on white. Raises BadInput when that cannot be written.

    Above, for every stage, milliseconds of one step: compute-bound kernels, memory-bound kernels
    and exposed communication, end to end; under them all communication, and the predicted step as a
    range. Below: memory of the stage that needs most, by kind, and the size of a device.
    """
    heights = [1.1 + 0.52 * len(plan["stages"]), 1.4 + 0.19 * len(memory_by_kind(plan))]

    def draw(figure: "Figure") -> None:
        engine = figure.get_layout_engine()
        engine.set(h_pad=0.08, hspace=0.06)  # type: ignore[union-attr, call-arg]
        above, below = figure.subplots(2, 1, gridspec_kw={"height_ratios": heights})
        title = printable(f"{plan['recipe']} on {plan['target']}", 50)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        for axes in (above, below):
            axes.set_facecolor("none")
            axes.grid(axis="x")
            axes.spines["left"].set_visible(False)
            axes.tick_params(axis="y", length=0)
        _times(above, plan["stages"])
        _memory(below, plan)

    write_whole(path, svg((4.8, sum(heights) + 0.5), draw))


def _times(axes: "Axes", stages: list[StagePlan]) -> None:
    """Draw the bars of every stage, first stage on top, and under them the predicted range."""
    axes.set_title("milliseconds of one step", fontsize=10)
    right = 0.0
    for row, stage in enumerate(stages):
        times, left = stage["time_ms"], 0.0
        for name, colour in TIMES.items():
            label = "" if row else name.replace("_", " ")
            axes.barh(row - 0.18, times[name], 0.32, left=left, color=colour, label=label)
            left += times[name]
        label = "" if row else "all communication"
        axes.barh(row + 0.08, times["communication"], 0.14, color=ALL_COMMUNICATION, label=label)
        low, high = stage["predicted_ms"]
        label = "" if row else "predicted step"
        axes.plot(
            [low, high],
            [row + 0.3] * 2,
            color=INK,
            linewidth=1.4,
            marker="|",
            markersize=6,
            label=label,
        )
        said = range_text([low, high], "ms")
        axes.annotate(
            said, (high, row + 0.3), (5, 0), textcoords="offset points", va="center", fontsize=9
        )
        right = max(right, left, times["communication"], high)
    axes.set_yticks(range(len(stages)), [printable(stage["name"], 16) for stage in stages])
    axes.set_ylim(len(stages) - 0.5, -0.5)
    axes.set_xlim(0, 1.34 * right)  # room for the words after a range
    _legend(axes, 2)


def _memory(axes: "Axes", plan: Plan) -> None:
    """Draw one bar of all kinds end to end, the compiler's peak, what JAX may take, and the
    device's size."""
    stage = fullest(plan)
    title = printable(f"GB of one device in {stage['name']}, the fullest", 50)
    axes.set_title(title, fontsize=10)
    left = 0.0
    for colour, (kind, amount) in zip(itertools.cycle(COLOURS), memory_by_kind(plan).items()):
        label = f" {printable(kind, 40)}, {size(amount)}" if amount >= MIB else ""
        axes.barh(0, amount / 1e9, 0.6, left=left / 1e9, color=colour, label=label)
        left += amount
    peak, device = stage["memory_bytes"]["peak"], plan["device_memory_bytes"]
    lines = {"peak": peak, "JAX may take": plan["memory_limit_bytes"], "device": device}
    for style, (name, at) in zip(MARKS, lines.items(), strict=True):
        label = f"{name} {size(at)}"
        axes.plot(
            [at / 1e9] * 2, [-0.42, 0.42], color=INK, linewidth=1.2, linestyle=style, label=label
        )
    axes.set_yticks([])
    axes.set_ylim(0.6, -0.6)
    axes.set_xlim(0, 1.04 * max(left, *lines.values()) / 1e9)
    _legend(axes, 1)


def _legend(axes: "Axes", columns: int) -> None:
    """Put a legend under the numbers of the axis, at one distance whatever the height of the
    axes."""
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.06, 0),
        borderaxespad=2.4,  # times the size of the font
        ncols=columns,
        frameon=False,
        handlelength=1.0,
        columnspacing=1.0,
    )
