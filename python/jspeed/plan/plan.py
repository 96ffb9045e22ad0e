"""The ahead-of-time plan of one recipe on one target, as plain values (:class:`.schema.Plan`)."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jspeed.errors import BadInput
from jspeed.parallel.layout import LAYOUTS, check_layout, with_remat
from jspeed.parallel.mesh import batch_rows, make_mesh, row_shards
from jspeed.plan import findings, hlo, predict
from jspeed.plan.compile import (
    Hardware,
    Step,
    add_remat,
    compile_stages,
    hardware_for,
    step_of,
    tries,
    with_backend,
)
from jspeed.plan.cudnn import plans as cudnn
from jspeed.plan.describe import describe_stage
from jspeed.plan.schema import MatmulRow, Plan, SearchRow, StagePlan
from jspeed.plan.shard_map_checks import check_shard_map
from jspeed.plan.target import Cluster, Target, pretend
from jspeed.recipe import Recipe, leaves
from jspeed.run.compute import program
from jspeed.run.compute.device import USABLE
from jspeed.run.compute.division import divisions, micro_batches
from jspeed.run.compute.known_faults import has_cas_scatter
from jspeed.run.find_recipe import LoadedRecipe
from jspeed.sizes import parameter_count, scored_shape
from jspeed.stage import Stage

BOUNDS = [
    "memory is what the compiler allocates: exact for its program, without fragmentation",
    "FLOPs of matmuls are exact; those of attention are an upper bound: every document counts as long as the recipe "
    "allows",
    "no kernel is faster than its FLOPs at the peak rate or its bytes at the bandwidth",
    "training also compiles the evaluation, which is not planned",
]
GUESSES = [
    "fraction of the peak that a kernel reaches: " + ", ".join(f"{k} {v}" for k, v in predict.FRACTIONS.items()),
    "step time over roofline: one factor, fitted on published times of other programs for the same schedules",
    f"the range: {predict.SPREAD[0]} to {predict.SPREAD[1]} times the fitted time",
    "communication time: bytes over bandwidth, and between nodes a latency for every node",
    f"{1e6 * predict.GAP:g} us between kernels (in CUDA graphs; {1e6 * predict.GAP_WITHOUT_GRAPHS:g} without), and "
    f"{1e6 * predict.EMPTY_BLOCK:g} us of an SM for each block of attention that finds nothing to do",
    "the price",
]


def make_plan(loaded: LoadedRecipe, hardware: Hardware, micro_batch: int | None = None) -> Plan:
    """Compile every stage of a recipe for a target and return the plan.

    The micro-batch is the one that training would find, with ``micro_batch`` tokens or the first that fits. Raises
    :class:`BadInput` when the recipe cannot run there at all; that it needs too much memory is in the plan.
    """
    recipe, cluster = loaded.recipe, hardware.cluster
    hardware = with_backend(hardware, recipe)
    steps = compile_stages(recipe, hardware, micro_batch)
    last = add_remat(hardware) if steps[-1].remat else hardware
    stages = [describe_stage(recipe, hardware, number, step) for number, step in enumerate(steps, 1)]
    total = sum(stage["steps"] for stage in stages)
    seconds = [sum(s["steps"] * s["predicted_ms"][edge] for s in stages) / 1e3 for edge in (0, 1)]
    problems, matmuls = find_problems(recipe, last, steps[-1], stages)
    answers = ask_cudnn(steps, cluster.target)
    problems += findings.refused_by_cudnn(answers) if answers else ()
    price = cluster.facts.dollars_per_hour
    fits, summary = memory_summary(recipe, hardware, steps)
    return {
        "schema": 2,
        "recipe": recipe.name,
        "recipe_hash": loaded.hash,
        "sets": [f"{name}={value}" for name, value in loaded.overrides.items()],
        "target": cluster.name,
        "device_kind": cluster.target.device_kind,
        "devices": cluster.devices,
        "nodes": cluster.nodes,
        "mesh": dict(hardware.mesh.shape),
        "layout": hardware.layout,
        "attention": hardware.device.attention,
        "compiled": True,
        "programs": sum(not step.shared for step in steps),
        "parameters": parameter_count(recipe.parameters),
        "device_memory_bytes": cluster.facts.hbm_bytes,
        "memory_limit_bytes": hardware.limit,
        "fits": fits,
        "fit": summary,
        "facts": {**cluster.facts._asdict(), "per_node": cluster.per_node},
        "fractions": {**predict.FRACTIONS, "step": 1 / predict.slowdown()},
        "calibration": predict.calibration(),
        "stages": stages,
        "predicted_step_ms": [1e3 * edge / total for edge in seconds],
        "predicted_seconds": seconds,
        "fitted_seconds": sum(s["steps"] * s["fitted_ms"] for s in stages) / 1e3,
        "bottlenecks": predict.bottlenecks([(step.stage.steps, step.kernels) for step in steps], cluster),
        "predicted_cost": {
            "currency": "USD",
            "per_device_hour": price,
            "low": seconds[0] / 3600 * price * cluster.devices,
            "high": seconds[1] / 3600 * price * cluster.devices,
        },
        "cudnn": answers
        and {
            "version": answers.version,
            "calls": [{"call": call.words, **one._asdict()} for call, one in answers.by_call.items()],
        },
        "findings": [problem._asdict() for problem in problems],
        "matmuls": matmuls,
        "warnings": warnings(hardware, steps, max(stage["attention_workspace_bytes"] for stage in stages), answers)
        + ([] if fits else [summary])
        + [f"{f.name}: {f.text}" for f in problems if f.level != "note"],
        "bounds": BOUNDS,
        "guesses": GUESSES,
    }


def find_problems(
    recipe: Recipe, hardware: Hardware, step: Step, stages: Sequence[StagePlan]
) -> tuple[list[findings.Finding], list[MatmulRow]]:
    """Examine the last ``step`` and the stage with most exposed communication: (findings, matmuls of the step)."""
    mesh = hardware.mesh
    matmuls = findings.matmuls(step.kernels, ideal_flops(recipe, hardware, step.parts), hardware.cluster.devices)
    micro = stages[-1]["micro_batch_tokens"]
    specs = findings.by_path(recipe, hardware.layout, mesh)
    worst = max(stages, key=lambda stage: stage["time_ms"]["exposed_communication"] / stage["roofline_ms"])
    problems = [
        *findings.redundant(matmuls, step.kernels),
        *findings.mesh_axis_use(specs, batch_rows(mesh).spec, dict(mesh.shape)),
        *(check_shard_map(trace_last(recipe, hardware, mesh, step.parts)) if mesh.size > 1 else ()),
        *findings.replicated_parameters(recipe, specs, mesh),
        *findings.wide_logits(step.text, micro, narrow_vocabulary(recipe, step.stage)),
        *findings.exposed(worst["collectives"], worst["roofline_ms"], worst["name"]),
        *(findings.slow_scatters(step.text) if has_cas_scatter() else ()),
    ]
    for row in matmuls:
        row["source"] = hlo.short(row["source"])
    return problems, matmuls


def ask_cudnn(steps: Sequence[Step], target: Target) -> cudnn.Answers | None:
    """What the real cuDNN says of the steps' attention, where it is installed for plans and there is such attention."""
    if (site := cudnn.folder()) is None:
        return None
    calls = cudnn.calls(kernel.instruction for step in steps if not step.shared for kernel in step.kernels)
    return cudnn.ask(site, target, calls) if calls else None


