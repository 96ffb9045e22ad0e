"""``jspeed plan``: memory, kernels, communication, predicted time and findings of a recipe on
absent GPUs."""

import gc
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jspeed.base.files import write_whole
from jspeed.base.standard_streams import without_logs
from jspeed.cli.flags import Command, check_folders, refuse
from jspeed.errors import BadInput
from jspeed.fields import Axes, Count, Fields, File, Wants
from jspeed.parallel import DEFAULT_LAYOUT
from jspeed.recipes import known_recipes

if TYPE_CHECKING:
    from jspeed.plan.compile import TargetPlacement
    from jspeed.recipe import Recipe


def plan(
    recipe: Annotated[str, Wants("RECIPE", positional=True)],
    target: Annotated[str, Wants("GPUS")] = "h100x8",
    layout: Annotated[str, Wants("NAME")] = DEFAULT_LAYOUT,
    mesh: Axes | None = None,
    micro_batch: Annotated[Count | None, Wants("TOKENS")] = None,
    host: Annotated[str | None, Wants("NAME=N,...")] = None,
    table: Annotated[str | None, Wants("PLACE")] = None,
    against: Annotated[str | None, Wants("RECIPE")] = None,
    compile: bool = True,
    search_: bool = False,
    bytes_: bool = False,
    evaluation: bool = False,
    strict: bool = False,
    json_: File | None = None,
    svg: File | None = None,
    html: File | None = None,
    set: Fields = (),
) -> int:
    """Predict memory, time and bottlenecks of a recipe on absent GPUs.

    Exit code: 0; 1 with --strict when a finding is an error or the recipe does not fit; 2 bad
    input.

    Args:
        recipe: Name of a recipe, path of a recipe file (FILE.py), or a published size without
            recipe, such as gpt2-xl.
        target: GPUs to plan for: h100x8, h200x1, a100x8, rtx4090x1, or h100x8x4 for 4 nodes of 8;
            or TPUs: v6ex8.
        layout: How parameters are sharded over the mesh: zero1, dp, fsdp, tp, fsdp+tp or pp; see
            jspeed run --help.
        mesh: Mesh axes and sizes, for example data=8 or data=4,model=2.
        micro_batch: Tokens per device in a micro-batch.
        host: The host of the devices, where a table lies that they do not hold: cores=16,memory=128
            (GB), and link=50 (GB/s a device); the target's usual one has what is left out.
        table: Where a table that is updated row by row lies, device or host; default: on the
            devices if it fits there.
        against: Another recipe to plan for the same target and micro-batch, and to compare with;
            --set is not its.
        compile: Compile the step; --no-compile prints only what formulas give: parameters, memory,
            FLOPs.
        search_: Compile the last stage with every layout and micro-batch, and print the table, best
            first.
        bytes_: Compile the last stage's step alone, and print the bytes it moves by source line,
            most first.
        evaluation: Compile the evaluation alone, and print its seconds and how many a run makes
            after its clock has stopped.
        strict: Exit with 1 when a finding is an error, or the recipe does not fit.
        json_: Write the plan as JSON.
        svg: Write a plot of the plan.
        html: Write a report that opens from disk.
        set: Replace fields of the recipe file.
    """
    add_installed_compiler()
    with without_logs():
        import jax

        from jspeed.parallel.mesh import check_xla_flags, parse_mesh
        from jspeed.plan.compile import place_on_gpus, place_on_target
        from jspeed.plan.describe import describe_evaluation, describe_traffic
        from jspeed.plan.estimates import PUBLISHED, abstract_mesh, published
        from jspeed.plan.host.choose import choose
        from jspeed.plan.make import candidates, make_plan, search
        from jspeed.plan.target import missing, parse_target
        from jspeed.plan.views import tables, terminal
        from jspeed.plan.views.plot import write_svg
        from jspeed.run.find_recipe import find

    check_xla_flags()
    # of this machine only, whatever plugins are installed
    jax.config.update("jax_platforms", "cpu")
    gc.freeze()  # programs are millions of objects: looking for cycles took 5 % of a profile
    gc.set_threshold(100_000, 50, 50)
    check_folders({"--json": json_, "--svg": svg, "--html": html})
    console = terminal.make_console()
    whole = {
        "--against": against,
        "--search": search_,
        "--strict": strict,
        "--svg": svg,
        "--html": html,
    }
    size = recipe in PUBLISHED and recipe not in known_recipes()
    if size or not compile:
        why = (
            f"the published size {recipe} is not compiled"
            if size
            else "--no-compile compiles nothing"
        )
        others = {"--bytes": bytes_, "--evaluation": evaluation, "--json": json_, "--host": host}
        others |= {"--table": table}
        refuse(whole | others, why)
    elif bytes_:
        refuse(whole | {"--evaluation": evaluation}, "--bytes compiles one step alone")
    elif evaluation:
        refuse(whole, "--evaluation compiles the evaluation alone")
    cluster, axes = parse_target(target), parse_mesh(mesh) if mesh is not None else None
    loaded = published(recipe, set) if size else find(recipe, set)
    absent = missing(cluster.target)
    if size or not compile or absent:
        devices = abstract_mesh(axes or {"data": cluster.devices}, cluster.devices)
        estimated = place_on_gpus(loaded.recipe, layout, devices, micro_batch)
        terminal.print_estimates(console, loaded.recipe, estimated, cluster.usable_bytes)
        if absent and compile and not size:
            raise BadInput(absent)
        return 0
    tell = terminal.Progress(console, cluster.name)

    def placed(recipe: "Recipe") -> "TargetPlacement":
        return place_on_target(recipe, cluster, layout, axes, micro_batch, tell)

    loaded, placement = choose(loaded, cluster, host, placed, table)
    if bytes_:
        moved = describe_traffic(loaded.recipe, placement)
        terminal.print_traffic(moved, console)
        write_json(json_, moved)
        return 0
    if evaluation:
        scored = describe_evaluation(loaded.recipe, placement)
        terminal.print_evaluation(scored, console)
        write_json(json_, scored)
        return 0
    if other := find(against) if against else None:
        other, beside = choose(other, cluster, None, placed)
    made = make_plan(loaded, placement)
    terminal.print_plan(made, console)
    if search_:
        made["search"] = search(loaded, candidates(loaded.recipe, cluster))
        terminal.print_table(console, tables.searched(made))
    if other:
        made["against"] = make_plan(other, beside)
        terminal.print_table(console, tables.compared(made["against"], made))
    write_json(json_, made)
    if svg:
        write_svg(svg, made)
    if html:
        terminal.write_html(html, made)
    print(
        f"report: {html.absolute().as_uri()}"
        if html
        else "for a report with all stages: --html FILE"
    )
    console.print(terminal.verdict(made), style="bold", markup=False, soft_wrap=True)
    failed = not made["fits"] or any(finding["level"] == "error" for finding in made["findings"])
    return 1 if strict and failed else 0


def add_installed_compiler() -> None:
    """Let JAX find the compiler that ``make test-aot`` keeps apart from other packages."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of what is missing without a GPU
    if "jax" not in sys.modules and (compiler := Path(sys.prefix, "aot")).is_dir():
        sys.path.append(str(compiler))


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    """Write what was found to ``path``, unless that is None."""
    if path:
        write_whole(path, json.dumps(content, indent=2) + "\n")


COMMAND = Command(
    plan,
    (
        "r29 --target h100x8  # what eight H100s would do; needs pip install 'jspeed[aot]'",
        "r29 --no-compile  # parameters, memory and FLOPs; needs no compiler",
        (
            "r21 --against r29 --html report.html  # what a change costs, as a report that opens"
            " from disk"
        ),
        "mine.py --target h100x8x4 --search  # the best layout and micro-batch on four nodes",
        "gpt2-xl --target a100x8  # a published size",
    ),
    {"hardware": "target layout mesh micro_batch host table", "output": "strict json_ svg html"},
)
