"""The ahead-of-time plan of one recipe on one target, as a dictionary of plain values: what ``--json`` writes.

Bytes, FLOPs, kernels and times are of one device and one step.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jspeed.errors import BadInput
from jspeed.parallel.layout import LAYOUTS, with_remat
from jspeed.parallel.mesh import batch_rows, make_mesh, row_shards
from jspeed.plan import findings, hlo, predict
from jspeed.plan.collectives import describe_collectives
from jspeed.plan.compile import Hardware, Step, compile_stages, distinct, largest_that_fits, memory_by_kind, suited
from jspeed.plan.cost import part_of
from jspeed.plan.shard_map_checks import manual_mode
from jspeed.plan.target import pretend
from jspeed.recipe import Recipe, leaves
from jspeed.recipe import replace as change
from jspeed.run.compute import program
from jspeed.run.compute.device import divisions, micro_batches
from jspeed.run.find_recipe import LoadedRecipe
from jspeed.sizes import flops_per_token, is_matrix, parameter_count, scored_shape
from jspeed.stage import Stage

KINDS = ("fp8_matmul", "matmul", "attention_forward", "attention_backward", "fusion", "other")
BOUNDS = [
    "memory is what the compiler allocates: exact for its program, without fragmentation",
    "FLOPs of matmuls are exact; those of attention are an upper bound: every document counts as long as the recipe "
    "allows",
    "no kernel is faster than its FLOPs at the peak rate or its bytes at the bandwidth",
]
GUESSES = [
    "fraction of the peak that a kernel reaches: " + ", ".join(f"{k} {v}" for k, v in predict.FRACTIONS.items()),
    "step time over roofline: one factor, fitted on published times of other programs for the same schedules",
    f"the range: {predict.SPREAD[0]} to {predict.SPREAD[1]} times the fitted time",
    "communication time: bytes over bandwidth, and between nodes a latency for every node",
    "the price",
]


def make_plan(
    found: LoadedRecipe, hardware: Hardware, micro_batch: int | None = None, dollars_per_hour: float | None = None
) -> dict[str, Any]:
    """Compile every stage of a recipe for a target and return the plan.

    What is taken at once is what training would find, with ``micro_batch`` tokens or the first that fits. Raises
    :class:`BadInput` when the recipe cannot run there at all; that it needs too much memory is in the plan.
    """
    recipe, cluster = found.recipe, hardware.cluster
    hardware = suited(hardware, recipe)
    steps = compile_stages(recipe, hardware, micro_batch)
    ideal = ideal_flops(recipe, hardware, steps[-1].parts)
    stages = [describe_stage(recipe, hardware, number, step) for number, step in enumerate(steps, 1)]
    total = sum(stage["steps"] for stage in stages)
    seconds = [sum(s["steps"] * s["predicted_ms"][edge] for s in stages) / 1e3 for edge in (0, 1)]
    problems, matmuls = examine(recipe, hardware, steps, stages, ideal)
    price = cluster.facts.dollars_per_hour if dollars_per_hour is None else dollars_per_hour
    fits, summary = fit(recipe, hardware, steps)
    return {
        "schema": 2,
        "recipe": recipe.name,
        "recipe_hash": found.hash,
        "sets": [f"{name}={value}" for name, value in found.overrides.items()],
        "target": cluster.name,
        "device_kind": cluster.target.device_kind,
        "devices": cluster.devices,
        "nodes": cluster.nodes,
        "mesh": dict(hardware.mesh.shape),
        "layout": hardware.layout,
        "attention": hardware.device.attention,
        "compiled": True,
        "programs": distinct(steps),
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
        "fitted_seconds": sum(s["steps"] * s["roofline_ms"] for s in stages) / 1e3 * predict.slowdown(),
        "bottlenecks": predict.bottlenecks([(step.stage.steps, step.kernels) for step in steps], cluster),
        "predicted_cost": {
            "currency": "USD",
            "per_device_hour": price,
            "low": seconds[0] / 3600 * price * cluster.devices,
            "high": seconds[1] / 3600 * price * cluster.devices,
        },
        "doctor": [finding._asdict() | {"threshold": _finite(finding.threshold)} for finding in problems],
        "matmuls": matmuls,
        "warnings": warnings(hardware, steps)
        + ([] if fits else [summary])
        + [f"{f.name}: {f.text}" for f in problems if f.level != "note"],
        "bounds": BOUNDS,
        "guesses": GUESSES,
    }


def describe_stage(recipe: Recipe, hardware: Hardware, number: int, step: Step) -> dict[str, Any]:
    """One stage of the plan."""
    cluster, stage, kernels = hardware.cluster, step.stage, step.kernels
    total, collectives = predict.times(kernels, cluster)
    computing = [kernel for kernel in kernels if not kernel.collective]
    matrices = matrices_of(recipe, stage)
    by_part: dict[str, float] = {}
    by_dtype: dict[str, float] = {}
    for kernel in computing:
        if kernel.flops:
            part, flops = part_of(kernel, matrices), kernel.times * kernel.flops
            by_part[part] = by_part.get(part, 0.0) + flops
            by_dtype[kernel.dtype] = by_dtype.get(kernel.dtype, 0.0) + flops
    largest = [
        {
            "bytes": buffer.array.bytes,
            "dtype": buffer.array.dtype,
            "dims": list(buffer.array.dims),
            "source": hlo.short(buffer.instruction.source),
            "op": buffer.instruction.op_name.rsplit("/", 1)[-1] or buffer.instruction.opcode,
        }
        for buffer in hlo.buffers(step.text, 2**16)[:10]
    ]
    tokens = recipe.tokens_per_step(stage)
    return {
        "name": name_of(recipe, number),
        "steps": stage.steps,
        "tokens_per_step": tokens,
        "micro_batches": step.parts,
        "micro_batch_tokens": tokens // hardware.mesh.shape["data"] // step.parts,
        "head_chunk": step.head_chunk,
        "remat": step.remat,
        "compiled": not step.shared,
        "memory_bytes": step.memory,
        "memory_by_kind": memory_by_kind(step),
        "largest_buffers": largest,
        "flops": sum(kernel.times * kernel.flops for kernel in computing),
        "flops_by_dtype": by_dtype,
        "flops_by_part": dict(sorted(by_part.items(), key=lambda item: -item[1])),
        "model_flops": flops_per_token(recipe, stage) * tokens / cluster.devices,
        "bytes_moved": sum(kernel.times * kernel.bytes for kernel in computing),
        "kernels": {kind: sum(k.times for k in computing if k.kind == kind) for kind in KINDS},
        "collectives": describe_collectives(kernels, collectives, hardware),
        "time_ms": {
            "compute": 1e3 * total.compute,
            "memory": 1e3 * total.memory,
            "communication": 1e3 * total.communication,
            "exposed_communication": 1e3 * total.exposed,
        },
        "roofline_ms": 1e3 * total.total,
        "predicted_ms": [1e3 * edge for edge in predict.predicted_range(total.total)],
    }


def name_of(recipe: Recipe, number: int) -> str:
    """Name the ``number``-th program, of which a stage has as many as the recipe's period."""
    stage, phase = divmod(number - 1, recipe.period)
    return f"stage {stage + 1}" + (f", step {phase + 1} of {recipe.period}" if recipe.period > 1 else "")


