"""Predict a step's time from its kernels: what each takes, communication that none of them hides,
and gaps between them. Nothing is fitted.

The range comes of published step times (:data:`MEASURED`): a factor over the sum of terms, fitted
on five of them, would predict the sixth no better than none (benchmarks/plan.md).
"""

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jspeed.plan import hlo
from jspeed.plan.assumed import Constant
from jspeed.plan.cost import Kernel
from jspeed.plan.measured import terms
from jspeed.plan.measured.rates import rates_of
from jspeed.plan.schema import BottleneckRow, Bound, CalibrationRow, Term, TermRow
from jspeed.plan.target import Cluster

# Idle seconds between two kernels, in a CUDA graph and without.
GAP = Constant(0.46e-6, "r92's step of 853 kernels on an H200, by its profile (benchmarks/gpu.md)")
GAP_WITHOUT_GRAPHS = Constant(
    0.9e-6,
    "guess, by 3.8 us a kernel of 2.9 on a V100: https://developer.nvidia.com/blog/cuda-graphs/",
)
# Four of five programs like the published ones lie within as many errors of those six.
WIDTH_OF_RANGE = Constant(1.44, "Student's t: 80 %, six degrees of freedom")


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
        """All terms but communication that is hidden, and empty blocks."""
        return self.compute + self.memory + self.exposed_communication + self.launches

    @property
    def expected(self) -> float:
        """What is predicted."""
        return self.total + self.empty_blocks


class MeasuredStep(NamedTuple):
    """A step time that others measured on 8 H100s, for a schedule that is a recipe here."""

    recipe: str
    measured_ms: float
    # what ``jspeed plan RECIPE --target h100x8`` says without empty blocks, which PyTorch's
    # programs have not, by tables and by flat rates alone: of benchmarks/plan.json
    tables_ms: float
    flat_ms: float
    source: str


MEASURED = (
    MeasuredStep("llmc", 140.0, 143.95, 143.31, "modded-nanogpt record 1 (llm.c)"),
    MeasuredStep("track3", 155.0, 122.96, 123.33, "modded-nanogpt track 3 baseline (PyTorch)"),
    MeasuredStep("r21", 100.0, 90.44, 89.61, "modded-nanogpt record 21 (PyTorch)"),
    MeasuredStep("r29", 97.98, 91.77, 89.97, "modded-nanogpt record 29 (PyTorch)"),
    MeasuredStep("r62", 61.3, 59.88, 58.36, "modded-nanogpt record 62 (PyTorch)"),
    MeasuredStep("r89", 57.5, 59.85, 58.38, "modded-nanogpt record 89 (PyTorch), by PR 360"),
)


def spread(cluster: Cluster) -> float:
    """Of log(predicted / measured) over MEASURED, from zero: the square root of the mean square."""
    errors = [math.log(1 + row["error"]) for row in calibration(cluster)]
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def predicted_range(expected: float, cluster: Cluster) -> tuple[float, float]:
    """(low, high) around ``expected``: four of five programs like the published ones are within."""
    factor = math.exp(WIDTH_OF_RANGE * spread(cluster))
    return expected / factor, expected * factor


def calibration(cluster: Cluster) -> list[CalibrationRow]:
    """Each of MEASURED beside what is predicted of it, by tables or, where the target of
    ``cluster`` has none, by flat rates."""
    tables = rates_of(cluster.target.name) is not None
    rows: list[CalibrationRow] = []
    for p in MEASURED:
        ms = p.tables_ms if tables else p.flat_ms
        rows.append(
            {
                "recipe": p.recipe,
                "measured_ms": p.measured_ms,
                "predicted_ms": ms,
                "error": ms / p.measured_ms - 1,
                "source": p.source,
            }
        )
    return rows


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
                by_flops, by_bytes, *_ = terms.price(kernel, cluster)
                file = hlo.file_and_line(kernel.instruction.source).partition(":")[0]
                bound: Bound = "compute" if by_flops > by_bytes else "memory"
                key = file or "the compiler", bound
                spent[key] = spent.get(key, 0.0) + steps * kernel.runs * max(by_flops, by_bytes)
    total = sum(spent.values())
    return [
        {
            "source": file,
            "bound": what,
            "seconds": seconds,
            "share": seconds / total,
        }
        for (file, what), seconds in sorted(spent.items(), key=lambda item: -item[1])
    ]


def terms_of(kernels: Sequence[Kernel], cluster: Cluster) -> dict[Term, tuple[float, float]]:
    """(seconds, those of them that are guesses) of a step by term."""
    times, _ = simulate(kernels, cluster)
    sums: dict[Term, tuple[float, float]] = {}

    def add(term: Term, seconds: float, guessed: bool) -> None:
        before, guesses = sums.get(term, (0.0, 0.0))
        sums[term] = before + seconds, guesses + seconds * guessed

    for kernel in kernels:
        if not kernel.collective:
            priced = terms.price(kernel, cluster)
            add(priced.term, kernel.runs * priced.seconds, priced.guessed)
    sent = [terms.collective_seconds(k.collective, cluster)[1] for k in kernels if k.collective]
    add("exposed communication", times.exposed_communication, any(sent))
    add("idle between kernels", times.launches, cluster.target.name not in terms.HOPPER)
    add("empty blocks of attention", times.empty_blocks, True)
    return sums


def by_term(runs: Iterable[tuple[int, dict[Term, tuple[float, float]]]]) -> list[TermRow]:
    """What the seconds of a run are made of, most first, and the share that is guessed; ``runs``
    are numbers of steps, and :func:`terms_of` of each."""
    sums: dict[Term, float] = defaultdict(float)
    guesses: dict[Term, float] = defaultdict(float)
    for steps, found in runs:
        for term, (seconds, guessed) in found.items():
            sums[term] += steps * seconds
            guesses[term] += steps * guessed
    total = sum(sums.values())
    return [
        {"term": term, "seconds": s, "share": s / total, "guessed": guesses[term] / total}
        for term, s in sorted(sums.items(), key=lambda item: -item[1])
        if s
    ]


def simulate(
    kernels: Sequence[Kernel], cluster: Cluster
) -> tuple[Times, dict[int, tuple[float, float]]]:
    """Simulate the schedule with a compute stream and a communication stream.

    Returns the sums and, by the index of each collective in ``kernels``, (its seconds, its exposed
    seconds). A loop is one pass through its body, stretched by how often it runs.
    """
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
            takes = kernel.runs * terms.collective_seconds(kernel.collective, cluster)[0]
            free = max(now, free) + takes
            ends[index], collectives[index] = free, (takes, 0.0)
            communication += takes
            continue
        by_flops, by_bytes, *_ = terms.price(kernel, cluster)
        takes = kernel.runs * max(by_flops, by_bytes)
        now += takes
        if by_flops > by_bytes:
            compute += takes
        else:
            memory += takes
    computing = [kernel for kernel in kernels if not kernel.collective]
    launches = launch_gap(cluster) * sum(kernel.runs for kernel in computing)
    empty = sum(kernel.runs * terms.empty_seconds(kernel, cluster) for kernel in computing)
    return Times(compute, memory, communication, exposed, launches, empty), collectives
