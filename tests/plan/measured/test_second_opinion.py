"""A step's time by measured rates: which kernels have one, and what is left to guess."""

import pytest

from jspeed.plan import hlo, predict
from jspeed.plan.cost import kernels
from jspeed.plan.measured import second_opinion
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
    assert second_opinion.kernel_seconds(fast, H100)[0] == pytest.approx(table)
    assert not second_opinion.is_guessed(fast, H100)
    _, slow = read("HIGHEST")
    assert second_opinion.kernel_seconds(slow, H100)[0] == pytest.approx(1.15 * table)


def test_exp_may_bound_a_kernel():
    exponential, _ = read("DEFAULT")
    by_units, by_bytes = second_opinion.kernel_seconds(exponential, H100)
    assert by_units == pytest.approx(49152 * 14336 / (16 * 1.755e9 * 132))
    assert by_bytes == pytest.approx(4 * 49152 * 14336 / (0.85 * 3.35e12))
    few = exponential._replace(bytes=1.0)
    assert second_opinion.is_guessed(few, H100) and not second_opinion.is_guessed(exponential, H100)


def test_custom_kernels_are_guesses_and_count():
    _, fast = read("DEFAULT")
    custom = fast._replace(instruction=fast.instruction._replace(target="mosaic_gpu_v2"))
    opinion = second_opinion.of_step([fast, custom], H100)
    assert opinion.guessed == pytest.approx(
        max(predict.kernel_seconds(custom, H100.target.data_sheet))
    )
    assert opinion.guessed < opinion.seconds
    assert second_opinion.of_step([fast], parse_target("rtx4090x1")) is None
    assert second_opinion.of_run([(10, opinion._asdict()), (5, None)]) is None


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
    assert second_opinion.collective_seconds(gather, H100) == pytest.approx(measured)
    across = gather._replace(members=tuple(range(0, 64, 8)))
    nodes = parse_target("h100x8x8")
    assert second_opinion.collective_seconds(across, nodes) == predict.collective_seconds(
        across, nodes
    )
