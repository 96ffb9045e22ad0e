"""Numbers as text: SI prefixes, and the mark of a missing value."""

import math

NONE = "-"


def si(value: float, figures: int, gap: str = "", zeros: bool = False) -> str:
    """Return ``value`` with ``figures`` significant figures and an SI prefix after ``gap``:
    ``13.1M``.

    ``zeros`` keeps zeros at the end of a number that has a prefix: ``5.90T``. What is below 1,000
    has no prefix.
    """
    rounded = float(f"{value:.{figures - 1}e}")
    power = min(8, int(math.log10(rounded) // 3)) if rounded >= 1 else 0
    text = f"{value / 1000**power:{'#' if zeros and power else ''}.{figures}g}".rstrip(".")
    return f"{text}{gap}{'kMGTPEZY'[power - 1]}" if power else text


def size(value: float) -> str:
    """Return bytes as ``21.50 GB``, or in MB or kB where that would show nothing."""
    if value >= 1e8:
        return f"{value / 1e9:,.2f} GB"
    return f"{value / 1e6:.3g} MB" if value >= 1e5 else f"{value / 1e3:.3g} kB"
