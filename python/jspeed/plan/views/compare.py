"""Differences between two plans, as rows for the terminal and the report: means over the steps of all stages."""

import math
from collections.abc import Iterable

from jspeed.plan.schema import Plan
from jspeed.plan.views.formatting import fullest


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
    old, new = (_values(plan, parts, after["stages"][-1]["kernels"]) for plan in (before, after))
    return [(name, old[name], new[name]) for name in new]


def _values(plan: Plan, parts: Iterable[str], kinds: Iterable[str]) -> dict[str, float]:
    """What is compared of a plan, with the FLOPs of these ``parts`` and the numbers of kernels of these ``kinds``."""
    stages = plan["stages"]
    steps = sum(stage["steps"] for stage in stages)

    def mean(values: Iterable[float]) -> float:
        return sum(stage["steps"] * value for stage, value in zip(stages, values, strict=True)) / steps

    return {
        "parameters": plan["parameters"],
        "steps": steps,
        "tokens a step": mean(stage["tokens_per_step"] for stage in stages),
        "TFLOPs": mean(stage["flops"] for stage in stages) / 1e12,
        **{
            f"TFLOPs of {part}": mean(stage["flops_by_part"].get(part, 0.0) for stage in stages) / 1e12
            for part in parts
        },
        "GB moved": mean(stage["bytes_moved"] for stage in stages) / 1e9,
        "GB communicated": mean(sum(c["bytes"] * c["count"] for c in stage["collectives"]) for stage in stages) / 1e9,
        **{f"{kind} kernels": mean(stage["kernels"].get(kind, 0) for stage in stages) for kind in kinds},
        "GB peak": fullest(plan)["memory_bytes"]["peak"] / 1e9,
        "compute ms": mean(stage["time_ms"]["compute"] for stage in stages),
        "memory ms": mean(stage["time_ms"]["memory"] for stage in stages),
        "exposed communication ms": mean(stage["time_ms"]["exposed_communication"] for stage in stages),
        "launch ms": mean(stage["time_ms"]["launches"] for stage in stages),
        "empty blocks ms": mean(stage["time_ms"]["empty_blocks"] for stage in stages),
        "predicted ms, low": plan["predicted_step_ms"][0],
        "seconds to target, low": plan["predicted_seconds"][0],
        "predicted ms, high": plan["predicted_step_ms"][1],
        "seconds to target, high": plan["predicted_seconds"][1],
    }


def _text(value: float, sign: str = "") -> str:
    return f"{value:{sign},.0f}" if value == round(value) or abs(value) >= 1e4 else f"{value:{sign},.3f}"