def narrow_vocabulary(recipe: Recipe, stage: Stage) -> int | None:
    """Rows that a head scores whose matmul is not in fp32 by the recipe; None where all compute in fp32."""
    heads = [spec for _, spec in leaves(recipe.parameters) if "vocab" in spec.axes]
    narrow = [spec for spec in heads if jnp.dtype(spec.compute or spec.dtype).itemsize < 4]
    return max((scored_shape(spec, stage)[spec.axes.index("vocab")] for spec in narrow), default=None)


def trace_last(recipe: Recipe, hardware: Hardware, mesh: Mesh, parts: int) -> Any:
    """The jaxpr of the last stage's step over ``parts`` micro-batches, on ``mesh``."""
    with pretend(hardware.cluster.target):
        return program.trace_step(recipe, recipe.stages[-1], replace(hardware, mesh=mesh), parts).jaxpr


def ideal_flops(recipe: Recipe, hardware: Hardware, parts: int) -> dict[str, float]:
    """FLOPs of a step's matmuls by source line, on a single device, in micro-batches as large as those of the plan."""
    one = make_mesh({"data": 1}, list(hardware.mesh.devices.flat[:1]))
    return findings.ideal_flops(trace_last(recipe, hardware, one, parts * hardware.mesh.shape["data"]))


