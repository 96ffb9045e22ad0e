"""Diagnose how a step is distributed over its devices: findings by name, each with its value and its threshold.

The redundancy of a matmul is its FLOPs on all devices over the FLOPs that the model needs, which come from the program
traced for one device, before anything is sharded. Matmuls are matched by source line.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import source_info_util
from jax.sharding import PartitionSpec

from jspeed.parallel.layout import SMALL, partition, sharded_dim
from jspeed.plan import hlo
from jspeed.plan.cost import Kernel
from jspeed.recipe import Recipe, leaves

REDUNDANT = 1.5  # times the FLOPs that a matmul needs
WORTH = 0.002  # of the step's FLOPs; smaller matmuls are padded, and cost nothing
EXPOSED = 0.05  # of the step's time: exposed communication
CONTENDED = 4096  # scalar updates of one scatter
WHOLE = 2**23  # bytes of a replicated fp32 array; smaller ones are not reported


class Finding(NamedTuple):
    """One finding. ``level``: error (counts for --strict), warning or note."""

    name: str
    level: str
    text: str
    value: float
    threshold: float


def ideal_flops(jaxpr: Any, times: int = 1) -> dict[str, float]:
    """FLOPs of the matmuls of a traced program by source line, unsharded, each loop counted by its length."""
    found: dict[str, float] = {}
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "dot_general":
            (contracting, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracting)
            flops = 2.0 * times * depth * math.prod(eqn.outvars[0].aval.shape)
            where = _source(eqn)
            found[where] = found.get(where, 0.0) + flops
        inner = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                for where, flops in ideal_flops(value, inner).items():
                    found[where] = found.get(where, 0.0) + flops
    return found


def matmuls(kernels: Iterable[Kernel], ideal: Mapping[str, float], devices: int) -> list[dict]:
    """The matmuls of a step by source line: FLOPs on all devices, and their redundancy."""
    found: dict[str, dict] = {}
    for kernel in kernels:
        if "matmul" in kernel.kind:
            row = found.setdefault(
                kernel.instruction.source,
                {"source": kernel.instruction.source, "name": "", "dtype": kernel.dtype, "shape": [], "count": 0}
                | {"flops": 0.0},
            )
            row["count"] += kernel.times
            row["flops"] += kernel.times * kernel.flops * devices
            row["shape"] = max(row["shape"], list(kernel.dims), key=lambda dims: math.prod(dims) if dims else 0)
            row["name"] = row["name"] or kernel.instruction.op_name.rsplit("/", 1)[-1]
    for row in found.values():
        wanted = ideal.get(row["source"])
        row["redundancy"] = row["flops"] / wanted if wanted else None
    return sorted(found.values(), key=lambda row: -row["flops"])


def redundant(rows: Sequence[dict], kernels: Iterable[Kernel]) -> list[Finding]:
    """Matmuls that devices repeat instead of sharing; those of Muon have a finding of their own."""
    whole = sum(row["flops"] for row in rows)
    muon = {k.instruction.source for k in kernels if "matmul" in k.kind and in_optimizer(k)}
    found = []
    for row in rows:
        factor = row["redundancy"]
        if factor and factor > REDUNDANT and row["flops"] > WORTH * whole:
            name = "replicated-muon" if row["source"] in muon else "redundant-matmul"
            why = (
                "every device orthogonalises matrices that others do too" if row["source"] in muon else "repeated work"
            )
            where = row["source"].rsplit("/", 1)[-1]
            found.append(
                Finding(name, "error", f"{where}: {factor:.2f} times the FLOPs it needs; {why}", factor, REDUNDANT)
            )
    return found


def in_optimizer(kernel: Kernel) -> bool:
    """Whether a matmul belongs to the optimizer: it lies outside of the ``shard_map`` of forward and backward pass."""
    name = kernel.instruction.op_name
    return bool(name) and not re.search(r"shard_map|jvp|transpose\(", name)


def placement(shapes: Sequence[tuple[str, tuple[int, ...], Any]], mesh: Mapping[str, int]) -> list[Finding]:
    """Mesh axes that shard no operand, and weights on the batch axis, which is FSDP and no error.

    ``shapes`` are (name, shape, PartitionSpec); names that begin with ``batch`` are data.
    """
    found, idle = [], []
    used: dict[str, set[str]] = {axis: set() for axis in mesh}
    for name, _, spec in shapes:
        for part in tuple(spec):
            for axis in part if isinstance(part, tuple) else (part,):
                if axis is not None:
                    used[axis].add("batch" if name.startswith("batch") else name)
    for axis, size in mesh.items():
        if size > 1 and not used[axis]:
            idle.append(axis)
            text = f"mesh axis '{axis}' of size {size} shards no operand: {size} devices do the same work"
            found.append(Finding("idle-axis", "error", text, float(size), 1.0))
    for axis, size in mesh.items():
        weights = sorted(used[axis] - {"batch"})
        if "batch" in used[axis] and weights and size > 1:
            both = f"{', '.join(weights[:4])} {'lie' if len(weights) > 1 else 'lies'} on the batch's axis '{axis}'"
            if idle:
                text = f"{both} while '{idle[0]}' is idle: move one of them there"
                found.append(Finding("axis-used-twice", "error", text, float(len(weights)), 0.0))
            else:
                text = f"{both}: FSDP, gathered before use"
                found.append(Finding("fsdp", "note", text, float(len(weights)), math.inf))
    return found


def whole_leaves(recipe: Recipe, layout: str, mesh: Any) -> list[Finding]:
    """Large parameters that are replicated: by the layout, or because their axes do not divide."""
    devices = mesh.shape["data"]
    best, specs = by_path(recipe, "zero1", mesh), by_path(recipe, layout, mesh)
    found = []
    for path, spec in leaves(recipe.parameters):
        if devices == 1 or spec.size < SMALL or sharded_dim(specs[path]) is not None:
            continue
        size = f"{path} {'x'.join(map(str, spec.shape))}"
        if sharded_dim(best[path]) is not None:
            text = f"{size} and its optimizer state are replicated; --layout zero1 shards them {devices} ways"
            found.append(Finding("replicated-leaf", "warning", text, 4.0 * spec.size, 4.0 * SMALL))
        elif "matrix" in spec.axes:
            length = spec.shape[spec.axes.index("matrix")]
            text = (
                f"{size} cannot be sharded over {devices} devices: {length} matrices do not divide; "
                f"{-length % devices} matrices of padding make it {length + -length % devices}"
            )
            found.append(Finding("bank-cannot-shard", "error", text, float(length % devices), 0.0))
        else:
            text = f"{size} has no axis that divides by {devices}, so every device stores and updates all of it"
            if 4 * spec.size > WHOLE:
                found.append(Finding("leaf-cannot-shard", "warning", text, 4.0 * spec.size, float(WHOLE)))
    return found


def wide_logits(text: str, tokens: int, vocabulary: int) -> list[Finding]:
    """fp32 arrays in memory as large as the logits of a micro-batch."""
    size = tokens * vocabulary
    wide = [b for b in hlo.buffers(text, 4 * size) if b.array.dtype in ("f32", "f64")]
    if not wide:
        return []
    where = sorted({buffer.instruction.source.rsplit("/", 1)[-1] for buffer in wide})
    gigabytes = max(buffer.array.bytes for buffer in wide) / 1e9
    text = f"{len(wide)} fp32 arrays of logits size, {gigabytes:.1f} GB each, made at {', '.join(where[:3])}"
    return [Finding("fp32-logits", "error", text, float(len(wide)), 0.0)]


def exposed(collectives: Sequence[dict], step_ms: float) -> list[Finding]:
    """Exposed communication above the threshold, and large collectives that are not asynchronous."""
    found = []
    exposed_ms = sum(one["exposed_ms"] * one["count"] for one in collectives)
    if exposed_ms > EXPOSED * step_ms:
        worst = max(collectives, key=lambda one: one["exposed_ms"] * one["count"])
        most = f"{worst['kind']} of {worst['bytes'] / 1e6:.0f} MB"
        text = f"{exposed_ms:.1f} of {step_ms:.1f} ms are exposed communication; most of it {most}"
        found.append(Finding("exposed-collective", "error", text, exposed_ms / step_ms, EXPOSED))
    for one in collectives:
        if not one["async"] and one["ms"] * one["count"] > EXPOSED / 5 * step_ms:
            text = f"{one['kind']} of {one['bytes'] / 1e6:.0f} MB is not asynchronous"
            found.append(Finding("synchronous-collective", "warning", text, one["ms"] / step_ms, EXPOSED / 5))
    return found


def slow_scatters(text: str) -> list[Finding]:
    """Scatters of single fp32 numbers, which jaxlib 0.10.2 to 0.11.0 compiles to compare-and-swap loops (jax 38806)."""
    found = []
    steps = {step.name: step for step in hlo.instructions(text)}
    for step in steps.values():
        if step.opcode != "scatter" or not step.arrays or step.arrays[0].dtype != "f32":
            continue
        update = steps[step.operands[2]].arrays[0].dims if step.operands[2] in steps else ()
        window = re.search(r"update_window_dims=\{([\d,]*)\}", step.attributes)
        dims = [int(dim) for dim in window[1].split(",") if dim] if window else []
        updates = math.prod(update)
        if math.prod(update[dim] for dim in dims) == 1 and updates >= CONTENDED:
            where = step.source.rsplit("/", 1)[-1]
            text = f"{where}: {updates} scalar fp32 additions by compare-and-swap; add in rows of 4 or more, or sort"
            found.append(Finding("cas-scatter", "error", text, float(updates), float(CONTENDED)))
    return found


def by_path(recipe: Recipe, layout: str, mesh: Any) -> dict[str, PartitionSpec]:
    """How every parameter is sharded, by its path."""
    return {path: partition(spec, layout, mesh) for path, spec in leaves(recipe.parameters)}


def _source(eqn: Any) -> str:
    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return f"{frame.file_name}:{frame.start_line}" if frame else ""
