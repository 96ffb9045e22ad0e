"""The pointer's kernels at full size, compiled for an absent H100: number of kernels, no spills,
bytes."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jspeed.base.compiler import options_for
from jspeed.kernels.pointer_attention import KERNEL
from jspeed.model import pointer
from jspeed.model.attention import find_documents
from jspeed.model.custom_kernels import label
from jspeed.plan import cost
from jspeed.plan.cost import TRITON

from .custom_calls import custom_calls

TOKENS = 49_152
WIDTH = 128
WINDOW = 2048
LONGEST = 3072


def test_three_kernels_spill_nothing_and_read_arrays_once(mesh):
    """The compiler refuses what spills, and what takes more than the 227 kB of shared memory that
    Hopper has."""
    lies = NamedSharding(mesh(1), PartitionSpec())

    def shapes(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=lies)

    def gradients(q, k, none, tokens, targets, g):
        def run(*qkn):
            documents = find_documents(tokens, 50_256)
            return pointer.copies(*qkn, tokens, targets, documents, WINDOW, KERNEL)

        out, back = jax.vjp(run, q, k, none)
        return out, back(g)

    big, ids, number = (
        shapes(1, TOKENS, WIDTH),
        shapes(1, TOKENS, dtype=jnp.uint16),
        shapes(1, TOKENS, dtype=jnp.float32),
    )
    traced = jax.jit(gradients).trace(big, big, shapes(WIDTH), ids, ids, (number, number))
    lowered = traced.lower(lowering_platforms=("cuda",))
    program = lowered.compile(
        options_for("cuda") | {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
    )
    text = program.as_text()
    calls = custom_calls(text)
    names = [re.search(r'name = "(\w+)"', call.attributes)[1] for call in calls]
    assert names == [
        label("pointer_attention", name, width=128, window=2048, own=own, visited=64)
        for name, own in {"forward": 128, "dq": 64, "dk": 64}.items()
    ]
    assert {call.target for call in calls} == {TRITON}
    kernels = [kernel for kernel in cost.kernels(text, LONGEST) if kernel.flops]
    # Blocks of 64 tokens that each block of a document sees: all before its own, or 32, and its
    # own.
    wide, narrow = (
        [min(start, WINDOW) // 64 + size // 64 for start in range(0, LONGEST, size)]
        for size in (128, 64)
    )
    pairs = [TOKENS // LONGEST * 64 * sum(seen) for seen in (wide, narrow)]
    assert [kernel.flops for kernel in kernels] == [
        2 * WIDTH * n for n in (128 * pairs[0], *[2 * 64 * pairs[1]] * 2)
    ]
    one, statistic = 2 * TOKENS * WIDTH, 4 * TOKENS
    assert [kernel.bytes for kernel in kernels] == [
        2 * one + 7 * statistic,
        *[3 * one + 6 * statistic] * 2,
    ]
    assert program.memory_analysis().temp_size_in_bytes < one / 4
