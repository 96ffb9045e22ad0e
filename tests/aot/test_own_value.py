"""Exclusive self-attention at full size, compiled for an absent H100 but not run."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jspeed.kernels.own_value import KERNEL
from jspeed.model.attention import attention, find_documents, without_own_value
from jspeed.plan import cost
from jspeed.plan.cost import TRITON

from .custom_calls import BY_ROWS, NO_SPILLS, array_on, by_rows, compiled, custom_calls

T, HEADS = 49_152, 6


@pytest.mark.parametrize(("width", "gated"), [(128, True), (128, False), (64, False)])
def test_a_pass_is_one_kernel_and_reads_everything_once(mesh, width, gated):
    """Forward and back, in registers; and the bytes are those of the arrays."""

    def gradients(g_BTHK, *arguments):
        out, back = jax.vjp(partial(without_own_value, kernel=KERNEL), *arguments)
        return out, *back(g_BTHK)

    shapes = [(1, T, HEADS, width)] * 3 + [(1, T, HEADS)] * (1 + gated)
    arrays = [array_on(mesh(1), shape, jnp.bfloat16) for shape in shapes]
    text = compiled(gradients, *arrays, **NO_SPILLS).as_text()
    assert len(custom_calls(text)) == len(custom_calls(text, TRITON)) == 2
    of_heads, numbers = 2 * T * HEADS * width, 2 * T * HEADS * (1 + gated)
    assert [kernel.bytes for kernel in cost.kernels(text)] == [
        3 * of_heads + numbers,
        5 * of_heads + 2 * numbers,
    ]


def test_only_a_sum_of_gradients_is_between_pass_and_attention(mesh):
    """No copy of an output, of values or of their gradients."""
    length, one = 2048, mesh(1)

    def gradients(q_BTHK, k_BTHK, v_BTHK, alpha_BTH, gate_BTH, tokens_BT, g_BTHK):
        rest = dict(
            documents=find_documents(tokens_BT, 0, 64),
            window=384,
            backend="cudnn",
            overflow_checked=True,
        )

        def call(q_BTHK, k_BTHK, v_BTHK, *numbers):
            y_BTHK = attention(q_BTHK, k_BTHK, v_BTHK, scale=0.1, **rest)
            return without_own_value(y_BTHK, v_BTHK, *numbers, kernel=KERNEL)

        out_BTHK, back = jax.vjp(call, q_BTHK, k_BTHK, v_BTHK, alpha_BTH, gate_BTH)
        return out_BTHK, *back(g_BTHK)

    heads, numbers = (
        array_on(one, (1, length, *shape), jnp.bfloat16, BY_ROWS)
        for shape in ((HEADS, 128), (HEADS,))
    )
    tokens = array_on(one, (1, length), jnp.uint16, BY_ROWS)
    arrays = heads, heads, heads, numbers, numbers, tokens, heads
    text = compiled(by_rows(gradients, one), *arrays).as_text()
    assert len(custom_calls(text, "__cudnn$fmha")) == len(custom_calls(text, TRITON)) == 2
    others = [kernel for kernel in cost.kernels(text) if kernel.instruction.opcode != "custom-call"]
    assert [kernel.bytes for kernel in others if kernel.bytes > 1e6] == [
        3 * 2 * length * HEADS * 128
    ]
