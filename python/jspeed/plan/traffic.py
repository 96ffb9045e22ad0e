"""Bytes that a step reads and writes in device memory (HBM), by Python source line."""

from collections.abc import Iterable

from jspeed.plan import hlo, predict
from jspeed.plan.compile import Hardware, last_step, with_backend
from jspeed.plan.cost import Kernel
from jspeed.plan.predict import kernel_seconds
from jspeed.plan.schema import BytesPlan, BytesRow, Pass
from jspeed.plan.target import Facts
from jspeed.recipe import Recipe


def of_last_step(recipe: Recipe, hardware: Hardware, micro_batch: int | None = None) -> BytesPlan:
    """Compile the step of the last stage that updates all parameters: sums of what it moves, and :func:`by_line`."""
    hardware = with_backend(hardware, recipe)
    step = last_step(recipe, hardware, micro_batch)
    computing = [kernel for kernel in step.kernels if not kernel.collective]
    times = predict.times(step.kernels, hardware.cluster)[0]
    return {
        "recipe": recipe.name,
        "target": hardware.cluster.name,
        "kernels": sum(kernel.times for kernel in computing),
        "bytes": sum(kernel.times * kernel.bytes for kernel in computing),
        "flops": sum(kernel.times * kernel.flops for kernel in computing),
        "micro_batch_tokens": recipe.tokens_per_step(step.stage) // hardware.mesh.shape["data"] // step.parts,
        "head_chunk": step.head_chunk,
        "remat": step.remat,
        "peak_bytes": step.memory["peak"],
        "roofline_ms": 1e3 * times.total,
        "fitted_ms": 1e3 * times.fitted,
        "lines": by_line(step.kernels, hardware.cluster.facts),
    }


def by_line(kernels: Iterable[Kernel], facts: Facts) -> list[BytesRow]:
    """Return what the kernels of each source line cost, most bytes first; collectives are left out."""
    found: dict[tuple[str, str, str], BytesRow] = {}
    for kernel in kernels:
        if kernel.collective:
            continue
        source = hlo.short(kernel.instruction.source) or "the compiler"
        pass_ = pass_of(kernel.instruction.op_name)
        row = found.setdefault(
            (source, pass_, kernel.kind),
            {"source": source, "pass": pass_, "kind": kernel.kind, "kernels": 0, "bytes": 0.0, "seconds": 0.0},
        )
        row["kernels"] += kernel.times
        row["bytes"] += kernel.times * kernel.bytes
        row["seconds"] += kernel.times * max(kernel_seconds(kernel, facts))
    return sorted(found.values(), key=lambda row: -row["bytes"])


def pass_of(op_name: str) -> Pass:
    """Which pass JAX's path of an operation belongs to: ``jvp(...)`` is forward, ``transpose(jvp(...))`` backward."""
    return "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else "rest"
