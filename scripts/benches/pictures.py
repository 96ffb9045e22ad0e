"""``jspeed bench pictures``: what no run and no plan draws: the house, and the kernels of the first
GPU beside their plans."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING

from jspeed.base.files import write_whole
from jspeed.base.plots import BLUE, EDGE, GREEN, INK, ORANGE, PALE, PINK, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "benchmarks" / "house.svg"
FIRST_GPU = ROOT / "lab" / "2026-11-27-first-gpu.csv"
# Rooms by floor, from above: each may import what is below it.
CORE = (
    ("cli",),
    ("run",),
    ("recipes",),
    ("optim",),
    ("record", "parallel", "data"),
    ("model", "recipe"),
    ("base",),
)
SATELLITES = (
    ("board", "cluster", "corpus"),
    ("doctor", "inference"),
    ("plan", "sharding"),
    ("kernels", "host_table"),
    ("retrieval", "saved", "speedrun"),
)
# Beginnings of a program's name, and how its family is drawn.
FAMILIES = {
    "attention": ("attention", PINK, "o"),
    "FP8": ("FP8 matmul", BLUE, "s"),
    "bf16": ("bf16 matmul", GREEN, "^"),
    "own": ("custom kernel", INK, "D"),
    "": ("pass over memory", ORANGE, "v"),
}


def pictures() -> None:
    """Draw benchmarks/house.svg and lab/2026-11-27-first-gpu.svg anew."""
    write_whole(HOUSE, svg((6.4, 3.3), house))
    write_whole(FIRST_GPU.with_suffix(".svg"), svg((4.8, 4.6), first_gpu))


def house(figure: "Figure") -> None:
    """Draw the rooms: the core's floors at the left, satellites at the right."""
    axes = figure.add_subplot(facecolor="none")
    axes.set_axis_off()
    axes.set(xlim=(0, 10), ylim=(-0.3, len(CORE) + 0.6))
    for left, width, title, floors, high in (
        (0.0, 5.2, "core: a floor imports from those below it", CORE, 1.0),
        (
            5.8,
            4.2,
            "satellites: delete one, all else works",
            SATELLITES,
            len(CORE) / len(SATELLITES),
        ),
    ):
        axes.text(left, len(CORE) + 0.2, title, fontsize=10)
        for number, floor in enumerate(floors):
            bottom = len(CORE) - high * (number + 1)
            for place, room in enumerate(floor):
                box(axes, left + place * width / len(floor), bottom, width / len(floor), high, room)


def box(axes: "Axes", left: float, bottom: float, width: float, height: float, room: str) -> None:
    """Draw one room with its name."""
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle(
            (left + 0.06, bottom + 0.08),
            width - 0.12,
            height - 0.16,
            facecolor=PALE,
            edgecolor=EDGE,
        )
    )
    middle = left + width / 2, bottom + height / 2
    axes.annotate(room, middle, ha="center", va="center", fontsize=10)


def first_gpu(figure: "Figure") -> None:
    """Draw milliseconds of each program on an H200, in a row, over those planned by flat rates."""
    axes = figure.add_subplot(facecolor="none")
    with FIRST_GPU.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["planned ms"]]
    for start, (family, colour, mark) in FAMILIES.items():
        mine = [row for row in rows if family_of(row["program"]) == start]
        planned, measured = (
            [float(row[name]) for row in mine] for name in ("planned ms", "ms in a row")
        )
        axes.plot(planned, measured, mark, color=colour, markersize=5, label=f" {family}")
    axes.plot([0.03, 2.5], [0.03, 2.5], color=EDGE, linewidth=1, label=" as planned")
    axes.set(xscale="log", yscale="log", xlabel="planned by flat rates, ms")
    axes.set_ylabel("measured on an H200, ms")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid()
    axes.legend(loc="lower right", frameon=False)


def family_of(program: str) -> str:
    """Return the key of FAMILIES that ``program`` begins with, or the last."""
    return next(start for start in FAMILIES if program.startswith(start))
