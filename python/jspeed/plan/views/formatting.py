"""Format values of a plan as text for tables and plots."""

from collections.abc import Sequence

from jspeed.numbers import NONE, si
from jspeed.plan.schema import BufferRow, Plan, StagePlan


def fullest(plan: Plan) -> StagePlan:
    """Return the stage that needs most memory."""
    return max(plan["stages"], key=lambda stage: stage["memory_bytes"]["peak"])


def memory_by_kind(plan: Plan) -> dict[str, int]:
    """Return bytes by kind of the fullest stage, without kinds that have none."""
    return {kind: value for kind, value in fullest(plan)["memory_by_kind"].items() if value > 0}


def limits(plan: Plan) -> list[str]:
    """Return the warnings that are neither a finding nor the summary of memory, which both stand elsewhere."""
    elsewhere = {plan["fit"], *(f"{finding['name']}: {finding['text']}" for finding in plan["doctor"])}
    return [warning for warning in plan["warnings"] if warning not in elsewhere]


def array(buffer: BufferRow) -> str:
    """Return a buffer's dtype and dimensions."""
    return f"{buffer['dtype']}[{shape(buffer['dims'])}]"


def shape(dims: Sequence[int]) -> str:
    """Return dimensions as ``8 x 128``."""
    return " x ".join(map(str, dims))


def number(value: float | None, unit: float = 1.0) -> str:
    """Return three digits of ``value`` in ``unit``; ``-`` for None."""
    if value is None:
        return NONE
    value /= unit
    return f"{value:.3g}" if abs(value) < 1000 or abs(value) >= 1e6 else f"{value:,.0f}"


def size(value: float) -> str:
    """Return bytes as ``21.50 GB``, or in MB or kB where that would show nothing."""
    if value >= 1e8:
        return f"{value / 1e9:,.2f} GB"
    return f"{value / 1e6:.3g} MB" if value >= 1e5 else f"{value / 1e3:.3g} kB"


def short(value: float) -> str:
    """``7.27e8`` as ``727 M``: four figures and an SI prefix."""
    return si(value, 4, gap=" ")


def percent(value: float, whole: float) -> str:
    """Return ``value`` as a share of ``whole``."""
    share = 100 * value / whole
    return f"{share:.3g} %" if abs(share) >= 0.1 or not share else "under 0.1 %"


def range_text(span: Sequence[float], unit: str = "") -> str:
    """Return ``[low, high]`` as ``68 to 97 ms``."""
    low, high = span
    return f"{number(low)} to {number(high)} {unit}".rstrip()
