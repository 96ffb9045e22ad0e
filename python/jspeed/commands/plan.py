"""``jspeed plan``: memory, kernels, communication, predicted time and findings of a recipe on absent GPUs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jspeed.commands.flags import Command, check_folders, refuse
from jspeed.errors import BadInput
from jspeed.fields import Axes, Fields, File, Wants
from jspeed.files import write_whole
from jspeed.parallel import DEFAULT_LAYOUT
from jspeed.plan import MEMORY_FRACTION, TPU_MEMORY_FRACTION
from jspeed.run.recipe_names import known_recipes
from jspeed.standard_streams import without_logs

if TYPE_CHECKING:
    from jspeed.recipe import Recipe

ESTIMATED = ("--micro-batch", "--mesh", "--memory-fraction", "--strict")  # what has an effect without a compiler


def plan(
    recipe: Annotated[str | None, Wants("RECIPE", positional=True)] = None,
    target: Annotated[str, Wants("GPUS")] = "h100x8",
    layout: Annotated[str, Wants("NAME")] = DEFAULT_LAYOUT,
    mesh: Axes | None = None,
    micro_batch: Annotated[int | None, Wants("TOKENS")] = None,
    against: Annotated[str | None, Wants("RECIPE")] = None,
    gpt3: bool = False,
    compile: bool = True,
    search_: bool = False,
    bytes_: bool = False,
    strict: bool = False,
    json_: File | None = None,
    svg: File | None = None,
    html: File | None = None,
    dollars_per_hour: Annotated[float | None, Wants("DOLLARS")] = None,
    memory_fraction: Annotated[float | None, Wants("SHARE")] = None,
    set: Fields = (),
) -> int:
    """Predict memory, time and bottlenecks of a recipe on absent GPUs.

    Exit code: 0; 1 with --strict when a finding is an error or the recipe does not fit; 2 bad input.

    Args:
        recipe: Name of a recipe, path of a recipe file (FILE.py), or a published size without recipe, such as gpt2-xl.
        target: GPUs to plan for: h100x8, h200x1, a100x8, rtx4090x1, or h100x8x4 for 4 nodes of 8; or TPUs: v6ex8.
        layout: How parameters are sharded over the mesh: zero1, dp, fsdp, tp, fsdp+tp or pp; see jspeed run --help.
        mesh: Mesh axes and sizes, for example data=8 or data=4,model=2.
        micro_batch: Tokens per device in a micro-batch.
        against: Another recipe to plan for the same target and micro-batch, and to compare with; --set is not its.
        gpt3: GPT-3 175B, without compiling.
        compile: Compile the step; --no-compile prints only what formulas give: parameters, memory, FLOPs.
        search_: Compile the last stage with every layout and micro-batch, and print the table, best first.
        bytes_: Compile the last stage's step alone, and print the bytes it moves by source line, most first.
        strict: Exit with 1 when a finding is an error, or the recipe does not fit.
        json_: Write the plan as JSON.
        svg: Write a plot of the plan.
        html: Write a report that opens from disk.
        dollars_per_hour: Price of one device, instead of the guess in the target's file.
        memory_fraction: Share of a device's memory that JAX may take (XLA_PYTHON_CLIENT_MEM_FRACTION); default: 0.75,
            and 0.93 of a TPU's.
        set: Replace fields of the recipe file.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of what is missing without a GPU
    if "jax" not in sys.modules and (compiler := Path(sys.prefix, "aot")).is_dir():  # which make test-aot keeps apart
        sys.path.append(str(compiler))
    with without_logs():
        import jax

        from jspeed.parallel.mesh import check_xla_flags, parse_mesh
        from jspeed.plan.compile import hardware_for
        from jspeed.plan.estimates import PRESETS, abstract_mesh, preset
        from jspeed.plan.plan import candidates, make_plan, require_devices, search
        from jspeed.plan.target import missing, parse_target
        from jspeed.plan.traffic import of_last_step
        from jspeed.plan.views import terminal
        from jspeed.plan.views.estimates import print_estimates
        from jspeed.plan.views.plot import plan_svg
        from jspeed.run.find_recipe import find

    check_xla_flags()
    jax.config.update("jax_platforms", "cpu")  # of this machine only, whatever plugins are installed
    given = {
        "--micro-batch": micro_batch, "--mesh": mesh, "--memory-fraction": memory_fraction, "--set": set or None,
        "--strict": strict or None, "--json": json_, "--svg": svg, "--html": html, "--search": search_ or None,
        "--bytes": bytes_ or None, "--against": against, "--dollars-per-hour": dollars_per_hour,
    }  # fmt: skip

    def only(usable: Collection[str], why: str) -> None:
        refuse([flag for flag, value in given.items() if value is not None and flag not in usable], why)

    check_folders({"--json": json_, "--svg": svg, "--html": html})
    cluster = parse_target(target)
    if memory_fraction is None:
        memory_fraction = TPU_MEMORY_FRACTION if cluster.target.tpu else MEMORY_FRACTION
    check_numbers(memory_fraction, dollars_per_hour)
    if gpt3 and recipe:
        raise BadInput(f"give either a recipe ({recipe}) or --gpt3")
    axes = parse_mesh(mesh) if mesh is not None else None

    def without_compiler(recipe: Recipe) -> int:
        """Print what needs no compiler; return 1 with --strict if the estimate does not fit."""
        limit = int(memory_fraction * cluster.facts.hbm_bytes)
        absent = abstract_mesh(axes or {"data": cluster.devices}, cluster.devices)
        fits = print_estimates(terminal.make_console(), recipe, layout, absent, limit, micro_batch)
        return 1 if strict and fits != "likely" else 0

    if gpt3 or (recipe in PRESETS and recipe not in known_recipes()):
        size = "gpt3" if gpt3 else str(recipe)
        refuse(["--set"] if set else [], f"the published size {size} has no recipe file")
        only(ESTIMATED, f"the published size {size} is not compiled")
        return without_compiler(preset(size))
    if not compile:
        only((*ESTIMATED, "--set"), "--no-compile compiles nothing")
    if recipe is None:
        raise BadInput(f"no recipe given; give one of {', '.join(known_recipes())}, a path, or --gpt3")
    found = find(recipe, set)
    if not compile:
        return without_compiler(found.recipe)
    if absent := missing(cluster.target):
        without_compiler(found.recipe)
        raise BadInput(absent)
    hardware = hardware_for(cluster, layout, axes, memory_fraction)
    require_devices(found.recipe, hardware)
    if bytes_:
        usable = ("--micro-batch", "--mesh", "--memory-fraction", "--set", "--json", "--bytes")
        only(usable, "--bytes compiles one step alone")
        moved = of_last_step(found.recipe, hardware, micro_batch)
        terminal.traffic(moved)
        if json_:
            write_whole(json_, json.dumps(moved, indent=2) + "\n")
        return 0
    other = find(against) if against else None
    if other:
        require_devices(other.recipe, hardware)
    made = make_plan(found, hardware, micro_batch, dollars_per_hour)
    terminal.plan(made)
    if search_:
        made["search"] = search(found, candidates(found.recipe, cluster, memory_fraction))
        terminal.searched(made)
    if other:
        made["against"] = make_plan(other, hardware, micro_batch, dollars_per_hour)
        terminal.comparison(made["against"], made)
    if json_:
        write_whole(json_, json.dumps(made, indent=2) + "\n")
    if svg:
        plan_svg(svg, made)
    if html:
        terminal.plan_html(html, made)
    terminal.last_line(html)
    errors = [finding for finding in made["doctor"] if finding["level"] == "error"]
    return 1 if strict and (errors or not made["fits"]) else 0


def check_numbers(memory_fraction: float, dollars_per_hour: float | None) -> None:
    """Raise :class:`BadInput` for a share of memory or a price that cannot be; a NaN is neither."""
    if not 0 < memory_fraction <= 1:
        raise BadInput(f"--memory-fraction {memory_fraction}: expected a number above 0 and at most 1, such as 0.9")
    if dollars_per_hour is not None and not 0 <= dollars_per_hour < float("inf"):
        raise BadInput(f"--dollars-per-hour {dollars_per_hour}: expected a price of 0 or more, such as 2.5")


COMMAND = Command(
    plan,
    (
        "r29 --target h100x8  # what eight H100s would do; needs pip install 'jspeed[aot]'",
        "r29 --no-compile  # parameters, memory and FLOPs; needs no compiler",
        "r21 --against r29 --html report.html  # what a change costs, as a report that opens from disk",
        "mine.py --target h100x8x4 --search  # the best layout and micro-batch on four nodes",
        "gpt2-xl --target a100x8  # a published size",
    ),
    {
        "hardware": ("target", "layout", "mesh", "micro_batch", "dollars_per_hour", "memory_fraction"),
        "output": ("strict", "json_", "svg", "html"),
    },
)
