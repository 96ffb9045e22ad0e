"""Cost of one step on one device, kernel by kernel in schedule order: FLOPs, bytes and collectives,
read from HLO.

Only matmuls have FLOPs, attention among them (`attention.py`); element-wise work counts as bytes.
Each array is counted once (concurrent blocks are assumed to share reads through the L2 cache),
except splash attention's repeated reads.
"""

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from jspeed.model.custom_kernels import Price, price
from jspeed.plan import attention, hlo
from jspeed.plan.hlo import Collective, Instruction
from jspeed.plan.schema import Kind

# Views of memory, bookkeeping, and control flow whose body is counted; none is a kernel.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call async after-all"
    " partition-id replica-id optimization-barrier add-dependency domain opt-barrier".split()
)
PARTIAL_READS = frozenset(("dynamic-slice", "gather", "slice"))
# How many results of the special function units an operation takes; a guess for those that XLA
# writes out (tanh and logistic: an exponential and a division each).
SPECIAL = {
    "divide": 1, "exponential": 1, "exponential-minus-one": 1, "log": 1, "log-plus-one": 1,
    "logistic": 2, "power": 2, "rsqrt": 1, "sqrt": 1, "tanh": 2,
}  # fmt: skip
TRITON = "__gpu$xla.gpu.triton"  # a kernel of Pallas, through Triton
PALLAS = TRITON, "mosaic_gpu", "tpu_custom_call"  # how targets of its kernels begin
TRITON_NAME = re.compile(r'\bname = "(\w+)"')
ELEMENTWISE = frozenset(
    "abs add and compare convert cosine divide exponential log logistic maximum minimum multiply"
    " negate or power rsqrt select sine sqrt subtract tanh".split()
)

Computations = dict[str, dict[str, Instruction]]  # by name, their instructions by name


class Kernel(NamedTuple):
    """One kernel of the schedule."""

    kind: Kind
    flops: float  # of one run; multiply by ``runs``
    bytes: float  # read and written in one run
    dtype: str  # of the operands of a matmul: bf16, f8, f32, ...; else empty
    dims: tuple[int, ...]  # of a matmul: batch, rows, contracted, columns
    runs: int  # in a step
    instruction: Instruction
    collective: Collective | None = None
    waited_at: int = 0  # of a collective: index of the first kernel that waits for it
    empty_blocks: int = 0  # thread blocks that find nothing to do
    seen: attention.Seen | None = None  # of attention by cuDNN
    special: float = 0.0  # results of exp, log, division, ..., which few units compute


@lru_cache(hlo.PROGRAMS)
def kernels(text: str, max_doc_len: int | None = None) -> tuple[Kernel, ...]:
    """Return the kernels of a step in schedule order; one in a loop is listed once, with its number
    of runs.

    Of a conditional all branches are counted.
    ``max_doc_len`` bounds the keys of packed attention: every document counts as that long.
    """
    found: list[Kernel] = []
    computations = _computations(text)
    collectives = {found.instruction.name: found for found in hlo.collectives(text)}

    def walk(name: str, runs: int) -> None:
        """Append the kernels of a computation and of the loops it runs, in order."""
        waiting: dict[str, int] = {}  # a collective that has started -> its index in ``found``
        for op in computations[name].values():
            if op.opcode.endswith(("-done", "-update")):
                for operand in op.operands:
                    if operand in waiting:
                        start = waiting.pop(operand)
                        if op.opcode.endswith("-update"):
                            waiting[op.name] = start
                        else:
                            found[start] = found[start]._replace(waited_at=len(found))
            elif collective := collectives.get(op.name):
                if op.opcode.endswith("-start"):
                    waiting[op.name] = len(found)
                found.append(
                    Kernel("collective", 0.0, 0.0, "", (), runs, op, collective, len(found) + 1)
                )
            elif op.opcode in ("while", "conditional", "call", "async", "async-start"):
                again = runs * (_trips(op, computations) if op.opcode == "while" else 1)
                for called in op.calls:
                    if called in computations:
                        walk(called, again)
            elif op.opcode not in FREE:
                found.append(_kernel(op, computations, runs, max_doc_len))

    walk(hlo.entry(text), 1)
    return tuple(found)


def part_of(kernel: Kernel, matrices: Mapping[str, tuple[int, int]]) -> str:
    """Name the part of the model that a matmul belongs to: attention, optimizer, or parameters of
    its shape.

    ``matrices`` holds the (in, out) of each parameter by its path. Parameters of one shape are
    named together.
    """
    if kernel.kind.startswith("attention"):
        return "attention scores"
    if in_optimizer(kernel.instruction):
        return "optimizer"
    _, *shape = kernel.dims
    for sizes in (shape[:2], shape[1:], [shape[0], shape[2]]):
        if names := [path for path, matrix in matrices.items() if sorted(matrix) == sorted(sizes)]:
            return " + ".join(names)
    return "other"


