"""What changes from one plan to another, as rows for the terminal and the page: means over the steps of all stages."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from jspeed.plan.views.format import mapping, mappings, mean, number, span
from jspeed.plan.views.picture import fullest

Plan = Mapping[str, Any]


def heading(before: Plan, after: Plan) -> list[str]:
    """Column names of :func:`rows`."""
    return ["a device", str(before.get("recipe", "before")), str(after.get("recipe", "after")), "change", "%"]


def rows(before: Plan, after: Plan) -> list[list[str]]:
    """Return :func:`changes` as text."""
    found = []
    for name, old, new in changes(before, after):
        same = math.isclose(old, new, rel_tol=1e-4, abs_tol=1e-6)
        ratio = "" if same else f"{new / old - 1:+.1%}" if old else "new"
        found.append([name, _text(old), _text(new), "" if same else _text(new - old, "+"), ratio])
    return found


def changes(before: Plan, after: Plan) -> list[tuple[str, float, float]]:
    """Return (what, before, after); what either plan lacks is left out."""
    found: list[tuple[str, float, float]] = []

    def row(name: str, get: Callable[[Plan], float | None]) -> None:
        old, new = get(before), get(after)
        if old is not None and new is not None:
            found.append((name, old, new))

    def means(name: str, get: Callable[[Plan], Any], unit: float = 1.0) -> None:
        def scaled(plan: Plan) -> float | None:
            value = mean(plan, get)
            return None if value is None else value / unit

        row(name, scaled)

    def edge(plan: Plan, key: str, which: int) -> float | None:
        bounds = span(plan.get(key))
        return bounds[which] if bounds else None

    row("parameters", lambda plan: number(plan.get("parameters")))
    row("steps", lambda plan: sum(number(stage.get("steps")) or 0.0 for stage in mappings(plan.get("stages"))))
    means("tokens a step", lambda stage: stage.get("tokens_per_step"))
    means("TFLOPs", lambda stage: stage.get("flops"), 1e12)
    for part in _keys("flops_by_part", before, after):
        means(f"TFLOPs of {part}", lambda stage, part=part: mapping(stage.get("flops_by_part")).get(part, 0.0), 1e12)  # type: ignore[misc]
    means("GB moved", lambda stage: stage.get("bytes_moved"), 1e9)
    means("GB communicated", _communicated, 1e9)
    for kind in _keys("kernels", after):
        means(f"{kind} kernels", lambda stage, kind=kind: mapping(stage.get("kernels")).get(kind))  # type: ignore[misc]
    row("GB peak", _peak)
    for kind in ("compute", "memory", "exposed_communication"):
        name = f"{kind.replace('_', ' ')} ms"
        means(name, lambda stage, kind=kind: mapping(stage.get("time_ms")).get(kind))  # type: ignore[misc]
    for which, name in enumerate(("low", "high")):
        row(f"predicted ms, {name}", lambda plan, which=which: edge(plan, "predicted_step_ms", which))  # type: ignore[misc]
        row(f"seconds to target, {name}", lambda plan, which=which: edge(plan, "predicted_seconds", which))  # type: ignore[misc]
    return found


def _keys(field: str, *plans: Plan) -> list[str]:
    """Every key that the last stage of a plan has under ``field``."""
    last = [stages[-1] for plan in plans if (stages := mappings(plan.get("stages")))]
    return list(dict.fromkeys(key for stage in last for key in mapping(stage.get(field))))


def _communicated(stage: Plan) -> float | None:
    if "collectives" not in stage:
        return None
    return sum(
        (number(c.get("bytes")) or 0.0) * (number(c.get("count")) or 0.0) for c in mappings(stage["collectives"])
    )


def _peak(plan: Plan) -> float | None:
    peak = number(mapping(fullest(plan).get("memory_bytes")).get("peak"))
    return None if peak is None else peak / 1e9


def _text(value: float, sign: str = "") -> str:
    return f"{value:{sign},.0f}" if value == round(value) or abs(value) >= 1e4 else f"{value:{sign},.3f}"
