"""Parse optimised HLO, the text of ``compiled.as_text()``: instructions, collectives, buffers.

Nothing here needs JAX or the device that the text was compiled for.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jspeed.base.cores import cores

# bf16[8,<=128], a bound counting as the size, and the memory space at the end of its layout:
# {1,0:T(8,128)S(1)}.
ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{[^{}]*S\((\d+)\)\})?")
VMEM = "1"  # of a TPU, on the chip
PROGRAMS = 64  # of which answers are kept: a plan asks again for every stage that shares a program
CALLED = re.compile(
    r"(calls|to_apply|body|condition|branch_computations|true_computation|false_computation)="
)
# of TPUs: an instruction in three lines
KERNEL_METADATA = re.compile(r"kernel_metadata=\{\n(.*)\n\}")
COLLECTIVES = frozenset(
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all collective-permute"
    " collective-broadcast".split()
)
# Instructions that allocate no memory: their results are arguments, views, or the buffers of their
# bodies.
NO_BUFFER = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "async",
}


class Array(NamedTuple):
    """One device's shard of an array."""

    dtype: str  # as HLO writes it: bf16, f8e4m3fn, s32, pred
    dims: tuple[int, ...]
    on_chip: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of memory, without padding; types under 8 bits are packed, a token takes none."""
        digits = re.search(r"\d+", self.dtype)
        bits = int(digits[0]) if digits else 8 if self.dtype == "pred" else 0
        return (math.prod(self.dims) * bits + 7) // 8


class Instruction(NamedTuple):
    """One instruction of one computation."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]  # the result: one array, or the leaves of a tuple in order
    operands: tuple[str, ...]  # names
    calls: tuple[str, ...]  # names of the computations it runs or applies
    target: str  # of a custom call: its name, such as __cublas$lt$matmul; else empty
    op_name: str  # the path JAX gave it, such as jit(step)/transpose(jvp(block))/dot_general
    source: str  # file:line of the innermost user frame; empty if unknown
    computation: str
    attributes: str  # all of the text after the operands
    asynchronous: bool = False  # a start and a done, merged by :func:`paired`
    # of a parameter: which argument of its computation it is; of a whole constant: its value
    number: int = -1

    @property
    def bytes(self) -> int:
        """Bytes of the whole result."""
        return sum(array.bytes for array in self.arrays)

    @property
    def bytes_off_chip(self) -> int:
        """Bytes of those arrays of the result that are in the device's memory."""
        return sum(array.bytes for array in self.arrays if not array.on_chip)


