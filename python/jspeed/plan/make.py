"""The ahead-of-time plan of one recipe on one target, as plain values (:class:`.schema.Plan`)."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from jspeed.base.compiler import has_cas_scatter
from jspeed.errors import BadInput
from jspeed.parallel.layout import LAYOUTS, partitions, with_remat
from jspeed.parallel.mesh import batch_lanes, make_mesh
from jspeed.plan import assumed, findings, hlo, predict
from jspeed.plan.compile import (
    Step,
    TargetPlacement,
    add_remat,
    compile_stages,
    place_on_target,
    read_step,
    step_attempts,
)
from jspeed.plan.cudnn import ask as cudnn
from jspeed.plan.describe import describe_stage
from jspeed.plan.host import cost as host_cost
from jspeed.plan.host.choose import memory_of
from jspeed.plan.measured import terms
from jspeed.plan.measured.rates import rates_of
from jspeed.plan.schema import MatmulRow, Plan, SearchRow, StagePlan, Term, TermRow
from jspeed.plan.shard_map_checks import check_shard_map
from jspeed.plan.target import Cluster, Target, pretend
from jspeed.recipe import Recipe, leaves
from jspeed.record.sizes import parameter_count, scored_heads
from jspeed.run.compute import program
from jspeed.run.compute.device import USABLE
from jspeed.run.compute.division import divisions
from jspeed.run.find_recipe import LoadedRecipe

BOUNDS = [
    "memory is what the compiler allocates: exact for its program, without fragmentation",
    (
        "FLOPs of matmuls are exact; those of attention are an upper bound: every document counts"
        " as long as the recipe allows"
    ),
    "no kernel is faster than its FLOPs at the peak rate or its bytes at the bandwidth",
    "training also compiles the evaluation, which --evaluation plans",
]
# The cost model's numbers by name, each with its source.
CONSTANTS = {
    **assumed.FRACTIONS,
    "least kernel, s": assumed.LAUNCH,
    "latency of a collective, s": assumed.LATENCY,
    "hop between nodes, s": assumed.HOP,
    "idle between kernels, s": predict.GAP,
    "likewise without CUDA graphs, s": predict.GAP_WITHOUT_GRAPHS,
    "empty block of attention, s": terms.EMPTY_BLOCK,
    "FP8 with fp32 sums": terms.WITHOUT_FAST_ACCUMULATION,
    "custom FP8 matmul": terms.CUSTOM_MATMUL,
    "special functions": terms.SPECIAL,
    "look-ups of a share that are found, 1/s": host_cost.ASKED,
    "gather of rows, bytes/s a core": host_cost.GATHER,
    "update of rows, bytes/s a core": host_cost.UPDATE,
    "look-ups of rows that another step names, share": host_cost.AGAIN,
    "look-ups of rows that a step waits for, share": host_cost.BOTH,
}


def make_plan(loaded: LoadedRecipe, placement: TargetPlacement) -> Plan:
    """Compile every stage of a recipe for its ``placement`` and return the plan.

    The micro-batch is the one that training would find: the one that was asked for, or the first
    that fits. That the recipe needs too much memory is in the plan. Raises :class:`BadInput` where
    the compiler refuses a step for it.
    """
    recipe, cluster = loaded.recipe, placement.cluster
    steps = compile_stages(recipe, placement)
    last = add_remat(placement) if steps[-1].remat else placement
    stages = [
        describe_stage(recipe, placement, number, step) for number, step in enumerate(steps, 1)
    ]
    total = sum(stage["steps"] for stage in stages)
    seconds = [sum(s["steps"] * s["predicted_ms"][edge] for s in stages) / 1e3 for edge in (0, 1)]
    problems, matmuls = find_problems(recipe, last, steps[-1], stages)
    answers = ask_cudnn(steps, cluster.target)
    problems += findings.refused_by_cudnn(answers) if answers else ()
    facts = cluster.target.data_sheet._asdict()
    price, fractions = facts["dollars_per_hour"], facts.pop("fractions")
    made_of = predict.by_term(
        (step.stage.steps, predict.terms_of(step.kernels, cluster) | of_host(stage))
        for step, stage in zip(steps, stages, strict=True)
    )
    fits, summary = memory_summary(recipe, placement, steps)
    waits = sum(row["share"] for row in made_of if row["term"] == "table on the host")
    return {
        "schema": 3,
        "recipe": recipe.name,
        "recipe_hash": loaded.hash,
        "sets": [f"{name}={value}" for name, value in loaded.overrides.items()],
        "target": cluster.name,
        "device_kind": cluster.target.device_kind,
        "devices": cluster.devices,
        "nodes": cluster.nodes,
        "mesh": dict(placement.mesh.shape),
        "layout": placement.layout,
        "attention": placement.device.attention,
        "compiled": True,
        "programs": sum(not step.shared for step in steps),
        "parameters": parameter_count(recipe.parameters),
        "device_memory_bytes": cluster.target.data_sheet.hbm_bytes,
        "memory_limit_bytes": placement.limit,
        "fits": fits,
        "fit": summary,
        "facts": facts | {"per_node": cluster.per_node},
        "constants": [
            {"name": name, "value": float(fractions.get(name, value)), "source": value.source}
            for name, value in CONSTANTS.items()
        ],
        "calibration": predict.calibration(cluster),
        "stages": stages,
        "predicted_step_ms": [1e3 * edge / total for edge in seconds],
        "predicted_seconds": seconds,
        "expected_seconds": sum(s["steps"] * s["expected_ms"] for s in stages) / 1e3,
        "terms": made_of,
        "guessed": sum(row["guessed"] for row in made_of),
        "bottlenecks": predict.bottlenecks(
            [(step.stage.steps, step.kernels) for step in steps], cluster
        ),
        "host": memory_of(recipe, placement.host, waits) if placement.host else None,
        "predicted_cost": {
            "currency": "USD",
            "per_device_hour": price,
            "low": seconds[0] / 3600 * price * cluster.devices,
            "high": seconds[1] / 3600 * price * cluster.devices,
        },
        "cudnn": (
            answers
            and {
                "version": answers.version,
                "calls": [
                    {"call": call.words, **one._asdict()} for call, one in answers.by_call.items()
                ],
            }
        ),
        "findings": [problem._asdict() for problem in problems],
        "matmuls": matmuls,
        "warnings": (
            warnings(
                placement,
                steps,
                max(stage["attention_workspace_bytes"] for stage in stages),
                answers,
            )
            + ([] if fits else [summary])
            + [f"{f.name}: {f.text}" for f in problems if f.level != "note"]
        ),
        "bounds": BOUNDS,
        "guesses": guesses(cluster, made_of),
    }


def of_host(stage: StagePlan) -> dict[Term, tuple[float, float]]:
    """The term of tables on the host in a step, none without: (seconds, those that are guesses),
    which are all, since no device has run it."""
    if not (row := stage["host"]):
        return {}
    return {"table on the host": (row["exposed_ms"] / 1e3, row["exposed_ms"] / 1e3)}


def guesses(cluster: Cluster, made_of: Sequence[TermRow]) -> list[str]:
    """What of the seconds nobody has measured, and how the range comes about."""
    listed = [
        f"{row['guessed']:.1%} of the seconds, {row['term']}"
        for row in made_of
        if row["guessed"] >= 0.001
    ]
    tables = "NVIDIA's tables" if rates_of(cluster.target.name) else "flat rates, all assumed"
    return [
        *listed,
        f"rates: {tables}; nothing is fitted",
        f"the range: {predict.WIDTH_OF_RANGE:g} errors of six published programs for the same"
        f" schedules ({predict.spread(cluster):.1%})",
        "the price",
    ]


def find_problems(
    recipe: Recipe, placement: TargetPlacement, step: Step, stages: Sequence[StagePlan]
) -> tuple[list[findings.Finding], list[MatmulRow]]:
    """Examine the last ``step`` and the stage with most exposed communication: (findings, matmuls
    of the step)."""
    mesh = placement.mesh

    def traced(mesh: Mesh, parts: int) -> Any:
        """The jaxpr of the last stage's step over ``parts`` micro-batches, on ``mesh``."""
        with pretend(placement.cluster.target):
            return program.trace_step(
                recipe, recipe.stages[-1], replace(placement, mesh=mesh), parts
            ).jaxpr

    # On a single device, in micro-batches as large as those of the plan.
    ideal = traced(
        make_mesh({"data": 1}, list(mesh.devices.flat[:1])), step.parts * mesh.shape["data"]
    )
    matmuls = findings.matmuls(step.kernels, findings.ideal_flops(ideal), placement.cluster.devices)
    specs = dict(leaves(partitions(recipe.parameters, placement.layout, mesh)))
    narrow = max(
        (rows for rows, size in scored_heads(recipe, step.stage) if size < 4), default=None
    )
    worst = max(
        stages, key=lambda stage: stage["time_ms"]["exposed_communication"] / stage["roofline_ms"]
    )
    problems = [
        *findings.redundant(matmuls, step.kernels),
        *findings.mesh_axis_use(specs, batch_lanes(mesh).spec, dict(mesh.shape)),
        *(check_shard_map(traced(mesh, step.parts)) if mesh.size > 1 else ()),
        *findings.replicated_parameters(recipe, specs, mesh),
        *findings.wide_logits(step.text, stages[-1]["micro_batch_tokens"], narrow),
        *findings.exposed(worst["collectives"], worst["roofline_ms"], worst["name"]),
        *(findings.slow_scatters(step.text) if has_cas_scatter() else ()),
    ]
    for row in matmuls:
        row["source"] = hlo.file_and_line(row["source"])
    return problems, matmuls


