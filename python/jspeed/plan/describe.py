"""A compiled step as plain values: a stage of a plan, or the bytes that it moves in device memory by source line."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from jspeed.plan import attention, hlo, predict
from jspeed.plan.compile import (
    Hardware,
    Step,
    compile_that_fits,
    largest_buffers,
    memory_by_kind,
    step_of,
    with_backend,
)
from jspeed.plan.cost import Kernel, part_of
from jspeed.plan.schema import BufferRow, CollectiveRow, Kind, LineRow, Pass, StagePlan, Traffic
from jspeed.plan.target import Facts, pretend
from jspeed.recipe import Recipe, leaves
from jspeed.sizes import flops_per_token, is_matrix, scored_shape
from jspeed.stage import Stage

ADD_UP = "flops flops_by_dtype flops_by_part bytes_moved kernels collectives time_ms roofline_ms fitted_ms".split()


def describe_stage(recipe: Recipe, hardware: Hardware, number: int, step: Step) -> StagePlan:
    """One stage of the plan; of a step with ``changed`` all that adds up is a sum."""
    plan: Any = _of_program(recipe, hardware, number, step)
    if step.changed:
        other, less = (_of_program(recipe, hardware, number, each) for each in step.changed)
        plan |= {name: _sum(plan[name], dict(other)[name], dict(less)[name]) for name in ADD_UP}
        plan["predicted_ms"] = [*predict.predicted_range(plan["fitted_ms"])]
    return plan


def _sum(a: Any, more: Any, less: Any) -> Any:
    """``a + more - less`` of numbers, dicts of them, or lists, whose items that ``less`` has are taken out of ``more``.

    Of dicts keys that only ``less`` has stay as they are in ``a``.
    """
    if isinstance(a, dict):
        return {key: _sum(a.get(key, 0), more.get(key, 0), less.get(key, 0)) for key in {**a, **more}}
    if isinstance(a, list):
        return a + [item for item in more if _key(item) not in map(_key, less)]
    return a + more - less


def _key(collective: CollectiveRow) -> tuple[Any, ...]:
    return tuple(collective[name] for name in ("kind", "bytes", "axis", "dtype", "source"))


def _of_program(recipe: Recipe, hardware: Hardware, number: int, step: Step) -> StagePlan:
    """One stage of the plan, of the program of ``step``."""
    cluster, stage, kernels = hardware.cluster, step.stage, step.kernels
    total, collectives = predict.times(kernels, cluster)
    computing = [kernel for kernel in kernels if not kernel.collective]
    matrices = matrices_of(recipe, stage)
    by_part: defaultdict[str, float] = defaultdict(float)
    by_dtype: defaultdict[str, float] = defaultdict(float)
    for kernel in computing:
        if kernel.flops:
            by_part[part_of(kernel, matrices)] += kernel.times * kernel.flops
            by_dtype[kernel.dtype] += kernel.times * kernel.flops
    largest: list[BufferRow] = [
        {
            "bytes": buffer.array.bytes,
            "dtype": buffer.array.dtype,
            "dims": list(buffer.array.dims),
            "source": hlo.short(buffer.instruction.source),
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
        "micro_batch_tokens": tokens // hardware.mesh.shape["data"] // step.parts,
        "head_chunk": step.head_chunk,
        "remat": step.remat,
        "compiled": not step.shared,
        "memory_bytes": step.memory,
        "memory_by_kind": memory_by_kind(step),
        "attention_workspace_bytes": max((attention.workspace(k.instruction) for k in computing), default=0),
        "largest_buffers": largest,
        "flops": sum(kernel.times * kernel.flops for kernel in computing),
        "flops_by_dtype": by_dtype,
        "flops_by_part": dict(sorted(by_part.items(), key=lambda item: -item[1])),
        "model_flops": flops_per_token(recipe, stage) * tokens / cluster.devices,
        "bytes_moved": sum(kernel.times * kernel.bytes for kernel in computing),
        "kernels": {
            kind: sum(k.times for k in computing if k.kind == kind) for kind in get_args(Kind) if kind != "collective"
        },
        "collectives": describe_collectives(kernels, collectives, hardware),
        "time_ms": {name: 1e3 * seconds for name, seconds in total._asdict().items()},
        "roofline_ms": 1e3 * total.total,
        "fitted_ms": 1e3 * total.fitted,
        "predicted_ms": [1e3 * edge for edge in predict.predicted_range(total.fitted)],
    }


def stage_name(recipe: Recipe, number: int) -> str:
    """Name the ``number``-th program, of which a stage has as many as the recipe's period."""
    stage, phase = divmod(number - 1, recipe.period)
    return f"stage {stage + 1}" + (f", step {phase + 1} of {recipe.period}" if recipe.period > 1 else "")


