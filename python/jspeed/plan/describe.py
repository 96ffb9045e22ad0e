"""A compiled step as plain values: a stage of a plan, or the bytes that it moves in device memory
by source line; and the evaluation."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import get_args

from jspeed.base import compiler
from jspeed.fields import Stage
from jspeed.plan import attention, cost, hlo, predict
from jspeed.plan.absent import machine_code
from jspeed.plan.compile import (
    Step,
    TargetPlacement,
    compile_that_fits,
    largest_buffers,
    memory_by_kind,
    program_name,
    read_step,
)
from jspeed.plan.cost import Kernel, part_of
from jspeed.plan.host.cost import exchange
from jspeed.plan.measured import terms
from jspeed.plan.schema import (
    BufferRow,
    CollectiveRow,
    EvaluationPlan,
    Kind,
    LineRow,
    Pass,
    StagePlan,
    Traffic,
)
from jspeed.plan.target import Cluster, pretend
from jspeed.recipe import Recipe, leaves
from jspeed.record.sizes import flops_per_token, is_matrix, scored_shape
from jspeed.run.compute import program
from jspeed.run.compute.division import looked_up
from jspeed.run.evidence.probes import evaluations_after


def describe_stage(
    recipe: Recipe, placement: TargetPlacement, number: int, step: Step
) -> StagePlan:
    """One stage of the plan, or one of a stage's programs: the ``number``-th."""
    cluster, stage, kernels = placement.cluster, step.stage, step.kernels
    total, collectives = predict.simulate(kernels, cluster)
    expected, host, phase = total.expected, placement.host, (number - 1) % recipe.period
    asked = recipe, stage, phase, looked_up(recipe, stage, placement.mesh, step.parts)
    on_host = exchange(*asked, host, cluster.devices, expected) if host else None
    expected += on_host["exposed_ms"] / 1e3 if on_host else 0.0
    computing = [kernel for kernel in kernels if not kernel.collective]
    matrices = matrices_of(recipe, stage)
    by_part: defaultdict[str, float] = defaultdict(float)
    by_dtype: defaultdict[str, float] = defaultdict(float)
    for kernel in computing:
        if kernel.flops:
            by_part[part_of(kernel, matrices)] += kernel.runs * kernel.flops
            by_dtype[kernel.dtype] += kernel.runs * kernel.flops
    largest: list[BufferRow] = [
        {
            "bytes": buffer.array.bytes,
            "dtype": buffer.array.dtype,
            "dims": list(buffer.array.dims),
            "source": hlo.file_and_line(buffer.instruction.source),
            "op": buffer.instruction.op_name.rsplit("/", 1)[-1] or buffer.instruction.opcode,
        }
        for buffer in largest_buffers(step)
    ]
    tokens = recipe.tokens_per_step(stage)
    return {
        "name": stage_name(recipe, number),
        "steps": stage.steps,
        "tokens_per_step": tokens,
        "micro_batches": step.parts,
        "micro_batch_tokens": tokens // placement.mesh.shape["data"] // step.parts,
        "head_chunk": step.head_chunk,
        "remat": step.remat,
        "compiled": not step.shared,
        "memory_bytes": step.memory,
        "memory_by_kind": memory_by_kind(step),
        "attention_workspace_bytes": max(
            (attention.workspace(k.instruction) for k in computing), default=0
        ),
        "largest_buffers": largest,
        "flops": sum(kernel.runs * kernel.flops for kernel in computing),
        "flops_by_dtype": by_dtype,
        "flops_by_part": dict(sorted(by_part.items(), key=lambda item: -item[1])),
        "model_flops": flops_per_token(recipe, stage) * tokens / cluster.devices,
        "bytes_moved": sum(kernel.runs * kernel.bytes for kernel in computing),
        "kernels": {
            kind: sum(k.runs for k in computing if k.kind == kind)
            for kind in get_args(Kind)
            if kind != "collective"
        },
        "collectives": describe_collectives(kernels, collectives, placement),
        "time_ms": {name: 1e3 * seconds for name, seconds in total._asdict().items()},
        "roofline_ms": 1e3 * total.total,
        "expected_ms": 1e3 * expected,
        "host": on_host,
        "predicted_ms": [1e3 * edge for edge in predict.predicted_range(expected, cluster)],
    }


def stage_name(recipe: Recipe, number: int) -> str:
    """Name the ``number``-th program, of which a stage has as many as the recipe's period."""
    return program_name(recipe, *divmod(number - 1, recipe.period))


def matrices_of(recipe: Recipe, stage: Stage) -> dict[str, tuple[int, int]]:
    """(in, out) of every parameter that multiplies in a step of ``stage``; of a head, the rows that
    are scored."""
    shapes = {
        path: scored_shape(spec, stage)
        for path, spec in leaves(recipe.parameters)
        if len(spec.shape) >= 2
        and spec.size >= 2**12
        and (is_matrix(spec) or "head" not in recipe.parameters)
    }
    return {path: (shape[-2], shape[-1]) for path, shape in shapes.items()}


