"""One stage of a plan as plain values: memory, FLOPs, kernels, collectives and predicted times of its step."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from jspeed.plan import hlo, predict
from jspeed.plan.compile import Hardware, Step, memory_by_kind
from jspeed.plan.cost import Kernel, part_of
from jspeed.plan.custom_calls import attention
from jspeed.plan.schema import BufferRow, CollectiveRow, Kind, StagePlan
from jspeed.recipe import Recipe, leaves
from jspeed.sizes import flops_per_token, is_matrix, scored_shape
from jspeed.stage import Stage

ADD_UP = "flops flops_by_dtype flops_by_part bytes_moved kernels collectives time_ms roofline_ms fitted_ms".split()


def describe_stage(recipe: Recipe, hardware: Hardware, number: int, step: Step) -> StagePlan:
    """One stage of the plan; of a step with ``changed`` all that adds up is a sum."""
    found: Any = _of_program(recipe, hardware, number, step)
    if step.changed:
        other, less = (_of_program(recipe, hardware, number, each) for each in step.changed)
        found |= {name: _sum(found[name], dict(other)[name], dict(less)[name]) for name in ADD_UP}
        found["predicted_ms"] = [*predict.predicted_range(found["fitted_ms"])]
    return found


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
    different = {(buffer.array, buffer.instruction.source): buffer for buffer in hlo.buffers(step.text, 2**16)}
    largest: list[BufferRow] = [
        {
            "bytes": buffer.array.bytes,
            "dtype": buffer.array.dtype,
            "dims": list(buffer.array.dims),
            "source": hlo.short(buffer.instruction.source),
            "op": buffer.instruction.op_name.rsplit("/", 1)[-1] or buffer.instruction.opcode,
        }
        for buffer in list(different.values())[:10]
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
        "time_ms": {
            "compute": 1e3 * total.compute,
            "memory": 1e3 * total.memory,
            "communication": 1e3 * total.communication,
            "exposed_communication": 1e3 * total.exposed,
            "launches": 1e3 * total.launches,
            "empty_blocks": 1e3 * total.empty_blocks,
        },
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
    found: list[CollectiveRow] = []
    for index, (takes, exposed) in times.items():
        kernel = kernels[index]
        collective = kernel.collective
        assert collective
        beside = [k for k in kernels[index + 1 : kernel.waited_at] if not k.collective]
        found.append(
            {
                "kind": collective.kind,
                "bytes": collective.bytes,
                "axis": axis_of(collective, dict(hardware.mesh.shape)),
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
    return found


def axis_of(collective: hlo.Collective, mesh: Mapping[str, int]) -> str:
    """Name the mesh axis (or axes, with a comma) along which the members of a replica group differ."""
    coordinates = np.unravel_index(collective.members, tuple(mesh.values()))
    varying = [axis for axis, places in zip(mesh, coordinates, strict=True) if len(set(places)) > 1]
    return ",".join(varying) or next(iter(mesh))