def matrices_of(recipe: Recipe, stage: Stage) -> dict[str, tuple[int, int]]:
    """(in, out) of every parameter that multiplies in a step of ``stage``; of a head, the rows that are scored."""
    shapes = {
        path: scored_shape(spec, stage)
        for path, spec in leaves(recipe.parameters)
        if len(spec.shape) >= 2 and spec.size >= 2**12 and (is_matrix(spec) or "head" not in recipe.parameters)
    }
    return {path: (shape[-2], shape[-1]) for path, shape in shapes.items()}


def describe_collectives(
    kernels: Sequence[Kernel], times: Mapping[int, tuple[float, float]], hardware: Hardware
) -> list[CollectiveRow]:
    """Every collective, in schedule order; ``times`` as :func:`jspeed.plan.predict.times` returns it."""
    rows: list[CollectiveRow] = []
    mesh = dict(hardware.mesh.shape)
    for index, (takes, exposed) in times.items():
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
                "count": kernel.times,
                "dtype": collective.arrays[0].dtype,
                "ms": 1e3 * takes / kernel.times,
                "compute_ms_between": 1e3 * sum(max(predict.kernel_seconds(k, hardware.cluster.facts)) for k in beside),
                "exposed_ms": 1e3 * exposed / kernel.times,
                "source": hlo.short(collective.instruction.source),
            }
        )
    return rows


def describe_traffic(recipe: Recipe, hardware: Hardware, micro_batch: int | None = None) -> Traffic:
    """Compile the step of the last stage that updates all parameters: sums of what it moves, and :func:`by_line`."""
    hardware = with_backend(hardware, recipe)
    with pretend(hardware.cluster.target):
        step = step_of(recipe.stages[-1], compile_that_fits(recipe, recipe.stages[-1], hardware, micro_batch))
    stage = describe_stage(recipe, hardware, 1, step)
    return {
        "recipe": recipe.name,
        "target": hardware.cluster.name,
        "kernels": sum(stage["kernels"].values()),
        "bytes": stage["bytes_moved"],
        "flops": stage["flops"],
        "micro_batch_tokens": stage["micro_batch_tokens"],
        "head_chunk": step.head_chunk,
        "remat": step.remat,
        "peak_bytes": step.memory["peak"],
        "roofline_ms": stage["roofline_ms"],
        "fitted_ms": stage["fitted_ms"],
        "lines": by_line(step.kernels, hardware.cluster.facts),
    }


def by_line(kernels: Iterable[Kernel], facts: Facts) -> list[LineRow]:
    """Return what the kernels of each source line cost, most bytes first; collectives are left out."""
    rows: dict[tuple[str, str, str], LineRow] = {}
    for kernel in kernels:
        if kernel.collective:
            continue
        source = hlo.short(kernel.instruction.source) or "the compiler"
        pass_ = pass_of(kernel.instruction.op_name)
        row = rows.setdefault(
            (source, pass_, kernel.kind),
            {"source": source, "pass": pass_, "kind": kernel.kind, "kernels": 0, "bytes": 0.0, "seconds": 0.0},
        )
        row["kernels"] += kernel.times
        row["bytes"] += kernel.times * kernel.bytes
        row["seconds"] += kernel.times * max(predict.kernel_seconds(kernel, facts))
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def pass_of(op_name: str) -> Pass:
    """Which pass JAX's path of an operation belongs to: ``jvp(...)`` is forward, ``transpose(jvp(...))`` backward."""
    return "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else "rest"
