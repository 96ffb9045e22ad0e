"""A plan as tables for the terminal; a comparison of two plans; the table of a search."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

Plan = Mapping[str, Any]
LEVELS = {"error": "red", "warning": "yellow", "note": "dim"}


def make_console() -> Console:
    """The terminal; 120 columns where the output goes to a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def plan(made: Plan, console: Console | None = None) -> None:
    """Print a plan."""
    console = console or make_console()
    low, high = made["predicted_seconds"]
    step, cost = made["predicted_step_ms"], made["predicted_cost"]
    mesh = ",".join(f"{axis}={size}" for axis, size in made["mesh"].items())
    console.print(
        f"{made['recipe']} on {made['target']} ({made['devices']} x {made['device_kind']}, {made['nodes']} node"
        f"{'s' if made['nodes'] > 1 else ''}), mesh {mesh}, layout {made['layout']}, {made['parameters']:,} parameters"
    )
    console.print(made["fit"], style=None if made["fits"] else "red")
    _print(console, stage_table(made))
    console.print(
        f"predicted: {step[0]:.1f} to {step[1]:.1f} ms a step, {low:.0f} to {high:.0f} s to the target "
        f"(fitted {made['fitted_seconds']:.0f}), "
        f"${cost['low']:.2f} to ${cost['high']:.2f} at ${cost['per_device_hour']:.2f} a GPU and hour"
    )
    most = (
        f"{row['source']}, held up by {row['held_up_by']}: {row['seconds']:.1f} s ({row['share']:.0%})"
        for row in made["hindrances"][:3]
    )
    console.print("most of it: " + "; ".join(most))
    last = made["stages"][-1]
    _print(console, parts_table(last))
    if last["collectives"]:
        _print(console, sends_table(last))
    _print(console, buffers_table(last))
    _print(console, calibration_table(made))
    if "search" in made:
        _print(console, search_table(made))
    for finding in made["doctor"]:
        console.print(f"{finding['level']}: {finding['name']}: {finding['text']}", style=LEVELS[finding["level"]])
    for warning in made["warnings"]:
        if not any(warning.startswith(f"{finding['name']}:") for finding in made["doctor"]) and warning != made["fit"]:
            console.print(f"note: {warning}", style="dim")
    console.print("bounds: " + "; ".join(made["bounds"]), style="dim")
    console.print("guesses: " + "; ".join(made["guesses"]), style="dim")


def stage_table(made: Plan) -> Table:
    """Stage by stage: FLOPs, bytes, memory, milliseconds."""
    table = _table("stage", "steps", "tokens", "TFLOPs", "GB moved", "GB peak", "compute", "memory", "send")
    table.add_column("exposed ms", justify="right")
    table.add_column("predicted ms", justify="right")
    for stage in made["stages"]:
        time = stage["time_ms"]
        table.add_row(
            stage["name"] + ("" if stage["compiled"] else " *"),
            f"{stage['steps']:,}",
            f"{stage['tokens_per_step']:,}",
            f"{stage['flops'] / 1e12:.2f}",
            f"{stage['bytes_moved'] / 1e9:.1f}",
            f"{stage['memory_bytes']['peak'] / 1e9:.1f}",
            *(f"{time[kind]:.1f}" for kind in ("compute", "memory", "communication", "exposed_communication")),
            "{:.1f} - {:.1f}".format(*stage["predicted_ms"]),
        )
    table.caption = "a device and a step; compute, memory, sends: ms of the roofline; *: shares another stage's program"
    return table


def parts_table(stage: Plan) -> Table:
    """FLOPs by part of the model, and kernels."""
    table = _table("part", "TFLOPs", "share")
    for part, flops in stage["flops_by_part"].items():
        table.add_row(part, f"{flops / 1e12:.3f}", f"{flops / stage['flops']:.1%}")
    dtypes = ", ".join(f"{dtype} {flops / 1e12:.2f}" for dtype, flops in stage["flops_by_dtype"].items())
    kernels = ", ".join(f"{count} {kind}" for kind, count in stage["kernels"].items())
    table.caption = f"{stage['name']}; TFLOPs by dtype: {dtypes}; kernels: {kernels}"
    return table


def sends_table(stage: Plan) -> Table:
    """Every exchange between devices."""
    table = _table("exchange", "MB", "axis", "devices", "times", "async", "ms", "beside it", "exposed ms")
    for send in stage["collectives"]:
        table.add_row(
            f"{send['kind']} {send['dtype']}",
            f"{send['bytes'] / 1e6:.3f}" if send["bytes"] < 1e6 else f"{send['bytes'] / 1e6:.1f}",
            send["axis"],
            str(send["group"]),
            str(send["count"]),
            "yes" if send["async"] else "no",
            f"{send['ms']:.2f}",
            f"{send['compute_ms_between']:.2f}",
            f"{send['exposed_ms']:.2f}",
        )
    return table


