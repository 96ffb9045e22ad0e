"""A plan as tables for the terminal; a comparison of two plans; the table of a search."""

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from jspeed.plan import predict
from jspeed.plan.views import compare

Plan = Mapping[str, Any]
BOUND = {predict.COMPUTE_BOUND: "compute-bound", predict.MEMORY_BOUND: "memory-bound"}
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
    largest = (
        f"{row['source']}, {BOUND[row['held_up_by']]}: {row['seconds']:.1f} s ({row['share']:.0%})"
        for row in made["hindrances"][:3]
    )
    console.print("bottlenecks: " + "; ".join(largest))
    last = made["stages"][-1]
    _print(console, parts_table(last))
    if last["collectives"]:
        _print(console, collectives_table(last))
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
    table = _table("stage", "steps", "tokens", "TFLOPs", "GB moved", "GB peak", "compute", "memory", "comm")
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
    table.caption = (
        "one device, one step; compute-bound kernels, memory-bound kernels, communication: ms of the roofline; "
        "*: shares another stage's program"
    )
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


def collectives_table(stage: Plan) -> Table:
    """Every collective of a stage."""
    table = _table("collective", "MB", "axis", "devices", "times", "async", "ms", "overlapping ms", "exposed ms")
    for one in stage["collectives"]:
        table.add_row(
            f"{one['kind']} {one['dtype']}",
            f"{one['bytes'] / 1e6:.3f}" if one["bytes"] < 1e6 else f"{one['bytes'] / 1e6:.1f}",
            one["axis"],
            str(one["group"]),
            str(one["count"]),
            "yes" if one["async"] else "no",
            f"{one['ms']:.2f}",
            f"{one['compute_ms_between']:.2f}",
            f"{one['exposed_ms']:.2f}",
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


def comparison(before: Plan, after: Plan, console: Console | None = None) -> None:
    """Print what changed from one plan to another."""
    table = _table(*compare.heading(before, after))
    for row in compare.rows(before, after):
        table.add_row(*row)
    table.caption = f"{after['recipe']} against {before['recipe']} on {after['target']}; means over all steps"
    _print(console or make_console(), table)


def _print(console: Console, table: Table) -> None:
    """Print a table, its caption under it as wide as the terminal."""
    caption, table.caption = table.caption, None
    console.print(table)
    if caption:
        console.print(caption, style="dim")
    console.print()


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table
