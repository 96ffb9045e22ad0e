"""Print a plan, its memory traffic, estimates without a compiler, or any table; a plan also as a
page."""

import io
import sys
from pathlib import Path

import rich.table
from rich.console import Console
from rich.text import Text

from jspeed.base.files import write_whole
from jspeed.base.numbers import size
from jspeed.parallel.layout import gathered_per_layer
from jspeed.parallel.mesh import lane_shards
from jspeed.plan.estimates import memory, tokens_at_once
from jspeed.plan.schema import EvaluationPlan, Plan, Traffic
from jspeed.plan.views import tables
from jspeed.recipe import Recipe, leaves
from jspeed.record.sizes import describe
from jspeed.run.clock import now
from jspeed.run.compute.device import Placement
from jspeed.run.console import opening

PAGE_ONLY = ("matmuls", "numbers of the cost model", "facts of the device")
READABLE = 28  # characters of a column of words, at least
LEVELS = {"error": "red", "warning": "yellow", "note": "dim"}


def make_console() -> Console:
    """The terminal; 120 columns where the output goes to a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class Progress:
    """Prints what a compilation tells, as it starts and ends, with the seconds since the first
    began."""

    def __init__(self, console: Console, target: str) -> None:
        self._console, self._target = console, target
        self._began: float | None = None

    def __call__(self, words: str) -> None:
        """Print ``words``, from whichever thread compiles."""
        self._began = self._began or now()
        line = f"{now() - self._began:4.0f} s  {self._target}: {words}"
        self._console.print(line, style="dim", markup=False, soft_wrap=True)


def print_plan(made: Plan, console: Console, whole: bool = False) -> None:
    """Print a plan: the tables of the last stage that a reader wants first, or the ``whole``."""
    step, cost = made["predicted_step_ms"], made["predicted_cost"]
    expected = made["expected_seconds"]
    mesh = ",".join(f"{axis}={size}" for axis, size in made["mesh"].items())
    console.print(
        f"{made['recipe']} on {made['target']} ({made['devices']} x {made['device_kind']},"
        f" {made['nodes']} node{'s' if made['nodes'] > 1 else ''}), mesh {mesh}, layout"
        f" {made['layout']}, {made['parameters']:,} parameters"
    )
    if whole:
        console.print(" ".join((f"recipe {made['recipe_hash']}", *made["sets"])), style="dim")
    console.print(made["fit"], style=None if made["fits"] else "red")
    if host := made["host"]:
        console.print(
            f"on the host: tables of {host['table_bytes'] / 1e9:.1f} GB, with room for"
            f" {host['share']:.0%} of their rows, and buffers of {host['buffer_bytes'] / 1e9:.1f}"
            f" in {host['memory_bytes'] / 1e9:.0f} GB; {host['cores']:g} cores,"
            f" {host['link_bytes_per_second'] / 1e9:g} GB/s to a device; {host['exposed']:.1%} of"
            " the seconds wait for it"
        )
    print_table(console, tables.stages(made))
    console.print(
        f"predicted: {step[0]:.1f} to {step[1]:.1f} ms a step,"
        f" {tables.duration(made['predicted_seconds'])} to the target (expected"
        f" {tables.duration([expected])}), ${cost['low']:.2f} to"
        f" ${cost['high']:.2f} at ${cost['per_device_hour']:.2f} per device-hour"
    )
    made_of = (f"{row['term']} {row['share']:.0%}" for row in made["terms"])
    console.print(f"seconds by term: {', '.join(made_of)}; {made['guessed']:.0%} are guesses")
    largest = (
        f"{row['source']}, {row['bound']}-bound: {row['seconds']:.1f} s ({row['share']:.0%})"
        for row in made["bottlenecks"][:3]
    )
    console.print("bottlenecks: " + "; ".join(largest))
    for table in tables.tables(made if whole else {**made, "stages": made["stages"][-1:]}):
        if whole or table.title not in PAGE_ONLY:
            print_table(console, table)
    if len(made["stages"]) > 1 and not whole:
        console.print(f"tables are of {made['stages'][-1]['name']}", style="dim")
    for finding in made["findings"]:
        console.print(
            f"{finding['level']}: {finding['name']}: {finding['text']}",
            style=LEVELS[finding["level"]],
        )
    elsewhere = {
        made["fit"],
        *(f"{finding['name']}: {finding['text']}" for finding in made["findings"]),
    }
    for warning in made["warnings"]:
        if warning not in elsewhere:
            console.print(f"note: {warning}", style="dim")
    console.print("bounds: " + "; ".join(made["bounds"]), style="dim")
    console.print("guesses: " + "; ".join(made["guesses"]), style="dim")


def verdict(made: Plan) -> str:
    """Return the line that a plan ends with: whether it fits, how long it takes, what it costs."""
    cost = made["predicted_cost"]
    peak, limit = tables.fullest(made)["memory_bytes"]["peak"], made["memory_limit_bytes"]
    return (
        f"{made['recipe']} on {made['target']} {'fits' if made['fits'] else 'does not fit'}"
        f" ({peak / 1e9:.1f} of {limit / 1e9:.1f} GB): predicted"
        f" {tables.duration(made['predicted_seconds'])}, ${cost['low']:.2f} to ${cost['high']:.2f}"
    )


def write_html(path: Path, made: Plan) -> None:
    """Write a whole plan to ``path`` as one page without a script. Raises BadInput when it
    cannot."""
    console = Console(highlight=False, record=True, file=io.StringIO(), width=160)
    print_plan(made, console, whole=True)
    write_whole(path, console.export_html())


def print_estimates(
    console: Console,
    recipe: Recipe,
    placement: Placement,
    limit: int,
) -> None:
    """Print what needs no compiler, with its formulas: counts of ``recipe``, and the memory of its
    longest stage.

    ``limit``: bytes of a device that a step may take.
    """
    stage = max(recipe.stages, key=lambda stage: stage.lane_len)
    mesh, layout = placement.mesh, placement.layout
    need = memory(recipe, stage, placement)
    tokens = tokens_at_once(recipe, stage, placement)
    by_layer = any(each for _, each in leaves(gathered_per_layer(recipe, layout)))
    whole = "unsharded" + ", of the layers one at a time" * by_layer
    why = f"{size(sum(need))} of {size(limit)}; compile to be sure"
    if need.fits(limit) == "no":
        why = (
            f"state and gathered parameters need {size(need.kept + need.gathered)} of {size(limit)}"
        )
        why += "; --layout fsdp gathers layer by layer" if recipe.alike and not by_layer else ""
    formulas = (
        "exact: stored, the master copy, sharded as jspeed run --show-layout shows",
        "exact: sharded as its parameters",
        (
            f"exact: {recipe.lanes // lane_shards(mesh)} lanes"
            f" x {recipe.lane_words(stage.lane_len)} tokens"
        ),
        f"bound: every parameter that is cast or gathered, {whole}",
        (
            f"bound: {whole} in the compute dtype, and sharded as stored; with several"
            " micro-batches also an fp32 sum"
        ),
        (
            f"estimate for {tokens:,} tokens: input and output of every matrix, a row of every"
            " table, logits twice"
        ),
    )
    rows = zip(need._fields, formulas, map(size, need), strict=True)
    console.print(Text(f"sizes of {recipe.name}", style="bold"))
    opening(console, describe(recipe))
    console.print(Text(f"\nmemory of one device of {mesh.size:,}, layout {layout}", style="bold"))
    opening(console, [*rows, ("all", "estimate: not all of it exists at once",
    size(sum(need))),
                      ("fits", why, need.fits(limit))])  # fmt: skip


def print_traffic(moved: Traffic, console: Console) -> None:
    """Print :func:`jspeed.plan.describe.describe_traffic`: its sums and its first 40 lines."""
    console.print(
        f"{moved['recipe']} on {moved['target']}: {moved['bytes'] / 1e9:.1f} GB and"
        f" {moved['flops'] / 1e12:.2f} TFLOP in {moved['kernels']} kernels,"
        f" {moved['roofline_ms']:.1f} ms (expected {moved['expected_ms']:.1f}),"
        f" {moved['peak_bytes'] / 1e9:.1f} GB of memory, micro-batch {tables.micro_batch(moved)}"
    )
    note = "One device, the last stage's step; seconds of the roofline; collectives are left out."
    print_table(console, tables.listing("bytes moved", moved["lines"][:40], note))


def print_evaluation(scored: EvaluationPlan, console: Console) -> None:
    """Print :func:`jspeed.plan.describe.describe_evaluation`."""
    one, all_ = scored["seconds"], scored["seconds_after_the_clock"]
    console.print(
        f"{scored['recipe']} on {scored['target']}: an evaluation of {scored['tokens']:,} tokens"
        f" takes {one[0]:.2f} s and {scored['peak_bytes'] / 1e9:.1f} GB a device;"
        f" after the clock has stopped a run makes {scored['after_the_clock']}: {all_[0]:.0f} s"
    )
    if one[1] > one[0]:
        console.print(
            f"at most {one[1]:.2f} s and {all_[1]:.0f} s: blocks of attention that find nothing to"
            " do, as many as documents as long as rows would have",
            style="dim",
        )


def print_table(console: Console, table: tables.Table) -> None:
    """Print a table with its title above and its note under it; nothing for one without rows.

    Columns that do not fit beside each other follow below, behind the first one again. Only words
    are wrapped.
    """
    if not table.rows:
        return
    console.print(Text(table.title, "bold"))
    for columns in side_by_side(table, console.width):
        shown = rich.table.Table(box=None, padding=(0, 1, 0, 0))
        for column in columns:
            numbers = table.numeric[column]
            shown.add_column(
                table.head[column],
                justify="right" if numbers else "left",
                overflow="fold",
                no_wrap=numbers,
            )
        for row in table.rows:
            shown.add_row(*(Text(row[column]) for column in columns))
        console.print(shown)
    if table.note:
        console.print(table.note, style="dim")
    console.print()


def side_by_side(table: tables.Table, width: int) -> list[list[int]]:
    """Divide the columns of ``table`` into groups that ``width`` characters hold, each with the
    first column; a column of words takes at least its longest word, or READABLE."""
    least = []
    for number, (name, numbers) in enumerate(zip(table.head, table.numeric, strict=True)):
        cells = [name, *(row[number] for row in table.rows)]
        longest = max(map(len, cells))
        words = max(len(word) for cell in cells for word in cell.split() or [""])
        least.append(1 + (longest if numbers else min(longest, max(words, READABLE))))
    groups = [[0]]
    for column in range(1, len(least)):
        if len(groups[-1]) > 1 and sum(least[each] for each in [*groups[-1], column]) > width:
            groups.append([0])
        groups[-1].append(column)
    return groups
