"""Plot of a plan (SVG): the time of every stage, and the memory of a device by kind.

The same plan gives the same bytes.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jspeed.files import write_whole
from jspeed.plan.schema import Plan, StagePlan, Time
from jspeed.plan.views.formatting import fullest, memory_by_kind, range_text, size
from jspeed.plots import BLUE, GREEN, INK, ORANGE, PINK, RED, SKY, plain, svg
from jspeed.standard_streams import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (BLUE, ORANGE, GREEN, RED, PINK, SKY)
TIMES: dict[Time, str] = {  # end to end
    "compute": BLUE,
    "memory": ORANGE,
    "exposed_communication": RED,
    "launches": PINK,
    "empty_blocks": SKY,
}
ALL_COMMUNICATION = GREEN  # hidden or not
MIB = 2**20  # bytes; the legend leaves out what is smaller


def plan_svg(path: Path, plan: Plan) -> None:
    """Draw ``plan`` to ``path``, on white. Raises BadInput when that cannot be written.

    Above, for every stage, milliseconds of one step: compute-bound kernels, memory-bound kernels and exposed
    communication, end to end; under them all communication, and the predicted step as a range.
    Below: memory of the stage that needs most, by kind, and the size of a device.
    """
    heights = [1.1 + 0.52 * len(plan["stages"]), 1.4 + 0.19 * len(memory_by_kind(plan))]

    def draw(figure: "Figure") -> None:
        figure.get_layout_engine().set(h_pad=0.08, hspace=0.06)  # type: ignore[union-attr, call-arg]
        above, below = figure.subplots(2, 1, gridspec_kw={"height_ratios": heights})
        title = printable(f"{plan['recipe']} on {plan['target']}", 50)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK, parse_math=False)
        for axes in (above, below):
            axes.set_facecolor("none")
            plain(axes, "x")
            axes.spines["left"].set_visible(False)
            axes.tick_params(axis="y", length=0)
        _times(above, plan["stages"])
        _memory(below, plan)

    write_whole(path, svg((4.8, sum(heights) + 0.5), draw))


def _times(axes: "Axes", stages: list[StagePlan]) -> None:
    """Draw the bars of every stage, first stage on top, and under them the predicted range."""
    axes.set_title("milliseconds of one step", loc="left", fontsize=10, color=INK)
    right = 0.0
    for row, stage in enumerate(stages):
        times = stage["time_ms"]
        left = 0.0
        for name, colour in TIMES.items():
            axes.barh(row - 0.18, times[name], 0.32, left=left, color=colour, zorder=2)
            left += times[name]
        axes.barh(row + 0.08, times["communication"], 0.14, color=ALL_COMMUNICATION, zorder=2)
        low, high = stage["predicted_ms"]
        height = row + 0.3
        axes.plot([low, high], [height, height], color=INK, linewidth=1.4, marker="|", markersize=6, zorder=3)
        label = range_text([low, high], "ms")
        axes.annotate(label, (high, height), (5, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
        right = max(right, left, times["communication"], high)
    axes.set_yticks(range(len(stages)), [printable(stage["name"], 16) for stage in stages], parse_math=False)
    axes.set_ylim(len(stages) - 0.5, -0.5)
    axes.set_xlim(0, 1.34 * right)  # room for the words after a range
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=colour, label=name.replace("_", " ")) for name, colour in TIMES.items()]
    handles.append(Patch(color=ALL_COMMUNICATION, label="all communication"))
    handles.append(Line2D([], [], color=INK, linewidth=1.4, marker="|", markersize=6, label="predicted step"))
    _legend(axes, handles, 2)


def _memory(axes: "Axes", plan: Plan) -> None:
    """Draw one bar of all kinds end to end, the compiler's peak, and the device's size."""
    from matplotlib.patches import Patch

    stage = fullest(plan)
    marks = {"peak": stage["memory_bytes"]["peak"], "device": plan["device_memory_bytes"]}
    title = f"GB of one device in {stage['name']}, the fullest"
    axes.set_title(printable(title, 50), loc="left", fontsize=10, color=INK, parse_math=False)
    left = 0.0
    handles: list[Any] = []
    for index, (kind, amount) in enumerate(memory_by_kind(plan).items()):
        colour = COLOURS[index % len(COLOURS)]
        axes.barh(0, amount / 1e9, 0.6, left=left / 1e9, color=colour, zorder=2)
        if amount >= MIB:
            handles.append(Patch(color=colour, label="_"))
            handles[-1].set_label(f" {printable(kind, 40)}, {size(amount)}")
        left += amount
    widest = max(left, *marks.values())
    for name, at in marks.items():
        axes.plot([at / 1e9] * 2, [-0.42, 0.42], color=INK, linewidth=1.4, linestyle="-" if name == "device" else ":")
        above = name == "device"
        axes.annotate(
            f"{name} {size(at)}",
            (at / 1e9, -0.42 if above else 0.42),
            (0, 3 if above else -3),
            textcoords="offset points",
            ha="right" if at > 0.8 * widest else "left",
            va="bottom" if above else "top",
            fontsize=9,
            color=INK,
        )
    limit = plan["memory_limit_bytes"]
    [line] = axes.plot([limit / 1e9] * 2, [-0.42, 0.42], color=INK, linewidth=1.0, linestyle=(0, (4, 2)))
    line.set_label(f"JAX may take {size(limit)}")
    axes.set_yticks([])
    axes.set_ylim(0.85, -0.85)
    axes.set_xlim(0, 1.04 * widest / 1e9)
    _legend(axes, [*handles, line], 1)


def _legend(axes: "Axes", handles: list[Any], columns: int) -> None:
    """Put a legend under the numbers of the axis, at one distance whatever the height of the axes."""
    from matplotlib.transforms import ScaledTranslation

    figure = axes.get_figure(root=True)
    assert figure is not None
    legend = axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=axes.transAxes + ScaledTranslation(0, -20 / 72, figure.dpi_scale_trans),
        ncols=columns,
        fontsize=9,
        labelcolor=INK,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.0,
        columnspacing=1.0,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
