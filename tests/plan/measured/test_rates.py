"""Measured rates: interpolation against rows of the source that the tables leave out, and limits
that no rate may pass."""

import csv
import itertools
import math
import statistics

import pytest

from jspeed.plan.attention import Seen
from jspeed.plan.measured import rates
from jspeed.plan.target import load_target

H100 = rates.rates_of("h100")
# aiconfigurator-core 0.12.0, h100_sxm/gemm/trtllm/1.3.0rc20, bf16: m, n, k, microseconds.
HELD_OUT = (
    (3072, 768, 768, 8.0),
    (2560, 3072, 768, 20.3),
    (1536, 768, 3584, 18.9),
    (8192, 3584, 768, 68.4),
    (16384, 768, 2560, 86.4),
    (1536, 5120, 10240, 203.1),
    (16384, 2560, 2560, 275.5),
    (2560, 12288, 3584, 287.5),
    (2560, 10240, 10240, 704.8),
    (16384, 3072, 6144, 781.9),
    (16384, 3584, 6144, 908.3),
    (16384, 10240, 2560, 1051.6),
    (16384, 3072, 10240, 1301.9),
    (8192, 10240, 10240, 2123.4),
)


def test_matmuls_between_the_measured_sizes():
    errors = [
        abs(1e6 * H100.matmul_seconds("bf16", (1, m, k, n)) / measured - 1)
        for m, n, k, measured in HELD_OUT
    ]
    assert statistics.median(errors) < 0.05
    assert max(errors) < 0.25  # a matmul of 19 us


@pytest.mark.parametrize("name", ["h100", "h200", "b200", "a100", "l40s"])
def test_no_matmul_is_faster_than_the_data_sheet(name):
    """Among them XLA's column of FP8 matmuls on Hopper, the mean of a matmul and a transpose."""
    found = rates.rates_of(name)
    peaks = load_target(name).data_sheet.peak_flops
    sizes = (256, 768, 3072, 16384)
    for dtype, (m, n, k) in itertools.product(found.matmuls, itertools.product(sizes, repeat=3)):
        rate = 2.0 * m * n * k / found.matmul_seconds(dtype, (1, m, k, n))
        assert rate < peaks[dtype], (dtype, m, n, k)


def test_what_lies_beyond_the_table_has_the_rate_of_its_edge():
    edge = H100.matmul_seconds("bf16", (1, 32768, 768, 768))
    assert H100.matmul_seconds("bf16", (1, 65536, 768, 768)) == pytest.approx(2 * edge, rel=0.05)
    assert H100.matmul_seconds("f32", (1, 64, 64, 64)) is None
    four = H100.matmul_seconds("bf16", (4, 768, 768, 768))
    assert H100.matmul_seconds("bf16", (1, 768, 768, 768)) < four
    assert four == pytest.approx(H100.matmul_seconds("bf16", (1, 4 * 768, 768, 768)), rel=0.05)


def test_collectives_of_two_bytes_a_number():
    """The table is of bytes; the source has the same arrays as halves too: elements, us."""
    halves = {
        "all-gather": ((2**25, 208.1), (2**27, 728.8)),
        "reduce-scatter": ((2**25, 200.8), (2**27, 721.7)),
        "all-to-all": ((2**25, 221.3), (2**27, 763.9)),
        "all-reduce": ((2**25, 324.5), (2**27, 1092.1)),
    }
    for kind, rows in halves.items():
        for elements, measured in rows:
            seconds = H100.collective_seconds(kind, 8, 2 * elements)
            assert 1e6 * seconds == pytest.approx(measured, rel=0.15), (kind, elements)
    assert H100.collective_seconds("collective-permute", 8, 1024) is None
    assert H100.collective_seconds("all-gather", 3, 1024) is None


def test_attention_is_slow_for_few_keys():
    def rate(width: int, keys: float, backward: bool) -> float:
        return 1e-12 / H100.attention_seconds(Seen(width, keys, 1.0, backward))

    # FlashAttention 3's paper, figures 5 and 6: cuDNN at 16,384 keys
    assert rate(128, 16384, False) == pytest.approx(617, rel=0.05)
    assert rate(64, 16384, False) == pytest.approx(413, rel=0.05)
    assert rate(64, 16384, True) == pytest.approx(433, rel=0.05)
    # heads of 128: ours, of an H200, to the longest of its windows
    assert rate(128, 1184, False) == pytest.approx(461)
    assert rate(128, 251, True) == pytest.approx(153)
    assert rate(128, 4096, True) == pytest.approx(522)
    assert rate(128, 256, False) < 0.35 * rate(128, 4096, False)
    assert rate(64, 256, False) < 0.35 * rate(64, 4096, False)
    assert rates.rates_of("a100").attention_seconds(Seen(64, 512, 1.0, False)) is None


def test_targets_without_a_table_have_no_rates():
    assert rates.rates_of("rtx4090") is None


def test_tables_are_small_and_whole():
    folder = rates.FOLDER
    tables = [path for path in folder.iterdir() if path.name.endswith(".csv")]
    assert sum(len(path.read_bytes()) for path in tables) < 200_000
    for path in tables:
        for row in csv.DictReader(path.read_text().splitlines()):
            numbers = [value for key, value in row.items() if key not in ("dtype", "kind")]
            assert all(math.isfinite(float(value)) and float(value) > 0 for value in numbers)