def memory_summary(recipe: Recipe, hardware: Hardware, steps: Sequence[Step]) -> tuple[bool, str]:
    """Return (whether every stage fits, a summary): what it needs, or what would fit, found by compiling."""
    worst = max(steps, key=lambda step: step.memory["peak"])
    need, limit = worst.memory["peak"], hardware.limit
    own = recipe.tokens_per_step(worst.stage) // hardware.mesh.shape["data"]
    tokens = own // worst.parts
    whole = hardware.cluster.facts.hbm_bytes
    have = f"{limit / 1e9:.1f} GB ({limit / whole:.0%} of {whole / 1e9:.1f})"
    if need <= limit:
        lane = worst.stage.lane_len
        pieces = f", lanes cut at document borders into {lane // tokens}" if tokens < lane else ""
        chunks = f", the head's loss in chunks of {worst.head_chunk:,}" if worst.head_chunk else ""
        again = ", layers recomputed for their gradients" if worst.remat else ""
        how = f"a micro-batch of {tokens:,} tokens{pieces}{chunks}{again}"
        return True, f"fits: {need / 1e9:.1f} of {have} a device with {how}"
    start = f"does not fit: {need / 1e9:.1f} GB a device with a micro-batch of {tokens:,} tokens, and there are {have}"
    numbers = [parts for parts in divisions(recipe, worst.stage, hardware.mesh) if parts > worst.parts]
    with pretend(hardware.cluster.target):
        smaller = next((one for one in tries(recipe, worst.stage, hardware, numbers) if one.fits(limit)), None)
    if smaller:
        flag = "--micro-batch " if len({stage.lane_len for stage in recipe.stages}) == 1 else "a micro-batch of "
        return False, f"{start}; {flag}{own // smaller.parts} needs {smaller.need / 1e9:.1f} GB and fits"
    if need <= USABLE * 0.95 * whole and not hardware.cluster.target.tpu:
        return False, f"{start}; XLA_PYTHON_CLIENT_MEM_FRACTION=.95 makes it fit"
    return (
        False,
        f"{start}; this is the smallest micro-batch of lanes of {worst.stage.lane_len:,} tokens: shorten them with "
        "--set, or use more or larger devices",
    )


