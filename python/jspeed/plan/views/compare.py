"""Differences between two plans, as rows for the terminal and the report: means over the steps of all stages."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from jspeed.plan.views.formatting import fullest

Plan = Mapping[str, Any]
Value = Callable[[Plan], float]


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
    parts = dict.fromkeys(part for plan in (before, after) for part in plan["stages"][-1]["flops_by_part"])
    values: dict[str, Value] = {
        "parameters": lambda plan: plan["parameters"],
        "steps": _steps,
        "tokens a step": _mean_of("tokens_per_step"),
        "TFLOPs": _mean_of("flops", unit=1e12),
        **{f"TFLOPs of {part}": _mean_of("flops_by_part", part, 1e12) for part in parts},
        "GB moved": _mean_of("bytes_moved", unit=1e9),
        "GB communicated": lambda p: _mean(p, lambda s: sum(c["bytes"] * c["count"] for c in s["collectives"])) / 1e9,
        **{f"{kind} kernels": _mean_of("kernels", kind) for kind in after["stages"][-1]["kernels"]},
        "GB peak": lambda plan: fullest(plan)["memory_bytes"]["peak"] / 1e9,
        "compute ms": _mean_of("time_ms", "compute"),
        "memory ms": _mean_of("time_ms", "memory"),
        "exposed communication ms": _mean_of("time_ms", "exposed_communication"),
        "predicted ms, low": lambda plan: plan["predicted_step_ms"][0],
        "seconds to target, low": lambda plan: plan["predicted_seconds"][0],
        "predicted ms, high": lambda plan: plan["predicted_step_ms"][1],
        "seconds to target, high": lambda plan: plan["predicted_seconds"][1],
    }
    return [(name, get(before), get(after)) for name, get in values.items()]


def _mean_of(field: str, key: str = "", unit: float = 1.0) -> Value:
    """The mean over the steps of a plan of a stage's ``field``, or of its ``key``."""
    return lambda plan: _mean(plan, lambda stage: stage[field].get(key, 0.0) if key else stage[field]) / unit


def _steps(plan: Plan) -> int:
    return sum(stage["steps"] for stage in plan["stages"])


def _mean(plan: Plan, get: Callable[[Plan], float]) -> float:
    """The mean over a plan's steps of ``get(stage)``."""
    return sum(stage["steps"] * get(stage) for stage in plan["stages"]) / _steps(plan)


def _text(value: float, sign: str = "") -> str:
    return f"{value:{sign},.0f}" if value == round(value) or abs(value) >= 1e4 else f"{value:{sign},.3f}"
