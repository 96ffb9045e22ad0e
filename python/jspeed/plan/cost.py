"""What one step costs on one device, kernel by kernel in schedule order: FLOPs, bytes and collectives of its HLO.

Only matmuls have FLOPs; element-wise work counts as bytes. Attention counts the keys that mask, window and longest
document leave: 2 matmuls forward, 5 backward, which recomputes the scores. jspeed's own attention kernels count whole
blocks of keys, as they multiply them, and 7 matmuls backward: scores are recomputed in each of two kernels. So does
splash attention on TPUs, whose blocks do not end with documents, and what it reads again for each block counts again.
Every other array counts once: what blocks side by side read is taken to be in the L2 cache.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jspeed.plan import hlo
from jspeed.plan.hlo import Collective, Instruction
from jspeed.sizes import mean_context
from jspeed.stage import Stage

ATTENTION = {"__cudnn$fmhaSoftmax": "attention_forward", "__cudnn$fmhaSoftmaxBackward": "attention_backward"}
ATTENTION_MATMULS = {"attention_forward": 2, "attention_backward": 5}
# The kernels of model/kernels/fused_attention.py: their names, and how many matmuls they do for each pair of blocks.
TRITON = "__gpu$xla.gpu.triton"
OWN_ATTENTION = re.compile(r"attention_(forward|dq|dk_dv)_(packed|causal)_window(\d+)_blocks(\d+)x(\d+)")
OWN_MATMULS = {"forward": 2, "dq": 3, "dk_dv": 4}
# JAX's kernels for TPUs: the scope that model/kernels/splash_attention.py names, then the kernel's own name.
TPU = "tpu_custom_call"
SPLASH = re.compile(r"splash_window(\d+)_blocks(\d+)\b.*splash_mha_(fwd|dq|dkv)")
SPLASH_MATMULS = {"fwd": 2, "dq": 3, "dkv": 4}
# Views of memory, bookkeeping, and control flow whose body is counted; none is a kernel.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call async after-all partition-id "
    "replica-id optimization-barrier add-dependency domain opt-barrier".split()
)
PARTIAL_READS = frozenset(("dynamic-slice", "gather", "slice"))
ELEMENTWISE = frozenset(
    "abs add and compare convert cosine divide exponential log logistic maximum minimum multiply negate or power rsqrt "
    "select sine sqrt subtract tanh".split()
)


class Kernel(NamedTuple):
    """One kernel of the schedule."""

    kind: str  # matmul, fp8_matmul, attention_forward, attention_backward, fusion, collective, other
    flops: float  # once
    bytes: float  # read and written, once
    dtype: str  # of the operands of a matmul: bf16, f8, f32, ...; else empty
    dims: tuple[int, ...]  # of a matmul: batch, rows, contracted, columns
    times: int  # how often it runs in a step
    instruction: Instruction
    collective: Collective | None = None
    until: int = 0  # of a collective: index of the first kernel that waits for it


def kernels(text: str, max_doc_len: int | None = None) -> list[Kernel]:
    """Return the kernels of a step in schedule order; one in a loop is listed once, with its number of runs.

    ``max_doc_len`` bounds the keys of packed attention: every document counts as that long.
    """
    found: list[Kernel] = []
    computations = _computations(text)
    collectives = {found.instruction.name: found for found in hlo.collectives(text)}
    _walk(hlo.entry(text), 1, computations, collectives, max_doc_len, found)
    return found


def with_windows(steps: Iterable[Kernel], windows: Mapping[int, int], max_doc_len: int | None) -> list[Kernel]:
    """Return ``steps`` with other attention windows: ``windows`` maps each one that was compiled to its value."""
    return [
        step._replace(flops=attention_flops(step.kind, step.instruction, max_doc_len, windows))
        if step.kind in ATTENTION_MATMULS
        else step
        for step in steps
    ]


def attention_flops(
    kind: str, step: Instruction, max_doc_len: int | None, windows: Mapping[int, int] | None = None
) -> float:
    """FLOPs of one call of cuDNN attention, of one of jspeed's own kernels, or of splash attention."""
    if step.target == TPU:
        return _splash(step)[0]
    if step.target == TRITON:
        return _own_attention_flops(step, max_doc_len, windows or {})
    config = _fmha(step)
    batch, heads, queries, keys = map(int, config["intermediate_tensor_shape"]["dimensions"])
    width = step.arrays[0].dims[-1]
    window = int(config["sliding_window_length"])
    window = (windows or {}).get(window, window)
    packed = int(config["max_seg_per_batch"]) > 1
    seen = float(keys)
    if "CAUSAL" in config["mask_type"]:
        lane = Stage(steps=1, lane_len=queries, max_doc_len=max_doc_len if packed else None)
        seen = mean_context(lane, window or None)
    return ATTENTION_MATMULS[kind] * 2 * batch * heads * queries * seen * width


