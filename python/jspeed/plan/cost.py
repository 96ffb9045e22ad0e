"""Cost of one step on one device, kernel by kernel in schedule order: FLOPs, bytes and collectives, read from HLO.

Only matmuls have FLOPs, attention among them (`attention.py`); element-wise work counts as bytes. Each
array is counted once (concurrent blocks are assumed to share reads through the L2 cache), except splash attention's
repeated reads.
"""

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from jspeed.plan import attention, hlo
from jspeed.plan.hlo import Collective, Instruction
from jspeed.plan.schema import Kind

# Views of memory, bookkeeping, and control flow whose body is counted; none is a kernel.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call async after-all partition-id "
    "replica-id optimization-barrier add-dependency domain opt-barrier".split()
)
PARTIAL_READS = frozenset(("dynamic-slice", "gather", "slice"))
ROW_ADAM = 'name = "row_adam"'  # of model/kernels/row_sums.py, which changes some rows of a table in place
ELEMENTWISE = frozenset(
    "abs add and compare convert cosine divide exponential log logistic maximum minimum multiply negate or power rsqrt "
    "select sine sqrt subtract tanh".split()
)


class Kernel(NamedTuple):
    """One kernel of the schedule."""

    kind: Kind
    flops: float  # of one run; multiply by ``times``
    bytes: float  # read and written in one run
    dtype: str  # of the operands of a matmul: bf16, f8, f32, ...; else empty
    dims: tuple[int, ...]  # of a matmul: batch, rows, contracted, columns
    times: int  # how often it runs in a step
    instruction: Instruction
    collective: Collective | None = None
    waited_at: int = 0  # of a collective: index of the first kernel that waits for it
    empty_blocks: int = 0  # thread blocks that find nothing to do


@lru_cache(hlo.PROGRAMS)
def kernels(text: str, max_doc_len: int | None = None) -> tuple[Kernel, ...]:
    """Return the kernels of a step in schedule order; one in a loop is listed once, with its number of runs.

    Of a conditional all branches are counted.
    ``max_doc_len`` bounds the keys of packed attention: every document counts as that long.
    """
    found: list[Kernel] = []
    computations = _computations(text)
    collectives = {found.instruction.name: found for found in hlo.collectives(text)}

    def walk(name: str, times: int) -> None:
        """Append the kernels of a computation and of the loops it runs, in order."""
        waiting: dict[str, int] = {}  # a collective that has started -> its index in ``found``
        for step in computations[name].values():
            if step.opcode.endswith(("-done", "-update")):
                for operand in step.operands:
                    if operand in waiting:
                        start = waiting.pop(operand)
                        if step.opcode.endswith("-update"):
                            waiting[step.name] = start
                        else:
                            found[start] = found[start]._replace(waited_at=len(found))
            elif collective := collectives.get(step.name):
                if step.opcode.endswith("-start"):
                    waiting[step.name] = len(found)
                found.append(Kernel("collective", 0.0, 0.0, "", (), times, step, collective, len(found) + 1))
            elif step.opcode in ("while", "conditional", "call", "async", "async-start"):
                again = times * (_trips(step, computations) if step.opcode == "while" else 1)
                for called in step.calls:
                    if called in computations:
                        walk(called, again)
            elif step.opcode not in FREE:
                found.append(_kernel(step, computations, times, max_doc_len))

    walk(hlo.entry(text), 1)
    return tuple(found)


def with_windows(steps: Iterable[Kernel], windows: Mapping[int, int], max_doc_len: int | None) -> tuple[Kernel, ...]:
    """Return ``steps`` with other attention windows: ``windows`` maps each one that was compiled to its value."""
    return tuple(
        step._replace(flops=attention.flops_of(step.kind, step.instruction, max_doc_len, windows))
        if step.kind in attention.MATMULS
        else step
        for step in steps
    )


def part_of(step: Kernel, matrices: Mapping[str, tuple[int, int]]) -> str:
    """Name the part of the model that a matmul belongs to: attention, optimizer, or parameters of its shape.

    ``matrices`` holds the (in, out) of each parameter by its path. Parameters of one shape are named together.
    """
    if step.kind in attention.MATMULS:
        return "attention scores"
    if in_optimizer(step.instruction):
        return "optimizer"
    _, *shape = step.dims
    for sizes in (shape[:2], shape[1:], [shape[0], shape[2]]):
        if names := [path for path, matrix in matrices.items() if sorted(matrix) == sorted(sizes)]:
            return " + ".join(names)
    return "other"


def in_optimizer(step: Instruction) -> bool:
    """Whether a matmul belongs to the optimizer: it is outside the ``shard_map`` of the forward and backward pass."""
    return bool(step.op_name) and not re.search(r"shard_map|jvp|transpose\(", step.op_name)


