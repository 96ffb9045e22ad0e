"""Plan a recipe for absent GPUs: memory, kernels, communication, predicted time, bottlenecks, and findings."""

from jspeed.terminal import starts

starts(__name__)

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro
from tyro.conf import Positional, UseAppendAction, arg

from jspeed.errors import BadInput, run_script
from jspeed.files import write_whole
from jspeed.parallel.layout import DEFAULT_LAYOUT
from jspeed.parallel.mesh import parse_mesh
from jspeed.plan import chinchilla
from jspeed.plan.calculate import PRESETS, preset, verdict, widest_memory
from jspeed.plan.compile import MEMORY_FRACTION, Hardware, hardware_for
from jspeed.plan.plan import candidates, make_plan, require_devices, search
from jspeed.plan.target import Cluster, missing, parse_target
from jspeed.plan.views import terminal
from jspeed.plan.views.formulas import print_tables
from jspeed.plan.views.picture import plan_svg
from jspeed.plan.views.report import plan_html
from jspeed.recipe import Recipe
from jspeed.run.find import find, known_recipes


def plan(
    recipe: Positional[str | None] = None,
    target: str = "h100x8",
    layout: str = DEFAULT_LAYOUT,
    mesh: str | None = None,
    micro_batch: int | None = None,
    against: str | None = None,
    gpt3: bool = False,
    flops: float | None = None,
    compile: bool = True,
    search_: Annotated[bool, arg(name="search")] = False,
    strict: bool = False,
    json_: Annotated[Path | None, arg(name="json", metavar="FILE")] = None,
    svg: Annotated[Path | None, arg(metavar="FILE")] = None,
    html: Annotated[Path | None, arg(metavar="FILE")] = None,
    dollars_per_hour: float | None = None,
    memory_fraction: float = MEMORY_FRACTION,
    set: Annotated[UseAppendAction[tuple[tuple[str, ...], ...]], arg(metavar="FIELD=VALUE ...")] = (),
) -> int:
    """Predict memory, time and bottlenecks of a recipe on absent GPUs.

    Exit code: 0; 1 with --strict when the doctor finds an error or the recipe does not fit; 2 bad input.

    Args:
        recipe: Name of a recipe, path of a recipe file (FILE.py), or a published size without recipe, such as gpt2-xl.
        target: GPUs to plan for: h100x8, h200x1, a100x8, b200x8, or h100x8x4 for 4 nodes of 8.
        layout: How parameters are sharded over the mesh: zero1, dp, fsdp, tp, fsdp+tp or pp; see speedrun.py --help.
        mesh: Mesh axes and sizes, for example data=8 or data=4,model=2.
        micro_batch: Tokens a device takes at once.
        against: Another recipe to plan for the same target, and to compare with.
        flops: Say instead which size and how many tokens are best for so many FLOPs of training, such as 2.21e19.
        gpt3: The numbers of GPT-3 that need no compiler.
        compile: Compile; without, only what needs no compiler: parameters, memory, FLOPs, compute-optimal tokens.
        search_: Compile the last stage with every layout and micro-batch, and print the table, best first.
        strict: Exit with 1 when the doctor finds an error, or the recipe does not fit.
        json_: Write the plan as JSON.
        svg: Write a picture of the plan.
        html: Write a report that opens from disk.
        dollars_per_hour: Price of one GPU, instead of the guess in the target's file.
        memory_fraction: Share of a GPU's memory that JAX may take (XLA_PYTHON_CLIENT_MEM_FRACTION).
        set: Replace fields of the recipe file.
    """
    if flops is not None:
        refuse(["a recipe"] if recipe or gpt3 else [], "--flops asks which size is best")
        print("\n".join(chinchilla.best_sizes(flops)))
        return 0
    cluster = parse_target(target)
    check_numbers(memory_fraction, dollars_per_hour)
    sets = tuple(text for group in set for text in group)
    if gpt3 and recipe:
        raise BadInput(f"both {recipe} and --gpt3 say what to plan; give one of them")
    size = "gpt3" if gpt3 else recipe if recipe in PRESETS else None
    if size or not compile:
        compiled_only = {
            "--against": against, "--json": json_, "--svg": svg, "--html": html, "--search": search_ or None,
            "--mesh": mesh, "--dollars-per-hour": dollars_per_hour,
        }  # fmt: skip
        why = f"the published size {size} is not compiled" if size else "--no-compile compiles nothing"
        refuse([flag for flag, value in compiled_only.items() if value is not None], why)
    if size:
        refuse(["--set"] if sets else [], f"the published size {size} has no recipe file")
        return without_compiler(preset(size), layout, cluster, micro_batch, memory_fraction, strict)
    if recipe is None:
        raise BadInput(f"no recipe given; give one of {', '.join(known_recipes())}, a path, or --gpt3")
    found = find(recipe, sets)
    if not compile or missing():
        code = without_compiler(found.recipe, layout, cluster, micro_batch, memory_fraction, strict)
        if compile:
            raise BadInput(str(missing()))
        return code
    other = find(against) if against else None
    axes = parse_mesh(mesh) if mesh is not None else None

    def hardware_in(layout: str, axes: dict[str, int] | None) -> Hardware:
        return hardware_for(cluster, layout, axes, memory_fraction)

    hardware = hardware_in(layout, axes)
    for one in (found, other):
        if one:
            require_devices(one.recipe, hardware)
    made = make_plan(found, hardware, micro_batch, dollars_per_hour)
    if search_:
        made["search"] = search(found, candidates(found.recipe, cluster.devices, hardware_in))
    terminal.plan(made)
    if other:
        made["against"] = make_plan(other, hardware, None, dollars_per_hour)
        terminal.comparison(made["against"], made)
    if json_:
        write_whole(json_, json.dumps(made, indent=2) + "\n")
    if svg:
        plan_svg(svg, made)
    if html:
        plan_html(html, made)
    errors = [finding for finding in made["doctor"] if finding["level"] == "error"]
    return 1 if strict and (errors or not made["fits"]) else 0


def check_numbers(memory_fraction: float, dollars_per_hour: float | None) -> None:
    """Raise :class:`BadInput` for a share of memory or a price that cannot be; a NaN is neither."""
    if not 0 < memory_fraction <= 1:
        raise BadInput(f"--memory-fraction {memory_fraction}: expected a number above 0 and at most 1, such as 0.9")
    if dollars_per_hour is not None and not 0 <= dollars_per_hour < float("inf"):
        raise BadInput(f"--dollars-per-hour {dollars_per_hour}: expected a price of 0 or more, such as 2.5")


def refuse(flags: Sequence[str], why: str) -> None:
    """Raise :class:`BadInput` when ``flags`` were given that would have no effect."""
    if flags:
        raise BadInput(
            f"{why}, so {', '.join(flags)} would have no effect; leave {'it' if len(flags) == 1 else 'them'} out"
        )


def without_compiler(
    recipe: Recipe, layout: str, cluster: Cluster, micro_batch: int | None, fraction: float, strict: bool
) -> int:
    """Print what needs no compiler; return 1 if ``strict`` and the estimate does not fit."""
    limit = int(fraction * cluster.facts.hbm_bytes)
    print_tables(terminal.make_console(), recipe, layout, cluster.devices, micro_batch=micro_batch, memory=limit)
    likely = verdict(widest_memory(recipe, layout, cluster.devices, micro_batch), limit) == "likely"
    return 1 if strict and not likely else 0


def main() -> int:
    """Read the command line; JAX uses the CPU of this machine only, whatever plugins are installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    jax.config.update("jax_platforms", "cpu")
    return tyro.cli(plan)


if __name__ == "__main__":
    run_script(main)
