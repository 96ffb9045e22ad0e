"""Matmuls of the MLP fused with their epilogues: squared ReLU and its FP8 copy; the derivative of squared ReLU.

Pallas kernels for Hopper (Mosaic GPU): one warpgroup loads, two multiply. Each has a reference in plain JAX with the
same results up to the order of sums. :func:`jspeed.model.mlp.mlp` takes them when asked; no recipe asks until a GPU has
measured them (benchmarks/kernels.md): they compile, and JAX's interpreter of such kernels runs them on a CPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspeed.errors import BadInput
from jspeed.model.fp8 import E4M3, quantise

ROWS, COLUMNS = 128, 128  # of the output, for one warpgroup; two lie side by side
STRIP = 64  # columns that leave the registers at once
WARPGROUPS = 2
LINE = 128  # bytes of the contracted dimension loaded at once, the widest swizzle
IN_FLIGHT = 3  # such loads; four would need 242 of an SM's 227 kB
SMS = 132  # streaming multiprocessors of an H100 or H200


def squared_relu_matmul(
    x_ND: jax.Array, w_FD: jax.Array, scales_2: jax.Array, *, interpret: Any = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return ``h = relu(x w.T)^2``, bf16 ``[N, F]``; ``h`` over a scale, e4m3; the largest ``h`` of each 64, fp32.

    ``x_ND`` and ``w_FD`` are e4m3. ``scales_2`` are fp32: what the matmul is multiplied by, and what the copy is
    divided by before it is clipped to 448. The largest are ``[F / 64, N]``, of 64 columns each. Raises BadInput
    unless N is a multiple of 128, F of 256, and D of 128.
    """
    (n, _), f = x_ND.shape, w_FD.shape[0]
    outputs = [((n, f), jnp.bfloat16), ((n, f), E4M3), ((f // STRIP, n), jnp.float32)]

    def finish(product, indices, refs, slots, barrier):
        scales, *_ = refs
        pre = (product * scales[0]).astype(jnp.bfloat16).astype(jnp.float32)
        positive = jnp.maximum(pre, 0.0)
        h = (positive * positive).astype(jnp.bfloat16)
        h32 = h.astype(jnp.float32)
        return h, jnp.minimum(h32 * (1 / scales[1]), 448.0).astype(E4M3), jnp.max(h32, axis=1)

    h_NF, copy_NF, largest_GN = _matmul(x_ND, w_FD, True, [scales_2], outputs, finish, interpret)
    return h_NF, copy_NF, largest_GN


def squared_relu_matmul_reference(
    x_ND: jax.Array, w_FD: jax.Array, scales_2: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """:func:`squared_relu_matmul` in plain JAX."""
    product_NF = lax.dot_general(x_ND, w_FD, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    pre_NF = (product_NF * scales_2[0]).astype(jnp.bfloat16).astype(jnp.float32)
    h_NF = jnp.square(jnp.maximum(pre_NF, 0.0)).astype(jnp.bfloat16)
    largest_NG = jnp.max(h_NF.reshape(h_NF.shape[0], -1, STRIP), axis=-1).astype(jnp.float32)
    return h_NF, quantise(h_NF, scales_2[1], E4M3), largest_NG.T


def squared_relu_gradient(g_ND: jax.Array, w_DF: jax.Array, h_NF: jax.Array, *, interpret: Any = False) -> jax.Array:
    """Return ``(g w) 2 sqrt(h)``: the gradient before a squared ReLU whose output was ``h``. bf16 ``[N, F]``, as all.

    Raises BadInput unless N is a multiple of 128, F of 256, and D of 64.
    """

    def finish(product, indices, refs, slots, barrier):
        h, *_ = refs
        plgpu.copy_gmem_to_smem(h.at[indices], slots[0], barrier)
        plgpu.barrier_wait(barrier)
        return (_gradient(product, slots[0][...]),)

    return _matmul(g_ND, w_DF, False, [h_NF], [(h_NF.shape, jnp.bfloat16)], finish, interpret)[0]


def squared_relu_gradient_reference(g_ND: jax.Array, w_DF: jax.Array, h_NF: jax.Array) -> jax.Array:
    """:func:`squared_relu_gradient` in plain JAX."""
    product_NF = jnp.matmul(g_ND, w_DF, preferred_element_type=jnp.float32)
    return _gradient(product_NF, h_NF)


def _gradient(product: jax.Array, h: jax.Array) -> jax.Array:
    h32 = h.astype(jnp.float32)
    root = h32 * lax.rsqrt(jnp.maximum(h32, 1e-30))  # Mosaic has no sqrt
    return (product * (2.0 * root)).astype(jnp.bfloat16)


def _matmul(
    a_NK: jax.Array,
    b: jax.Array,
    b_in_rows: bool,
    others: Sequence[jax.Array],
    outputs: Sequence[tuple[tuple[int, ...], Any]],
    finish: Callable[..., tuple[jax.Array, ...]],
    interpret: Any,
) -> tuple[jax.Array, ...]:
    """Multiply ``a`` with ``b`` (``[F, K]`` if ``b_in_rows``, else ``[K, F]``) and write what ``finish`` makes of it.

    ``finish(product, indices, others, slots, barrier)`` gets fp32 ``[ROWS, STRIP]`` of the product and its indices
    in the output, and returns a part of each of ``outputs``: matrices go through shared memory, whose ``slots`` it
    may load into first, and vectors, one number a row, straight out.
    """
    if interpret and b_in_rows:  # the interpreter knows no transposed operand of wgmma
        b, b_in_rows = b.T, False
    (n, k), f = a_NK.shape, b.shape[0 if b_in_rows else 1]
    line = LINE // a_NK.dtype.itemsize
    wide = WARPGROUPS * COLUMNS
    for what, size, unit in (("rows", n, ROWS), ("columns", f, wide), ("contracted", k, line)):
        if size % unit:
            raise BadInput(
                f"fused matmul: {what} must be a multiple of {unit}, found {size}; use the reference in plain JAX"
            )
    tiled = _tiled(a_NK.dtype, line)
    matrices = [dtype for shape, dtype in outputs if shape == (n, f)]

    def loads(multiply: Any, context: Any) -> Any:
        b_shape, b_index = ((wide, line), lambda s: (0, s)) if b_in_rows else ((line, wide), lambda s: (s, 0))
        return plgpu.emit_pipeline_warp_specialized(
            multiply,
            grid=(k // line,),
            memory_registers=40,
            in_specs=[
                plgpu.BlockSpec((ROWS, line), lambda s: (0, s), transforms=tiled),
                plgpu.BlockSpec(b_shape, b_index, transforms=tiled),
            ],
            wg_axis="wg",
            num_compute_wgs=WARPGROUPS,
            max_concurrent_steps=IN_FLIGHT,
            compute_context=context,
        )

    def kernel(a_gmem: Any, b_gmem: Any, *rest: Any) -> None:
        refs, results = rest[: len(others)], rest[len(others) :]

        def scope(blocks: Any, slots: Any, barriers: Any) -> None:
            wg = lax.axis_index("wg")

            def tile(loop: plgpu.NDLoopInfo) -> None:
                row, column = loop.index
                rows = pl.ds(row * ROWS, ROWS)

                def context(run: Any) -> None:
                    def with_sum(acc: Any) -> None:
                        run(acc)
                        product = acc[...]
                        for strip in range(COLUMNS // STRIP):
                            first = column * wide + wg * COLUMNS + strip * STRIP
                            indices = rows, pl.ds(first, STRIP)
                            # Slots are free again once the copies out of them, of the strip before, have been read.
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                            own = [slot.at[wg] for slot in slots]
                            part = product[:, strip * STRIP : (strip + 1) * STRIP]
                            made = finish(part, indices, refs, own, barriers.at[wg])
                            free = iter(own)
                            for (shape, _), result, value in zip(outputs, results, made, strict=True):
                                if shape == (n, f):
                                    slot = next(free)
                                    slot[...] = value
                                    plgpu.commit_smem()
                                    plgpu.copy_smem_to_gmem(slot, result.at[indices])
                                else:
                                    result[first // STRIP, rows] = value

                    pl.run_scoped(with_sum, plgpu.ACC((ROWS, COLUMNS), jnp.float32))

                def multiply(_: Any, a_smem: Any, b_smem: Any, acc: Any) -> Any:
                    mine = pl.ds(wg * COLUMNS, COLUMNS)
                    b_part = plgpu.transpose_ref(b_smem.at[mine], (1, 0)) if b_in_rows else b_smem.at[:, mine]
                    plgpu.wgmma(acc, a_smem, b_part)
                    plgpu.wgmma_wait(0)
                    return acc

                columns = pl.ds(column * wide, wide)
                b_tile = b_gmem.at[columns, :] if b_in_rows else b_gmem.at[:, columns]
                loads(multiply, context)(a_gmem.at[rows, :], b_tile, allocations=blocks)

            plgpu.nd_loop((n // ROWS, f // wide), collective_axes="sm")(tile)

        nothing = lambda *_, **__: None  # noqa: E731  what a pipeline computes does not change what it needs
        pl.run_scoped(
            scope,
            loads(nothing, nothing).get_allocations(a_gmem, b_gmem),
            [plgpu.SMEM((WARPGROUPS, ROWS, STRIP), dtype, transforms=_tiled(dtype, STRIP)) for dtype in matrices],
            plgpu.Barrier(num_barriers=WARPGROUPS),
            collective_axes="wg",
        )
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs],
        grid=(1 if interpret else SMS,),
        grid_names=("sm",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        interpret=interpret,
    )(a_NK, b, *others)


def _tiled(dtype: Any, columns: int) -> tuple[Any, ...]:
    """How TMA lays rows of ``columns`` entries in shared memory so that wgmma reads them without conflicts."""
    line = columns * jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(min(line, LINE))
