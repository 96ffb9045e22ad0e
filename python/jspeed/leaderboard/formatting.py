"""Numbers and devices of the board as text."""

from collections.abc import Mapping
from typing import Any

from jspeed.record.schema import Devices, Git

NONE = "-"


def seconds(value: float | None) -> str:
    """Return seconds with two decimals, one from 10 and none from 1,000; from ten hours as hours with one decimal."""
    if value is None:
        return NONE
    if value >= 36_000:
        return f"{value / 3600:.1f} h"
    return f"{value:,.0f} s" if value >= 1000 else f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"


def loss(value: float | None) -> str:
    """Return a loss with four decimals."""
    return NONE if value is None else f"{value:.4f}"


def short(count: float) -> str:
    """Return ``count`` with three digits and a prefix: 13.1M."""
    for size, unit in ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            value = count / size
            return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}{unit}"
    return f"{count:g}"


def devices(found: Devices) -> str:
    """Return devices as ``8 x NVIDIA H100 in 8 processes``."""
    among = f" in {found['processes']} processes" if found["processes"] > 1 else ""
    return f"{found['count']} x {found['kind']}{among}"


def same_devices(one: Devices, two: Devices) -> bool:
    """Whether two runs ran on one kind and number of devices, so that their seconds compare."""
    return (one["kind"], one["count"]) == (two["kind"], two["count"])


def commit(git: Git) -> str:
    """Return the short commit, with "+" when files differed from it, or "no commit"."""
    return f"{git['commit'][:8]}{'+' if git['dirty'] else ''}" if git["commit"] else "no commit"


def chance(p: float | None) -> str:
    """Return a p-value with two figures: ``p = 0.0035``."""
    if p is None:
        return "no p"
    return "p < 1e-9" if p < 1e-9 else f"p = {p:.2g}"


def ratio(found: Mapping[str, Any]) -> str:
    """Return a ratio of times with its interval: ``0.91 (0.88 to 0.94)``."""
    if found["low"] is None:
        return f"{found['ratio']:.3f}"
    return f"{found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})"