class Collective(NamedTuple):
    """One collective; its start and its done are one."""

    kind: str  # one of COLLECTIVES
    # results on one device; more than one when the compiler combined several
    arrays: tuple[Array, ...]
    # on one device: the input of a reduce-scatter, the output of the others (permute, all-to-all
    # too)
    bytes: int
    # devices of the first replica group; of a permute: the first chain of its pairs
    members: tuple[int, ...]
    overlaps: bool  # asynchronous: kernels may run between its start and its done
    instruction: Instruction

    @property
    def group(self) -> int:
        """Devices of a replica group."""
        return len(self.members)

    def along(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of ``mesh`` along which the members of a replica group differ."""
        places = zip(mesh, np.unravel_index(self.members, tuple(mesh.values())), strict=True)
        return tuple(axis for axis, at in places if len(set(at)) > 1)


class Buffer(NamedTuple):
    """One array that an instruction writes."""

    array: Array
    instruction: Instruction


# a plan reads a program on each core, and asks several things of each
@lru_cache(maxsize=max(2, cores()))
def instructions(text: str) -> tuple[Instruction, ...]:
    """Return the instructions of all computations, in the order of the text (the schedule, if it is
    scheduled)."""
    text = KERNEL_METADATA.sub(r"kernel_metadata={\1}", text)
    frames = _source_lines(text)
    listed, computation = [], ""
    for line in text.splitlines():
        if line.endswith("{") and " -> " in line:
            computation = line.removeprefix("ENTRY ").split(" ", 1)[0].removeprefix("%")
        elif line.startswith("  ") and " = " in line:
            listed.append(_instruction(line.strip().removeprefix("ROOT "), computation, frames))
    return tuple(listed)


def running(text: str) -> list[Instruction]:
    """Return the instructions outside of fusions: of the entry and of every loop, branch and call
    it reaches.

    A start and its done are one (:func:`paired`). What is inside a fusion, or applied to elements
    (the addition of a reduction), is left out: it takes no memory of its own. A loop's body is here
    once, however often it runs.
    """
    computations: dict[str, list[Instruction]] = {}
    for instruction in paired(instructions(text)):
        computations.setdefault(instruction.computation, []).append(instruction)
    reached = [entry(text)]
    for computation in reached:
        for instruction in computations[computation]:
            if instruction.opcode in ("while", "conditional", "call", "async"):
                reached += [name for name in instruction.calls if name not in reached]
    return [instruction for name in reached for instruction in computations[name]]


def paired(ops: Sequence[Instruction]) -> list[Instruction]:
    """Merge each ``x-start`` with its ``x-done`` into one asynchronous ``x`` at the position of the
    start."""
    origin: dict[str, str] = {}  # of a done or update -> its start
    results: dict[str, tuple[Array, ...]] = {}
    for op in ops:
        if op.opcode.endswith(("-done", "-update")):
            origin[op.name] = origin.get(op.operands[0], op.operands[0])
            results[origin[op.name]] = op.arrays
    return [
        (
            op._replace(
                opcode=op.opcode.removesuffix("-start"), arrays=results[op.name], asynchronous=True
            )
            if op.opcode.endswith("-start")
            else op
        )
        for op in ops
        if op.name not in origin
    ]


def entry(text: str) -> str:
    """Return the name of the entry computation. Raises ``ValueError`` when the text is not HLO."""
    if match := re.search(r"^ENTRY %?([^\s(]+)", text, re.MULTILINE):
        return match[1]
    raise ValueError("no ENTRY computation: this is not the text of an HLO module")


def collectives(text: str) -> list[Collective]:
    """Return every collective; one in a loop is listed once, however often the loop runs."""
    ops = paired(instructions(text))
    wrapped = {name for op in ops if op.opcode == "async" for name in op.calls}
    header = text[: text.index("\n")]
    devices = int(_word(header, "num_partitions=") or 1) * int(_word(header, "replica_count=") or 1)
    listed = []
    for op in ops:
        if op.opcode in COLLECTIVES:
            members = _members(op.attributes, devices)
            whole = op.bytes * (len(members) if op.opcode == "reduce-scatter" else 1)
            overlaps = (
                op.asynchronous or op.computation in wrapped
            ) and '"is_sync":true' not in op.attributes
            listed.append(Collective(op.opcode, op.arrays, whole, members, overlaps, op))
    return listed


@lru_cache(PROGRAMS)
def arguments(text: str) -> tuple[Instruction, ...]:
    """Return the arguments of the program."""
    main = entry(text)
    return tuple(
        op for op in instructions(text) if op.opcode == "parameter" and op.computation == main
    )


@lru_cache(PROGRAMS)
def buffers(text: str, at_least_bytes: int = 1) -> tuple[Buffer, ...]:
    """Return the arrays that running instructions write, of ``at_least_bytes`` bytes each, largest
    first.

    Arguments are not among them. Two of them can share memory when they are not needed at the same
    time. An in-place update is listed although it writes into its operand: for the peak ask
    ``memory_analysis()``.
    """
    found = [
        Buffer(array, op)
        for op in running(text)
        if op.opcode not in NO_BUFFER
        for array in op.arrays
        if array.bytes >= at_least_bytes
    ]
    return tuple(sorted(found, key=lambda buffer: -buffer.array.bytes))


def _instruction(line: str, computation: str, frames: dict[str, str]) -> Instruction:
    """Read ``%name = shape opcode(operands), attributes``."""
    name, _, rest = line.partition(" = ")
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    end = len(opcode) + _closing(rest[len(opcode) :])
    operands, attributes = rest[len(opcode) + 1 : end - 1], rest[end:].lstrip(", ")
    return Instruction(
        name=name.removeprefix("%"),
        opcode=opcode,
        arrays=tuple(
            Array(dtype, tuple(map(int, re.findall(r"\d+", dims))), space == VMEM)
            for dtype, dims, space in ARRAY.findall(shape)
        ),
        operands=tuple(re.findall(r"%([\w.\-]+)", operands)),
        calls=tuple(_called(attributes)),
        target=_quoted(attributes, "custom_call_target="),
        op_name=_quoted(attributes, "op_name="),
        source=frames.get(_word(attributes, "stack_frame_id="), ""),
        computation=computation,
        attributes=attributes,
        number=int(operands) if opcode in ("parameter", "constant") and operands.isdigit() else -1,
    )


def _called(attributes: str) -> Iterator[str]:
    """Names after calls=, body= and the like: ``%name`` or ``{%name, %name}``."""
    for match in CALLED.finditer(attributes):
        rest = attributes[match.end() :]
        listed = (
            rest[1 : rest.index("}")]
            if rest.startswith("{")
            else re.split(r"[,\s]", rest, maxsplit=1)[0]
        )
        yield from (name.strip().removeprefix("%") for name in listed.split(","))


def _members(attributes: str, devices: int) -> tuple[int, ...]:
    """Devices of the first replica group, which is written in one of four ways; an empty list means
    all ``devices``."""
    _, found, rest = attributes.partition("replica_groups=")
    if found and (listed := re.match(r"\{\{([\d,]+)\}", rest)):  # {{0,1},{2,3}}
        return tuple(map(int, listed[1].split(",")))
    # [groups,size]<=[dims]T(order)
    if found and (iota := re.match(r"\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)):
        dims, order = (
            [int(n) for n in part.split(",")] if part else None for part in iota.groups()[1:]
        )
        assert dims
        return tuple(
            map(int, np.arange(math.prod(dims)).reshape(dims).transpose(order).flat[: int(iota[1])])
        )
    # mesh['data'=4,'model'=2] {'data'}; part of an axis: 'data':(before)size
    if found and rest.startswith("mesh["):
        axes = {
            axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", rest[: rest.index("]")])
        }
        members = np.zeros(1, int)
        named = re.findall(
            r"'(\w+)'(?::\((\d+)\)(\d+))?", rest[rest.index("{") + 1 : rest.index("}")]
        )
        for axis, before, part in named:
            stride = math.prod(list(axes.values())[list(axes).index(axis) + 1 :])
            size = int(part or axes[axis])
            stride *= axes[axis] // (size * int(before or 1))
            members = np.add.outer(members, stride * np.arange(size)).ravel()
        return tuple(map(int, members))
    if "source_target_pairs=" in attributes:
        listed_pairs = attributes.partition("source_target_pairs=")[2].partition("}}")[0]
        pairs = [(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", listed_pairs)]
        chain = set(pairs[0])
        while more := {device for pair in pairs if chain & set(pair) for device in pair} - chain:
            chain |= more
        return tuple(sorted(chain))
    return tuple(range(devices))


def _source_lines(text: str) -> dict[str, str]:
    """Stack frame number -> file:line, from the four tables at the head of the text."""
    tables: dict[str, dict[str, str]] = {}
    table: dict[str, str] = {}
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif line.endswith("{"):
            break
        elif line[:1].isdigit():
            number, _, row = line.partition(" ")
            table[number] = row
    files, locations = tables.get("FileNames", {}), tables.get("FileLocations", {})

    def source(row: str) -> str:
        location = locations[_word(row, "file_location_id=")]
        return files[_word(location, "file_name_id=")].strip('"') + ":" + _word(location, "line=")

    return {number: source(row) for number, row in tables.get("StackFrames", {}).items()}


def _closing(text: str) -> int:
    """Index just past the parenthesis that closes the first one of ``text``, quoted text not
    counted."""
    depth, quoted = 0, False
    for index, char in enumerate(text):
        if char == '"':
            quoted = not quoted
        elif not quoted and char in "()":
            depth += 1 if char == "(" else -1
            if depth == 0:
                return index + 1
    raise ValueError(f"unbalanced parentheses in HLO: {text[:100]}")


def _quoted(text: str, key: str) -> str:
    """The value of ``key="value"``, or an empty string."""
    return text.partition(f'{key}"')[2].partition('"')[0]


def _word(text: str, key: str) -> str:
    """The word after ``key``, or an empty string."""
    return re.split(r"[,\s}]", text.partition(key)[2], maxsplit=1)[0]


def file_and_line(source: str) -> str:
    """``file:line`` without the folders."""
    return source.rsplit("/", 1)[-1]
