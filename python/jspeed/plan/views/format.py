"""Values of a plan, any of which may be missing, as text for tables and pictures."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from jspeed.markup import NONE as NONE
from jspeed.markup import printable as printable

UNITS = ((86_400, "days"), (3600, "h"), (60, "min"), (1, "s"))  # seconds in each


def number(value: Any) -> float | None:
    """Return ``value`` as a float if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def span(value: Any) -> tuple[float, float] | None:
    """Return ``[low, high]`` as two floats, else None."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    low, high = number(value[0]), number(value[1])
    return None if low is None or high is None else (low, high)


def mapping(value: Any) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def pairs(value: Any) -> list[tuple[str, Any]]:
    """Return the items of a mapping, none of anything else."""
    return list(mapping(value).items())


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """Return the mappings in a list, none of anything else."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def mean(plan: Mapping[str, Any], get: Callable[[Mapping[str, Any]], Any]) -> float | None:
    """Return the mean over a plan's steps of ``get(stage)``; None where a stage has no such number."""
    total, steps = 0.0, 0.0
    for stage in mappings(plan.get("stages")):
        found, times = number(get(stage)), number(stage.get("steps"))
        if found is None or times is None:
            return None
        total, steps = total + times * found, steps + times
    return total / steps if steps else None


def stage_name(stage: Mapping[str, Any]) -> str:
    """Return what a stage is called."""
    return str(stage.get("name", "a step"))


def array(buffer: Mapping[str, Any]) -> str:
    """Return a buffer's dtype and dimensions."""
    return f"{buffer.get('dtype', '')}[{shape(buffer.get('dims'))}]"


def shape(dims: Any) -> str:
    """Return dimensions as ``8 x 128``."""
    return " x ".join(str(n) for n in dims) if isinstance(dims, list | tuple) else NONE


def whole(value: Any) -> str:
    """Return a number without decimals, thousands apart."""
    found = number(value)
    return NONE if found is None else f"{round(found):,}"


def figures(value: Any, unit: float = 1.0) -> str:
    """Three figures of ``value`` in ``unit``."""
    found = number(value)
    if found is None:
        return NONE
    found /= unit
    return f"{found:.3g}" if abs(found) < 1000 or abs(found) >= 1e6 else f"{found:,.0f}"


def size(value: Any) -> str:
    """Return bytes as ``21.50 GB``, or in MB or kB where that would show nothing."""
    found = number(value)
    if found is None:
        return NONE
    if found >= 1e8:
        return f"{found / 1e9:,.2f} GB"
    return f"{found / 1e6:.3g} MB" if found >= 1e5 else f"{found / 1e3:.3g} kB"


def short(value: float) -> str:
    """``7.27e8`` as ``727 M``: four figures and an SI prefix."""
    power = max(0, min(8, math.floor(math.log10(max(value, 1)) / 3)))
    return f"{value / 1000**power:.4g} {' kMGTPEZY'[power]}".rstrip()


def percent(value: Any, whole: float) -> str:
    """Return ``value`` as a share of ``whole``."""
    found = number(value)
    if found is None or not whole:
        return NONE
    share = 100 * found / whole
    return f"{share:.3g} %" if abs(share) >= 0.1 or not share else "under 0.1 %"


def between(value: Any, unit: str) -> str:
    """Return ``[low, high]`` as ``68 to 97 ms``."""
    found = span(value)
    return NONE if found is None else f"{figures(found[0])} to {figures(found[1])} {unit}".rstrip()


def duration(value: Any) -> str:
    """Seconds as a range in the unit that suits its end."""
    found = span(value)
    if found is None:
        return NONE
    length, unit = next(unit for unit in UNITS if found[1] >= 2 * unit[0] or unit[0] == 1)
    return between([found[0] / length, found[1] / length], unit)