def in_optimizer(op: Instruction) -> bool:
    """Whether a matmul belongs to the optimizer: it is outside the ``shard_map`` of the forward and
    backward pass."""
    return bool(op.op_name) and not re.search(r"shard_map|jvp|transpose\(", op.op_name)


def matmul_flops(op: Instruction, operands: list[Instruction]) -> tuple[float, tuple[int, ...]]:
    """Return (FLOPs, (batch, rows, contracted, columns)) of a dot or a cuBLAS call."""
    numbers = _dot_numbers(op)
    left, right = operands[0].arrays[0].dims, operands[1].arrays[0].dims
    contracted = math.prod(left[dim] for dim in numbers["lhs_contracting"])
    batch = math.prod(left[dim] for dim in numbers["lhs_batch"])
    rows = math.prod(left) // max(1, contracted * batch)
    columns = math.prod(right) // max(1, contracted * batch)
    return 2.0 * batch * rows * contracted * columns, (batch, rows, contracted, columns)


def convolution_flops(
    op: Instruction, operands: list[Instruction]
) -> tuple[float, tuple[int, ...]]:
    """:func:`matmul_flops` of a matmul that the TPU compiler writes as a convolution.

    Batch dimensions are spatial dimensions with output size > 1; contracted dimensions besides the
    features are spatial dimensions with output size 1.
    """
    match = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attributes)
    assert match, op.attributes
    kernel, out = (dict(zip(labels, array.dims, strict=True)) for labels, array in (
        (match[2], operands[1].arrays[0]), (match[3], op.arrays[0])
    ))  # fmt: skip
    spatial = [label for label in out if label.isdigit()]
    batch = math.prod(out[label] for label in spatial)
    contracted = kernel["i"] * math.prod(kernel[label] for label in spatial if out[label] == 1)
    return 2.0 * batch * out["b"] * contracted * out["f"], (batch, out["b"], contracted, out["f"])


MATMUL_OPS = {"dot": matmul_flops, "convolution": convolution_flops}


def _kernel(
    op: Instruction, computations: Computations, runs: int, max_doc_len: int | None
) -> Kernel:
    inside = computations[op.computation]
    operands = [inside[name] for name in op.operands if name in inside]
    moved = float(_bytes_moved(op, operands, computations))
    if kind := attention.CUDNN.get(op.target):
        flops, dtype = attention.flops_of(op, max_doc_len), _dtype(op.arrays[0].dtype)
        moved, empty = moved - attention.workspace(op), attention.empty_blocks(op)
        seen = attention.seen_of(op, flops, max_doc_len)
        return Kernel(kind, flops, moved, dtype, (), runs, op, empty_blocks=empty, seen=seen)
    if found := _price(op, operands, max_doc_len):
        moved += found.more_bytes
        return Kernel(found.kind, found.flops, moved, found.dtype, found.dims, runs, op)
    flops, dims, dtype = _matmul(op, computations)
    if flops:
        return Kernel(
            "fp8_matmul" if dtype == "f8" else "matmul", flops, moved, dtype, dims, runs, op
        )
    kind = "fusion" if op.opcode == "fusion" else "other"
    return Kernel(kind, 0.0, moved, "", (), runs, op, special=_special(op, computations))


def _special(op: Instruction, computations: Computations) -> float:
    """Results of special functions in an operation, or in all that is fused into it."""
    own = SPECIAL.get(op.opcode, 0) * math.prod(op.arrays[0].dims) if op.arrays else 0
    if op.opcode != "fusion":
        return own
    inside = (inner for name in op.calls for inner in computations.get(name, {}).values())
    return own + sum(_special(inner, computations) for inner in inside)


def _matmul(op: Instruction, computations: Computations) -> tuple[float, tuple[int, ...], str]:
    """FLOPs, dims and dtype of a matmul, or of a fusion's matmuls together (dims: the last)."""
    dots = [op]
    # from JAX 0.12 on cuBLAS's are in fusions too, with the slice of a bank that they read
    if op.opcode == "fusion":
        dots = [inner for name in op.calls for inner in computations.get(name, {}).values()]
    flops, dtype = 0.0, ""
    dims: tuple[int, ...] = ()
    for dot in dots:
        if dot.opcode not in MATMUL_OPS and "matmul" not in dot.target:
            continue
        given = [computations[dot.computation][name] for name in dot.operands]
        more, dims = MATMUL_OPS.get(dot.opcode, matmul_flops)(dot, given)
        flops, dtype = flops + more, _dtype(given[0].arrays[0].dtype)
    return flops, dims, dtype


