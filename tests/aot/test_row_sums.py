"""Sums of gradients of equal rows, and row Adam, at r92's full size, compiled for an absent H100
but not run."""

import math

import jax
import jax.numpy as jnp

from jspeed.base.compiler import options_for
from jspeed.kernels.row_sums import row_adam, sum_rows
from jspeed.model.custom_kernels import Kernel
from jspeed.parallel.sparse_rows import SparseTable, empty, read, sink_size
from jspeed.plan import cost
from jspeed.plan.cost import TRITON
from jspeed.recipes import r92

from .custom_calls import BY_ROWS, NO_SPILLS, array_on, by_rows, compiled, custom_calls

IDS, D, DEVICES = 2 * 49_152, r92.WIDTH, 8
SLOTS = sink_size(IDS, r92.NGRAMS // DEVICES, DEVICES)


def test_all_sums_are_one_kernel_which_reads_everything_once(mesh):
    shapes = ((IDS, D), jnp.bfloat16), ((IDS,), jnp.int32), ((SLOTS + 1,), jnp.int32)
    arrays = [array_on(mesh(1), *each) for each in shapes]
    text = compiled(sum_rows, *arrays, **options_for("cuda"), **NO_SPILLS).as_text()
    assert len(custom_calls(text, TRITON)) == 1 and " fusion(" not in text
    assert [kernel.bytes for kernel in cost.kernels(text)] == [
        2 * D * (IDS + SLOTS) + 4 * (IDS + SLOTS + 1)
    ]


def test_row_adam_is_one_kernel_which_changes_the_table_in_place(mesh):
    """Four steps' lists: gradients are read once, and two rows of the table moved for each."""
    size = 4 * SLOTS
    shapes = [((SLOTS, D), jnp.bfloat16)] * 4 + [
        ((size,), jnp.int32),
        ((size + 1,), jnp.int32),
        ((size,), jnp.int32),
    ]
    shapes += [
        ((size,), jnp.float32),
        ((4,), jnp.float32),
        ((r92.NGRAMS // DEVICES, D), jnp.bfloat16),
    ]
    arrays = [array_on(mesh(1), *each) for each in shapes]
    changed = jax.jit(row_adam, donate_argnums=6).trace(arrays[:4], *arrays[4:])
    lowered = changed.lower(lowering_platforms=("cuda",))
    program = lowered.compile(options_for("cuda") | NO_SPILLS)
    assert len(custom_calls(text := program.as_text(), TRITON)) == 1 and "copy" not in text
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * D * r92.NGRAMS // DEVICES
    assert not memory.temp_size_in_bytes
    assert [kernel.bytes for kernel in cost.kernels(text)] == [
        3 * 2 * D * size + 4 * (5 * size + 1 + 4)
    ]


def test_only_the_kernel_lies_between_gradients_and_all_to_all(mesh):
    """No copy, no scatter and nothing in fp32; what makes the gradients writes them once, as the
    kernel reads them."""
    eight = mesh(DEVICES)

    def gradients(part_VD, ids_BT, grad_BTD):
        sink = empty(part_VD, IDS, DEVICES)
        return jax.vjp(
            lambda sink: read(SparseTable(part_VD, sink), ids_BT, "data", Kernel(sum_rows)), sink
        )[1](2 * grad_BTD)

    shapes = (
        ((r92.NGRAMS, D), jnp.bfloat16),
        ((DEVICES, IDS), jnp.int32),
        ((DEVICES, IDS, D), jnp.bfloat16),
    )
    arrays = [array_on(eight, *each, BY_ROWS) for each in shapes]
    text = compiled(by_rows(gradients, eight), *arrays, **options_for("cuda")).as_text()
    wide = [
        each for each in cost.kernels(text) if math.prod(each.instruction.arrays[0].dims) >= IDS * D
    ]
    assert [each.kind for each in wide] == ["fusion", "other", "collective"]
    assert {array.dtype for each in wide for array in each.instruction.arrays} == {"bf16"}
    assert custom_calls(text, TRITON) == [wide[1].instruction]
