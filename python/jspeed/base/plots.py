"""Draw matplotlib figures in one style as SVG text, the same bytes for the same content on every
machine."""

import importlib
import io
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
PINK = "#CC79A7"
SKY = "#56B4E9"
INK, EDGE, PALE = "#333333", "#999999", "#dddddd"
# Each colour where the reader's system is dark, which a browser asks of a picture too.
DARK = {
    "#ffffff": "#0d1117", INK: "#e6edf3", EDGE: "#8b949e", PALE: "#30363d",
    BLUE: "#4aa3df", RED: "#ff8c42", GREEN: "#2fc59b",
}  # fmt: skip
STYLE: dict[Any, Any] = {  # matplotlib's parameters
    "svg.hashsalt": "jspeed", "svg.fonttype": "none", "font.size": 10, "text.color": INK,
    "text.parse_math": False,
    "axes.titlelocation": "left", "axes.titlesize": 11, "axes.labelcolor": INK, "axes.edgecolor":
    EDGE,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "xtick.color": EDGE, "xtick.labelcolor": INK, "ytick.color": EDGE, "ytick.labelcolor": INK,
    "grid.color": PALE, "grid.linewidth": 0.6,
    "legend.fontsize": 9, "legend.facecolor": "white", "legend.edgecolor": "none",
}  # fmt: skip


def load_matplotlib() -> None:
    """Import what :func:`svg` needs, as far as it can be."""
    with suppress(Exception):  # which svg would raise
        importlib.import_module("matplotlib.figure")
        importlib.import_module("matplotlib.backends.backend_svg")


def svg(size: tuple[float, float], draw: Callable[["Figure"], None]) -> str:
    """Return what ``draw`` puts into an empty figure of ``size`` inches; text in it stays text.

    Its colours follow the reader's system, light or dark.
    """
    # Imported here because it takes a second, which a run without a plot should not pay. A bare
    # Figure needs neither a display nor pyplot's global state.
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the user's own style would make other bytes
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        draw(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "jspeed"})
    return light_and_dark(buffer.getvalue().decode())


def light_and_dark(text: str) -> str:
    """Return an SVG of :func:`svg`'s colours with a rule that replaces them on dark screens."""
    rules = "".join(
        f'[style*="{what}: {light.lower()}"]{{{what}: {dark} !important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    )
    return text.replace("</style>", f"@media (prefers-color-scheme: dark) {{{rules}}}</style>", 1)


def loss_limits(curves: list[tuple[Any, Any]], target: float | None) -> tuple[float, float]:
    """Return the lowest and the highest loss to show.

    Limits cover 90 % of each curve's time, so the initial drop does not flatten the rest.
    ``curves`` are (seconds, losses) as float64 arrays [N].
    """
    lows, bulks, tops = ([] if target is None else [target] for _ in range(3))
    for seconds, losses in curves:
        keep = np.isfinite(losses)
        if not keep.any():
            continue
        seconds, losses = seconds[keep], losses[keep]
        evenly = np.interp(np.linspace(seconds[0], seconds[-1], 400), seconds, losses)
        lows.append(float(losses.min()))
        bulks.append(float(np.percentile(evenly, 90)))
        tops.append(float(losses.max()))
    if not lows:
        return 0.0, 1.0
    low, bulk, top = min(lows), max(bulks), max(tops)
    high = top if top - low < 2.0 * (bulk - low) else bulk + 0.25 * (bulk - low)
    margin = 0.06 * (high - low) or 0.05 * max(1.0, abs(low))
    return low - margin, high + margin
