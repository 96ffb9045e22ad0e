"""Say what a recipe will do on GPUs that are not here: memory, kernels, sends, milliseconds, and what is wrong."""

import json
import os
from pathlib import Path
from typing import Annotated

import jax
import tyro
from tyro.conf import Positional, UseAppendAction, arg

from jspeed.errors import BadInput, run_script
from jspeed.files import write_whole
from jspeed.parallel.layout import DEFAULT_LAYOUT
from jspeed.parallel.mesh import parse_mesh
from jspeed.plan.calculate import PRESETS, preset
from jspeed.plan.compile import MEMORY_FRACTION, Rented, rent
from jspeed.plan.plan import make_plan, places, require_devices, search
from jspeed.plan.target import Cluster, missing, parse_target
from jspeed.plan.views import show
from jspeed.plan.views.picture import plan_svg
from jspeed.plan.views.report import plan_html
from jspeed.plan.views.tables import print_tables
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
    """Say what a recipe will do on GPUs that are not here.

    Exit code: 0; 1 with --strict when the doctor finds an error or the recipe does not fit; 2 bad input.

    Args:
        recipe: Name of a recipe, path of a recipe file (FILE.py), or a published size without recipe, such as gpt2-xl.
        target: GPUs to plan for: h100x8, h200x1, a100x8, b200x8, or h100x8x4 for 4 nodes of 8.
        layout: How parameters lie on the mesh: zero1, dp, fsdp, tp, fsdp+tp or pp; see speedrun.py --help.
        mesh: Mesh axes and sizes, for example data=8 or data=4,model=2.
        micro_batch: Tokens a device takes at once.
        against: Another recipe to plan for the same target, and to compare with.
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
    cluster = parse_target(target)
    sets = tuple(text for group in set for text in group)
    if gpt3 or recipe in PRESETS:
        return without_compiler(preset("gpt3" if gpt3 else str(recipe)), layout, cluster, micro_batch)
    if recipe is None:
        raise BadInput(f"no recipe given; give one of {', '.join(known_recipes())}, a path, or --gpt3")
    found = find(recipe, sets)
    if not compile or missing():
        without_compiler(found.recipe, layout, cluster, micro_batch)
        if compile:
            raise BadInput(str(missing()))
        return 0
    other = find(against) if against else None
    axes = parse_mesh(mesh) if mesh is not None else None

    def rent_as(layout: str, axes: dict[str, int] | None) -> Rented:
        return rent(cluster, layout, axes, memory_fraction)

    rented = rent_as(layout, axes)
    for one in (found, other):
        if one:
            require_devices(one.recipe, rented)
    made = make_plan(found, rented, micro_batch, dollars_per_hour)
    if search_:
        made["search"] = search(found, places(found.recipe, cluster.devices, rent_as))
    show.plan(made)
    if other:
        made["against"] = make_plan(other, rented, None, dollars_per_hour)
        show.comparison(made["against"], made)
    if json_:
        write_whole(json_, json.dumps(made, indent=2) + "\n")
    if svg:
        plan_svg(svg, made)
    if html:
        plan_html(html, made)
    errors = [finding for finding in made["doctor"] if finding["level"] == "error"]
    return 1 if strict and (errors or not made["fits"]) else 0


def without_compiler(recipe: Recipe, layout: str, cluster: Cluster, micro_batch: int | None) -> int:
    """Print what needs no compiler."""
    memory = cluster.facts.hbm_bytes
    print_tables(show.make_console(), recipe, layout, cluster.devices, micro_batch=micro_batch, memory=memory)
    return 0


def main() -> int:
    """Read the command line; on this machine JAX has its CPU only, whatever is installed, and CUDA need not say so."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    jax.config.update("jax_platforms", "cpu")
    return tyro.cli(plan)


if __name__ == "__main__":
    run_script(main)