def candidates(recipe: Recipe, cluster: Cluster) -> Iterator[Hardware]:
    """Yield ``cluster`` in every layout that fits ``recipe``, with 2 along the axis that it needs besides ``data``."""
    for layout, how in LAYOUTS.items():
        over = sorted(set(how.rules.values()) - {"data"})
        if over and cluster.devices % 2:
            continue
        hardware = hardware_for(cluster, layout, {"data": cluster.devices // 2, over[0]: 2} if over else None)
        try:
            require_devices(recipe, hardware)
        except BadInput:
            continue
        yield hardware


def search(loaded: LoadedRecipe, candidates: Iterable[Hardware]) -> list[SearchRow]:
    """Compile the last stage on all ``candidates``; best first, what does not fit last.

    The first micro-batch is the one that training would choose, then smaller ones until one fits. If none does and all
    layers are alike, remat is tried.
    """
    rows = []
    for hardware in (with_backend(candidate, loaded.recipe) for candidate in candidates):
        tried = list(search_layout(loaded.recipe, hardware))
        plain = [row for row in tried if row["fits"] and row["layout"] == hardware.layout]
        if not plain and loaded.recipe.alike:
            tried = [row for row in tried if row["layout"] == hardware.layout]  # with remat the largest, not the last
            tried += search_layout(loaded.recipe, add_remat(hardware))
        rows += tried
    return sorted(rows, key=lambda row: (not row["fits"], (row["predicted_ms"] or [math.inf])[0], row["peak_bytes"]))


def search_layout(recipe: Recipe, hardware: Hardware) -> Iterator[SearchRow]:
    """Compile the last stage's step as training would, with ever smaller micro-batches, and yield a row for each try.

    It ends with the first that fits.
    """
    last = recipe.stages[-1]
    tokens_per_device = recipe.tokens_per_step(last) // hardware.mesh.shape["data"]
    numbers = micro_batches(recipe, last, hardware.mesh, hardware.device, None)
    with pretend(hardware.cluster.target):
        for attempt in tries(recipe, last, hardware, numbers):
            fits, predicted = attempt.fits(hardware.limit), None
            if attempt.step:
                seconds = predict.times(step_of(last, attempt).kernels, hardware.cluster)[0].fitted
                predicted = [1e3 * edge for edge in predict.predicted_range(seconds)]
            yield {
                "layout": with_remat(hardware.layout) if attempt.remat else hardware.layout,
                "mesh": dict(hardware.mesh.shape),
                "micro_batch_tokens": tokens_per_device // attempt.parts,
                "head_chunk": attempt.head_chunk,
                "peak_bytes": attempt.need,
                "fits": fits,
                "predicted_ms": predicted,
            }
            if fits:
                return


def warnings(hardware: Hardware, steps: Sequence[Step], workspace: int, answers: cudnn.Answers | None) -> list[str]:
    """Limits of this plan: shared programs, attention backend with its ``workspace`` in bytes, autotuning."""
    lines = []
    if shared := sum(step.shared for step in steps):
        lines.append(
            f"{len(steps)} stages, {len(steps) - shared} compiled: the others differ in attention windows alone "
            "(checked on the first and the last program), or in nothing, so their kernels, bytes and memory are those "
            "of the compiled one"
        )
    if summed := sum(step.changed is not None for step in steps):
        lines.append(
            f"{summed} of the others update other parameters than the one whose memory and largest arrays they have: "
            "times, FLOPs and bytes are its own and what that changes in the longest stage, where it was compiled"
        )
    if hardware.device.attention in ("cudnn", "cudnn_lanes"):
        size = f"{workspace / 1e9:.2f} GB of workspace"
        lines.append(
            f"attention is cuDNN's: cuDNN {answers.version}, asked, has a plan for each call that it does not refuse "
            f"above; at most {size}"
            if answers
            else f"attention is cuDNN's, with at most {size} by the formula that its plans for an H100 follow; what it "
            "supports is not asked: make test-cudnn installs it for plans to ask"
        )
        lines.append("with fa4_jax installed, training uses FlashAttention 4 on H100 and H200")
    elif hardware.device.attention == "triton":
        lines.append(
            "attention is planned with jspeed's own kernels; they compile for this GPU but have not run on one, and "
            "their efficiency is assumed to be cuDNN's"
        )
    elif hardware.device.attention == "splash":
        lines.append("attention is JAX's splash attention, which computes and masks blocks of other documents")
    elif hardware.device.attention == "xla":
        lines.append("this device gets XLA's own attention, which holds the scores of a block of queries in memory")
    if hardware.cluster.target.tpu:
        lines.append("not measured on TPUs: kernel efficiencies are those assumed for GPUs")
        lines.append("libtpu compiles with its least effort, as runs do; JAX_OPTIMIZATION_LEVEL changes it")
    else:
        lines.append("matmuls are cuBLAS calls: what autotuning would choose cannot be known without the GPU")
    return lines


def require_devices(recipe: Recipe, hardware: Hardware) -> None:
    """Raise :class:`BadInput` when the layout does not fit, or the lanes cannot be divided over the devices."""
    check_layout(hardware.layout, hardware.mesh, recipe)
    devices = row_shards(hardware.mesh)
    if recipe.lanes % devices:
        raise BadInput(
            f"recipe {recipe.name} has {recipe.lanes} lanes, which {devices} devices cannot share equally; "
            f"--set LANES={-(-recipe.lanes // devices) * devices} gives each a whole number (the global batch grows)"
        )
