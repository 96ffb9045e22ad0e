"""``jspeed plan``: memory, kernels, communication, predicted time and findings of a recipe on absent GPUs."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

from jspeed.commands.flags import Axes, Command, Fields, File, Wants, check_folders, refuse
from jspeed.errors import BadInput
from jspeed.files import write_whole
from jspeed.parallel import DEFAULT_LAYOUT
from jspeed.plan import MEMORY_FRACTION, TPU_MEMORY_FRACTION
from jspeed.run.recipe_names import known_recipes
from jspeed.standard_streams import importing

if TYPE_CHECKING:
    from jspeed.plan.compile import Hardware
    from jspeed.plan.target import Cluster
    from jspeed.recipe import Recipe


def plan(
    recipe: Annotated[str | None, Wants("RECIPE", positional=True)] = None,
    target: Annotated[str, Wants("GPUS")] = "h100x8",
    layout: Annotated[str, Wants("NAME")] = DEFAULT_LAYOUT,
    mesh: Axes | None = None,
    micro_batch: Annotated[int | None, Wants("TOKENS")] = None,
    against: Annotated[str | None, Wants("RECIPE")] = None,
    gpt3: bool = False,
    flops: Annotated[float | None, Wants("FLOPS")] = None,
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

    Exit code: 0; 1 with --strict when the doctor finds an error or the recipe does not fit; 2 bad input.

    Args:
        recipe: Name of a recipe, path of a recipe file (FILE.py), or a published size without recipe, such as gpt2-xl.
        target: GPUs to plan for: h100x8, h200x1, a100x8, rtx4090x1, or h100x8x4 for 4 nodes of 8; or TPUs: v6ex8.
        layout: How parameters are sharded over the mesh: zero1, dp, fsdp, tp, fsdp+tp or pp; see jspeed run --help.
        mesh: Mesh axes and sizes, for example data=8 or data=4,model=2.
        micro_batch: Tokens a device takes at once.
        against: Another recipe to plan for the same target, and to compare with.
        flops: Say instead which size and how many tokens are best for so many FLOPs of training, such as 2.21e19.
        gpt3: The numbers of GPT-3 that need no compiler.
        compile: Compile; without, only what needs no compiler: parameters, memory, FLOPs, compute-optimal tokens.
        search_: Compile the last stage with every layout and micro-batch, and print the table, best first.
        bytes_: Compile the last stage's step alone, and print the bytes it moves by source line, most first.
        strict: Exit with 1 when the doctor finds an error, or the recipe does not fit.
        json_: Write the plan as JSON.
        svg: Write a picture of the plan.
        html: Write a report that opens from disk.
        dollars_per_hour: Price of one GPU, instead of the guess in the target's file.
        memory_fraction: Share of a GPU's memory that JAX may take (XLA_PYTHON_CLIENT_MEM_FRACTION); default: 0.75, and
            0.93 of a TPU's.
        set: Replace fields of the recipe file.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of what it lacks where the GPU is absent
    with importing():
        import jax

        from jspeed.parallel.mesh import parse_mesh
        from jspeed.plan import chinchilla
        from jspeed.plan.compile import hardware_for
        from jspeed.plan.estimates import PRESETS, preset
        from jspeed.plan.plan import candidates, make_plan, require_devices, search
        from jspeed.plan.target import missing, parse_target
        from jspeed.plan.traffic import of_last_step
        from jspeed.plan.views import terminal
        from jspeed.plan.views.plot import plan_svg
        from jspeed.plan.views.report import plan_html
        from jspeed.run.find_recipe import find

    jax.config.update("jax_platforms", "cpu")  # of this machine only, whatever plugins are installed
    if flops is not None:
        refuse(["a recipe"] if recipe or gpt3 else [], "--flops asks which size is best")
        print("\n".join(chinchilla.best_sizes(flops)))
        return 0
    check_folders({"--json": json_, "--svg": svg, "--html": html})
    cluster = parse_target(target)
    if memory_fraction is None:
        memory_fraction = TPU_MEMORY_FRACTION if cluster.target.tpu else MEMORY_FRACTION
    check_numbers(memory_fraction, dollars_per_hour)
    if gpt3 and recipe:
        raise BadInput(f"both {recipe} and --gpt3 say what to plan; give one of them")
    size = "gpt3" if gpt3 else recipe if recipe in PRESETS else None
    if size or not compile:
        compiled_only = {
            "--against": against, "--json": json_, "--svg": svg, "--html": html, "--search": search_ or None,
            "--bytes": bytes_ or None, "--mesh": mesh, "--dollars-per-hour": dollars_per_hour,
        }  # fmt: skip
        why = f"the published size {size} is not compiled" if size else "--no-compile compiles nothing"
        refuse([flag for flag, value in compiled_only.items() if value is not None], why)
    if size:
        refuse(["--set"] if set else [], f"the published size {size} has no recipe file")
        return without_compiler(preset(size), layout, cluster, micro_batch, memory_fraction, strict)
    if recipe is None:
        raise BadInput(f"no recipe given; give one of {', '.join(known_recipes())}, a path, or --gpt3")
    found = find(recipe, set)
    absent = missing(cluster.target)
    if not compile or absent:
        code = without_compiler(found.recipe, layout, cluster, micro_batch, memory_fraction, strict)
        if compile:
            raise BadInput(str(absent))
        return code
    other = find(against) if against else None
    axes = parse_mesh(mesh) if mesh is not None else None

    def hardware_in(layout: str, axes: dict[str, int] | None) -> Hardware:
        return hardware_for(cluster, layout, axes, memory_fraction)

    hardware = hardware_in(layout, axes)
    for one in (found, other):
        if one:
            require_devices(one.recipe, hardware)
    if bytes_:
        whole = {"--against": against, "--svg": svg, "--html": html, "--search": search_ or None}
        refuse([flag for flag, value in whole.items() if value is not None], "--bytes compiles one step alone")
        moved = of_last_step(found.recipe, hardware, micro_batch)
        terminal.traffic(moved)
        if json_:
            write_whole(json_, json.dumps(moved, indent=2) + "\n")
        return 0
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
    terminal.last_line(html)
    errors = [finding for finding in made["doctor"] if finding["level"] == "error"]
    return 1 if strict and (errors or not made["fits"]) else 0


def check_numbers(memory_fraction: float, dollars_per_hour: float | None) -> None:
    """Raise :class:`BadInput` for a share of memory or a price that cannot be; a NaN is neither."""
    if not 0 < memory_fraction <= 1:
        raise BadInput(f"--memory-fraction {memory_fraction}: expected a number above 0 and at most 1, such as 0.9")
    if dollars_per_hour is not None and not 0 <= dollars_per_hour < float("inf"):
        raise BadInput(f"--dollars-per-hour {dollars_per_hour}: expected a price of 0 or more, such as 2.5")


def without_compiler(
    recipe: Recipe, layout: str, cluster: Cluster, micro_batch: int | None, fraction: float, strict: bool
) -> int:
    """Print what needs no compiler; return 1 if ``strict`` and the estimate does not fit."""
    from jspeed.plan.estimates import verdict, widest_memory
    from jspeed.plan.views import terminal
    from jspeed.plan.views.estimates import print_tables

    limit = int(fraction * cluster.facts.hbm_bytes)
    print_tables(terminal.make_console(), recipe, layout, cluster.devices, micro_batch=micro_batch, memory=limit)
    likely = verdict(widest_memory(recipe, layout, cluster.devices, micro_batch), limit) == "likely"
    return 1 if strict and not likely else 0


COMMAND = Command(
    plan,
    (
        "r29 --target h100x8  # what eight H100s would do; needs pip install 'jspeed[aot]'",
        "r29 --no-compile  # parameters, memory and FLOPs; needs no compiler",
        "r21 --against r29 --html report.html  # what a change costs, as a page that opens from disk",
        "mine.py --target h100x8x4 --search  # the best layout and micro-batch on four nodes",
        "gpt2-xl --target a100x8  # a published size",
    ),
    {
        "hardware": ("target", "layout", "mesh", "micro_batch", "memory_fraction", "dollars_per_hour"),
        "output": ("json_", "svg", "html", "strict"),
    },
)
