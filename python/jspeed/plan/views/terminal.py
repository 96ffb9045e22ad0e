"""Print a plan, a comparison of two, the results of a search, or memory traffic as tables; a plan also as a page."""

import io
import sys
from pathlib import Path

import rich.table
from rich.console import Console
from rich.text import Text

from jspeed.files import write_whole
from jspeed.plan.schema import BytesPlan, Plan
from jspeed.plan.views.formatting import limits, number, range_text
from jspeed.plan.views.tables import Table, compared, micro_batch, stages, tables
from jspeed.plan.views.tables import searched as search_table

PAGE_ONLY = ("matmuls", "assumed fraction of the peak", "facts of the device")
LEVELS = {"error": "red", "warning": "yellow", "note": "dim"}


def make_console() -> Console:
    """The terminal; 120 columns where the output goes to a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def plan(made: Plan, console: Console | None = None, whole: bool = False) -> None:
    """Print a plan: the tables of the last stage that a reader wants first, or the ``whole``."""
    console = console or make_console()
    step, cost = made["predicted_step_ms"], made["predicted_cost"]
    mesh = ",".join(f"{axis}={size}" for axis, size in made["mesh"].items())
    console.print(
        f"{made['recipe']} on {made['target']} ({made['devices']} x {made['device_kind']}, {made['nodes']} node"
        f"{'s' if made['nodes'] > 1 else ''}), mesh {mesh}, layout {made['layout']}, {made['parameters']:,} parameters"
    )
    if whole:
        console.print(" ".join((f"recipe {made['recipe_hash']}", *made["sets"])), style="dim")
    console.print(made["fit"], style=None if made["fits"] else "red")
    show(console, stages(made))
    console.print(
        f"predicted: {step[0]:.1f} to {step[1]:.1f} ms a step, "
        f"{range_text(made['predicted_seconds'], 's')} to the target (fitted {number(made['fitted_seconds'])} s), "
        f"${cost['low']:.2f} to ${cost['high']:.2f} at ${cost['per_device_hour']:.2f} per device-hour"
    )
    largest = (
        f"{row['source']}, {row['bound']}-bound: {row['seconds']:.1f} s ({row['share']:.0%})"
        for row in made["bottlenecks"][:3]
    )
    console.print("bottlenecks: " + "; ".join(largest))
    for table in tables(made if whole else {**made, "stages": made["stages"][-1:]}):
        if whole or table.title not in PAGE_ONLY:
            show(console, table)
    if len(made["stages"]) > 1 and not whole:
        console.print(f"tables are of {made['stages'][-1]['name']}", style="dim")
    for finding in made["doctor"]:
        console.print(f"{finding['level']}: {finding['name']}: {finding['text']}", style=LEVELS[finding["level"]])
    for warning in limits(made):
        console.print(f"note: {warning}", style="dim")
    console.print("bounds: " + "; ".join(made["bounds"]), style="dim")
    console.print("guesses: " + "; ".join(made["guesses"]), style="dim")


def plan_html(path: Path, made: Plan) -> None:
    """Write a whole plan to ``path`` as one page without a script. Raises BadInput when it cannot."""
    console = Console(highlight=False, record=True, file=io.StringIO(), width=160)
    plan(made, console, whole=True)
    write_whole(path, console.export_html())


def searched(made: Plan, console: Console | None = None) -> None:
    """Print the table of a search."""
    show(console or make_console(), search_table(made))


def last_line(html: Path | None) -> None:
    """Print the address of the report, or how to have one."""
    if html:
        print(f"report: {html.absolute().as_uri()}")
    else:
        print("for a report with all stages: --html FILE")


def traffic(found: BytesPlan, console: Console | None = None) -> None:
    """Print :func:`jspeed.plan.traffic.of_last_step`: its sums and its first 40 lines."""
    console = console or make_console()
    console.print(
        f"{found['recipe']} on {found['target']}: {found['bytes'] / 1e9:.1f} GB and {found['flops'] / 1e12:.2f} TFLOP "
        f"in {found['kernels']} kernels, {found['roofline_ms']:.1f} ms (fitted {found['fitted_ms']:.1f}), "
        f"{found['peak_bytes'] / 1e9:.1f} GB of memory, micro-batch {micro_batch(found)}"
    )
    head = ["source", "pass", "kind", "kernels", "GB", "share", "ms"]
    rows = [
        [row["source"], row["pass"], row["kind"], str(row["kernels"]), f"{row['bytes'] / 1e9:.2f}",
         f"{row['bytes'] / found['bytes']:.1%}", f"{1e3 * row['seconds']:.2f}"]
        for row in found["lines"][:40]
    ]  # fmt: skip
    note = "One device, the last stage's step; ms of the roofline; collectives are left out."
    show(console, Table("bytes moved", head, rows, note))


def comparison(before: Plan, after: Plan, console: Console | None = None) -> None:
    """Print what changed from one plan to another."""
    title = f"{after['recipe']} against {before['recipe']} on {after['target']}; means over all steps"
    show(console or make_console(), compared(title, before, after))


def show(console: Console, table: Table) -> None:
    """Print a table with its title above and its note under it; nothing for one without rows."""
    if not table.rows:
        return
    shown = rich.table.Table(box=None, padding=(0, 1, 0, 0))
    for name, numbers in zip(table.head, table.numeric, strict=True):
        shown.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    console.print(Text(table.title, "bold"))
    console.print(shown)
    if table.note:
        console.print(table.note, style="dim")
    console.print()
