"""A step's time by what others measured of its kernels, with nothing fitted: beside the prediction.

Matmuls of cuBLAS, attention of cuDNN and collectives within a node take the seconds of
:mod:`.rates`. All else takes its bytes at the bandwidth that FP8 casts reach (0.84 to 0.90 of an
H100's; ``predict.FRACTIONS["memory"]``), or its special functions at their units' rate. Custom
kernels, which no GPU has run, and the floor of a launch stay guesses: their share is counted.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jspeed.plan import predict
from jspeed.plan.cost import PALLAS, Kernel
from jspeed.plan.hlo import Collective
from jspeed.plan.measured.rates import rates_of
from jspeed.plan.target import Cluster

# pytorch/ao issue 2377: 1.1 to 1.2 times the time, where sums of FP8 products stay in fp32.
WITHOUT_FAST_ACCUMULATION = 1.15
HIGHEST = '"operand_precision":["HIGHEST"'  # a matmul without it
# Results of special functions a clock and SM: 16 (CUDA C++ programming guide, throughput of
# arithmetic instructions, compute capability 9.0). The clock is a guess; an H100's boost is 1.98.
SPECIAL_PER_CLOCK, CLOCK = 16, 1.755e9


class Opinion(NamedTuple):
    """Seconds of a step on one device."""

    seconds: float  # kernels, exposed communication and launch gaps
    guessed: float  # of them, of kernels whose time nobody has measured
    empty_blocks: float  # a guess too, which the prediction adds as well


def of_step(kernels: Sequence[Kernel], cluster: Cluster) -> Opinion | None:
    """The second opinion of a step; None where the target has no measured rates."""
    if rates_of(cluster.target.name) is None:
        return None
    times, _ = predict.simulate(kernels, cluster, kernel_seconds, collective_seconds)
    guessed = sum(
        kernel.runs * max(kernel_seconds(kernel, cluster))
        for kernel in kernels
        if not kernel.collective and is_guessed(kernel, cluster)
    )
    return Opinion(times.total, guessed, times.empty_blocks)


def of_run(stages: Iterable[tuple[int, dict[str, float] | None]]) -> dict[str, float] | None:
    """The sums over (steps, opinion of a step) of a run's stages; None where a stage has none."""
    sums = dict.fromkeys(Opinion._fields, 0.0)
    for steps, opinion in stages:
        if opinion is None:
            return None
        for name, value in opinion.items():
            sums[name] += steps * value
    return sums


def kernel_seconds(kernel: Kernel, cluster: Cluster) -> tuple[float, float]:
    """(seconds by FLOPs, seconds by bytes) of one run, as :func:`.predict.kernel_seconds`."""
    by_flops, by_bytes = predict.kernel_seconds(kernel, cluster.target.data_sheet)
    if (measured := measured_seconds(kernel, cluster)) is not None:
        return measured, by_bytes
    special = kernel.special / (SPECIAL_PER_CLOCK * CLOCK * cluster.target.cores)
    return max(by_flops, special), by_bytes


def measured_seconds(kernel: Kernel, cluster: Cluster) -> float | None:
    """Seconds that the tables have for a matmul of cuBLAS or for cuDNN's attention; None for all
    else."""
    rates = rates_of(cluster.target.name)
    assert rates is not None
    if kernel.seen:
        return rates.attention_seconds(kernel.seen)
    if "matmul" not in kernel.kind or is_custom(kernel):
        return None
    seconds = rates.matmul_seconds("bf16" if kernel.dtype == "f16" else kernel.dtype, kernel.dims)
    if seconds is None:
        return None
    exact = kernel.dtype == "f8" and HIGHEST in kernel.instruction.attributes
    several = kernel.flops / (2.0 * math.prod(kernel.dims))  # of a fusion dims are the last one's
    return seconds * several * (WITHOUT_FAST_ACCUMULATION if exact else 1.0)


def is_custom(kernel: Kernel) -> bool:
    """Whether a kernel is written with Pallas."""
    return kernel.instruction.target.startswith(PALLAS)


def is_guessed(kernel: Kernel, cluster: Cluster) -> bool:
    """Whether nobody has measured what bounds a kernel: FLOPs of a kind without a table, special
    functions, a launch, or anything in a custom kernel."""
    by_flops, by_bytes = kernel_seconds(kernel, cluster)
    if is_custom(kernel) or max(by_flops, by_bytes) <= predict.LAUNCH:
        return True
    return by_flops > by_bytes and measured_seconds(kernel, cluster) is None


def collective_seconds(collective: Collective, cluster: Cluster) -> float:
    """Seconds of one collective; between nodes, or among a number of GPUs that was not measured, as
    :func:`.predict.collective_seconds`."""
    rates = rates_of(cluster.target.name)
    assert rates is not None
    if len({device // cluster.per_node for device in collective.members}) == 1:
        measured = rates.collective_seconds(collective.kind, collective.group, collective.bytes)
        if measured is not None:
            return measured
    return predict.collective_seconds(collective, cluster)
