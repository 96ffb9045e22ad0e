"""From kernels to milliseconds: a roofline for each kernel, sends beside them, and what published times make of that.

A bound: no kernel runs faster than its FLOPs at the peak rate or its bytes at the bandwidth. The rest is a guess:
which fraction of them a kernel reaches (FRACTIONS), and how far a whole step stays behind its kernels, which one number
says (:func:`slowdown`). It is fitted on published step times of other programs for the same schedules.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jspeed.plan import hlo
from jspeed.plan.cost import PRODUCTS, Kernel
from jspeed.plan.hlo import Collective
from jspeed.plan.target import Cluster, Facts

# Fractions of the peak that single kernels reach. Matrix products: what cuBLAS does at 768 to 3,072 columns is well
# under the 0.75 to 0.8 of large squares. Attention: cuDNN does 582 TFLOP/s (0.59) forward on H100 at 8,192 keys
# (tritonbench issue 141), less backward and in short windows. Memory: copies reach 0.9. Communication: NCCL's bus
# bandwidth on one node of H100 is 330 to 370 of 450 GB/s.
FRACTIONS = {
    "matmul": 0.65,
    "fp8_matmul": 0.55,
    "attention_forward": 0.5,
    "attention_backward": 0.4,
    "memory": 0.85,
    "communication": 0.75,
}
LAUNCH = 2e-6  # seconds that the smallest kernel takes
LATENCY = 15e-6  # seconds that the smallest exchange takes within a node
HOP = 8e-6  # seconds more for every node that a ring passes
SPREAD = (0.85, 1.25)  # range around the fitted time: wide enough for the four published programs


class Times(NamedTuple):
    """Seconds of one step on one device. ``total`` is compute + memory + exposed."""

    compute: float  # kernels that the multipliers hold up
    memory: float  # kernels that the memory holds up
    communication: float  # sends, whatever runs beside them
    exposed: float  # sends that nothing runs beside
    total: float


class Published(NamedTuple):
    """A step time that others measured on 8 H100s, for a schedule that is a recipe here."""

    recipe: str
    milliseconds: float
    roofline: float  # ms: what ``plan.py RECIPE --target h100x8`` computes before the slowdown; checked in tests/aot
    fitted: bool
    source: str


PUBLISHED = (
    Published("r29", 97.98, 90.57, True, "modded-nanogpt record 29 (PyTorch)"),
    Published("r21", 100.0, 89.78, True, "modded-nanogpt record 21 (PyTorch)"),
    Published("llmc", 140.0, 143.02, True, "modded-nanogpt record 1 (llm.c)"),
    Published("track3", 155.0, 122.81, False, "modded-nanogpt track 3 baseline (PyTorch)"),
)


def slowdown() -> float:
    """Measured over roofline milliseconds: the geometric mean over the published programs that are fitted."""
    ratios = [math.log(p.milliseconds / p.roofline) for p in PUBLISHED if p.fitted]
    return math.exp(sum(ratios) / len(ratios))


def predicted_range(seconds: float) -> tuple[float, float]:
    """(low, high) seconds of something whose roofline is ``seconds``."""
    low, high = SPREAD
    return seconds * slowdown() * low, seconds * slowdown() * high


def calibration() -> list[dict]:
    """Every published time beside what is predicted for it; ``error`` is (predicted - measured) / measured."""
    return [
        {
            "recipe": p.recipe,
            "measured_ms": p.milliseconds,
            "roofline_ms": p.roofline,
            "predicted_ms": [1e3 * edge for edge in predicted_range(p.roofline / 1e3)],
            "used_to_fit": p.fitted,
            "error": p.roofline * slowdown() / p.milliseconds - 1,
            "source": p.source,
        }
        for p in PUBLISHED
    ]


def kernel_seconds(kernel: Kernel, facts: Facts) -> tuple[float, float]:
    """(seconds by FLOPs, seconds by bytes) of one run of a kernel; it takes the larger of them."""
    by_bytes = kernel.bytes / (facts.hbm_bytes_per_second * FRACTIONS["memory"])
    if not kernel.flops:
        return 0.0, max(by_bytes, LAUNCH)
    kind = kernel.kind if kernel.kind in FRACTIONS else "matmul"
    fastest = facts.peak_flops.get("bf16" if kernel.kind in PRODUCTS else rate_name(kernel.dtype, facts))
    assert fastest
    return kernel.flops / (fastest * FRACTIONS[kind]), max(by_bytes, LAUNCH)


def hindrances(runs: Iterable[tuple[int, Sequence[Kernel]]], cluster: Cluster) -> list[dict]:
    """Return where the time of a run goes, most first: by the file that asks for kernels, and what holds these up.

    ``runs`` are numbers of steps and the kernels of each. Sends are not among them; ``share`` is of all kernels.
    """
    spent: dict[tuple[str, str], float] = {}
    for steps, kernels in runs:
        for kernel in kernels:
            if not kernel.collective:
                by_flops, by_bytes = kernel_seconds(kernel, cluster.facts)
                file = hlo.short(kernel.instruction.source).partition(":")[0]
                key = file or "the compiler", "the multipliers" if by_flops > by_bytes else "memory"
                spent[key] = spent.get(key, 0.0) + steps * kernel.times * max(by_flops, by_bytes)
    return [
        {"source": file, "held_up_by": what, "seconds": seconds * slowdown(), "share": seconds / sum(spent.values())}
        for (file, what), seconds in sorted(spent.items(), key=lambda item: -item[1])
    ]


def rate_name(dtype: str, facts: Facts) -> str:
    """The peak rate that a product of ``dtype`` goes by; a type without one is multiplied as bf16."""
    known = {"f32": "tf32", "f16": "bf16", "bf16": "bf16", "f8": "f8", "f64": "f32"}
    name = known.get(dtype, "bf16")
    return name if name in facts.peak_flops else "bf16"


def collective_seconds(exchange: Collective, cluster: Cluster) -> float:
    """Seconds of one exchange as a ring: over NVLink within a node, over all adapters of a node between nodes.

    An all-reduce sends twice what the others do.
    """
    facts = cluster.facts
    nodes = -(-exchange.group // cluster.per_node)
    bandwidth = facts.nvlink_bytes_per_second
    if nodes > 1:
        bandwidth = min(bandwidth, facts.network_bytes_per_second * cluster.per_node)
    rounds = 2 if exchange.kind == "all-reduce" else 1
    sent = rounds * exchange.bytes * (exchange.group - 1) / max(1, exchange.group)
    return sent / (bandwidth * FRACTIONS["communication"]) + LATENCY + HOP * (nodes - 1)


def times(kernels: Sequence[Kernel], cluster: Cluster) -> tuple[Times, dict[int, tuple[float, float]]]:
    """Follow the schedule with one stream of kernels and one of sends.

    Returns the sums and, by the place of each send in ``kernels``, (seconds it takes, seconds of it exposed). A loop
    is one pass through its body, stretched by how often it runs.
    """
    now = compute = memory = communication = exposed = 0.0
    free = 0.0  # when the last send is done
    ends: dict[int, float] = {}
    sends: dict[int, tuple[float, float]] = {}
    waits: dict[int, list[int]] = {}
    for place, kernel in enumerate(kernels):
        if kernel.collective:
            waits.setdefault(kernel.until, []).append(place)
    for place in range(len(kernels) + 1):
        for send in waits.get(place, ()):
            late = max(0.0, ends[send] - now)
            exposed += late
            now += late
            sends[send] = (sends[send][0], late)
        if place == len(kernels):
            break
        kernel = kernels[place]
        if kernel.collective:
            takes = kernel.times * collective_seconds(kernel.collective, cluster)
            free = max(now, free) + takes
            ends[place], sends[place] = free, (takes, 0.0)
            communication += takes
            continue
        by_flops, by_bytes = kernel_seconds(kernel, cluster.facts)
        takes = kernel.times * max(by_flops, by_bytes)
        now += takes
        if by_flops > by_bytes:
            compute += takes
        else:
            memory += takes
    return Times(compute, memory, communication, exposed, compute + memory + exposed), sends
