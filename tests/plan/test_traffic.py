"""Bytes moved by source line: HLO that XLA wrote for an H100, and a small recipe compiled for this
CPU."""

import io
import json

import pytest
from rich.console import Console

from jspeed.fields import check_json
from jspeed.plan import cost, describe
from jspeed.plan.schema import Traffic
from jspeed.plan.target import parse_target
from jspeed.plan.views import terminal

from .test_cost import TEXT
from .test_plan import FOUND, placement_here

H100 = parse_target("h100x8")
# From the program of record 89 with OWN_KERNELS=on, shortened; the last one is a copy, no matmul.
OWN = """HloModule jit_step, is_scheduled=true

ENTRY %main (x: f8e4m3fn[49152,768], w: f8e4m3fn[3072,768], s: f32[2]) -> bf16[49152,3072] {
  %x = f8e4m3fn[49152,768]{1,0} parameter(0)
  %w = f8e4m3fn[3072,768]{1,0} parameter(1)
  %s = f32[2]{0} parameter(2)
  %mpmd_map.4 = (bf16[49152,3072]{1,0}, f8e4m3fn[49152,3072]{1,0}, f32[48,49152]{1,0}) \
custom-call(%x, %w, %s), \
custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(step)/shard_map/jvp(fused_matmul__matmul)/kernel/mpmd_map"}
  ROOT %same = (f8e4m3fn[49152,768]{1,0}) custom-call(%x, %x), custom_call_target="mosaic_gpu_v2"
}
"""
# The gradient in FP8, by the shapes of fused_mlp.squared_relu_gradient_fp8; g and the weights are
# of two FP8 types.
OWN_FP8 = """HloModule jit_step, is_scheduled=true

ENTRY %main (g: f8e5m2[49152,768], w: f8e5m2[3072,768], s: f32[3], h: f8e4m3fn[49152,3072]) -> \
f8e5m2[49152,3072] {
  %g = f8e5m2[49152,768]{1,0} parameter(0)
  %w = f8e5m2[3072,768]{1,0} parameter(1)
  %s = f32[3]{0} parameter(2)
  %h = f8e4m3fn[49152,3072]{1,0} parameter(3)
  ROOT %own = (f8e5m2[49152,3072]{1,0}, f8e5m2[3072,49152]{1,0}, f32[48,49152]{1,0}) \
custom-call(%g, %w, %s, %h), \
custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(step)/shard_map/transpose(jvp(fused_matmul__matmul))/kernel/mpmd_map"}
}
"""


def test_lines_are_sums_over_their_kernels_most_bytes_first():
    kernels = cost.kernels(TEXT)
    rows = describe.by_line(kernels, H100)
    computing = [kernel for kernel in kernels if not kernel.collective]
    assert sum(row["bytes"] for row in rows) == sum(kernel.bytes for kernel in computing)
    assert [row["bytes"] for row in rows] == sorted((row["bytes"] for row in rows), reverse=True)
    assert {(row["kind"], row["pass"]) for row in rows} == {
        ("matmul", "forward"),
        ("attention_forward", "forward"),
        ("other", "rest"),
        ("fusion", "rest"),
    }


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("jit(step)/shard_map/jvp(btd,gdk->btgk)/dot_general", "forward"),
        ("jit(step)/shard_map/transpose(jvp())/mul", "backward"),
        ("jit(step)/mul", "rest"),
        ("", "rest"),
    ],
)
def test_the_pass_is_read_from_the_path(path, found):
    assert describe.pass_of(path) == found


@pytest.mark.parametrize(("text", "scales", "others"), [(OWN, 2, 1), (OWN_FP8, 3, 0)])
def test_an_own_matmul_has_flops_and_the_bytes_of_its_arrays(text, scales, others):
    """Also one of two FP8 types that is written both ways."""
    product, *copies = cost.kernels(text)
    n, d, f = product.dims[1:]
    assert (product.kind, product.dims) == ("fp8_matmul", (1, 49152, 768, 3072))
    assert product.flops == 2 * 49152 * 768 * 3072
    assert product.bytes == n * d + f * d + 4 * scales + 3 * n * f + 4 * 48 * n
    assert [(copy.kind, copy.flops) for copy in copies] == [("other", 0)] * others


def test_the_last_step_of_a_recipe_by_line():
    found = describe.describe_traffic(FOUND.recipe, placement_here())
    assert json.loads(json.dumps(found)) == found  # all of it is plain
    check_json(found, Traffic)
    assert found["bytes"] == pytest.approx(sum(row["bytes"] for row in found["lines"]))
    assert found["expected_ms"] > 0
    assert any(row["source"].startswith("faulty_recipe.py:") for row in found["lines"])
    console = Console(file=io.StringIO(), width=120)
    terminal.print_traffic(found, console)
    assert found["lines"][0]["source"] in console.file.getvalue()