def matmul_flops(step: Instruction, operands: list[Instruction]) -> tuple[float, tuple[int, ...]]:
    """Return (FLOPs, (batch, rows, contracted, columns)) of a dot or a cuBLAS call."""
    numbers = _dot_numbers(step)
    left, right = operands[0].arrays[0].dims, operands[1].arrays[0].dims
    contracted = math.prod(left[dim] for dim in numbers["lhs_contracting"])
    batch = math.prod(left[dim] for dim in numbers["lhs_batch"])
    rows = math.prod(left) // max(1, contracted * batch)
    columns = math.prod(right) // max(1, contracted * batch)
    return 2.0 * batch * rows * contracted * columns, (batch, rows, contracted, columns)


def convolution_flops(step: Instruction, operands: list[Instruction]) -> tuple[float, tuple[int, ...]]:
    """:func:`matmul_flops` of a matmul that the TPU compiler writes as a convolution.

    Batch dimensions are spatial dimensions with output size > 1; contracted dimensions besides the features are
    spatial dimensions with output size 1.
    """
    match = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", step.attributes)
    assert match, step.attributes
    kernel, out = (dict(zip(labels, array.dims, strict=True)) for labels, array in (
        (match[2], operands[1].arrays[0]), (match[3], step.arrays[0])
    ))  # fmt: skip
    spatial = [label for label in out if label.isdigit()]
    batch = math.prod(out[label] for label in spatial)
    contracted = kernel["i"] * math.prod(kernel[label] for label in spatial if out[label] == 1)
    return 2.0 * batch * out["b"] * contracted * out["f"], (batch, out["b"], contracted, out["f"])


MATMUL_OPS = {"dot": matmul_flops, "convolution": convolution_flops}


def _kernel(
    step: Instruction, computations: dict[str, dict[str, Instruction]], times: int, max_doc_len: int | None
) -> Kernel:
    inside = computations[step.computation]
    operands = [inside[name] for name in step.operands if name in inside]
    moved = float(_bytes_moved(step, operands, computations))
    if kind := attention.kind_of(step):
        flops = attention.flops_of(kind, step, max_doc_len)
        dtype = "bf16" if step.target in (attention.TPU, attention.TRITON) else _dtype(step.arrays[0].dtype)
        moved += attention.read_again(step) - attention.workspace(step)
        return Kernel(kind, flops, moved, dtype, (), times, step, empty_blocks=attention.empty_blocks(step))
    flops, dims, dtype = _matmul(step, operands, computations)
    if flops:
        return Kernel("fp8_matmul" if dtype == "f8" else "matmul", flops, moved, dtype, dims, times, step)
    return Kernel("fusion" if step.opcode == "fusion" else "other", 0.0, moved, "", (), times, step)


def _matmul(
    step: Instruction, operands: list[Instruction], computations: dict[str, dict[str, Instruction]]
) -> tuple[float, tuple[int, ...], str]:
    """FLOPs, dims and dtype of a matmul, of a fusion's matmuls together (dims: the last), or of a kernel of our own."""
    if step.target.startswith("mosaic_gpu") and (sizes := _own_matmul(step, operands)):
        return 2.0 * math.prod(sizes), sizes, _dtype(operands[0].arrays[0].dtype)
    dots = [step]
    if step.opcode == "fusion":  # from JAX 0.12 on cuBLAS's are in fusions too, with the slice of a bank that they read
        dots = [inner for name in step.calls for inner in computations.get(name, {}).values()]
    flops, dtype = 0.0, ""
    dims: tuple[int, ...] = ()
    for dot in dots:
        if dot.opcode not in MATMUL_OPS and "matmul" not in dot.target:
            continue
        given = [computations[dot.computation][name] for name in dot.operands]
        more, dims = MATMUL_OPS.get(dot.opcode, matmul_flops)(dot, given)
        flops, dtype = flops + more, _dtype(given[0].arrays[0].dtype)
    return flops, dims, dtype


def _own_matmul(step: Instruction, operands: list[Instruction]) -> tuple[int, ...] | None:
    """(1, rows, contracted, columns) of a kernel of fused_mlp.py, by its shapes: [N, K] times [K, F] or [F, K]."""
    if len(operands) < 2 or any(len(operand.arrays[0].dims) != 2 for operand in operands[:2]):
        return None
    (rows, contracted), right = operands[0].arrays[0].dims, operands[1].arrays[0].dims
    for columns in (right[1],) if right[0] == contracted else (right[0],) if right[1] == contracted else ():
        if step.arrays[0].dims == (rows, columns):
            return 1, rows, contracted, columns
    return None


