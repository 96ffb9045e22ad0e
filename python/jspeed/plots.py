"""Draw matplotlib figures in one style as SVG text, the same bytes for the same content on every
machine."""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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


def svg(size: tuple[float, float], draw: Callable[["Figure"], None]) -> str:
    """Return what ``draw`` puts into an empty figure of ``size`` inches; text in it stays text."""
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
    return buffer.getvalue().decode()