def examine(
    recipe: Recipe, hardware: Hardware, steps: Sequence[Step], stages: Sequence[dict], ideal: Mapping[str, float]
) -> tuple[list[findings.Finding], list[dict]]:
    """Run the doctor on the last stage and on the stage with most exposed communication: (findings, matmuls)."""
    step, devices = steps[-1], hardware.cluster.devices
    matmuls = findings.matmuls(step.kernels, ideal, devices)
    micro = stages[-1]["micro_batch_tokens"]
    heads = [spec for _, spec in leaves(recipe.parameters) if "vocab" in spec.axes]
    rows = (scored_shape(spec, step.stage)[spec.axes.index("vocab")] for spec in heads)
    vocabulary = max(rows, default=recipe.data.vocab_size)
    _, shardings = program.state_shardings(recipe, hardware.layout, hardware.mesh)
    shapes: list[tuple[str, tuple[int, ...], Any]] = [("batch", (), batch_rows(hardware.mesh).spec)]
    shapes += [(path, (), cut) for path, cut in findings.by_path(recipe, hardware.layout, hardware.mesh).items()]
    worst = max(stages, key=lambda stage: stage["time_ms"]["exposed_communication"] / stage["roofline_ms"])
    found = [
        *findings.redundant(matmuls, step.kernels),
        *findings.placement(shapes, dict(hardware.mesh.shape)),
        *misuse(recipe, hardware, steps[-1].parts),
        *findings.whole_leaves(recipe, hardware.layout, hardware.mesh),
        *findings.wide_logits(step.text, micro, vocabulary),
        *findings.exposed(worst["collectives"], worst["roofline_ms"]),
        *findings.slow_scatters(step.text),
    ]
    for row in matmuls:
        row["source"] = hlo.short(row["source"])
    return found, matmuls