def _bytes_moved(
    step: Instruction, operands: list[Instruction], computations: dict[str, dict[str, Instruction]]
) -> int:
    """Bytes read and written, off the chip. Where a fusion slices an array or updates it in place, only that counts."""
    written, read = step.bytes_off_chip, [operand.bytes_off_chip for operand in operands]
    if step.opcode == "copy-start":  # its result is the copy, and what is copied
        return written
    if step.target == attention.TRITON and ROW_ADAM in step.attributes:
        _, _, numbers, squares, _, table, *_ = (operand.arrays[0] for operand in operands)
        rows = numbers.dims[0] * (table.bytes // table.dims[0])
        return sum(read) - table.bytes + squares.bytes + 2 * rows
    if step.opcode in PARTIAL_READS:
        return written + (step.bytes if read and read[0] else 0)
    if step.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * sum(read[1:])
    if step.opcode == "fusion" and step.calls and (body := computations.get(step.calls[0])):
        used = _bytes_of_arguments(body, computations)
        read = [min(size, used.get(number, size)) for number, size in enumerate(read)]
        for inner in body.values():  # an update in place writes its update alone; a scatter reads and writes rows
            if inner.opcode in ("dynamic-update-slice", "scatter"):
                update = body[inner.operands[1 if inner.opcode == "dynamic-update-slice" else 2]]
                written += update.bytes - inner.bytes
    return max(written, 0) + sum(read)


def _bytes_of_arguments(
    body: dict[str, Instruction], computations: dict[str, dict[str, Instruction]]
) -> dict[int, int]:
    """Bytes that a fusion reads of each of its arguments."""
    users: dict[str, list[Instruction]] = {}
    for inner in body.values():
        for operand in inner.operands:
            users.setdefault(operand, []).append(inner)
    known: dict[str, int] = {}
    for inner in body.values():  # fusions in a fusion, of TPUs
        if inner.opcode == "fusion" and inner.calls and (within := computations.get(inner.calls[0])):
            used = _bytes_of_arguments(within, computations)
            for number, name in enumerate(inner.operands):
                if users[name] == [inner] and inner.operands.count(name) == 1 and number in used:
                    known[name] = min(body[name].bytes, used[number])
    arguments = [inner for inner in body.values() if inner.opcode == "parameter"]
    return {inner.number: _bytes_used(inner, users, body, known) for inner in arguments}


def _bytes_used(
    step: Instruction, users: dict[str, list[Instruction]], body: dict[str, Instruction], known: dict[str, int]
) -> int:
    """Bytes of ``step``, an argument or an instruction of a fusion, that its users read."""
    if step.name in known:
        return known[step.name]
    total = 0 if users.get(step.name) or step.opcode == "parameter" else step.bytes  # all of a result
    for user in users.get(step.name, []):
        if user.opcode in PARTIAL_READS and user.operands[0] == step.name:
            total += _bytes_used(user, users, body, known)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == step.name:
            continue
        elif user.opcode == "scatter" and user.operands[0] == step.name:
            total += body[user.operands[2]].bytes
        elif user.opcode == "bitcast" or (user.opcode in ELEMENTWISE and user.arrays[0].dims == step.arrays[0].dims):
            total += _bytes_used(user, users, body, known) * step.bytes // max(1, user.bytes)
        else:
            total = step.bytes
    known[step.name] = min(total, step.bytes)
    return known[step.name]


def _computations(text: str) -> dict[str, dict[str, Instruction]]:
    by_name: dict[str, dict[str, Instruction]] = {}
    for step in hlo.instructions(text):
        by_name.setdefault(step.computation, {})[step.name] = step
    return by_name


def _dot_numbers(step: Instruction) -> dict[str, list[int]]:
    """Contracted and batch dimensions, as a dot writes them ({1}) or as a cuBLAS call does (["1"])."""
    numbers = {}
    for key in ("lhs_contracting", "lhs_batch"):
        match = re.search(key + r'_dim(?:ension)?s"?[=:]\s*[{\[]([^}\]]*)[}\]]', step.attributes)
        numbers[key] = [int(number) for number in re.findall(r"\d+", match[1])] if match else []
    return numbers


def _trips(step: Instruction, computations: dict[str, dict[str, Instruction]]) -> int:
    """How often a loop runs: what XLA found out, or 1.

    A TPU's compiler does not write what it found out: there it is the constant below which a loop goes on, since those
    of JAX count from 0.
    """
    if match := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', step.attributes):
        return int(match[1])
    match = re.search(r"condition=%?([\w.\-]+)", step.attributes)
    condition = computations.get(match[1], {}) if match else {}
    *_, last = [None, *condition.values()]
    if last is None or "direction=LT" not in last.attributes:
        return 1
    limits = [condition[name].number for name in last.operands if condition[name].opcode == "constant"]
    return limits[0] if limits and limits[0] > 0 else 1


def _dtype(name: str) -> str:
    return "f8" if name.startswith("f8") else name
