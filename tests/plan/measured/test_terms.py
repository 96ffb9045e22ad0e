"""What a kernel takes by what was measured of such kernels, and what is left to guess."""

import math

import pytest

from jspeed.plan import assumed, hlo, predict
from jspeed.plan.assumed import Constant
from jspeed.plan.cost import kernels
from jspeed.plan.measured import rates, terms
from jspeed.plan.measured.rates import rates_of
from jspeed.plan.target import parse_target

H100 = parse_target("h100x8")
TEXT = """HloModule jit_step, is_scheduled=true, num_partitions=8

ENTRY %main (x: f8e4m3fn[49152,768], w: f8e4m3fn[768,3072]) -> bf16[49152,3072] {
  %x = f8e4m3fn[49152,768]{1,0} parameter(0)
  %w = f8e4m3fn[768,3072]{1,0} parameter(1)
  %l = bf16[49152,14336]{1,0} parameter(2)
  %soft = bf16[49152,14336]{1,0} exponential(%l)
  ROOT %product = (bf16[49152,3072]{1,0}, s8[8]{0}) custom-call(%x, %w), \
custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],\
"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},\
"precision_config":{"operand_precision":["PRECISION","PRECISION"],"algorithm":"ALG_UNSET"}}}
}
"""


def read(precision: str):
    return kernels(TEXT.replace("\\\n", "").replace("PRECISION", precision))


def test_a_matmul_takes_what_was_measured():
    exponential, fast = read("DEFAULT")
    assert not exponential.flops and exponential.special == 49152 * 14336
    table = rates_of("h100").matmul_seconds("f8", (1, 49152, 768, 3072))
    priced = terms.price(fast, H100)
    assert (priced.by_work, priced.term, priced.guessed) == (
        pytest.approx(table), "FP8 matmuls", False,
    )  # fmt: skip
    _, slow = read("HIGHEST")
    assert terms.price(slow, H100).by_work == pytest.approx(1.06 * table)


def test_exp_may_bound_a_kernel():
    exponential, _ = read("DEFAULT")
    priced = terms.price(exponential, H100)
    assert priced.by_work == pytest.approx(49152 * 14336 / (6 * 1.98e9 * 132))
    assert priced.by_bytes == pytest.approx(4 * 49152 * 14336 / 3.01e12)
    assert priced.term == "passes over memory" and not priced.guessed
    few = terms.price(exponential._replace(bytes=1.0), H100)
    assert few.term == "special functions" and not few.guessed
    # the units were measured on Hopper alone
    assert terms.price(exponential._replace(bytes=1.0), parse_target("a100x8")).guessed


def test_custom_kernels_that_ran_on_a_gpu_are_no_guesses():
    exponential, fast = read("DEFAULT")
    mosaic = fast.instruction._replace(target="mosaic_gpu_v2")
    custom = terms.price(fast._replace(instruction=mosaic), H100)
    assert custom.by_work == pytest.approx(fast.flops / (0.35 * 1978.9e12))
    assert custom.term == "custom FP8 matmuls" and not custom.guessed
    for name, guessed in (("fp8_cast", False), ("own_value_forward", True)):
        triton = exponential.instruction._replace(
            target="__gpu$xla.gpu.triton", attributes=f'name = "{name}"'
        )
        one = terms.price(exponential._replace(instruction=triton, special=0.0), H100)
        assert (one.term, one.guessed) == ("custom passes", guessed)


def test_all_is_a_guess_without_tables():
    exponential, fast = read("DEFAULT")
    cluster = parse_target("rtx4090x1")
    for kernel in (exponential, fast):
        priced = terms.price(kernel, cluster)
        assert priced.guessed
        assert (priced.by_work, priced.by_bytes) == assumed.kernel_seconds(
            kernel, cluster.target.data_sheet
        )


def test_each_number_has_a_source_or_the_word_guess():
    found = [value for module in (assumed, terms, rates, predict)
             for name, value in vars(module).items() if name.isupper()]  # fmt: skip
    numbers = []
    for value in found:
        numbers += value.values() if isinstance(value, dict) else [value]
    numbers = [number for number in numbers if isinstance(number, float)]
    assert len(numbers) >= 18
    words = ("guess", "https://", "benchmarks/gpu.md", "aiconfigurator-core", "Student's t")
    for number in numbers:
        if number in (*rates.FORWARD.values(),):
            continue  # of a paper that a comment names, as ratios
        assert isinstance(number, Constant), number
        assert any(word in number.source for word in words), number.source
        assert math.isfinite(number) and number > 0


def test_collectives_within_a_node_are_measured():
    text = """HloModule m, is_scheduled=true
ENTRY %main (p: bf16[1048576]) -> bf16[8388608] {
  %p = bf16[1048576]{0} parameter(0)
  ROOT %all = bf16[8388608]{0} all-gather(%p), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true
}
"""
    [gather] = hlo.collectives(text.replace("\\\n", ""))
    measured = rates_of("h100").collective_seconds("all-gather", 8, 2 * 8388608)
    assert terms.collective_seconds(gather, H100) == (pytest.approx(measured), False)
    across = gather._replace(members=tuple(range(0, 64, 8)))
    nodes = parse_target("h100x8x8")
    assumed_seconds = assumed.collective_seconds(across, nodes)
    assert terms.collective_seconds(across, nodes) == (assumed_seconds, True)