def ask_cudnn(steps: Sequence[Step], target: Target) -> cudnn.Answers | None:
    """What the real cuDNN says of the steps' attention, where it is installed for plans and there
    is such attention."""
    if (site := cudnn.wheels_folder()) is None:
        return None
    calls = cudnn.attention_calls(
        kernel.instruction for step in steps if not step.shared for kernel in step.kernels
    )
    return cudnn.ask(site, target, calls) if calls else None


def memory_summary(
    recipe: Recipe, placement: TargetPlacement, steps: Sequence[Step]
) -> tuple[bool, str]:
    """Return (whether every stage fits, a summary): what it needs, or what would fit, found by
    compiling."""
    worst = max(steps, key=lambda step: step.memory["peak"])
    need, limit = worst.memory["peak"], placement.limit
    device_tokens = recipe.tokens_per_step(worst.stage) // placement.mesh.shape["data"]
    tokens = device_tokens // worst.parts
    device_bytes = placement.cluster.target.data_sheet.hbm_bytes
    available = f"{limit / 1e9:.1f} GB ({limit / device_bytes:.0%} of {device_bytes / 1e9:.1f})"
    if need <= limit:
        lane = worst.stage.lane_len
        sub_lanes = (
            f", lanes cut at document borders into {lane // tokens}" if tokens < lane else ""
        )
        chunks = f", the head's loss in chunks of {worst.head_chunk:,}" if worst.head_chunk else ""
        remat = ", layers recomputed for their gradients" if worst.remat else ""
        how = f"a micro-batch of {tokens:,} tokens{sub_lanes}{chunks}{remat}"
        return True, f"fits: {need / 1e9:.1f} of {available} a device with {how}"
    problem = (
        f"does not fit: {need / 1e9:.1f} GB a device with a micro-batch of {tokens:,} tokens, and"
        f" there are {available}"
    )
    numbers = [
        parts for parts in divisions(recipe, worst.stage, placement.mesh) if parts > worst.parts
    ]
    with pretend(placement.cluster.target):
        smaller = next(
            (
                one
                for one in step_attempts(recipe, worst.stage, placement, numbers)
                if one.fits(limit)
            ),
            None,
        )
    if smaller:
        flag = (
            "--micro-batch "
            if len({stage.lane_len for stage in recipe.stages}) == 1
            else "a micro-batch of "
        )
        return (
            False,
            (
                f"{problem}; {flag}{device_tokens // smaller.parts} needs {smaller.need / 1e9:.1f}"
                " GB and fits"
            ),
        )
    if need <= USABLE * 0.95 * device_bytes and not placement.cluster.target.tpu:
        return False, f"{problem}; XLA_PYTHON_CLIENT_MEM_FRACTION=.95 makes it fit"
    return (
        False,
        (
            f"{problem}; this is the smallest micro-batch of lanes of {worst.stage.lane_len:,}"
            " tokens: shorten them with --set, or use more or larger devices"
        ),
    )