def misuse(recipe: Recipe, hardware: Hardware, parts: int) -> list[findings.Finding]:
    """What :func:`.shard_map_checks.manual_mode` finds in the last stage's step, where there are several devices."""
    if hardware.mesh.size == 1:
        return []
    with pretend(hardware.cluster.target):
        traced = program.trace_step(recipe, recipe.stages[-1], hardware.mesh, hardware.layout, hardware.device, parts)
    return manual_mode(traced.jaxpr)


def ideal_flops(recipe: Recipe, hardware: Hardware, parts: int) -> dict[str, float]:
    """FLOPs of a step's matmuls by source line, on a single device."""
    parts *= hardware.mesh.shape["data"]  # micro-batches as large as those of the plan
    one = make_mesh({"data": 1}, list(hardware.mesh.devices.flat[:1]))
    with pretend(hardware.cluster.target):
        traced = program.trace_step(recipe, recipe.stages[-1], one, hardware.layout, hardware.device, parts)
    return findings.ideal_flops(traced.jaxpr)


def fit(recipe: Recipe, hardware: Hardware, steps: Sequence[Step]) -> tuple[bool, str]:
    """Return (whether every stage fits, a summary): what it needs, or what would fit, found by compiling."""
    worst = max(steps, key=lambda step: step.memory["peak"])
    need, limit = worst.memory["peak"], hardware.limit
    tokens = recipe.tokens_per_step(worst.stage) // hardware.mesh.shape["data"] // worst.parts
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
    if smaller := largest_that_fits(recipe, hardware, worst.stage, tokens):
        flag = "--micro-batch " if len({stage.lane_len for stage in recipe.stages}) == 1 else "a micro-batch of "
        return False, f"{start}; {flag}{smaller[0]} needs {smaller[1] / 1e9:.1f} GB and fits"
    if need <= 0.95 * whole:
        return False, f"{start}; XLA_PYTHON_CLIENT_MEM_FRACTION=.95 makes it fit"
    return (
        False,
        f"{start}; that is the least there is of lanes of {worst.stage.lane_len:,} tokens: shorten them with --set, or "
        "use more devices or larger ones",
    )


