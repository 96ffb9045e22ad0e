"""Predict a step's time from its kernels: rooflines, launches, overlapped communication, a fit to
published step times.

roofline = kernels, each at a fraction (FRACTIONS, or the data sheet's own where it was measured) of
peak FLOP/s or of bandwidth + exposed communication + launch gaps; predicted time = roofline x
:func:`slowdown` + empty blocks of attention, which the programs of the fit do not have.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jspeed.plan import hlo
from jspeed.plan.cost import Kernel
from jspeed.plan.hlo import Collective
from jspeed.plan.schema import BottleneckRow, Bound
from jspeed.plan.target import Cluster, DataSheet

# Fractions of the peak that single kernels are assumed to reach; own attention kernels count as
# cuDNN's. Measured by others: matmuls of large squares 0.75 to 0.8, cuDNN forward with 8,192 keys
# 0.59 (tritonbench issue 141), copies 0.9, NCCL's bus bandwidth on one node of H100s 330 to 370 of
# 450 GB/s.
FRACTIONS = {
    "matmul": 0.65,
    "fp8_matmul": 0.55,
    "attention_forward": 0.5,
    "attention_backward": 0.4,
    "memory": 0.85,
    "communication": 0.75,
}
# Guesses, in seconds.
LAUNCH = 2e-6  # minimum time of a kernel
# Idle time between two kernels, in a CUDA graph and without. NVIDIA measured 3.4 and 3.8 us a
# kernel of 2.9 us on a V100 (https://developer.nvidia.com/blog/cuda-graphs/, 2019); no such figures
# of an H100 are known here.
GAP, GAP_WITHOUT_GRAPHS = 0.5e-6, 0.9e-6
# Of an SM, for a block that reads the length of its document and ends. No figure is published;
# scripts/gpu_day.sh measures it, as the difference of the backends cudnn and cudnn_lanes.
EMPTY_BLOCK = 1e-6
LATENCY = 15e-6  # latency of a collective within a node
HOP = 8e-6  # added latency for every further node of a ring
SPREAD = (0.85, 1.25)  # range around the fitted time: wide enough for the four published programs


class Times(NamedTuple):
    """Seconds of one step on one device; a plan has them in ms under these names."""

    compute: float  # compute-bound kernels
    memory: float  # memory-bound kernels
    communication: float  # all communication, hidden or not
    exposed_communication: float  # communication that no kernel hides
    launches: float  # idle time between kernels
    empty_blocks: float  # blocks of attention that find nothing to do

    @property
    def total(self) -> float:
        """The roofline: everything but communication that is hidden, and empty blocks."""
        return self.compute + self.memory + self.exposed_communication + self.launches

    @property
    def fitted(self) -> float:
        """What is predicted."""
        return self.total * slowdown() + self.empty_blocks


class MeasuredStep(NamedTuple):
    """A step time that others measured on 8 H100s, for a schedule that is a recipe here."""

    recipe: str
    measured_ms: float
    # what ``plan.py RECIPE --target h100x8`` computes before the slowdown; checked in tests/aot
    roofline_ms: float
    used_to_fit: bool
    source: str


MEASURED = (
    MeasuredStep("r29", 97.98, 90.01, True, "modded-nanogpt record 29 (PyTorch)"),
    MeasuredStep("r21", 100.0, 89.64, True, "modded-nanogpt record 21 (PyTorch)"),
    MeasuredStep("llmc", 140.0, 143.34, True, "modded-nanogpt record 1 (llm.c)"),
    MeasuredStep("track3", 155.0, 123.37, False, "modded-nanogpt track 3 baseline (PyTorch)"),
)


def slowdown() -> float:
    """Measured over roofline milliseconds: the geometric mean over the published programs that are
    fitted."""
    ratios = [math.log(p.measured_ms / p.roofline_ms) for p in MEASURED if p.used_to_fit]
    return math.exp(sum(ratios) / len(ratios))


def predicted_range(fitted: float) -> tuple[float, float]:
    """(low, high) of what is predicted, around ``fitted``."""
    low, high = SPREAD
    return fitted * low, fitted * high


def calibration() -> list[dict[str, Any]]:
    """Each of MEASURED with the range that is predicted for it, and the error of the fitted
    time."""
    fitted = [p.roofline_ms * slowdown() for p in MEASURED]
    return [
        {**p._asdict(), "predicted_ms": list(predicted_range(ms)), "error": ms / p.measured_ms - 1}
        for p, ms in zip(MEASURED, fitted, strict=True)
    ]


def kernel_seconds(kernel: Kernel, sheet: DataSheet) -> tuple[float, float]:
    """(seconds by FLOPs, seconds by bytes) of one run of a kernel; it takes the larger of them."""
    fractions = FRACTIONS | sheet.fractions
    by_bytes = kernel.bytes / (sheet.hbm_bytes_per_second * fractions["memory"])
    if not kernel.flops:
        return 0.0, max(by_bytes, LAUNCH)
    rate = "bf16" if kernel.kind.startswith("attention") else rate_name(kernel.dtype, sheet)
    return kernel.flops / (sheet.peak_flops[rate] * fractions[kernel.kind]), max(by_bytes, LAUNCH)


def launch_gap(cluster: Cluster) -> float:
    """Seconds between two kernels. XLA puts kernels into CUDA graphs unless XLA_FLAGS says that it
    should not."""
    if cluster.target.tpu:
        return 0.0
    graphs = re.search(r"--xla_gpu_enable_command_buffer=(\S*)", os.environ.get("XLA_FLAGS", ""))
    return GAP_WITHOUT_GRAPHS if graphs and not graphs[1].strip("'\"") else GAP


def bottlenecks(
    runs: Iterable[tuple[int, Sequence[Kernel]]], cluster: Cluster
) -> list[BottleneckRow]:
    """Return where the time of a run goes, largest first; collectives are left out.

    ``runs`` are numbers of steps and the kernels of each.
    """
    spent: dict[tuple[str, Bound], float] = {}
    for steps, kernels in runs:
        for kernel in kernels:
            if not kernel.collective:
                by_flops, by_bytes = kernel_seconds(kernel, cluster.target.data_sheet)
                file = hlo.file_and_line(kernel.instruction.source).partition(":")[0]
                bound: Bound = "compute" if by_flops > by_bytes else "memory"
                key = file or "the compiler", bound
                spent[key] = spent.get(key, 0.0) + steps * kernel.runs * max(by_flops, by_bytes)
    total = sum(spent.values())
    return [
        {"source": file, "bound": what, "seconds": seconds * slowdown(), "share": seconds / total}
        for (file, what), seconds in sorted(spent.items(), key=lambda item: -item[1])
    ]


def rate_name(dtype: str, sheet: DataSheet) -> str:
    """The name of the peak rate of a matmul of ``dtype``; a type without one counts as bf16."""
    known = {"f32": "tf32", "f16": "bf16", "bf16": "bf16", "f8": "f8", "f64": "f32"}
    name = known.get(dtype, "bf16")
    return name if name in sheet.peak_flops else "bf16"


def collective_seconds(collective: Collective, cluster: Cluster) -> float:
    """Seconds of one collective as a ring: NVLink within a node; between nodes the adapters of its
    members of a node.

    An all-reduce moves twice the bytes of the others. The device ids of a node are consecutive.
    """
    sheet = cluster.target.data_sheet
    nodes = len({device // cluster.per_node for device in collective.members})
    bandwidth = sheet.nvlink_bytes_per_second
    if nodes > 1:
        bandwidth = min(bandwidth, sheet.network_bytes_per_second * collective.group / nodes)
    rounds = 2 if collective.kind == "all-reduce" else 1
    moved = rounds * collective.bytes * (collective.group - 1) / max(1, collective.group)
    return moved / (bandwidth * FRACTIONS["communication"]) + LATENCY + HOP * (nodes - 1)


def simulate(
    kernels: Sequence[Kernel],
    cluster: Cluster,
    time: Callable[[Kernel, Cluster], tuple[float, float]] | None = None,
    send: Callable[[Collective, Cluster], float] | None = None,
) -> tuple[Times, dict[int, tuple[float, float]]]:
    """Simulate the schedule with a compute stream and a communication stream.

    Returns the sums and, by the index of each collective in ``kernels``, (its seconds, its exposed
    seconds). A loop is one pass through its body, stretched by how often it runs. ``time`` and
    ``send`` stand for :func:`kernel_seconds` and :func:`collective_seconds`.
    """
    time = time or (lambda kernel, at: kernel_seconds(kernel, at.target.data_sheet))
    send = send or collective_seconds
    now = compute = memory = communication = exposed = 0.0
    free = 0.0  # when the last collective is done
    ends: dict[int, float] = {}
    collectives: dict[int, tuple[float, float]] = {}
    waits: dict[int, list[int]] = {}
    for index, kernel in enumerate(kernels):
        if kernel.collective:
            waits.setdefault(kernel.waited_at, []).append(index)
    for index in range(len(kernels) + 1):
        for waited in waits.get(index, ()):
            late = max(0.0, ends[waited] - now)
            exposed += late
            now += late
            collectives[waited] = (collectives[waited][0], late)
        if index == len(kernels):
            break
        kernel = kernels[index]
        if kernel.collective:
            takes = kernel.runs * send(kernel.collective, cluster)
            free = max(now, free) + takes
            ends[index], collectives[index] = free, (takes, 0.0)
            communication += takes
            continue
        by_flops, by_bytes = time(kernel, cluster)
        takes = kernel.runs * max(by_flops, by_bytes)
        now += takes
        if by_flops > by_bytes:
            compute += takes
        else:
            memory += takes
    computing = [kernel for kernel in kernels if not kernel.collective]
    launches = launch_gap(cluster) * sum(kernel.runs for kernel in computing)
    blocks = sum(kernel.runs * kernel.empty_blocks for kernel in computing)
    empty = blocks * EMPTY_BLOCK / cluster.target.cores if blocks else 0.0
    return Times(compute, memory, communication, exposed, launches, empty), collectives