def describe_collectives(
    kernels: Sequence[Kernel],
    seconds: Mapping[int, tuple[float, float]],
    placement: TargetPlacement,
) -> list[CollectiveRow]:
    """Every collective, in schedule order; ``seconds`` as :func:`jspeed.plan.predict.simulate`
    returns them."""
    rows: list[CollectiveRow] = []
    mesh = dict(placement.mesh.shape)
    for index, (takes, exposed) in seconds.items():
        kernel = kernels[index]
        collective = kernel.collective
        assert collective
        beside = [k for k in kernels[index + 1 : kernel.waited_at] if not k.collective]
        rows.append(
            {
                "kind": collective.kind,
                "bytes": collective.bytes,
                "axis": ",".join(collective.along(mesh)) or next(iter(mesh)),
                "group": collective.group,
                "async": collective.overlaps,
                "count": kernel.runs,
                "dtype": collective.arrays[0].dtype,
                "ms": 1e3 * takes / kernel.runs,
                "compute_ms_between": 1e3
                * sum(terms.price(k, placement.cluster).seconds for k in beside),
                "exposed_ms": 1e3 * exposed / kernel.runs,
                "source": hlo.file_and_line(collective.instruction.source),
            }
        )
    return rows


def describe_traffic(recipe: Recipe, placement: TargetPlacement) -> Traffic:
    """Compile the step of the last stage that updates all parameters: sums of what it moves, and
    :func:`by_line`."""
    with pretend(placement.cluster.target):
        step = read_step(recipe.stages[-1], compile_that_fits(recipe, placement, -1))
    stage = describe_stage(recipe, placement, len(recipe.stages) * recipe.period, step)
    return {
        "recipe": recipe.name,
        "target": placement.cluster.name,
        "kernels": sum(stage["kernels"].values()),
        "bytes": stage["bytes_moved"],
        "flops": stage["flops"],
        "micro_batch_tokens": stage["micro_batch_tokens"],
        "head_chunk": step.head_chunk,
        "remat": step.remat,
        "peak_bytes": step.memory["peak"],
        "roofline_ms": stage["roofline_ms"],
        "expected_ms": stage["expected_ms"],
        "lines": by_line(step.kernels, placement.cluster),
    }


def describe_evaluation(recipe: Recipe, placement: TargetPlacement) -> EvaluationPlan:
    """Compile the evaluation as a run does, and predict it.

    Raises :class:`.compiler.DoesNotFit` where the compiler refuses it.
    """
    rows = recipe.eval_tokens // recipe.eval_len
    micro_tokens = recipe.tokens_per_step(recipe.stages[-1]) // placement.parts[-1]
    build = partial(machine_code.compiled, device=placement.device)
    with pretend(placement.cluster.target):
        _, traced = program.trace_evaluation(recipe, placement, micro_tokens, rows)
        need, compiled = compiler.need_and_step(build, traced.lower())
    if compiled is None:
        raise compiler.DoesNotFit(need)
    longest = recipe.eval_max_doc_len or recipe.eval_len
    times, _ = predict.simulate(cost.kernels(compiled.as_text(), longest), placement.cluster)
    after = evaluations_after(rows)
    return {
        "recipe": recipe.name,
        "target": placement.cluster.name,
        "tokens": rows * recipe.eval_len,
        "peak_bytes": need,
        "fits": need <= placement.limit,
        "seconds": [times.total, times.expected],
        "after_the_clock": after,
        "seconds_after_the_clock": [after * times.total, after * times.expected],
    }


def by_line(kernels: Iterable[Kernel], cluster: Cluster) -> list[LineRow]:
    """Return what the kernels of each source line cost, most bytes first; collectives are left
    out."""
    rows: dict[tuple[str, str, str], LineRow] = {}
    for kernel in kernels:
        if kernel.collective:
            continue
        source = hlo.file_and_line(kernel.instruction.source) or "the compiler"
        pass_ = pass_of(kernel.instruction.op_name)
        row = rows.setdefault(
            (source, pass_, kernel.kind),
            {
                "source": source,
                "pass": pass_,
                "kind": kernel.kind,
                "kernels": 0,
                "bytes": 0.0,
                "seconds": 0.0,
            },
        )
        row["kernels"] += kernel.runs
        row["bytes"] += kernel.runs * kernel.bytes
        row["seconds"] += kernel.runs * terms.price(kernel, cluster).seconds
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def pass_of(op_name: str) -> Pass:
    """Which pass JAX's path of an operation belongs to: ``jvp(...)`` is forward,
    ``transpose(jvp(...))`` backward."""
    return "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else "rest"
