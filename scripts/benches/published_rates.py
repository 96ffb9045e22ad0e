"""Make the plan's tables of measured rates from what NVIDIA publishes of its own measurements.

    pip install pyarrow
    pip download --no-deps aiconfigurator-core==0.12.0
    python scripts/benches/published_rates.py aiconfigurator_core-0.12.0-*.whl

The package (Apache-2.0, 82 MB) holds kernel times of inference frameworks on each GPU. A few tens
of kB of them go into ``python/jspeed/plan/measured/tables``: matmuls on a grid of sizes,
collectives by kind and bytes, attention by length. ``jspeed.plan.measured.rates`` interpolates.
"""

import argparse
import io
import statistics
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[2] / "python" / "jspeed" / "plan" / "measured" / "tables"
DATA = "aiconfigurator_core/systems/data"
SYSTEMS = {  # our name of a GPU: the package's, its measurements of matmuls and of collectives
    "h100": ("h100_sxm", "trtllm/1.3.0rc20", "2.29.2"),
    "h200": ("h200_sxm", "trtllm/1.3.0rc20", "2.29.2"),
    "b200": ("b200_sxm", "trtllm/1.3.0rc20", "2.29.2"),
    "a100": ("a100_sxm", "trtllm/1.0.0", "2.27.3"),
    "l40s": ("l40s", "trtllm/1.3.0rc20", "2.27.3"),
}
ROWS = (64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 16384, 32768)
SIDES = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 51200)
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
WIDTH = 64  # of a head; 128 is measured only together with a write to a key-value cache
HOPPER = ("h100", "h200")  # whose attention cuDNN's is compared with, in jspeed.plan.measured.rates
FLASH = ("vllm/0.24.0", "sglang/0.5.14")  # FlashAttention 3 on Hopper, forward, not causal
BUSY = 16384  # tokens x heads / 12 from which a kernel fills the device
KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "alltoall": "all-to-all",
}


def main() -> None:
    """Read the wheel that is named and write the tables of every system in it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path, help="the package, as pip download leaves it")
    wheel = zipfile.ZipFile(parser.parse_args().wheel)
    for name, (system, gemm, nccl) in SYSTEMS.items():
        write(
            OUT / f"{name}_matmul.csv",
            matmuls(read(wheel, f"{system}/gemm/{gemm}/gemm_perf"), casts(wheel, system, gemm)),
        )
        write(
            OUT / f"{name}_collective.csv",
            collectives(read(wheel, f"{system}/comm/nccl/{nccl}/nccl_perf")),
        )
        flash = [
            row
            for each in FLASH
            for row in read(wheel, f"{system}/encoder_attention/{each}/encoder_attention_perf")
        ]
        if name in HOPPER:
            write(OUT / f"{name}_attention.csv", attention(flash))


def read(wheel: zipfile.ZipFile, name: str) -> list[dict[str, Any]]:
    """The rows of one of the package's tables; none where it has no such table."""
    import pyarrow.parquet

    path = f"{DATA}/{name}.parquet"
    if path not in wheel.namelist():
        return []
    return pyarrow.parquet.read_table(io.BytesIO(wheel.read(path))).to_pylist()


def casts(wheel: zipfile.ZipFile, system: str, gemm: str) -> dict[tuple[int, int], float]:
    """Milliseconds that finding a scale and casting [m, k] to FP8 take: part of FP8 matmuls."""
    found: dict[tuple[int, int], float] = {}
    for table in ("computescale_perf", "scale_matrix_perf"):
        for row in read(wheel, f"{system}/quantize/{gemm}/{table}"):
            key = row["m"], row["k"]
            found[key] = found.get(key, 0.0) + row["latency"]
    return found


def matmuls(rows: list[dict[str, Any]], casts: dict[tuple[int, int], float]) -> Iterable[str]:
    """A header and lines of microseconds by the contracted size k, of the sizes that are measured
    in all combinations.

    An FP8 matmul is what is left of its row without the cast, and at least half of bf16's: twice
    the rate is the most that tensor cores do. A small one is a small difference of large numbers.
    """
    times = {(row["gemm_dtype"], row["m"], row["n"], row["k"]): row["latency"] for row in rows}

    def microseconds(dtype: str, m: int, n: int, k: int) -> str:
        wide = times.get(("bfloat16", m, n, k))
        if dtype == "bf16":
            return "" if wide is None else f"{1e3 * wide:.4g}"
        whole, cast = times.get(("fp8", m, n, k)), casts.get((m, k))
        if wide is None or whole is None or cast is None:
            return ""
        return f"{1e3 * max(whole - cast, wide / 2):.4g}"

    measured = [
        {sizes[place] for dtype, *sizes in times if dtype == "bfloat16"} for place in (1, 2)
    ]
    sides = [side for side in SIDES if all(side in found for found in measured)]
    yield "dtype,m,n," + ",".join(map(str, sides))
    for dtype in ("bf16", "f8"):
        for m in ROWS:
            for n in sides:
                line = [microseconds(dtype, m, n, k) for k in sides]
                if all(line):
                    yield ",".join((dtype, str(m), str(n), *line))


def collectives(rows: list[dict[str, Any]]) -> Iterable[str]:
    """Lines of microseconds by kind, devices and bytes of the whole array, of two bytes a number:
    NVLink SHARP adds those in the switch, but no bytes."""
    yield "kind,devices,bytes,us"
    for row in rows:
        if row["nccl_dtype"] == "half" and row["op_name"] in KINDS and row["message_size"] >= 512:
            yield (
                f"{KINDS[row['op_name']]},{row['num_gpus']},{2 * row['message_size']},"
                f"{1e3 * row['latency']:.4g}"
            )


def attention(rows: list[dict[str, Any]]) -> Iterable[str]:
    """Lines of TFLOP/s by the keys of a query: medians over what fills the device."""
    yield "keys,tflops"
    for keys in LENGTHS:
        rates = [
            4 * row["batch_size"] * keys**2 * row["num_heads"] * WIDTH / row["latency"] / 1e9
            for row in rows
            if row["head_dim"] == WIDTH
            and row["isl"] == keys
            and row["batch_size"] * keys * row["num_heads"] >= 12 * BUSY
        ]
        if rates:
            yield f"{keys},{statistics.median(rates):.1f}"


def write(path: Path, lines: Iterable[str]) -> None:
    """Write a table, and say how large it is."""
    path.write_text("\n".join(lines) + "\n")
    print(f"{path.name}: {path.stat().st_size / 1e3:.1f} kB")


if __name__ == "__main__":
    main()