def _price(op: Instruction, operands: list[Instruction], max_doc_len: int | None) -> Price | None:
    """What a custom kernel says of a call, whose label is in its name or in what JAX calls it."""
    if not op.target.startswith(PALLAS):
        return None
    name = TRITON_NAME.search(op.attributes) if op.target == TRITON else None
    arrays = [operand.arrays[0] for operand in operands]
    return price(f"{op.op_name} {name and name[1]}", arrays, op.arrays, max_doc_len)


def _bytes_moved(op: Instruction, operands: list[Instruction], computations: Computations) -> int:
    """Bytes read and written, off the chip. Where a fusion slices an array or updates it in place,
    only that counts."""
    written, read = op.bytes_off_chip, [operand.bytes_off_chip for operand in operands]
    if op.opcode == "copy-start":  # its result is the copy, and what is copied
        return written
    if op.opcode in PARTIAL_READS:
        return written + (op.bytes if read and read[0] else 0)
    if op.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * sum(read[1:])
    if op.opcode == "fusion" and op.calls and (body := computations.get(op.calls[0])):
        used = _bytes_of_arguments(body, computations)
        read = [min(size, used.get(number, size)) for number, size in enumerate(read)]
        # an update in place writes its update alone; a scatter reads and writes rows
        for inner in body.values():
            if inner.opcode in ("dynamic-update-slice", "scatter"):
                update = body[inner.operands[1 if inner.opcode == "dynamic-update-slice" else 2]]
                written += update.bytes - inner.bytes
    return max(written, 0) + sum(read)


def _bytes_of_arguments(body: dict[str, Instruction], computations: Computations) -> dict[int, int]:
    """Bytes that a fusion reads of each of its arguments."""
    users: dict[str, list[Instruction]] = {}
    for inner in body.values():
        for operand in inner.operands:
            users.setdefault(operand, []).append(inner)
    known: dict[str, int] = {}
    for inner in body.values():  # fusions in a fusion, of TPUs
        if (
            inner.opcode == "fusion"
            and inner.calls
            and (within := computations.get(inner.calls[0]))
        ):
            used = _bytes_of_arguments(within, computations)
            for number, name in enumerate(inner.operands):
                if users[name] == [inner] and inner.operands.count(name) == 1 and number in used:
                    known[name] = min(body[name].bytes, used[number])
    arguments = [inner for inner in body.values() if inner.opcode == "parameter"]
    return {inner.number: _bytes_used(inner, users, body, known) for inner in arguments}


def _bytes_used(
    op: Instruction,
    users: dict[str, list[Instruction]],
    body: dict[str, Instruction],
    known: dict[str, int],
) -> int:
    """Bytes of ``op``, an argument or an instruction of a fusion, that its users read."""
    if op.name in known:
        return known[op.name]
    total = 0 if users.get(op.name) or op.opcode == "parameter" else op.bytes  # all of a result
    for user in users.get(op.name, []):
        if user.opcode in PARTIAL_READS and user.operands[0] == op.name:
            total += _bytes_used(user, users, body, known)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == op.name:
            continue
        elif user.opcode == "scatter" and user.operands[0] == op.name:
            total += body[user.operands[2]].bytes
        elif user.opcode == "bitcast" or (
            user.opcode in ELEMENTWISE and user.arrays[0].dims == op.arrays[0].dims
        ):
            total += _bytes_used(user, users, body, known) * op.bytes // max(1, user.bytes)
        else:
            total = op.bytes
    known[op.name] = min(total, op.bytes)
    return known[op.name]


def _computations(text: str) -> Computations:
    by_name: Computations = {}
    for op in hlo.instructions(text):
        by_name.setdefault(op.computation, {})[op.name] = op
    return by_name


def _dot_numbers(op: Instruction) -> dict[str, list[int]]:
    """Contracted and batch dimensions, as a dot writes them ({1}) or as a cuBLAS call does
    (["1"])."""
    numbers = {}
    for key in ("lhs_contracting", "lhs_batch"):
        match = re.search(key + r'_dim(?:ension)?s"?[=:]\s*[{\[]([^}\]]*)[}\]]', op.attributes)
        numbers[key] = [int(number) for number in re.findall(r"\d+", match[1])] if match else []
    return numbers


def _trips(op: Instruction, computations: Computations) -> int:
    """How often a loop runs: what XLA found out, or 1.

    A TPU's compiler does not write what it found out: there it is the constant below which a loop
    goes on, since those of JAX count from 0.
    """
    if match := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', op.attributes):
        return int(match[1])
    match = re.search(r"condition=%?([\w.\-]+)", op.attributes)
    condition = computations.get(match[1], {}) if match else {}
    *_, last = [None, *condition.values()]
    if last is None or "direction=LT" not in last.attributes:
        return 1
    limits = [
        condition[name].number for name in last.operands if condition[name].opcode == "constant"
    ]
    return limits[0] if limits and limits[0] > 0 else 1


def _dtype(name: str) -> str:
    return "f8" if name.startswith("f8") else name
