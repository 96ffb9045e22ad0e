"""Sums of rows that belong together, as they are, or as gradients in a step of row Adam: Pallas
(Triton backend).

XLA writes zeros in fp32, adds to them by atomics, and reads the sums in other passes. Here each
program has a few neighbouring sums, whose rows are neighbours in a given order. It reads a block of
them at a time. It multiplies that by the matrix of zeros and ones that says which row is of which
sum; so a sum of many rows, such as the most frequent bigram's, is not added up row by row. Each row
is read once, and sums stay in registers. An H200 has run these kernels.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jspeed.kernels.examples import normal, with_gradients
from jspeed.kernels.fused_attention import dot
from jspeed.model.custom_kernels import (
    Call,
    Case,
    CustomKernel,
    Kernel,
    Price,
    Refused,
    Sizes,
    label,
)
from jspeed.optim import rows
from jspeed.parallel import sharded_table
from jspeed.parallel.sparse_rows import Pending

SUMS = 16  # of a program
# at most, of a block; a program that changes a table does all, one that only sums does one block
COLUMNS = 128
ROWS, ADAM_ROWS = 32, 16  # of a block
WARPS = 4


def sum_rows(
    rows_ND: jax.Array, order_N: jax.Array, starts_S1: jax.Array, interpret: bool = False
) -> jax.Array:
    """Return ``[S, D]``: the sums of ``rows_ND[order_N[starts_S1[s] : starts_S1[s + 1]]]``, 0 where
    there are none.

    Rows are bf16, ``order_N`` and the ascending ``starts_S1`` int32. Sums are fp32, and then
    rounded to bf16. A number that is not finite makes NaN of its column in sums beside its own,
    too.

    Raises Refused for other dtypes, and where D is no multiple of 16.
    """
    _check(rows_ND)
    count, width = starts_S1.shape[0] - 1, rows_ND.shape[1]
    columns = math.gcd(width, COLUMNS)
    return pl.pallas_call(
        _sum_kernel,
        grid=(width // columns, pl.cdiv(count, SUMS)),
        in_specs=[
            *(pl.BlockSpec(x.shape, lambda j, i: (0,)) for x in (order_N, starts_S1)),
            pl.BlockSpec((rows_ND.shape[0], columns), lambda j, i: (0, j)),
        ],
        out_specs=pl.BlockSpec((count, columns), lambda j, i: (0, j)),
        out_shape=jax.ShapeDtypeStruct((count, width), rows_ND.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name=label("row_sums", "sum_rows"),
    )(order_N, starts_S1, rows_ND)


def row_adam(
    lists: Sequence[jax.Array],
    order_N: jax.Array,
    starts_S1: jax.Array,
    numbers_S: jax.Array,
    squares_S: jax.Array,
    factors_4: jax.Array,
    table_VD: jax.Array,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return a table, changed in place, and the mean squares of its rows: a step of
    :mod:`jspeed.optim.rows`.

    The gradients of rows ``numbers_S`` of ``table_VD``, all different, are sums as :func:`sum_rows`
    makes, in fp32, of the rows of ``lists``, one after the other; rows from V on are left out.
    ``squares_S`` are the mean squares, already decayed; ``factors_4`` (fp32) are the share of the
    new ones, the rate, epsilon, and the share of a weight that it loses. A number that is not
    finite makes NaN of the rows of all SUMS sums of its program. It does so in all columns, as a
    row's mean square counts them.

    Raises Refused as :func:`sum_rows` does.
    """
    for rows_ND in lists:
        _check(rows_ND)
    arrays = order_N, starts_S1, numbers_S, squares_S, factors_4, table_VD, *lists
    whole = [pl.BlockSpec(x.shape, lambda i, x=x: (0,) * x.ndim) for x in arrays]
    return pl.pallas_call(
        _adam_kernel,
        grid=(pl.cdiv(len(numbers_S), SUMS),),
        in_specs=whole,
        out_specs=(whole[5], whole[3]),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (table_VD, squares_S)),
        # not the squares: each warp reads all of a program's, and one writes them
        input_output_aliases={5: 0},
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name=label("row_sums", "row_adam"),
    )(*arrays)


def _check(rows_ND: jax.Array) -> None:
    if rows_ND.dtype != jnp.bfloat16 or rows_ND.shape[1] % 16:
        raise Refused(
            "kernel that sums rows: needs bfloat16 and a multiple of 16 columns, found "
            f"{rows_ND.dtype} and {rows_ND.shape[1]}; use OWN_KERNELS=off"
        )


def _sum_kernel(order_ref, starts_ref, rows_ref, sums_ref):
    sums = pl.program_id(1) * SUMS + jnp.arange(SUMS)
    columns = jnp.arange(sums_ref.shape[1])[None]
    (total,) = _add_up(order_ref, starts_ref, [rows_ref], pl.program_id(1), ROWS, [columns])
    inside = sums < sums_ref.shape[0]
    plgpu.store(
        sums_ref.at[sums[:, None], columns], total.astype(sums_ref.dtype), mask=inside[:, None]
    )