def candidates(
    recipe: Recipe, devices: int, hardware_in: Callable[[str, dict[str, int] | None], Hardware]
) -> Iterator[Hardware]:
    """Yield the devices in every layout that fits ``recipe``, with 2 along the axis that it needs besides ``data``."""
    for layout, how in LAYOUTS.items():
        over = sorted(set(how.cuts.values()) - {"data"})
        if over and devices % 2:
            continue
        hardware = hardware_in(layout, {"data": devices // 2, over[0]: 2} if over else None)
        try:
            program.check_layout(layout, hardware.mesh, recipe)
        except BadInput:
            continue
        yield hardware


def search(found: LoadedRecipe, candidates: Iterable[Hardware]) -> list[dict[str, Any]]:
    """Compile the last stage on all ``candidates``; best first, what does not fit last.

    The first micro-batch is the one that training would choose, then smaller ones until one fits. If none does and all
    layers are alike, remat is tried.
    """
    rows = []
    for hardware in (suited(candidate, found.recipe) for candidate in candidates):
        tried = list(_until_it_fits(found.recipe, hardware))
        plain = [row for row in tried if row["fits"] and row["layout"] == hardware.layout]
        if not plain and found.recipe.alike:
            tried = [row for row in tried if row["layout"] == hardware.layout]  # with remat the largest, not the last
            tried += _until_it_fits(found.recipe, replace(hardware, layout=with_remat(hardware.layout)))
        rows += tried
    return sorted(rows, key=lambda row: (not row["fits"], row["predicted_ms"][0], row["peak_bytes"]))


def _until_it_fits(recipe: Recipe, hardware: Hardware) -> Iterator[dict[str, Any]]:
    last = recipe.stages[-1]
    parts = micro_batches(recipe, last, hardware.mesh, hardware.device, None)
    own = recipe.tokens_per_step(last) // hardware.mesh.shape["data"]
    for number in divisions(recipe, last, hardware.mesh):
        if number < parts:
            continue
        step = compile_stages(change(recipe, stages=(last,)), hardware, own // number)[-1]
        seconds = predict.times(step.kernels, hardware.cluster)[0].total
        yield {
            "layout": with_remat(hardware.layout) if step.remat else hardware.layout,
            "mesh": dict(hardware.mesh.shape),
            "micro_batch_tokens": own // number,
            "head_chunk": step.head_chunk,
            "peak_bytes": step.memory["peak"],
            "fits": step.memory["peak"] <= hardware.limit,
            "predicted_ms": [1e3 * edge for edge in predict.predicted_range(seconds)],
        }
        if step.memory["peak"] <= hardware.limit:
            return


def matrices_of(recipe: Recipe, stage: Stage) -> dict[str, tuple[int, int]]:
    """(in, out) of every parameter that multiplies in a step of ``stage``; of a head, the rows that are scored."""
    shapes = {
        path: scored_shape(spec, stage)
        for path, spec in leaves(recipe.parameters)
        if len(spec.shape) >= 2 and spec.size >= 2**12 and (is_matrix(spec) or "head" not in recipe.parameters)
    }
    return {path: (shape[-2], shape[-1]) for path, shape in shapes.items()}


def warnings(hardware: Hardware, steps: Sequence[Step]) -> list[str]:
    """What this plan cannot know."""
    found = []
    if any(step.shared for step in steps):
        found.append(
            f"{len(steps)} stages, {distinct(steps)} compiled: the others differ in attention windows alone (checked "
            "on the first and the last program), so their kernels, bytes and memory are those of the compiled one"
        )
    if hardware.device.attention == "cudnn":
        found.append(
            "attention is planned as cuDNN's, whose plans are only built on a GPU: what it refuses there is not seen "
            "here; where fa4_jax is installed training uses that on H100 and H200"
        )
    elif hardware.device.attention == "triton":
        found.append(
            "attention is planned as jspeed's own kernels, which have run on no GPU: they are compiled for this one, "
            "and taken to reach the fraction of its peak that cuDNN's are"
        )
    elif hardware.device.attention == "splash":
        found.append("attention is JAX's splash attention, which computes and masks blocks of other documents")
    elif hardware.device.attention == "xla":
        found.append("this device gets XLA's own attention, which holds the scores of a block of queries in memory")
    if hardware.cluster.target.tpu:
        found.append("nothing has run on a TPU: what a kernel reaches of its peak is what was assumed of GPUs")
        found.append(
            "libtpu compiles with its least effort, as runs do; JAX_EXEC_TIME_OPTIMIZATION_EFFORT changes both"
        )
    else:
        found.append("matmuls are cuBLAS calls: what autotuning would choose cannot be known without the GPU")
    return found


def require_devices(recipe: Recipe, hardware: Hardware) -> None:
    """Raise :class:`BadInput` when the layout does not fit, or the lanes cannot be divided over the devices."""
    program.check_layout(hardware.layout, hardware.mesh, recipe)
    devices = row_shards(hardware.mesh)
    if recipe.lanes % devices:
        raise BadInput(
            f"recipe {recipe.name} has {recipe.lanes} lanes, which {devices} devices cannot share equally; "
            f"--set LANES={-(-recipe.lanes // devices) * devices} gives each a whole number (the global batch grows)"
        )


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
