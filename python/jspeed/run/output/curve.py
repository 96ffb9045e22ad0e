"""Plot the validation losses so far in block characters, for the terminal."""

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from jspeed.record.loss_plot import loss_limits

ROWS, COLUMNS = 8, 72  # of the plot with its labels, at most
BLOCKS, ASCII = " ▁▂▃▄▅▆▇█", " .:|"  # a cell by how far it is filled from below


def plot(
    losses: Sequence[tuple[int, float]], steps: int, target: float | None, columns: int = COLUMNS, ascii: bool = False
) -> Text | None:
    """Return ``losses``, points (step, nats per token) in order, as ROWS lines; None where ``columns`` are too few.

    The area under the curve is filled, from step 0 at the left to ``steps`` at the right, so that it grows with the
    run down to the dashed line of the ``target``. High losses of the first steps are clipped, as in loss.svg.
    Without ``ascii`` the terminal must support Unicode.
    """
    if not losses:
        return None
    at, values = (np.array(part, dtype=np.float64) for part in zip(*losses, strict=True))
    low, high = loss_limits([(at, values)], target)
    edges = high - (high - low) / ROWS * np.arange(ROWS + 1)  # losses at the borders of rows, from above
    row_of_target = None if target is None else min(int((high - target) / (high - low) * ROWS), ROWS - 1)
    labels = [f"{edges[0]:.4g}", *[""] * (ROWS - 1)]
    if row_of_target is not None:
        labels[row_of_target] = f"target {target:g}"
    label = max(map(len, labels))
    width = min(columns, COLUMNS) - label - 1
    if width < 8:
        return None
    here = steps * (np.arange(width) + 0.5) / width
    curve = np.interp(here, at, values)
    drawn = here - 0.5 * steps / width <= at[-1]  # cells that have begun
    cells, dash = (ASCII, "-") if ascii else (BLOCKS, "╌")
    text = Text(no_wrap=True, overflow="crop")
    for row in range(ROWS):
        filled = np.clip((curve - edges[row + 1]) / (edges[row] - edges[row + 1]), 0.0, 1.0)
        filled = np.where(drawn, np.rint(filled * (len(cells) - 1)).astype(int), 0)
        line = "".join(cells[level] for level in filled)
        area = len(line.rstrip())
        text.append(f"{labels[row]:>{label}} ", "dim").append(line[:area], "cyan")
        text.append(dash * (width - area) if row == row_of_target else "", "dim")
        text.append("\n" if row < ROWS - 1 else "")
    return text
