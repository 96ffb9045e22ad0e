"""Flat rates: a kernel at a fraction of the data sheet's peaks, where no table has its time
(:mod:`.measured.terms`)."""

from jspeed.plan.cost import Kernel
from jspeed.plan.hlo import Collective
from jspeed.plan.target import Cluster, DataSheet


class Constant(float):
    """A number of the cost model, and ``source``: where it was measured, or the word guess."""

    source: str

    def __new__(cls, value: float, source: str) -> "Constant":
        made = super().__new__(cls, value)
        made.source = source
        return made


# Fractions of the peak that kernels reach; own attention kernels count as cuDNN's.
FRACTIONS = {
    "matmul": Constant(0.65, "guess; large squares reach 0.75 to 0.8 of an H100's"),
    "fp8_matmul": Constant(0.55, "guess"),
    "attention_forward": Constant(
        0.5,
        "guess; cuDNN with 8,192 keys on an H100: 0.59 (github.com/pytorch-labs/tritonbench 141)",
    ),
    "attention_backward": Constant(0.4, "guess"),
    "memory": Constant(0.85, "guess; copies reach 0.9 of an H100's"),
    "communication": Constant(0.75, "guess; NCCL reaches 330 to 370 of 450 GB/s on eight H100s"),
}
LAUNCH = Constant(2e-6, "guess: least seconds of a kernel")
LATENCY = Constant(15e-6, "guess: seconds of a collective within a node, besides bytes")
HOP = Constant(8e-6, "guess: seconds for each further node of a ring")


def kernel_seconds(kernel: Kernel, sheet: DataSheet) -> tuple[float, float]:
    """(seconds by FLOPs, seconds by bytes) of one run of a kernel; it takes the larger of them."""
    fractions = FRACTIONS | sheet.fractions
    by_bytes = kernel.bytes / (sheet.hbm_bytes_per_second * fractions["memory"])
    if not kernel.flops:
        return 0.0, max(by_bytes, LAUNCH)
    rate = "bf16" if kernel.kind.startswith("attention") else rate_name(kernel.dtype, sheet)
    return kernel.flops / (sheet.peak_flops[rate] * fractions[kernel.kind]), max(by_bytes, LAUNCH)


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
