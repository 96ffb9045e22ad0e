"""What each kernel of a step takes, and by which term: by what was measured of such kernels, where
the target has tables (:mod:`.rates`), else by flat rates (:mod:`jspeed.plan.assumed`).

Matmuls of cuBLAS and collectives within a node have the times that NVIDIA measured; attention of
cuDNN, custom matmuls and special functions those of an H200 that ran r92's kernels
(benchmarks/gpu.md); all else takes its bytes at the rate of passes over memory. What stays a guess
says so.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from jspeed.plan import assumed
from jspeed.plan.assumed import Constant
from jspeed.plan.cost import PALLAS, Kernel
from jspeed.plan.hlo import Collective
from jspeed.plan.measured.rates import Rates, rates_of
from jspeed.plan.schema import Term
from jspeed.plan.target import Cluster, device_numbers

HOPPER = ("h100", "h200")  # alike but for memory
HIGHEST = '"operand_precision":["HIGHEST"'  # a matmul without fast accumulation
WITHOUT_FAST_ACCUMULATION = Constant(
    1.06, "times the seconds: eleven FP8 matmuls on an H200, median, in a row (benchmarks/gpu.md)"
)  # fmt: skip
CUSTOM_MATMUL = Constant(
    0.35, "of the FP8 peak: r92's two MLP kernels on an H200, in a row (benchmarks/gpu.md)"
)  # fmt: skip
# Of 49,152 x 14,336 logits, three each, in 0.75 ms forward and 1.94 ms for their gradient.
SPECIAL = Constant(
    6.0, "exp, log, divisions a clock and SM: r92's loss in its step (benchmarks/gpu.md)"
)  # fmt: skip
# Custom kernels that were seen to move their bytes on an H200 at the rate of other passes.
AS_PASSES = 'name = "fp8_cast"', 'name = "norm_gradient"'
EMPTY_BLOCK = Constant(1e-6, "guess: seconds of an SM for a block of attention that finds nothing")
# In the measured calls of cuDNN: for each block of queries with work so many without.
EMPTY_MEASURED = 7


class Priced(NamedTuple):
    """Seconds of one run of a kernel, which takes the larger of the two."""

    by_work: float  # FLOPs or special functions
    by_bytes: float
    term: Term  # that bounds it
    guessed: bool  # whether nobody has measured that

    @property
    def seconds(self) -> float:
        """What it takes."""
        return max(self.by_work, self.by_bytes)


def price(kernel: Kernel, cluster: Cluster) -> Priced:
    """What one run of a kernel takes."""
    sheet, rates = cluster.target.data_sheet, rates_of(cluster.target.name)
    work, moved = assumed.kernel_seconds(kernel, sheet)
    measured = passes = None
    if rates:
        measured = _measured(kernel, cluster, rates)
        work = max(work, _special(kernel, cluster)) if measured is None else measured
        passes = rates.passes if "memory" not in sheet.fractions else None
        moved = max(kernel.bytes / passes, assumed.LAUNCH) if passes else moved
    custom = kernel.instruction.target.startswith(PALLAS)
    if max(work, moved) <= assumed.LAUNCH:
        return Priced(work, moved, "least kernels", True)
    if work > moved:
        return Priced(work, moved, _term(kernel, custom), measured is None)
    known = not custom or any(name in kernel.instruction.attributes for name in AS_PASSES)
    return Priced(
        work, moved, "custom passes" if custom else "passes over memory", not (passes and known)
    )


def _measured(kernel: Kernel, cluster: Cluster, rates: Rates) -> float | None:
    """Seconds by FLOPs, or special functions, as they were measured; None where nobody has."""
    if kernel.seen:
        return rates.attention_seconds(kernel.seen)
    if not kernel.flops and cluster.target.name in HOPPER:
        return _special(kernel, cluster)
    if "matmul" not in kernel.kind:
        return None
    if kernel.instruction.target.startswith(PALLAS):
        peak = cluster.target.data_sheet.peak_flops["f8"] * CUSTOM_MATMUL
        return kernel.flops / peak if cluster.target.name in HOPPER else None
    dtype = "bf16" if kernel.dtype == "f16" else kernel.dtype
    if (seconds := _matmul(cluster.target.name, dtype, kernel.dims)) is None:
        return None
    exact = kernel.dtype == "f8" and HIGHEST in kernel.instruction.attributes
    several = kernel.flops / (2.0 * math.prod(kernel.dims))  # of a fusion dims are the last one's
    return seconds * several * (WITHOUT_FAST_ACCUMULATION if exact else 1.0)


def _special(kernel: Kernel, cluster: Cluster) -> float:
    clock = 1e9 * device_numbers(cluster.target.text)["clock_rate_ghz"]
    return kernel.special / (SPECIAL * clock * cluster.target.cores)


@lru_cache(4096)
def _matmul(target: str, dtype: str, dims: tuple[int, ...]) -> float | None:
    rates = rates_of(target)
    return rates and rates.matmul_seconds(dtype, dims)


def _term(kernel: Kernel, custom: bool) -> Term:
    """The term of a kernel that FLOPs or special functions bound."""
    if kernel.kind.startswith("attention"):
        return "custom attention" if custom else "attention"
    if kernel.kind == "fp8_matmul":
        return "custom FP8 matmuls" if custom else "FP8 matmuls"
    if kernel.kind == "matmul":
        return "bf16 matmuls" if kernel.dtype == "bf16" else "other matmuls"
    return "special functions"


def collective_seconds(collective: Collective, cluster: Cluster) -> tuple[float, bool]:
    """Seconds of one collective, and whether they are a guess: between nodes, or among a number of
    GPUs that was not measured."""
    rates = rates_of(cluster.target.name)
    if rates and len({device // cluster.per_node for device in collective.members}) == 1:
        measured = rates.collective_seconds(collective.kind, collective.group, collective.bytes)
        if measured is not None:
            return measured, False
    return assumed.collective_seconds(collective, cluster), True


def empty_seconds(kernel: Kernel, cluster: Cluster) -> float:
    """Seconds of attention's blocks that find nothing to do, beyond those of the calls that were
    measured."""
    blocks = kernel.empty_blocks
    if kernel.seen and cluster.target.name in HOPPER:
        blocks = max(0, blocks - EMPTY_MEASURED * kernel.seen.blocks)
    return blocks * EMPTY_BLOCK / cluster.target.cores if blocks else 0.0
