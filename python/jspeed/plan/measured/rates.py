"""Measured rates of a GPU by interpolation: matmuls, collectives, attention, passes over memory.

The tables in ``tables/`` are NVIDIA's own measurements, from the package aiconfigurator-core
(Apache-2.0); ``scripts/benches/published_rates.py`` makes them. ``hopper_cudnn.csv`` is ours.
GPUs without a table have None here. :mod:`.terms` prices kernels by them.
"""

import csv
import math
from functools import cache
from importlib import resources
from typing import NamedTuple

import numpy as np
from scipy.interpolate import RegularGridInterpolator

from jspeed.plan.assumed import Constant
from jspeed.plan.attention import Seen

# cuDNN's attention on Hopper over FlashAttention 3's forward pass with heads of 64, which the table
# has: figures 5 and 6 of its paper (arXiv 2407.08608), without a causal mask, 512 to 16,384 keys.
# cuDNN forward 335 to 413 (heads of 64) and 497 to 617 TFLOP/s (128); backward 266 to 433 and 305
# to 518.
FORWARD = {64: 0.83, 128: 1.24}
BACKWARD = {64: (0.79, 1.05), 128: (0.61, 0.84)}  # over forward: at 512 keys, at 16,384
CHART = (512, 16384)

# Bytes a second of passes over memory: casts to FP8 of 100 MB to 1 GB by the same package, medians
# (141 a GPU; 2.90 to 3.07 on an H100). XLA's own on an H200 are slower than its 4.05e12.
CASTS = "aiconfigurator-core 0.12.0, scale_matrix_perf"
PASSES = {
    "h100": Constant(3.01e12, CASTS),
    "h200": Constant(3.45e12, "XLA's copy and Adam of 1 GB, in a row (benchmarks/gpu.md)"),
    "b200": Constant(4.37e12, CASTS),
    "l40s": Constant(0.68e12, CASTS),
}
FOLDER = resources.files("jspeed.plan.measured") / "tables"
Points = tuple[np.ndarray, np.ndarray]  # logarithms of sizes and of what was measured there


class Rates(NamedTuple):
    """What was measured of one GPU."""

    # by dtype: log seconds a FLOP over log (m, n, k)
    matmuls: dict[str, RegularGridInterpolator]
    collectives: dict[tuple[str, int], Points]  # by kind and devices: bytes, seconds
    attention: Points | None  # keys of a query, FLOP/s
    # of cuDNN, with heads of 128, forward and backward, likewise
    cudnn: tuple[Points, Points] | None = None
    passes: float | None = None  # bytes a second

    def matmul_seconds(self, dtype: str, dims: tuple[int, ...]) -> float | None:
        """Seconds of a matmul of ``dims`` = (batch, rows, contracted, columns); None for a dtype
        that was not measured.

        A batch counts as that many more rows: it has as many tiles. Of the two orders of rows and
        columns the faster one counts: XLA may choose it.
        """
        if dtype not in self.matmuls:
            return None
        batch, rows, contracted, columns = dims
        grid = self.matmuls[dtype]
        orders = ((batch * rows, columns, contracted), (batch * columns, rows, contracted))
        points = [
            [
                np.clip(math.log(size), axis[0], axis[-1])
                for size, axis in zip(order, grid.grid, strict=True)
            ]
            for order in orders
        ]
        return 2.0 * math.prod(dims) * math.exp(min(grid(points)))

    def collective_seconds(self, kind: str, devices: int, size: int) -> float | None:
        """Seconds of a collective over ``size`` bytes of the whole array; None where it was not
        measured on as many devices."""
        if (kind, devices) not in self.collectives:
            return None
        sizes, seconds = self.collectives[kind, devices]
        over = max(0.0, math.log(max(size, 1)) - sizes[-1])
        return math.exp(float(np.interp(math.log(max(size, 1)), sizes, seconds)) + over)

    def attention_seconds(self, seen: Seen) -> float | None:
        """Seconds of a call of cuDNN's attention, by the keys that a query sees in whole tiles;
        None where none was measured.

        With heads of 128, or packed documents, as r92's were measured: five windows on an H200 in a
        row, blocks that find nothing to do included (benchmarks/gpu.md). Of them keys are counted
        as if each document were as long as the longest, here as there.
        """
        if self.attention is None:
            return None
        keys, widths = math.log(seen.keys), list(FORWARD)
        chart = math.exp(float(np.interp(keys, *self.attention)))
        chart *= float(np.interp(seen.width, widths, list(FORWARD.values())))
        if seen.backward:
            ends = np.log(CHART)
            over = [float(np.interp(keys, ends, BACKWARD[w])) for w in widths]
            chart *= float(np.interp(seen.width, widths, over))
        if self.cudnn is None or not (seen.packed or seen.width >= 128):
            return seen.flops / chart
        rate = math.exp(float(np.interp(keys, *self.cudnn[seen.backward])))
        narrow = FORWARD[64] / FORWARD[128]
        if seen.backward:
            narrow *= BACKWARD[64][0] / BACKWARD[128][0]
        rate *= float(np.interp(seen.width, widths, (narrow, 1.0)))
        beyond = keys > self.cudnn[seen.backward][0][-1]  # of the longest window that was measured
        return seen.flops / (max(rate, chart) if beyond else rate)


@cache
def rates_of(name: str) -> Rates | None:
    """The measured rates of the GPU with the data sheet ``targets/NAME.toml``, if it has any."""
    if not (FOLDER / f"{name}_matmul.csv").is_file():
        return None

    def table(kind: str, name: str = name) -> list[dict[str, str]]:
        path = FOLDER / f"{name}_{kind}.csv"
        return list(csv.DictReader(path.read_text().splitlines())) if path.is_file() else []

    def rates(rows: list[dict[str, str]], column: str) -> Points:
        return _points(
            [(math.log(int(row["keys"])), math.log(1e12 * float(row[column]))) for row in rows]
        )

    flash, cudnn = table("attention"), table("cudnn", "hopper")
    return Rates(
        _matmuls(table("matmul")),
        _collectives(table("collective")),
        rates(flash, "tflops") if flash else None,
        (rates(cudnn, "forward"), rates(cudnn, "backward")) if flash else None,
        PASSES.get(name),
    )


def _matmuls(rows: list[dict[str, str]]) -> dict[str, RegularGridInterpolator]:
    grids = {}
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        own = [row for row in rows if row["dtype"] == dtype]
        sides = [int(key) for key in own[0] if key.isdigit()]
        m, n = (sorted({int(row[key]) for row in own}) for key in "mn")
        values = np.empty((len(m), len(n), len(sides)))
        for row in own:
            at = m.index(int(row["m"])), n.index(int(row["n"]))
            for place, k in enumerate(sides):
                flops = 2.0 * int(row["m"]) * int(row["n"]) * k
                values[at][place] = math.log(1e-6 * float(row[str(k)]) / flops)
        grids[dtype] = RegularGridInterpolator(
            tuple(np.log(axis) for axis in (m, n, sides)), values
        )
    return grids


def _collectives(rows: list[dict[str, str]]) -> dict[tuple[str, int], Points]:
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in rows:
        point = math.log(int(row["bytes"])), math.log(1e-6 * float(row["us"]))
        found.setdefault((row["kind"], int(row["devices"])), []).append(point)
    return {key: _points(points) for key, points in found.items()}


def _points(pairs: list[tuple[float, float]]) -> Points:
    sizes, values = np.array(sorted(pairs)).T
    return sizes, values
