"""Differences between two plans, as rows for the terminal and the report: means over the steps of all stages."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from jspeed.plan.views.formatting import fullest

Plan = Mapping[str, Any]


def heading(before: Plan, after: Plan) -> list[str]:
    """Column names of :func:`rows`."""
    return ["a device", before["recipe"], after["recipe"], "change", "%"]


def rows(before: Plan, after: Plan) -> list[list[str]]:
    """Return :func:`changes` as text."""
    found = []
    for name, old, new in changes(before, after):
        same = math.isclose(old, new, rel_tol=1e-4, abs_tol=1e-6)
        ratio = "" if same else f"{new / old - 1:+.1%}" if old else "new"
        found.append([name, _text(old), _text(new), "" if same else _text(new - old, "+"), ratio])
    return found


def changes(before: Plan, after: Plan) -> list[tuple[str, float, float]]:
    """Return (what, before, after)."""
    found: list[tuple[str, float, float]] = []

    def row(name: str, get: Callable[[Plan], float]) -> None:
        found.append((name, get(before), get(after)))

    def means(name: str, get: Callable[[Plan], float], unit: float = 1.0) -> None:
        row(name, lambda plan: _mean(plan, get) / unit)

    def last(field: str, *plans: Plan) -> list[str]:
        return list(dict.fromkeys(key for plan in plans for key in plan["stages"][-1][field]))

    row("parameters", lambda plan: plan["parameters"])
    row("steps", _steps)
    means("tokens a step", lambda stage: stage["tokens_per_step"])
    means("TFLOPs", lambda stage: stage["flops"], 1e12)
    for part in last("flops_by_part", before, after):
        means(f"TFLOPs of {part}", lambda stage, part=part: stage["flops_by_part"].get(part, 0.0), 1e12)  # type: ignore[misc]
    means("GB moved", lambda stage: stage["bytes_moved"], 1e9)
    means("GB communicated", lambda stage: sum(c["bytes"] * c["count"] for c in stage["collectives"]), 1e9)
    for kind in last("kernels", after):
        means(f"{kind} kernels", lambda stage, kind=kind: stage["kernels"][kind])  # type: ignore[misc]
    row("GB peak", lambda plan: fullest(plan)["memory_bytes"]["peak"] / 1e9)
    for kind in ("compute", "memory", "exposed_communication"):
        means(f"{kind.replace('_', ' ')} ms", lambda stage, kind=kind: stage["time_ms"][kind])  # type: ignore[misc]
    for edge, name in enumerate(("low", "high")):
        row(f"predicted ms, {name}", lambda plan, edge=edge: plan["predicted_step_ms"][edge])  # type: ignore[misc]
        row(f"seconds to target, {name}", lambda plan, edge=edge: plan["predicted_seconds"][edge])  # type: ignore[misc]
    return found


def _steps(plan: Plan) -> int:
    return sum(stage["steps"] for stage in plan["stages"])


def _mean(plan: Plan, get: Callable[[Plan], float]) -> float:
    """The mean over a plan's steps of ``get(stage)``."""
    return sum(stage["steps"] * get(stage) for stage in plan["stages"]) / _steps(plan)


def _text(value: float, sign: str = "") -> str:
    return f"{value:{sign},.0f}" if value == round(value) or abs(value) >= 1e4 else f"{value:{sign},.3f}"