def candidates(recipe: Recipe, cluster: Cluster) -> Iterator[TargetPlacement]:
    """Yield ``cluster`` in every layout that fits ``recipe``, with 2 along the axis that it needs
    besides ``data``."""
    for layout, how in LAYOUTS.items():
        over = sorted(set(how.rules.values()) - {"data"})
        if over and cluster.devices % 2:
            continue
        axes = {"data": cluster.devices // 2, over[0]: 2} if over else None
        with suppress(BadInput):
            yield place_on_target(recipe, cluster, layout, axes)


def search(loaded: LoadedRecipe, candidates: Iterable[TargetPlacement]) -> list[SearchRow]:
    """Compile the last stage on all ``candidates``; best first, what does not fit last.

    The first micro-batch is the one that training would choose, then smaller ones until one fits.
    If none does and all layers are alike, remat is tried.
    """
    rows = []
    for placement in candidates:
        tried = list(search_layout(loaded.recipe, placement))
        plain = [row for row in tried if row["fits"] and row["layout"] == placement.layout]
        if not plain and loaded.recipe.alike:
            # with remat the largest, not the last
            tried = [row for row in tried if row["layout"] == placement.layout]
            tried += search_layout(loaded.recipe, add_remat(placement))
        rows += tried
    return sorted(
        rows,
        key=lambda row: (
            not row["fits"],
            (row["predicted_ms"] or [math.inf])[0],
            row["peak_bytes"],
        ),
    )


def search_layout(recipe: Recipe, placement: TargetPlacement) -> Iterator[SearchRow]:
    """Compile the last stage's step as training would, with ever smaller micro-batches, and yield a
    row for each try.

    It ends with the first that fits.
    """
    last = recipe.stages[-1]
    tokens_per_device = recipe.tokens_per_step(last) // placement.mesh.shape["data"]
    with pretend(placement.cluster.target):
        for attempt in step_attempts(recipe, last, placement, placement.micro_batches[-1]):
            fits, predicted = attempt.fits(placement.limit), None
            if attempt.step:
                times, _ = predict.simulate(read_step(last, attempt).kernels, placement.cluster)
                edges = predict.predicted_range(times.expected, placement.cluster)
                predicted = [1e3 * edge for edge in edges]
            yield {
                "layout": with_remat(placement.layout) if attempt.remat else placement.layout,
                "mesh": dict(placement.mesh.shape),
                "micro_batch_tokens": tokens_per_device // attempt.parts,
                "head_chunk": attempt.head_chunk,
                "peak_bytes": attempt.need,
                "fits": fits,
                "predicted_ms": predicted,
            }
            if fits:
                return


def warnings(
    placement: TargetPlacement, steps: Sequence[Step], workspace: int, answers: cudnn.Answers | None
) -> list[str]:
    """Limits of this plan: shared programs, attention backend with its ``workspace`` in bytes,
    autotuning."""
    lines = []
    if shared := sum(step.shared for step in steps):
        lines.append(
            f"{len(steps)} stages, {len(steps) - shared} compiled: the others differ in attention"
            " windows alone (checked on the first and the last program), or in nothing, so their"
            " kernels, bytes and memory are those of the compiled one"
        )
    if placement.device.attention in ("cudnn", "cudnn_lanes"):
        size = f"{workspace / 1e9:.2f} GB of workspace"
        lines.append(
            f"attention is cuDNN's: cuDNN {answers.version}, asked, has a plan for each call that"
            f" it does not refuse above; at most {size}"
            if answers
            else (
                f"attention is cuDNN's, with at most {size} by the formula that its plans for an"
                " H100 follow; what it supports is not asked: make test-cudnn installs it for"
                " plans to ask"
            )
        )
    elif placement.device.attention == "triton":
        lines.append(
            "attention is planned with jspeed's custom kernels; they compile for this GPU but have"
            " not run on one, and their efficiency is assumed to be cuDNN's"
        )
    elif placement.device.attention == "splash":
        lines.append(
            "attention is JAX's splash attention, which computes and masks blocks of other"
            " documents"
        )
    elif placement.device.attention == "xla":
        lines.append(
            "this device gets XLA's own attention, which holds the scores of a block of queries in"
            " memory"
        )
    if placement.device.note and not placement.cluster.target.tpu:
        lines.append(placement.device.note)
    if placement.cluster.target.tpu:
        lines.append("not measured on TPUs: kernel efficiencies are those assumed for GPUs")
        lines.append(
            "libtpu compiles with its least effort, as runs do; JAX_OPTIMIZATION_LEVEL changes it"
        )
    else:
        lines.append(
            "matmuls are cuBLAS calls: what autotuning would choose cannot be known without the GPU"
        )
    return lines
