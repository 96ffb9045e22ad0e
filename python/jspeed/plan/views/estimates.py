"""Tables that need no compiler: parameters, memory, FLOPs and compute-optimal tokens of a recipe, with formulas."""

from typing import NamedTuple

import jax.numpy as jnp
from rich.console import Console
from rich.text import Text

from jspeed.parallel import DEFAULT_LAYOUT
from jspeed.parallel.layout import partition, sharded_dim
from jspeed.plan import chinchilla, estimates
from jspeed.plan.views.formatting import short, size
from jspeed.recipe import ParamSpec, Recipe, leaves
from jspeed.run.output.console import opening
from jspeed.sizes import active_matmul_parameters, flops_per_token, is_matrix, matmul_parameters, parameter_count

Row = tuple[str, str, str]


class Table(NamedTuple):
    """A title and its rows: (name, value, formula)."""

    title: str
    rows: list[Row]


def tables(
    recipe: Recipe,
    layout: str = DEFAULT_LAYOUT,
    devices: int = 8,
    *,
    micro_batch: int | None = None,
    memory: int | None = None,
) -> list[Table]:
    """Return the numbers of :mod:`jspeed.plan.estimates` for ``recipe`` on ``devices``, with their formulas.

    ``micro_batch`` are tokens a device takes at once (None: as training would choose on a GPU); ``memory`` are the
    bytes of a device that JAX may take (None: not judged). Raises :class:`BadInput` as
    :func:`jspeed.plan.estimates.memory` does.
    """
    return [
        Table(f"parameters of {recipe.name}", _parameter_rows(recipe)),
        Table(
            f"memory of one device of {devices:,}, layout {layout}",
            _memory_rows(recipe, layout, devices, micro_batch, memory),
        ),
        Table(
            "the same state if it were sharded evenly (ZeRO-3), whatever the layout",
            _even_rows(recipe, devices, memory),
        ),
        Table("FLOPs, forward and backward", _flops_rows(recipe)),
        Table("compute-optimal tokens (Chinchilla's text, not FineWeb)", _token_rows(recipe)),
    ]


def print_tables(
    console: Console,
    recipe: Recipe,
    layout: str = DEFAULT_LAYOUT,
    devices: int = 8,
    *,
    micro_batch: int | None = None,
    memory: int | None = None,
) -> None:
    """Print :func:`tables`, every formula beside its value; raises :class:`BadInput` as that does."""
    for number, table in enumerate(tables(recipe, layout, devices, micro_batch=micro_batch, memory=memory)):
        if number:
            console.print()
        console.print(Text(table.title, style="bold"))
        opening(console, [(name, formula, value) for name, value, formula in table.rows])


def _parameter_rows(recipe: Recipe) -> list[Row]:
    def formula(spec: ParamSpec) -> str:
        rest = f", of which {spec.padding} are padding" if spec.padding else ""
        return " x ".join(f"{name} {size:,}" for name, size in zip(spec.axes, spec.shape, strict=True)) + rest

    rows = [(path, f"{spec.size:,}", formula(spec)) for path, spec in leaves(recipe.parameters)]
    rows.append(("all", f"{parameter_count(recipe.parameters):,}", "sum"))
    matrices = ", ".join(path for path, spec in leaves(recipe.parameters) if is_matrix(spec))
    return [*rows, ("matmul parameters N", f"{matmul_parameters(recipe.parameters):,}", matrices)]


