"""A run's terminal output: opening table, progress bar under a curve or plain lines, closing
summary."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import numpy as np
from jax.sharding import Mesh, NamedSharding
from rich.console import Console, ConsoleDimensions, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from jspeed.base.plots import loss_limits
from jspeed.errors import BadInput, nearest
from jspeed.parallel.describe import describe_layout, tiles
from jspeed.parallel.layout import partition
from jspeed.parallel.pipeline import bubble
from jspeed.recipe import Recipe, leaves
from jspeed.record.consistent import PROBES
from jspeed.record.schema import Unsealed, Validation
from jspeed.run.clock import now
from jspeed.run.compute.device import Placement

NARROW = 72  # columns
MOST = 1_000_000  # of a line that nothing wraps
LINES, COLUMNS = 8, 72  # of the plot of losses with its labels, at most
BLOCKS, ASCII = " ▁▂▃▄▅▆▇█", " .:|"  # a cell by how far it is filled from below


def opening(console: Console, lines: Sequence[tuple[str, str, str]]) -> None:
    """Print every derived number as name, value and formula: a table, or on a narrow terminal
    lines."""
    if console.width < NARROW:
        for name, formula, value in lines:
            console.print(
                Text.assemble(f"{name}  ", (value, "bold"), (f"\n  {formula}", "dim")),
                soft_wrap=True,
            )
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", style="bold", overflow="fold")
    table.add_column(style="dim", overflow="fold")
    for name, formula, value in lines:
        table.add_row(Text(name), Text(value), Text(formula))
    console.print(table)


def notes(console: Console, *lines: str | None) -> None:
    """Print what a user should know; None is nothing to say."""
    for line in filter(None, lines):
        console.print(f"note: {line}", markup=False, soft_wrap=True)


def by_stage(parts: Sequence[int]) -> str:
    """Write a number of each stage, equal neighbours once."""
    return " then ".join(str(part) for part, _ in itertools.groupby(parts))


def pipeline_note(mesh: Mesh, parts: int) -> str:
    """Describe the bubble of a pipeline."""
    stages = mesh.shape.get("pipe", 1)
    return (
        f" micro-batches through {stages} stages, bubble {bubble(stages, parts):.1%}"
        if stages > 1
        else ""
    )


@contextmanager
def waiting(console: Console, what: str) -> Iterator[None]:
    """Print ``what ...`` before, and the seconds it took after, work that prints nothing itself."""
    began = now()
    console.print(f"{what} ...", end="", style="dim")
    try:
        yield
    except BaseException:
        console.print()
        raise
    console.print(f" {now() - began:.1f} s", style="dim")


def layout_table(console: Console, recipe: Recipe, placement: Placement) -> None:
    """Print how each parameter is sharded, why some are not, and what a device holds in all."""
    table = Table(box=None, pad_edge=False)
    for name in ("parameter", "shape", "sharding", "shape per device", "MB per device"):
        table.add_column(
            name, justify="right" if name.startswith("MB") else "left", overflow="fold"
        )
    table.add_column("why not sharded", style="dim", overflow="fold")
    total = 0
    for *what, size, why in describe_layout(recipe, placement.layout, placement.mesh):
        total += size
        table.add_row(*map(Text, map(str, what)), f"{size / 1e6:,.3f}", Text(why))
    table.add_row("all", "", "", "", f"{total / 1e6:,.3f}", "", style="bold")
    console.print(
        f"layout {placement.layout}, mesh {dict(placement.mesh.shape)}",
        markup=False,
        soft_wrap=True,
    )
    print_whole(console, table)


def print_whole(console: Console, table: Table) -> None:
    """Print a table of which nothing is cut: a terminal gets wrapped cells, a file or pipe lines as
    long as needed."""
    least = 4 * len(table.columns) + 1  # a character in each, with its frame
    if not console.is_terminal:
        least = console.measure(table, options=console.options.update(width=MOST)).maximum
    # both, or a dumb terminal has 80
    console.size = ConsoleDimensions(max(console.width, least), console.height)
    console.print(table)


def tile_table(console: Console, recipe: Recipe, placement: Placement, name: str) -> None:
    """Print the tiles of one parameter with the devices that hold each. Raises :class:`BadInput`
    for another name."""
    table = dict(leaves(recipe.parameters))
    if name not in table:
        raise BadInput(
            f"--show-tiles {name}: recipe {recipe.name} has no such"
            f" parameter{nearest(name, table)}; it has {', '.join(table)}"
        )
    spec = table[name]
    sharding = NamedSharding(placement.mesh, partition(spec, placement.layout, placement.mesh))
    drawn = tiles(spec.shape, sharding)
    shapes = ["x".join(map(str, shape)) for shape in (spec.shape, sharding.shard_shape(spec.shape))]
    console.print(
        f"{name} {shapes[0]}, tiles of {shapes[1]} on devices", markup=False, soft_wrap=True
    )
    grid = Table(show_header=False, show_lines=True)
    for _ in drawn[0]:
        grid.add_column(overflow="fold")
    for cells in drawn:
        grid.add_row(*cells)
    print_whole(console, grid)


FILES = ("run.json", "metrics.jsonl", "loss.svg", "model.safetensors")  # that a run may leave


class Bar(Progress):
    """A progress bar below a plot; assign ``plot`` to redraw it."""

    plot: Text | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return what is drawn, from above."""
        if self.plot:
            yield self.plot
        yield from super().get_renderables()