def buffers_table(stage: Plan) -> Table:
    """The ten largest arrays, and memory by kind."""
    table = _table("array", "GB", "made at")
    for buffer in stage["largest_buffers"]:
        name = f"{buffer['dtype']}[{','.join(map(str, buffer['dims']))}]"
        table.add_row(name, f"{buffer['bytes'] / 1e9:.2f}", f"{buffer['source']} {buffer['op']}")
    kinds = ", ".join(f"{kind} {size / 1e9:.2f} GB" for kind, size in stage["memory_by_kind"].items())
    table.caption = f"largest arrays (some share memory); {kinds}"
    return table


def calibration_table(made: Plan) -> Table:
    """Published times beside predicted ones."""
    table = _table("published", "measured ms", "predicted ms", "error", "")
    for row in made["calibration"]:
        table.add_row(
            f"{row['recipe']}: {row['source']}",
            f"{row['measured_ms']:.1f}",
            "{:.0f} - {:.0f}".format(*row["predicted_ms"]),
            f"{row['error']:+.1%}",
            "fitted" if row["used_to_fit"] else "held out",
        )
    table.caption = "8xH100, programs of others; record 89 publishes 31.5 / 56.8 / 82.6 ms for its stages 1 to 3"
    return table


def search_table(made: Plan) -> Table:
    """Layouts and micro-batches, best first."""
    table = _table("layout", "mesh", "micro-batch", "GB peak", "fits", "predicted ms")
    for row in made["search"]:
        table.add_row(
            row["layout"],
            ",".join(f"{axis}={size}" for axis, size in row["mesh"].items()),
            f"{row['micro_batch_tokens']:,}",
            f"{row['peak_bytes'] / 1e9:.1f}",
            "yes" if row["fits"] else "no",
            "{:.1f} - {:.1f}".format(*row["predicted_ms"]),
        )
    return table


def changes(before: Plan, after: Plan) -> list[tuple[str, float, float]]:
    """What differs between two plans, means over their steps: (what, before, after)."""
    rows: list[tuple[str, float, float]] = []

    def row(name: str, get: Callable[[Plan], float]) -> None:
        rows.append((name, float(get(before)), float(get(after))))

    def means(name: str, get: Callable[[Plan], float]) -> None:
        row(name, lambda made: mean(made, get))

    row("parameters", lambda made: made["parameters"])
    row("steps", lambda made: sum(stage["steps"] for stage in made["stages"]))
    means("tokens a step", lambda stage: stage["tokens_per_step"])
    means("TFLOPs", lambda stage: stage["flops"] / 1e12)
    for part in dict.fromkeys(part for made in (before, after) for part in made["stages"][-1]["flops_by_part"]):
        means(f"TFLOPs of {part}", lambda stage, part=part: stage["flops_by_part"].get(part, 0.0) / 1e12)  # type: ignore[misc]
    means("GB moved", lambda stage: stage["bytes_moved"] / 1e9)
    means("GB sent", lambda stage: sum(send["bytes"] * send["count"] for send in stage["collectives"]) / 1e9)
    for kind in after["stages"][-1]["kernels"]:
        means(f"{kind} kernels", lambda stage, kind=kind: stage["kernels"][kind])  # type: ignore[misc]
    row("GB peak", lambda made: max(stage["memory_bytes"]["peak"] for stage in made["stages"]) / 1e9)
    for kind in ("compute", "memory", "exposed_communication"):
        name = f"{kind.replace('_', ' ')} ms"
        means(name, lambda stage, kind=kind: stage["time_ms"][kind])  # type: ignore[misc]
    for edge, name in enumerate(("low", "high")):
        row(f"predicted ms, {name}", lambda made, edge=edge: made["predicted_step_ms"][edge])  # type: ignore[misc]
        row(f"seconds to target, {name}", lambda made, edge=edge: made["predicted_seconds"][edge])  # type: ignore[misc]
    return rows


def comparison(before: Plan, after: Plan, console: Console | None = None) -> None:
    """Print what changed from one plan to another."""
    table = _table("a device", before["recipe"], after["recipe"], "change", "%")
    for name, old, new in changes(before, after):
        same = math.isclose(old, new, rel_tol=1e-4, abs_tol=1e-6)
        ratio = "" if same else f"{new / old - 1:+.1%}" if old else "new"
        table.add_row(name, _number(old), _number(new), "" if same else _number(new - old, "+"), ratio)
    table.caption = f"{after['recipe']} against {before['recipe']} on {after['target']}; means over all steps"
    _print(console or make_console(), table)


def mean(made: Plan, get: Callable[[Plan], float]) -> float:
    """Mean of something over the steps of all stages."""
    return sum(s["steps"] * get(s) for s in made["stages"]) / sum(s["steps"] for s in made["stages"])


def _print(console: Console, table: Table) -> None:
    """Print a table, its caption under it as wide as the terminal."""
    caption, table.caption = table.caption, None
    console.print(table)
    if caption:
        console.print(caption, style="dim")
    console.print()


def _number(value: float, sign: str = "") -> str:
    return f"{value:{sign},.0f}" if value == round(value) or abs(value) >= 1e4 else f"{value:{sign},.3f}"


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table
