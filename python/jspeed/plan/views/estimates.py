"""Print estimates that need no compiler: parameters, memory, FLOPs, each with its formula."""

import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console
from rich.text import Text

from jspeed.parallel.layout import gathered_per_layer, partition, sharded_dim
from jspeed.parallel.mesh import row_shards
from jspeed.plan import estimates
from jspeed.plan.views.formatting import short, size
from jspeed.recipe import ParamSpec, Recipe, leaves
from jspeed.run.output.console import opening
from jspeed.sizes import active_matmul_parameters, flops_per_token, is_matrix, matmul_parameters, parameter_count

Row = tuple[str, str, str]  # name, formula, value


def print_estimates(
    console: Console, recipe: Recipe, layout: str, mesh: Mesh, limit: int, micro_batch: int | None = None
) -> str:
    """Print the tables of :mod:`jspeed.plan.estimates`, a formula beside every value; return whether a step fits.

    ``limit`` are the bytes of a device that JAX may take; ``micro_batch`` the tokens of one (None: as training would
    choose on a GPU). Raises :class:`BadInput` as :func:`jspeed.plan.estimates.memory` does.
    """
    found = estimates.memory(recipe, estimates.longest_stage(recipe), layout, mesh, micro_batch)
    tables = {
        f"parameters of {recipe.name}": _parameter_rows(recipe),
        f"memory of one device of {mesh.size:,}, layout {layout}": _memory_rows(
            recipe, layout, mesh, found, limit, micro_batch
        ),
        "the same state under ZeRO-3 (evenly sharded)": _zero3_rows(recipe, mesh.size, limit),
        "FLOPs, forward and backward": _flops_rows(recipe),
    }
    for number, (title, rows) in enumerate(tables.items()):
        if number:
            console.print()
        console.print(Text(title, style="bold"))
        opening(console, rows)
    return estimates.verdict(found, limit)


def _parameter_rows(recipe: Recipe) -> list[Row]:
    def formula(spec: ParamSpec) -> str:
        rest = f", of which {spec.padding} are padding" if spec.padding else ""
        return " x ".join(f"{name} {size:,}" for name, size in zip(spec.axes, spec.shape, strict=True)) + rest

    rows = [(path, formula(spec), f"{spec.size:,}") for path, spec in leaves(recipe.parameters)]
    rows.append(("all", "sum", f"{parameter_count(recipe.parameters):,}"))
    matrices = ", ".join(path for path, spec in leaves(recipe.parameters) if is_matrix(spec))
    return [*rows, ("matmul parameters N", matrices, f"{matmul_parameters(recipe.parameters):,}")]


def _memory_rows(
    recipe: Recipe, layout: str, mesh: Mesh, found: estimates.Memory, limit: int, micro_batch: int | None
) -> list[Row]:
    stage = estimates.longest_stage(recipe)
    parts, at_once = estimates.micro_batching(recipe, stage, mesh, micro_batch)
    specs = leaves(recipe.parameters)
    rows = []
    for axis, ways in mesh.shape.items():
        if cut := [path for path, spec in specs if sharded_dim(partition(spec, layout, mesh), axis) is not None]:
            rows.append(f"1/{ways} of {', '.join(cut)}")
    where = "; ".join([*rows, "the rest replicated"]) if rows else "all replicated"
    a_token = found.activations // at_once
    computing = sorted({jnp.dtype(spec.compute or spec.dtype).name for _, spec in specs if is_matrix(spec)})
    lanes, total = recipe.lanes // row_shards(mesh), sum(found)
    by_layer = any(each for _, each in leaves(gathered_per_layer(recipe, layout)))
    whole = "unsharded" + ", of the layers one at a time" * by_layer
    fits = estimates.verdict(found, limit)
    why = f"{size(total)} of {size(limit)}; compile to be sure"
    if fits == "no":
        why = f"state and gathered parameters need {size(found.kept + found.gathered)} of {size(limit)}"
        if sum(estimates.zero3_bytes(parameter_count(recipe.parameters), mesh.size).values()) <= limit:
            fits = f"not in {layout}"
            why += "; evenly sharded, see below, the state fits"
            why += ": --layout fsdp gathers layer by layer" if recipe.alike and not by_layer else ""
    return [
        ("parameters", f"exact: stored, the master copy; {where}", size(found.parameters)),
        ("optimizer state", "exact: sharded as its parameters", size(found.optimizer)),
        (
            "batch",
            f"exact: {lanes} lanes x {stage.lane_len + 1} tokens x {recipe.data.dtype.itemsize} B",
            size(found.batch),
        ),
        ("gathered parameters", f"bound: every parameter that is cast or gathered, {whole}", size(found.gathered)),
        (
            "gradients",
            f"bound: {whole} in the compute dtype, sharded as stored" + ", fp32 sum" * (parts > 1),
            size(found.gradients),
        ),
        (
            "activations",
            f"estimate: {at_once:,} tokens x {a_token:,} B in {', '.join(computing)}: "
            "input and output of every matrix, a row of every table, logits twice",
            size(found.activations),
        ),
        *(
            [("  of one lane", f"the smallest micro-batch: {stage.lane_len:,} tokens", size(stage.lane_len * a_token))]
            if at_once > stage.lane_len
            else []
        ),
        ("all", "estimate: not all of it exists at once, and the compiler adds workspace", size(total)),
        ("fits", why, fits),
    ]


def _zero3_rows(recipe: Recipe, devices: int, limit: int) -> list[Row]:
    count = parameter_count(recipe.parameters)
    sizes = estimates.zero3_bytes(count, devices)
    rows = [
        (name, f"{each * devices / count:.0f} B x {count:,} / {devices}", size(each)) for name, each in sizes.items()
    ]
    total = sum(sizes.values())
    return [
        *rows,
        ("all", f"16 B x {count:,} / {devices}, without activations", size(total)),
        ("fits", f"{size(total)} of {size(limit)}, without activations", "yes" if total <= limit else "no"),
    ]


def _flops_rows(recipe: Recipe) -> list[Row]:
    first = recipe.stages[0]
    of_head = f", of a head {first.scored:,} rows" if first.scored else ""
    dense = short(6 * active_matmul_parameters(recipe, first))
    rows, whole = [("matmuls per token", f"6 x N{of_head}: 2 forward, 4 backward", dense)], 0.0
    for number, stage in enumerate(recipe.stages, 1):
        each, tokens = flops_per_token(recipe, stage), recipe.tokens_per_step(stage)
        whole += stage.steps * tokens * each
        name = f"stage {number}: " if len(recipe.stages) > 1 else ""
        keys = short(each - 6 * active_matmul_parameters(recipe, stage))
        rows.append((f"{name}attention per token", "12 x width x keys a query sees, each layer", keys))
        rows.append((f"{name}a step", f"{tokens:,} tokens x {short(each)}", short(tokens * each)))
    full = estimates.flops_without_mask(recipe, recipe.stages[-1])
    rows.append(("per token, mask ignored", "6 x N + 12 x layers x width x lane, as PaLM's MFU counts", short(full)))
    return [*rows, ("the run", "sum of steps x a step; the optimizer's own are not counted", short(whole))]