def _adam_kernel(order_ref, starts_ref, numbers_ref, squares_ref, factors_ref, table_ref, *refs):
    *lists, changed_ref, new_squares_ref = refs
    rows, width = table_ref.shape
    columns = math.gcd(width, COLUMNS)
    parts = [jnp.arange(start, start + columns)[None] for start in range(0, width, columns)]
    totals = _add_up(order_ref, starts_ref, lists, pl.program_id(0), ADAM_ROWS, parts)
    sums = pl.program_id(0) * SUMS + jnp.arange(SUMS)
    inside = sums < numbers_ref.shape[0]
    number = plgpu.load(numbers_ref.at[sums], mask=inside, other=rows)[:, None]
    fresh, rate, eps, fraction = (factors_ref[n] for n in range(4))
    mean = sum(jnp.sum(total * total, axis=1) for total in totals) / width
    square = plgpu.load(squares_ref.at[sums], mask=inside, other=0) + fresh * mean
    plgpu.store(new_squares_ref.at[sums], square, mask=inside)
    rate = (rate / (jnp.sqrt(square) + eps))[:, None]
    for total, part in zip(totals, parts, strict=True):
        old = plgpu.load(table_ref.at[number, part], mask=number < rows, other=0).astype(
            jnp.float32
        )
        change = rate * total
        change += fraction * old * (change * old > 0)
        plgpu.store(
            changed_ref.at[number, part],
            (old - change).astype(changed_ref.dtype),
            mask=number < rows,
        )


def _add_up(order_ref, starts_ref, lists, program, block, parts):
    """The sums of a program, fp32 ``[SUMS, C]`` for each of the ``parts`` of the columns ``[1,
    C]``."""
    count, first = starts_ref.shape[0] - 1, program * SUMS
    sums = first + jnp.arange(SUMS)
    starts, ends = (
        plgpu.load(starts_ref.at[sums + n], mask=sums < count, other=0)[:, None] for n in range(2)
    )
    start, end = (plgpu.load(starts_ref.at[at]) for at in (first, jnp.minimum(first + SUMS, count)))

    def add(n, totals):
        at = start + n * block + jnp.arange(block)
        number = plgpu.load(order_ref.at[at], mask=at < end, other=0)[:, None]
        belongs = ((starts <= at[None]) & (at[None] < ends)).astype(lists[0].dtype)
        rows = (_read(lists, number, part, (at < end)[:, None]) for part in parts)
        return tuple(total + dot(belongs, part) for total, part in zip(totals, rows, strict=True))

    zeros = tuple(jnp.zeros((SUMS, part.shape[1]), jnp.float32) for part in parts)
    return lax.fori_loop(0, lax.div(end - start + block - 1, block), add, zeros)


def _read(lists, number, part, mask):
    """Columns ``part`` of rows, by their ``number`` among those of all lists; zeros where ``mask``
    leaves them out."""
    found, start = 0, 0
    for ref in lists:
        here = (
            mask & (start <= number) & (number < start + ref.shape[0]) if len(lists) > 1 else mask
        )
        found = plgpu.load(ref.at[number - start, part], mask=here, other=found)
        start += ref.shape[0]
    return found


def price(call: Call) -> Price:
    """Of the table an update reads and writes the rows that are named alone."""
    if call.kernel != "row_adam":
        return Price("other")
    _, _, numbers, _, _, table, *_ = call.operands
    changed = numbers.dims[0] * (table.bytes // table.dims[0])
    return Price("other", more_bytes=2 * (changed - table.bytes))


def examples_of_sums(sizes: Sizes) -> Mapping[str, Case]:
    """The gradient of a table by ids, one of which many tokens name."""
    ids = _ids(sizes)

    def fetch(table: jax.Array, kernel: Kernel | None) -> jax.Array:
        return sharded_table.fetch(table, jnp.asarray(ids), None, kernel)

    arrays = normal((*ids.shape, sizes.width), (sizes.tokens, sizes.width))
    return {"look-up": (*with_gradients(fetch, Kernel(sum_rows)), arrays)}


def examples_of_updates(sizes: Sizes) -> Mapping[str, Case]:
    """Two lists of rows and gradients, by an owner that has half of the rows."""
    half, ids = sizes.tokens // 2, cast(jax.Array, _ids(sizes).reshape(-1))
    adam = rows.row_adam(lambda _: 1.0, lambda _: 0.5, eps=1e-10, weight_decay=lambda _: 0.1)

    def update(
        kernel: Kernel | None, gradients: jax.Array, table: jax.Array, squares: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        lists = [Pending(ids[part], gradients[part]) for part in (slice(half), slice(half, None))]
        table = table if kernel else table.astype(jnp.float32)
        state = rows.RowState(jnp.int32(0), squares)
        table, state = adam.update(lists, table, state, kernel)
        return table, state.square_V

    gradients, table = normal((sizes.tokens, sizes.width), (half, sizes.width))
    (squares,) = normal((half,), dtype=np.float32)
    arrays = [gradients, table, np.square(squares)]
    return {"update": (partial(update, Kernel(row_adam)), partial(update, None), arrays)}


def _ids(sizes: Sizes) -> np.ndarray:
    shape = 2, sizes.tokens // 2
    ids = np.random.default_rng(0).integers(0, sizes.tokens, size=shape, dtype=np.int32)
    ids[0, : sizes.tokens // 4] = 7
    return ids


CUSTOM = (
    CustomKernel("sums of rows", Kernel(sum_rows), examples_of_sums),
    CustomKernel("update of rows", Kernel(row_adam), examples_of_updates),
)
