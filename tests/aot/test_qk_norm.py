"""Fused QK-norm and RoPE at full size, compiled for an absent H100 but not run."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jspeed.kernels.qk_norm import KERNEL, norm_and_rotate
from jspeed.model.attention import attention, find_documents
from jspeed.model.positions import frequencies, queries_and_keys
from jspeed.plan import cost, hlo
from jspeed.plan.cost import TRITON
from jspeed.speedrun.heads import attention_in_pairs, pair_positions

from .custom_calls import BY_ROWS, NO_SPILLS, array_on, by_rows, compiled, custom_calls

T, HEADS, K = 49_152, 6, 128


@pytest.mark.parametrize(("width", "look_back"), [(K, False), (K, True), (K // 2, False)])
@pytest.mark.parametrize("columns", [1, 2])
def test_a_pass_is_one_kernel_and_reads_everything_once(mesh, columns, width, look_back):
    """Forward and back, in registers; and the bytes are those of the arrays. Narrow heads get tags,
    and zeros."""

    def gradient(y, cos, sin, factor, dq, dk, *tags):
        out, back = jax.vjp(
            lambda y: norm_and_rotate(y, cos, sin, factor, *(tags or [None]), HEADS, look_back, K),
            y,
        )
        return *out, *back((dq, dk))

    shapes = [
        ((1, T, 2 * HEADS * width), jnp.bfloat16),
        *[((T, columns, K // 4), jnp.float32)] * 2,
        ((1,), jnp.float32),
    ]
    shapes += [((1, T, HEADS, K), jnp.bfloat16)] * 2 + [((1, T, K // 4), jnp.bfloat16)] * (
        width < K
    )
    arrays = [array_on(mesh(1), *each) for each in shapes]
    text = compiled(gradient, *arrays, **NO_SPILLS).as_text()
    assert len(custom_calls(text)) == len(custom_calls(text, TRITON)) == 2
    assert " fusion(" not in text
    y, heads = (2 * T * 2 * HEADS * n for n in (width, K))
    tables, tags = 2 * 4 * T * columns * K // 4 + 4, 2 * T * K // 4 * (width < K)
    assert sorted(kernel.bytes for kernel in cost.kernels(text)) == [
        y + heads + tables + tags,
        2 * y + heads + tables,
    ]


@pytest.mark.parametrize(("paired", "width"), [(False, K), (True, K), (True, K // 2)])
def test_nothing_lies_between_a_pass_and_attention(mesh, paired, width):
    """Lanes with too many documents are NaN, keys look back and heads lie in pairs, all without
    another kernel. Narrow heads have tags of their documents, and no block of attention is without
    work."""
    length, one, tagged = 2048, mesh(1), width < K
    positions = pair_positions(length) if paired else jnp.arange(length)[:, None]

    def gradients(y_BTE, v_BTHK, tokens_BT, dout_BTHK):
        documents = find_documents(tokens_BT, 0, 64)

        def call(y_BTE, v_BTHK):
            shape, look_back = (*v_BTHK.shape[:3], width), not paired
            q, k = queries_and_keys(
                y_BTE, shape, frequencies(K // 4), positions, KERNEL, documents, look_back, K
            )
            attend = partial(
                attention_in_pairs if paired else attention,
                backend="cudnn",
                overflow_checked=True,
                doc_tagged=tagged,
            )
            return attend(q, k, v_BTHK, scale=0.1, documents=documents, window=384)

        out_BTHK, back = jax.vjp(call, y_BTE, v_BTHK)
        return out_BTHK, *back(dout_BTHK)

    y = array_on(one, (1, length, 2 * HEADS * width), jnp.bfloat16, BY_ROWS)
    v = array_on(one, (1, length, HEADS, K), jnp.bfloat16, BY_ROWS)
    tokens = array_on(one, (1, length), jnp.uint16, BY_ROWS)
    text = compiled(by_rows(gradients, one), y, v, tokens, v).as_text()
    assert len(custom_calls(text, "__cudnn$fmha")) == len(custom_calls(text, TRITON)) == 2
    steps = {step.name: step for step in hlo.instructions(text)}
    assert (sum(kernel.empty_blocks for kernel in cost.kernels(text)) == 0) == tagged
    others = [
        kernel.instruction
        for kernel in cost.kernels(text)
        if kernel.instruction.opcode != "custom-call"
    ]
    dtypes = {
        array.dtype
        for step in others
        for name in (step.name, *step.operands)
        for array in steps[name].arrays
    }
    # the others find documents and make tables, or tags
    assert "s32" in dtypes and ("bf16" in dtypes) == tagged