def _own_attention_flops(step: Instruction, max_doc_len: int | None, windows: Mapping[int, int]) -> float:
    """All of every pair of blocks that are visited, if all documents have ``max_doc_len`` tokens."""
    found = OWN_ATTENTION.search(step.attributes)
    assert found
    lanes, length, heads, width = step.arrays[0].dims
    window, own, visited = map(int, found.groups()[2:])
    window = windows.get(window, window) or length
    document = min(length, max_doc_len or length) if found[2] == "packed" else length
    pairs = _pairs(found[1] == "dk_dv", length, document, window, own, visited)
    return OWN_MATMULS[found[1]] * 2 * lanes * heads * width * own * visited * pairs


def _pairs(by_keys: bool, length: int, document: int, window: int, own: int, visited: int) -> int:
    """Pairs of a block of ``own`` queries and one of ``visited`` keys that it sees; of keys and queries ``by_keys``."""
    pairs = 0
    for start in range(0, length, own):
        end = min(start + own, length)
        if by_keys:  # blocks of queries, up to the last one that sees the last key
            last = min((end - 1) // document * document + document, length, end - 1 + window) - 1
            pairs += last // visited + 1 - start // visited
        else:
            first = max(start // document * document, start - window + 1)
            pairs += -(-end // visited) - first // visited
    return pairs


def _splash(step: Instruction) -> tuple[int, int]:
    """FLOPs of a call of splash attention, and bytes read again: a block of two arrays for each pair of blocks."""
    found = SPLASH.search(step.op_name)
    assert found
    window, block = int(found[1]), int(found[2])
    *rows, length, width = next(array.dims for array in step.arrays if array.dtype == "bf16")
    pairs = _pairs(found[3] == "dkv", length, length, window or length, block, block)
    channels = math.prod(rows) * width
    return SPLASH_MATMULS[found[3]] * 2 * channels * block * block * pairs, 4 * channels * (pairs * block - length)


def attention_kind(step: Instruction) -> str | None:
    """Whether a kernel is ``attention_forward``, ``attention_backward``, or neither."""
    if step.target == TRITON and (found := OWN_ATTENTION.search(step.attributes)):
        return "attention_forward" if found[1] == "forward" else "attention_backward"
    if step.target == TPU and (found := SPLASH.search(step.op_name)):
        return "attention_forward" if found[3] == "fwd" else "attention_backward"
    return ATTENTION.get(step.target)


def part_of(step: Kernel, matrices: Mapping[str, tuple[int, int]]) -> str:
    """Name the part of the model that a matmul belongs to: attention, optimizer, or parameters of its shape.

    ``matrices`` holds the (in, out) of each parameter by its path. Parameters of one shape are named together.
    """
    if step.kind in ATTENTION_MATMULS:
        return "attention scores"
    if step.instruction.op_name and not re.search(r"shard_map|jvp|transpose\(", step.instruction.op_name):
        return "optimizer"
    _, *shape = step.dims
    for sizes in (shape[:2], shape[1:], [shape[0], shape[2]]):
        if names := [path for path, matrix in matrices.items() if sorted(matrix) == sorted(sizes)]:
            return " + ".join(names)
    return "other"


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
    """:func:`matmul_flops` of a matmul that a TPU's compiler writes as a convolution.

    A dimension that is batched, or belongs to one operand alone, is a spatial one whose windows hold one product; one
    that is contracted besides the features is a spatial one of which a single window is left.
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


PRODUCTS = {"dot": matmul_flops, "convolution": convolution_flops}


def _walk(
    name: str,
    times: int,
    computations: dict[str, dict[str, Instruction]],
    collectives: dict[str, Collective],
    max_doc_len: int | None,
    found: list[Kernel],
) -> None:
    """Append the kernels of a computation and of the loops it runs, in order."""
    inside = computations[name]
    waiting: dict[str, int] = {}  # a collective that has started -> its index in ``found``
    for step in inside.values():
        if step.opcode.endswith(("-done", "-update")):
            for operand in step.operands:
                if operand in waiting:
                    start = waiting.pop(operand)
                    if step.opcode.endswith("-update"):
                        waiting[step.name] = start
                    else:
                        found[start] = found[start]._replace(until=len(found))
        elif collective := collectives.get(step.name):
            if step.opcode.endswith("-start"):
                waiting[step.name] = len(found)
            found.append(Kernel("collective", 0.0, 0.0, "", (), times, step, collective, len(found) + 1))
        elif step.opcode in ("while", "conditional", "call", "async", "async-start"):
            again = times * (_trips(step) if step.opcode == "while" else 1)
            for called in step.calls:
                if called in computations:
                    _walk(called, again, computations, collectives, max_doc_len, found)
        elif step.opcode not in FREE:
            found.append(_kernel(step, inside, computations, times, max_doc_len))


def _kernel(
    step: Instruction,
    inside: dict[str, Instruction],
    computations: dict[str, dict[str, Instruction]],
    times: int,
    max_doc_len: int | None,
) -> Kernel:
    operands = [inside[name] for name in step.operands if name in inside]
    moved = float(_bytes_moved(step, operands, computations))
    if kind := attention_kind(step):
        flops = attention_flops(kind, step, max_doc_len)
        dtype = "bf16" if step.target == TPU else _dtype(step.arrays[0].dtype)
        moved += _splash(step)[1] if step.target == TPU else 0
        return Kernel(kind, flops, moved, dtype, (), times, step)
    if step.opcode in PRODUCTS or "matmul" in step.target:
        flops, dims = PRODUCTS.get(step.opcode, matmul_flops)(step, [inside[name] for name in step.operands])
        dtype = _dtype(operands[0].arrays[0].dtype)
        return Kernel("fp8_matmul" if dtype == "f8" else "matmul", flops, moved, dtype, dims, times, step)
    if step.target.startswith("mosaic_gpu") and (sizes := _own_matmul(step, operands)):
        dtype = _dtype(operands[0].arrays[0].dtype)
        return Kernel(
            "fp8_matmul" if dtype == "f8" else "matmul", 2.0 * math.prod(sizes), moved, dtype, sizes, times, step
        )
    if step.opcode == "fusion":
        flops, dims, dtype = 0.0, (), ""
        for called in step.calls:
            body = computations.get(called, {})
            for dot in body.values():
                if dot.opcode in PRODUCTS:
                    more, dims = PRODUCTS[dot.opcode](dot, [body[name] for name in dot.operands])
                    flops, dtype = flops + more, _dtype(body[dot.operands[0]].arrays[0].dtype)
        what = "fusion" if not flops else "fp8_matmul" if dtype == "f8" else "matmul"
        return Kernel(what, flops, moved, dtype, dims, times, step)
    return Kernel("other", 0.0, moved, "", (), times, step)


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
    """Bytes read and written. Where a fusion slices an array or updates it in place, only the slice counts."""
    if step.opcode in PARTIAL_READS:
        return 2 * step.bytes
    written, read = step.bytes, [operand.bytes for operand in operands]
    if step.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * sum(read[1:])
    if step.opcode == "fusion" and step.calls and (body := computations.get(step.calls[0])):
        users: dict[str, list[Instruction]] = {}
        for inner in body.values():
            for operand in inner.operands:
                users.setdefault(operand, []).append(inner)
        known: dict[str, int] = {}
        for inner in body.values():
            if inner.opcode == "parameter" and 0 <= inner.number < len(read):
                read[inner.number] = min(read[inner.number], _bytes_used(inner, users, body, known))
        for inner in body.values():  # an update in place writes its update alone; a scatter reads and writes rows
            if inner.opcode in ("dynamic-update-slice", "scatter"):
                update = body[inner.operands[1 if inner.opcode == "dynamic-update-slice" else 2]]
                written += update.bytes - inner.bytes
    return max(written, 0) + sum(read)


def _bytes_used(
    step: Instruction, users: dict[str, list[Instruction]], body: dict[str, Instruction], known: dict[str, int]
) -> int:
    """Bytes that a fusion reads of one of its arguments, or computes of one of its instructions: what is used of it."""
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
    found: dict[str, dict[str, Instruction]] = {}
    for step in hlo.instructions(text):
        found.setdefault(step.computation, {})[step.name] = step
    return found


def _dot_numbers(step: Instruction) -> dict[str, list[int]]:
    """Contracted and batch dimensions, as a dot writes them ({1}) or as a cuBLAS call does (["1"])."""
    found = {}
    for key in ("lhs_contracting", "lhs_batch"):
        match = re.search(key + r'_dim(?:ension)?s"?[=:]\s*[{\[]([^}\]]*)[}\]]', step.attributes)
        found[key] = [int(number) for number in re.findall(r"\d+", match[1])] if match else []
    return found


def _fmha(step: Instruction) -> dict:
    """What XLA tells cuDNN about one attention call."""
    config, _ = json.JSONDecoder().raw_decode(step.attributes.partition("backend_config=")[2])
    return config["cudnn_fmha_backend_config"]


def _trips(step: Instruction) -> int:
    """How often a loop runs: what XLA found out, or 1."""
    match = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', step.attributes)
    return int(match[1]) if match else 1


def _dtype(name: str) -> str:
    return "f8" if name.startswith("f8") else name
