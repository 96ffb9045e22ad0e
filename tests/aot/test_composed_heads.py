"""Composed-heads kernels at full size, compiled for an absent H100: number of kernels, no spills,
bytes."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jspeed.model.attention import find_documents
from jspeed.model.heads import composed
from jspeed.plan import cost
from jspeed.plan.attention import TRITON
from jspeed.run.compute.compiler import options_for

from .custom_calls import custom_calls

TOKENS = 49_152
HEADS = 6
WIDTH = 128
WINDOW = 112
SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


def compiled(mesh, own_kernels):
    """The program of all five gradients, of record 89's last layer."""
    lies = NamedSharding(mesh(1), PartitionSpec())
    big, small = (
        jax.ShapeDtypeStruct((1, TOKENS, HEADS, *k), jnp.bfloat16, sharding=lies)
        for k in ((WIDTH,), ())
    )
    tokens = jax.ShapeDtypeStruct((1, TOKENS), jnp.uint16, sharding=lies)

    def gradients(q, k, v, take, give, tokens, g):
        how = {
            "documents": find_documents(tokens, 50_256, 128),
            "window": WINDOW,
            "own_kernels": own_kernels,
        }
        out, back = jax.vjp(partial(composed, scale=0.12, **how), q, k, v, take, give)
        return out, back(g)

    lowered = (
        jax.jit(gradients)
        .trace(big, big, big, small, small, tokens, big)
        .lower(lowering_platforms=("cuda",))
    )
    return lowered.compile(options_for("cuda") | (SPILLS if own_kernels else {}))


def test_four_kernels_that_spill_nothing_and_read_every_array_once(mesh):
    """The compiler refuses what spills, and what takes more than the 227 kB of shared memory that
    Hopper has."""
    program = compiled(mesh, own_kernels=True)
    text = program.as_text()
    calls = custom_calls(text)
    names = [re.search(r'name = "(\w+)"', call.attributes)[1] for call in calls]
    assert names == [
        f"composed_heads_{name}_6x128_blocks64x192" for name in ("forward", "dmixed", "dq", "dk_dv")
    ]
    assert {call.target for call in calls} == {TRITON}
    kernels = [kernel for kernel in cost.kernels(text, 2048) if kernel.flops]
    assert [kernel.flops for kernel in kernels] == [
        n * 2 * TOKENS * 192 * HEADS * WIDTH for n in (2, 1, 3, 3)
    ]
    one, mixture = 2 * TOKENS * HEADS * WIDTH, 2 * TOKENS * 192
    # Arrays [T, H, K]; the mixture and its gradient; a few numbers for each query.
    for kernel, arrays, mixtures in zip(kernels, (4, 2, 3, 5), (1, 2, 1, 2), strict=True):
        assert 0 <= kernel.bytes - arrays * one - mixtures * mixture < 0.07 * one
    assert sum(kernel.runs * kernel.bytes for kernel in cost.kernels(text, 2048)) < 1.2e9
    assert program.memory_analysis().temp_size_in_bytes < 3 * mixture


@pytest.mark.slow
def test_plain_jax_moves_five_times_as_much(mesh):
    text = compiled(mesh, own_kernels=False).as_text()
    assert sum(kernel.runs * kernel.bytes for kernel in cost.kernels(text, 2048)) > 5e9
