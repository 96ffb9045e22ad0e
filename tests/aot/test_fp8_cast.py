"""FP8 cast kernels compiled for an absent H100: alone at full size, and within a step."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jspeed.base.compiler import options_for
from jspeed.kernels import fp8_cast
from jspeed.model import fp8
from jspeed.model.custom_kernels import custom_kernel
from jspeed.model.fp8 import E4M3, E5M2
from jspeed.model.mlp import fp8_mlp
from jspeed.plan import cost, hlo
from jspeed.plan.cost import TRITON

from .custom_calls import NO_SPILLS, array_on, compiled, custom_calls

N, D = 49_152, 768
BF16, F32 = jnp.bfloat16, jnp.float32
SCALAR = ((), F32)
CASES = {
    "cast e4m3": (partial(fp8_cast.cast, dtype=E4M3), [((N, D), BF16), SCALAR]),
    "cast e5m2": (partial(fp8_cast.cast, dtype=E5M2), [((N, 2 * D), BF16), SCALAR]),
}


def text_of(mesh, function, arguments, **options) -> str:
    arrays = [array_on(mesh(1), *each) for each in arguments]
    return compiled(function, *arrays, **options_for("cuda"), **options).as_text()


@pytest.mark.parametrize("case", CASES)
def test_a_cast_is_one_kernel_without_spills(mesh, case):
    text = text_of(mesh, *CASES[case], **NO_SPILLS)
    calls = custom_calls(text)
    assert [call.target for call in calls] == [TRITON]
    # All else is of scalars: their reciprocals.
    found = cost.kernels(text)
    assert sum(kernel.bytes for kernel in found if kernel.instruction.name != calls[0].name) < 1000
    n, m = CASES[case][1][0][0]
    # a byte each copy
    assert sum(kernel.bytes for kernel in found) == pytest.approx(n * m * 4, rel=1e-3)


def own_matmul(x_ND, w_VD, largest, g_NV):
    run = partial(
        fp8.delayed_matmul, share=0.5, x_scale=0.1, kernel=custom_kernel("FP8 casts").kernel
    )
    y_NV, pull = jax.vjp(run, x_ND, w_VD, largest)
    return y_NV, *pull(g_NV)


def own_mlp(x_BTD, up_DF, down_DF, largest_3, g_BTD):
    def run(x_BTD, up_DF, down_DF, largest_3):
        scales = {"mlp": fp8.scales_of(jnp.stack([up_DF, down_DF]))[None]}
        rounding = fp8.Rounding(largest_3[None], {"mlp": slice(3)}, scales, 0.5, D**0.5)
        return fp8_mlp(x_BTD, up_DF, down_DF, rounding, 0, custom_kernel("MLP").kernel)

    y_BTD, pull = jax.vjp(run, x_BTD, up_DF, down_DF, largest_3)
    return y_BTD, *pull(g_BTD)


SMALL = 1024
AROUND = {
    own_matmul: ([((SMALL, 256), BF16), ((384, 256), BF16), SCALAR, ((SMALL, 384), BF16)], 1, 0, 3),
    own_mlp: (
        [((1, SMALL, 256), BF16), ((256, 512), BF16), ((256, 512), BF16), ((3,), F32), ((1, SMALL,
        256), BF16)], 1, 2, 4
    ),
}  # fmt: skip


@pytest.mark.parametrize("function", AROUND, ids=lambda function: function.__name__)
def test_no_fp8_activation_is_read_to_be_transposed(mesh, function):
    """The kernels write all but ``x``, of which XLA makes both forms in one pass; matmuls take them
    as they are."""
    arguments, casts, fused, matmuls = AROUND[function]
    text = text_of(mesh, function, arguments)
    targets = [call.target for call in custom_calls(text)]
    expected = ["__cublas$lt$matmul$f8"] * matmuls + [TRITON] * casts + ["mosaic_gpu_v2"] * fused
    assert sorted(targets) == sorted(expected)
    steps = {step.name: step for step in hlo.instructions(text)}

    def forms(step):
        return [
            array for array in step.arrays if array.dtype.startswith("f8") and SMALL in array.dims
        ]

    others = [
        kernel.instruction
        for kernel in cost.kernels(text)
        if kernel.instruction.opcode != "custom-call"
    ]
    (rounding,) = [step for step in others if forms(step)]
    assert len(forms(rounding)) == 2
    assert not any(forms(steps[name]) for step in others for name in step.operands)
    # No other pass over the batch is left.
    assert [step.name for step in others if any(SMALL in array.dims for array in step.arrays)] == [
        rounding.name
    ]
