"""Find problems in how a step is distributed over its devices: each finding has a name, a value and
a threshold.

The redundancy of a matmul is its FLOPs on all devices over the FLOPs that the model needs. Those
come from the program traced for one device, before anything is sharded. Matmuls are matched by
source line.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

from jspeed.base.compiler import MIN_SCATTER_UPDATES, scalar_scatters
from jspeed.base.jax_versions import source_line
from jspeed.parallel.layout import partitions, sharded_dim
from jspeed.plan import hlo
from jspeed.plan.cost import Kernel, in_optimizer
from jspeed.plan.cudnn.ask import Answers
from jspeed.plan.schema import CollectiveRow, Level, MatmulRow
from jspeed.recipe import SMALL, Recipe, leaves

# Thresholds are choices, not measurements.
MAX_REDUNDANCY = 1.5  # times the FLOPs that a matmul needs
# of the step's FLOPs; smaller matmuls are not reported: their redundancy is mostly padding
MIN_SHARE = 0.002
MAX_EXPOSED = 0.05  # of the step's time: exposed communication
MIN_REPLICATED_BYTES = 2**23  # of a replicated fp32 array; smaller ones are not reported

EMPTY: Mapping[Any, Any] = MappingProxyType({})


class Finding(NamedTuple):
    """One finding."""

    name: str
    level: Level
    text: str
    value: float
    threshold: float | None  # None where every value is right


def ideal_flops(
    jaxpr: Any,
    runs: int = 1,
    spread: Mapping[Any, Iterable[str]] = EMPTY,
    mesh: Mapping[str, int] = EMPTY,
) -> dict[str, float]:
    """FLOPs of the matmuls of a traced program by source line, unsharded, each loop counted by its
    length.

    A matmul in a ``shard_map`` counts once for each part of it: once for each device of ``mesh``
    along the axes that ``spread`` has for its result (:func:`.shard_map_checks.walk`).
    """
    by_source: dict[str, float] = defaultdict(float)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracting, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracting)
            parts = math.prod(mesh[axis] for axis in spread.get(eqn.outvars[0], ()))
            flops = 2.0 * runs * parts * depth * math.prod(eqn.outvars[0].aval.shape)
            by_source[source_line(eqn)] += flops
        inner = runs * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        sizes = eqn.params["mesh"].shape if eqn.primitive.name == "shard_map" else mesh
        for body in jaxprs_in_params(eqn.params):
            for where, flops in ideal_flops(body, inner, spread, sizes).items():
                by_source[where] += flops
    return by_source


def matmuls(kernels: Iterable[Kernel], ideal: Mapping[str, float], devices: int) -> list[MatmulRow]:
    """The matmuls of a step by source line, most FLOPs first."""
    by_source: dict[str, MatmulRow] = {}
    for kernel in kernels:
        if "matmul" in kernel.kind:
            row = by_source.setdefault(
                kernel.instruction.source,
                {"source": kernel.instruction.source, "name": "", "dtype": kernel.dtype, "shape":
                [], "count": 0,
                 "flops": 0.0, "redundancy": None},
            )  # fmt: skip
            row["count"] += kernel.runs
            row["flops"] += kernel.runs * kernel.flops * devices
            row["shape"] = max(
                row["shape"], list(kernel.dims), key=lambda dims: math.prod(dims) if dims else 0
            )
            row["name"] = row["name"] or kernel.instruction.op_name.rsplit("/", 1)[-1]
    for row in by_source.values():
        if wanted := ideal.get(row["source"]):
            row["redundancy"] = row["flops"] / wanted
    return sorted(by_source.values(), key=lambda row: -row["flops"])


def redundant(rows: Sequence[MatmulRow], kernels: Iterable[Kernel]) -> Iterator[Finding]:
    """Matmuls that devices repeat instead of sharing; those of Muon have a finding of their own."""
    whole = sum(row["flops"] for row in rows)
    muon = {
        k.instruction.source for k in kernels if "matmul" in k.kind and in_optimizer(k.instruction)
    }
    for row in rows:
        factor = row["redundancy"]
        if factor and factor > MAX_REDUNDANCY and row["flops"] > MIN_SHARE * whole:
            name = "replicated-muon" if row["source"] in muon else "redundant-matmul"
            why = "every device runs Newton-Schulz on the same matrices"
            text = f"{hlo.file_and_line(row['source'])}: {factor:.2f} times the FLOPs it needs; "
            text += why if row["source"] in muon else "devices repeat the same matmul"
            yield Finding(name, "error", text, factor, MAX_REDUNDANCY)


def mesh_axis_use(
    weights: Mapping[str, PartitionSpec], batch: PartitionSpec, mesh: Mapping[str, int]
) -> Iterator[Finding]:
    """Mesh axes that shard no operand, and ``weights`` on an axis of the batch, which is FSDP and
    no error."""
    of_batch, of_weight = axes_of(batch), {name: axes_of(spec) for name, spec in weights.items()}
    idle = [
        axis
        for axis, size in mesh.items()
        if size > 1 and axis not in of_batch.union(*of_weight.values())
    ]
    for axis in idle:
        text = (
            f"mesh axis '{axis}' of size {mesh[axis]} shards no operand: {mesh[axis]} devices do"
            " the same work"
        )
        yield Finding("idle-axis", "error", text, float(mesh[axis]), 1.0)
    for axis, size in mesh.items():
        names = sorted(name for name, axes in of_weight.items() if axis in axes)
        if axis in of_batch and names and size > 1:
            both = (
                f"{', '.join(names[:4])} {'are' if len(names) > 1 else 'is'} sharded over the batch"
                f" axis '{axis}'"
            )
            if idle:
                text = f"{both} while '{idle[0]}' is idle: shard one of the two over '{idle[0]}'"
                yield Finding("axis-used-twice", "error", text, float(len(names)), 0.0)
            else:
                text = f"{both} and gathered before use"
                yield Finding("fsdp", "note", text, float(len(names)), None)


def replicated_parameters(
    recipe: Recipe, specs: Mapping[str, PartitionSpec], mesh: Any
) -> Iterator[Finding]:
    """Large parameters that are sharded over no axis: by the layout, or because their axes do not
    divide.

    ``specs`` are those of the layout, by path.
    """
    devices = mesh.shape["data"]
    best = dict(leaves(partitions(recipe.parameters, "zero1", mesh)))
    for path, spec in leaves(recipe.parameters):
        if devices == 1 or spec.size < SMALL or axes_of(specs[path]):
            continue
        size = f"{path} {'x'.join(map(str, spec.shape))}"
        if sharded_dim(best[path]) is not None:
            text = (
                f"{size} and its optimizer state are replicated; --layout zero1 shards them"
                f" {devices} ways"
            )
            yield Finding("replicated-leaf", "warning", text, 4.0 * spec.size, 4.0 * SMALL)
        elif "matrix" in spec.axes:
            length = spec.shape[spec.axes.index("matrix")]
            text = (
                f"{size} cannot be sharded over {devices} devices: {length} matrices are not"
                f" divisible by {devices}; pad the bank to {length + -length % devices}"
            )
            yield Finding("bank-cannot-shard", "error", text, float(length % devices), 0.0)
        else:
            text = (
                f"{size} has no axis that divides by {devices}, so every device stores and updates"
                " all of it"
            )
            if 4 * spec.size > MIN_REPLICATED_BYTES:
                yield Finding(
                    "leaf-cannot-shard",
                    "warning",
                    text,
                    4.0 * spec.size,
                    float(MIN_REPLICATED_BYTES),
                )


def wide_logits(text: str, tokens: int, vocabulary: int | None) -> Iterator[Finding]:
    """fp32 arrays with a ``vocabulary`` dimension, as large as the logits of a micro-batch; none
    where it is None."""
    buffers = hlo.buffers(text, 4 * tokens * vocabulary) if vocabulary else []
    wide = [b for b in buffers if b.array.dtype in ("f32", "f64") and vocabulary in b.array.dims]
    if wide:
        where = sorted({hlo.file_and_line(buffer.instruction.source) for buffer in wide})
        gigabytes = max(buffer.array.bytes for buffer in wide) / 1e9
        text = (
            f"{len(wide)} fp32 arrays of logits size, {gigabytes:.1f} GB each, made at"
            f" {', '.join(where[:3])}"
        )
        yield Finding("fp32-logits", "error", text, float(len(wide)), 0.0)


def exposed(collectives: Sequence[CollectiveRow], step_ms: float, stage: str) -> Iterator[Finding]:
    """Exposed communication of a ``stage``'s step above the threshold, and large synchronous
    collectives."""
    exposed_ms = sum(one["exposed_ms"] * one["count"] for one in collectives)
    if exposed_ms > MAX_EXPOSED * step_ms:
        worst = max(collectives, key=lambda one: one["exposed_ms"] * one["count"])
        most = f"{worst['kind']} of {worst['bytes'] / 1e6:.0f} MB"
        text = (
            f"{stage}: {exposed_ms:.1f} of {step_ms:.1f} ms are exposed communication; most of it"
            f" {most}"
        )
        yield Finding("exposed-collective", "error", text, exposed_ms / step_ms, MAX_EXPOSED)
    for one in collectives:
        share = one["ms"] * one["count"] / step_ms
        if not one["async"] and share > MAX_EXPOSED / 5:
            times = f" ({one['count']} times)" if one["count"] > 1 else ""
            text = (
                f"{stage}: {one['kind']} of {one['bytes'] / 1e6:.0f} MB{times} is not asynchronous"
            )
            yield Finding("synchronous-collective", "warning", text, share, MAX_EXPOSED / 5)


def refused_by_cudnn(answers: Answers) -> Iterator[Finding]:
    """Calls of attention that cuDNN has no plan for."""
    for call, answer in answers.by_call.items():
        if answer.refused:
            text = f"cuDNN {answers.version} has no plan for {call.words}: {answer.refused}"
            yield Finding("cudnn-refuses", "error", text, 1.0, 0.0)


def slow_scatters(text: str) -> Iterator[Finding]:
    """Scatters of single fp32 numbers, for a jaxlib that compiles them to compare-and-swap
    (has_cas_scatter)."""
    sources = {step.name: step.source for step in hlo.instructions(text)}
    for name, updates in scalar_scatters(text):
        where = hlo.file_and_line(sources[name])
        said = (
            f"{where}: {updates} scalar fp32 additions by compare-and-swap; add in rows of 4 or"
            " more, or sort"
        )
        yield Finding("cas-scatter", "error", said, float(updates), float(MIN_SCATTER_UPDATES))


def axes_of(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes that ``spec`` shards over."""
    return frozenset(
        axis for part in spec if part for axis in (part if isinstance(part, tuple) else (part,))
    )
