"""``jspeed bench gpu``: time each recipe's step (MFU, memory, kernels), or race recipes; steps.py
times."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benches.steps import ALL_STAGES, Row, Settings, measure_recipe, peak_flops
from benches.versus import race
from jspeed.base import accelerators
from jspeed.base.accelerators import visible_gpus
from jspeed.base.files import write_whole
from jspeed.cli.flags import check_folders, refuse
from jspeed.data import find_split
from jspeed.errors import BadInput
from jspeed.fields import Count, Fields, File, Wants
from jspeed.parallel import DEFAULT_LAYOUT
from jspeed.parallel.mesh import make_mesh
from jspeed.recipe import Recipe
from jspeed.record import provenance
from jspeed.run.compute.device import Device, device_of, keep_freed_memory, platform_problem
from jspeed.run.find_recipe import find

RECIPES = ("llmc", "track3", "r21", "r29", "r62", "r89")
MFU_FORMULA = "FLOPs/token x tokens/s / (devices x peak dense bf16 FLOP/s)"
FLOPS_FORMULA = (
    "FLOPs/token = 6 x matmul parameters + 12 x width x keys a causal mask and the window leave x"
    " layers"
)


def gpu(
    recipe: Annotated[tuple[str, ...], Wants("RECIPE")] = (),
    steps: Count | None = None,
    data: Path | None = None,
    micro_batch: Count | None = None,
    attention: str | None = None,
    set: Fields = (),
    json_: File | None = None,
    versus: Annotated[str | None, Wants("CMD")] = None,
    rounds: Count | None = None,
    svg: File | None = None,
) -> int:
    """Measure one training step of recipes on the GPUs or TPUs there are; or race a recipe against
    another program.

    Steps are timed one by one (median, p99), and as many in a row without waiting for each, as a
    training run does. Of a recipe with many stages the first, the middle and the last are measured.
    Compile seconds are without a cache. With JAX_PLATFORMS=cpu the CPU is measured. Exit code: 1
    when a recipe could not be measured.

    Args:
        recipe: Names or paths; default: all of the records, with --versus r29.
        steps: Steps timed one by one, and again in a row; default 30.
        data: Folder of token shards; default: synthetic tokens, as frequent as words, on the
            devices already.
        micro_batch: Tokens per device in a micro-batch.
        attention: Attention backend instead of the device's: xla, triton, cudnn, cudnn_lanes or
            (TPU) splash.
        set: Replace fields of the recipe files.
        json_: Write everything here.
        versus: Shell command that trains on the same tokens (their folder is in JSPEED_DATA and
            DATA_PATH) and prints modded-nanogpt's log; whole training runs of both, in turn, and
            their losses against seconds.
        rounds: With --versus, runs of each: ours theirs, theirs ours, ...; default 1.
        svg: With --versus, draw the curves here.
    """
    check_folders({"--json": json_, "--svg": svg})
    if versus is not None:
        if data is None or len(recipe) > 1:
            raise BadInput(
                "--versus needs --data DIR, the tokens both train on, and at most one --recipe"
            )
        refuse({"--steps": steps}, "--versus runs whole trainings")
        # JAX would take its memory
        require_accelerator(bool(visible_gpus(os.environ) or accelerators.find().tpus))
        flags = {"--micro-batch": micro_batch, "--attention": attention}
        return race((recipe or ("r29",))[0], versus, data, rounds or 1, flags, set, json_, svg)
    if svg:
        raise BadInput("--svg draws the curves of --versus CMD; give both or neither")
    refuse({"--rounds": rounds}, "without --versus CMD every recipe is measured once")
    found = [find(name, set) for name in recipe or RECIPES]
    jax.config.update("jax_enable_compilation_cache", False)
    mesh = make_mesh()
    if mesh.devices.flat[0].platform == "cpu":
        require_accelerator(False)
        keep_freed_memory()
    shards = None if data is None else find_split(data, "train")
    setting = Settings(mesh, attention, micro_batch, steps or 30, shards)
    default = device_of(mesh, attention)
    console = Console(highlight=False, width=170)
    for line in opening(setting, default):
        console.print(f"[dim]{escape(line)}[/]")
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for each in found:
        own: list[Row] = []
        try:
            own.extend(measure_recipe(each.recipe, each.hash, setting))
        except BadInput as error:
            if len(found) == 1:
                raise
            failed[each.recipe.name] = str(error)
        except FloatingPointError as error:
            failed[each.recipe.name] = str(error)
        # out of memory, or a kernel that XLA could not build
        except jax.errors.JaxRuntimeError as error:
            failed[each.recipe.name] = failure_reason(error, each.recipe, mesh)
        show(console, each.recipe, own, setting, failed.get(each.recipe.name))
        rows += own
    if json_:
        content = {
            "devices": provenance.devices(),
            "versions": provenance.versions(),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "git": provenance.git(Path(__file__).parent),
            "kernels": {"attention": default.attention, "fp8": default.fp8},
            "data": str(data) if data else None,
            "peak_flops": peak_flops(mesh),
            "formulas": {"mfu": MFU_FORMULA, "flops_per_token": FLOPS_FORMULA},
            "failed": failed,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        write_whole(json_, json.dumps(content, indent=1) + "\n")
    return int(bool(failed))


def require_accelerator(there: bool) -> None:
    """Raise BadInput unless an accelerator is ``there`` or the user has said on which platform JAX
    computes."""
    if not there and not jax.config.values["jax_platforms"]:
        problem = platform_problem("cpu")
        raise BadInput(
            "bench gpu measures on a GPU or TPU and JAX uses none"
            f" here{f' ({problem})' if problem else ''}; JAX_PLATFORMS=cpu measures the CPU"
        )


def failure_reason(error: Exception, recipe: Recipe, mesh: Mesh) -> str:
    """Return the reason why XLA could not run a step."""
    reason = str(error).splitlines()[0]
    if "RESOURCE_EXHAUSTED" not in reason:
        return f"recipe {recipe.name} failed: {reason}"
    asked = re.search(r"allocating (\d+) bytes", reason)
    how_much = f": {int(asked[1]) / 1e9:.1f} GB were asked for at once" if asked else ""
    memory = f"the memory of {mesh.size} x {mesh.devices.flat[0].device_kind}"
    return (
        f"recipe {recipe.name} does not fit into {memory}{how_much}; give a smaller --micro-batch"
        f" or --set LANES=1, or measure it on GPUs (`python scripts/plan.py {recipe.name}` says how"
        " much it needs)"
    )


def opening(setting: Settings, device: Device) -> Iterator[str]:
    """Yield what all measurements share."""
    mesh = setting.mesh
    kind = mesh.devices.flat[0].device_kind
    yield (
        f"{mesh.size} x {kind}, layout {DEFAULT_LAYOUT}, FP8 {device.fp8}; attention as each recipe"
        " gets it"
    )
    tokens = (
        "token shards, through the loader"
        if setting.shards
        else "synthetic tokens, on the devices already"
    )
    yield (
        f"{setting.steps} steps one by one, then as many in a row; {tokens}; compiled without a"
        " cache"
    )
    if flops := peak_flops(mesh):
        yield f"MFU = {MFU_FORMULA}; peak {flops / 1e12:.1f} T; {FLOPS_FORMULA}"
    else:
        yield f"no MFU: the peak FLOP/s of '{kind}' are not in python/jspeed/plan/targets"


def show(
    console: Console, recipe: Recipe, rows: list[Row], setting: Settings, failure: str | None
) -> None:
    """Print the figures of one recipe and the kernels of each stage."""
    console.rule(f"[bold]{escape(recipe.name)}[/]", align="left")
    if len(recipe.stages) > ALL_STAGES:
        console.print(
            f"[dim]{len(recipe.stages)} stages: only the first, the middle and the last are"
            " measured[/]"
        )
    table = Table(box=None, pad_edge=False)
    for name in (
        *(
            "stage",
            "lanes x tokens",
            "window",
            "attention",
            "micro",
            "compile s",
            "median ms",
            "p99 ms",
            "in a row ms",
        ),
        *("tokens/s", "per device", "MFLOP/token", "MFU", "GB needed", "GB peak", "wait ms"),
        "loss",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.stage}/{row.stages}",
            f"{row.lanes} x {row.lane_len}",
            str(row.longest_window or "-"),
            row.attention,
            f"{row.micro_batches}"
            + (f", logits of {row.head_chunk:,}" if row.head_chunk else "")
            + ", layers recomputed" * row.remat,
            f"{row.compile_seconds:.1f}",
            f"{row.step_ms_median:.2f}",
            f"{row.step_ms_p99:.2f}",
            f"{row.step_ms_in_a_row:.2f}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.tokens_per_second_per_device:,.0f}",
            f"{row.flops_per_token / 1e6:.1f}",
            f"{row.mfu:.1%}" if row.mfu is not None else "-",
            f"{row.memory_needed / 1e9:.2f}",
            f"{row.memory_peak / 1e9:.2f}" if row.memory_peak is not None else "-",
            f"{row.data_wait_ms:.3f}" if row.data_wait_ms is not None else "-",
            f"{row.first_loss:.2f} to {row.loss:.2f}",
        )
    if rows:
        console.print(table)
    for row in rows:
        for part in kernel_table(row):
            console.print(part)
    if failure:
        console.print(f"[bold red]{escape(failure)}[/]")


def kernel_table(row: Row) -> Iterator[Table | str]:
    """The longest kernels of one step, or the reason why there are none."""
    seen = row.profile
    if isinstance(seen, str):
        yield f"[dim]stage {row.stage}: {escape(seen)}[/]"
        return
    device = escape(seen.device)
    yield (
        f"stage {row.stage}, one step on {device}: {seen.kernel_ms:.2f} ms in kernels, busy for"
        f" {seen.busy_ms:.2f} ms"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column(f"longest of {seen.distinct} kernels", no_wrap=True, max_width=100)
    for name in ("calls", "ms", "share"):
        table.add_column(name, justify="right")
    for kernel in seen.kernels:
        table.add_row(
            escape(kernel.name), str(kernel.calls), f"{kernel.ms:.3f}", f"{kernel.share:.1%}"
        )
    yield table
