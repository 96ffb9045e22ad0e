"""The gradient of a norm beside a residual stream at full size, compiled for an absent H100 but not
run."""

import jax.numpy as jnp

from jspeed.kernels.norm_gradient import norm_gradient
from jspeed.plan import cost
from jspeed.plan.cost import TRITON

from .custom_calls import NO_SPILLS, array_on, compiled, custom_calls

T, D = 49_152, 768


def test_one_pass(mesh):
    arrays = [array_on(mesh(1), (T, D), jnp.bfloat16)] * 3
    arrays += [array_on(mesh(1), shape, jnp.float32) for shape in ((T,), ())]
    text = compiled(norm_gradient, *arrays, **NO_SPILLS).as_text()
    assert len(custom_calls(text)) == len(custom_calls(text, TRITON)) == 1
    largest = max(kernel.bytes for kernel in cost.kernels(text))
    assert largest == 4 * 2 * T * D + 4 * T + 4 * T // 16 + 4
    assert len(cost.kernels(text)) == 2  # with the sum of what the programs have summed