def _memory_rows(recipe: Recipe, layout: str, devices: int, micro_batch: int | None, limit: int | None) -> list[Row]:
    stage = estimates.widest(recipe)
    found = estimates.memory(recipe, stage, layout, devices, micro_batch)
    parts, at_once = estimates.micro_batching(recipe, stage, devices, micro_batch)
    mesh = estimates.absent_mesh(devices)
    specs = leaves(recipe.parameters)
    cut = [path for path, spec in specs if sharded_dim(partition(spec, layout, mesh)) is not None]
    where = f"1/{devices} of {', '.join(cut)}; the rest replicated" if cut and devices > 1 else "all replicated"
    a_token = found.activations // at_once
    computing = sorted({jnp.dtype(spec.compute or spec.dtype).name for _, spec in specs if is_matrix(spec)})
    total = sum(found)
    rows = [
        ("parameters", size(found.parameters), f"exact: stored, the master copy; {where}"),
        ("optimizer state", size(found.optimizer), "exact: sharded as its parameters"),
        ("batch", size(found.batch), f"exact: {recipe.lanes // devices} lanes x {stage.lane_len + 1} tokens x 2 B"),
        ("gathered parameters", size(found.gathered), "bound: every parameter that is cast or gathered, unsharded"),
        (
            "gradients",
            size(found.gradients),
            "bound: unsharded in the compute dtype, sharded as stored" + ", fp32 sum" * (parts > 1),
        ),
        (
            "activations",
            size(found.activations),
            f"estimate: {at_once:,} tokens x {a_token:,} B in {', '.join(computing)}: "
            "input and output of every matrix, a row of every table, logits twice",
        ),
    ]
    if at_once > stage.lane_len:
        rows.append(
            ("  of one lane", size(stage.lane_len * a_token), f"the smallest micro-batch: {stage.lane_len:,} tokens")
        )
    rows.append(("all", size(total), "estimate: not all of it exists at once, and the compiler adds workspace"))
    if limit is None:
        return rows
    fits = estimates.verdict(found, limit)
    why = f"{size(total)} of {size(limit)}; compile to be sure"
    if fits == "no":
        why = f"state and gathered parameters need {size(found.kept + found.gathered)} of {size(limit)}"
    return [*rows, ("fits", fits, why)]


def _even_rows(recipe: Recipe, devices: int, limit: int | None) -> list[Row]:
    count = parameter_count(recipe.parameters)
    sizes = estimates.evenly_cut(count, devices)
    rows = [
        (name, size(each), f"{each * devices / count:.0f} B x {count:,} / {devices}") for name, each in sizes.items()
    ]
    total = sum(sizes.values())
    rows.append(("all", size(total), f"16 B x {count:,} / {devices}, without activations"))
    if limit is None:
        return rows
    return [*rows, ("fits", "yes" if total <= limit else "no", f"{size(total)} of {size(limit)}, without activations")]


def _flops_rows(recipe: Recipe) -> list[Row]:
    first = recipe.stages[0]
    of_head = f", of a head {first.scored:,} rows" if first.scored else ""
    dense = short(6 * active_matmul_parameters(recipe, first))
    rows, whole = [("matmuls per token", dense, f"6 x N{of_head}: 2 forward, 4 backward")], 0.0
    for number, stage in enumerate(recipe.stages, 1):
        each, tokens = flops_per_token(recipe, stage), recipe.tokens_per_step(stage)
        whole += stage.steps * tokens * each
        name = f"stage {number}: " if len(recipe.stages) > 1 else ""
        keys = short(each - 6 * active_matmul_parameters(recipe, stage))
        rows.append((f"{name}attention per token", keys, "12 x width x keys a query sees, each layer"))
        rows.append((f"{name}a step", short(tokens * each), f"{tokens:,} tokens x {short(each)}"))
    full = estimates.flops_without_mask(recipe, recipe.stages[-1])
    rows.append(("per token, mask ignored", short(full), "6 x N + 12 x layers x width x lane, as PaLM's MFU counts"))
    return [*rows, ("the run", short(whole), "sum of steps x a step; the optimizer's own are not counted")]


def _token_rows(recipe: Recipe) -> list[Row]:
    n, d = matmul_parameters(recipe.parameters), recipe.tokens
    parameters, tokens = chinchilla.best_for_flops(6 * n * d)
    slope, _ = chinchilla.line()
    fit = f"least L = {chinchilla.E} + {chinchilla.A} / N^{chinchilla.ALPHA} + {chinchilla.B} / D^{chinchilla.BETA}"
    return [
        ("tokens of the recipe", short(d), f"{d / n:.1f} per matmul parameter N"),
        ("rule of thumb", short(chinchilla.TOKENS_PER_PARAMETER * n), f"{chinchilla.TOKENS_PER_PARAMETER} x N"),
        ("approach 2", short(chinchilla.tokens_on_line(n)), f"line through table A3: D ~ N^{slope:.3f}"),
        ("approach 3", short(chinchilla.best_tokens(n)), fit),
        (
            "best for this compute",
            f"N {short(parameters)}, D {short(tokens)}",
            f"the same, with 6 N D = {short(6 * n * d)}",
        ),
    ]