class Display:
    """Shows training as a bar under a curve on a terminal, else as a plain line for about every
    twentieth step.

    Use as a context manager; :meth:`step` and :meth:`validation` take what the loop has just
    learned. ``target`` is the loss to reach, in nats per token.
    """

    def __init__(
        self, console: Console, steps: int, bar: bool, target: float | None = None
    ) -> None:
        self._console, self._steps, self._target = console, steps, target
        self._every = max(1, steps // 20)
        self._last = now(), 0
        self._tokens = 0
        self._rate = 0.0
        self._narrow = console.width < NARROW
        self._progress: Bar | None = None
        if bar and console.is_interactive:
            self._progress = Bar(
                TextColumn("step {task.completed}/{task.total}"),
                *([] if self._narrow else [BarColumn()]),
                TextColumn("{task.fields[text]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=console,
                refresh_per_second=2,
            )
            self._task = self._progress.add_task("training", total=steps, text="")

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            # the final evaluation leaves it on the screen, with its own point
            self._progress.plot = None
            self._progress.stop()

    def step(self, step: int, loss: float, tokens: int) -> None:
        """Show training loss (nats per token) after ``step`` steps and ``tokens`` tokens."""
        moment, self._tokens = now(), tokens
        if moment - self._last[0] > 1 or step == self._steps or not self._rate:
            self._rate = (tokens - self._last[1]) / max(moment - self._last[0], 1e-9)
            self._last = moment, tokens
        if self._progress:
            text = f"loss {loss:.4f}" + ("" if self._narrow else f"  {self._rate:,.0f} tokens/s")
            self._progress.update(self._task, completed=step, text=text)
        elif step % self._every == 0 or step == self._steps:
            self._console.print(
                f"step {step}/{self._steps}  loss {loss:.4f}  {self._rate:,.0f} tokens/s",
                highlight=False,
            )

    def validation(self, losses: Sequence[Validation], accuracy: float | None = None) -> None:
        """Show the last of the validation ``losses`` so far, with its ``accuracy``, and all as a
        plot where there is a bar: above it while it is shown, else printed once. The time since the
        last step is not training time."""
        step, loss, seconds = (
            losses[-1]["step"],
            losses[-1]["val_loss"],
            losses[-1]["timed_seconds"],
        )
        plot = self._plot(losses) if self._progress else None
        live = self._progress and self._progress.live.is_started
        if self._progress and live:
            self._progress.plot = plot
        self._console.print(
            f"step {step}/{self._steps}  [bold]validation {loss:.4f}[/]"
            + ("" if accuracy is None else f"  accuracy {accuracy:.2%}")
            + f"  at {seconds:.1f} s timed",
            highlight=False,
        )
        if plot and not live:
            self._console.print(plot)
        self._last = now(), self._tokens

    def _plot(self, losses: Sequence[Validation]) -> Text | None:
        # the bar and a few lines of what was said stay in sight
        if self._console.height < LINES + 8:
            return None
        points = [
            (point["step"], loss) for point in losses if (loss := point["val_loss"]) is not None
        ]
        ascii = self._console.options.ascii_only
        return curve_plot(points, self._steps, self._target, self._console.width, ascii)


def curve_plot(
    losses: Sequence[tuple[int, float]],
    steps: int,
    target: float | None,
    columns: int = COLUMNS,
    ascii: bool = False,
) -> Text | None:
    """Return ``losses``, points (step, nats per token) in order, as LINES lines; None where
    ``columns`` are too few.

    The area under the curve is filled, from step 0 at the left to ``steps`` at the right. It grows
    with the run, down to the dashed line of the ``target``. High losses of the first steps
    are clipped, as in loss.svg. Without ``ascii`` the terminal must support Unicode.
    """
    if not losses:
        return None
    at, values = (np.array(part, dtype=np.float64) for part in zip(*losses, strict=True))
    low, high = loss_limits([(at, values)], target)
    # losses at the borders of lines, from above
    edges = high - (high - low) / LINES * np.arange(LINES + 1)
    line_of_target = (
        None if target is None else min(int((high - target) / (high - low) * LINES), LINES - 1)
    )
    labels = [f"{edges[0]:.4g}", *[""] * (LINES - 1)]
    if line_of_target is not None:
        labels[line_of_target] = f"target {target:g}"
    label = max(map(len, labels))
    width = min(columns, COLUMNS) - label - 1
    if width < 8:
        return None
    here = steps * (np.arange(width) + 0.5) / width
    curve = np.interp(here, at, values)
    drawn = here - 0.5 * steps / width <= at[-1]  # cells that have begun
    cells, dash = (ASCII, "-") if ascii else (BLOCKS, "╌")
    text = Text(no_wrap=True, overflow="crop")
    for line in range(LINES):
        filled = np.clip((curve - edges[line + 1]) / (edges[line] - edges[line + 1]), 0.0, 1.0)
        filled = np.where(drawn, np.rint(filled * (len(cells) - 1)).astype(int), 0)
        shown = "".join(cells[level] for level in filled)
        area = len(shown.rstrip())
        text.append(f"{labels[line]:>{label}} ", "dim").append(shown[:area], "cyan")
        text.append(dash * (width - area) if line == line_of_target else "", "dim")
        text.append("\n" if line < LINES - 1 else "")
    return text


def closing(
    run: Unsealed, run_dir: Path, unit: str = "token", remarks: Sequence[str] = ()
) -> list[str]:
    """Return the last lines of a run as rich markup; the very last one holds loss, target, seconds
    (on the clock, and from the command to the result) and n.

    ``unit`` is what a token of its data stands for; ``remarks`` are notes on the run.
    """
    lines = []
    timed = run["timed_seconds"] or math.inf
    wait, dispatch = (
        run["host"][name] / timed for name in ("data_wait_seconds", "dispatch_seconds")
    )
    lines.append(
        f"[dim]host: {wait:.2%} of the timed seconds waiting for data, {dispatch:.2%} dispatching"
        " steps[/]"
    )
    lines.append(f"[dim]{loader_lines(run['loader'])}[/]")
    for name, verdict in run["probes"].items():
        if not verdict["passed"]:
            meant = f" ({PROBES[name]})" if name in PROBES else ""
            found = escape(f"{name}{meant} failed: {verdict}")
            lines.append(f"[bold red]validity check {found}; this run does not count[/]")
    if not run["probes"] and run["val_loss"] is not None:
        lines.append(
            "[dim]fewer steps than its schedule: this run does not count, nor is probed[/]"
        )
    written = [name for name in FILES if (run_dir / name).exists()]
    lines.append(f"[dim]{escape(str(run_dir))}: {', '.join(written)}[/]")
    ended = f"{run['status']} after {run['steps']} of {run['planned_steps']} steps"
    lines += [f"note: {escape(remark)}" for remark in remarks]
    loss, target = run["val_loss"], run["target_loss"]
    if loss is None:
        return [
            *lines,
            f"[bold]no final validation loss: {ended}, {run['timed_seconds']:.1f} s timed[/]",
        ]
    bits = f" ({loss / math.log(2):.3f} bits)" if unit == "byte" else ""
    line = (
        f"{loss:.4f} nats/{unit}{bits} {'<=' if loss <= target else '>'} {target} "
        f"in {run['timed_seconds']:.1f} s timed, {run['wall_seconds']:.1f} s in all; "
        f"compile {run['compile_seconds']:.1f} s; n=1"
    )
    return [*lines, f"[bold]{line}{'' if run['status'] == 'finished' else '; ' + ended}[/]"]


def loader_lines(stats: dict[str, float]) -> str:
    """Format :meth:`jspeed.data.TokenLoader.stats` as two lines that 80 columns hold."""
    p50, p99, longest = (1e3 * stats[f"wait_{name}"] for name in ("p50", "p99", "max"))
    return (
        f"loader: {stats['batches']:,} batches, {stats['bytes_read'] / 1e6:,.1f} MB read,"
        f" {stats['dropped_tokens']:,} tokens dropped, {stats['shard_switches']:,} shard switches\n"
        f"  waits p50 {p50:.3f}, p99 {p99:.3f}, longest {longest:.2f} ms; prefetch queue found"
        f" empty {stats['queue_empty']:,} times"
    )
