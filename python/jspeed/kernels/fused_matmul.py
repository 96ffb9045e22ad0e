"""A Hopper matmul with a fused epilogue: only the epilogue's results are written to memory. Pallas
(Mosaic GPU).

One warpgroup loads, two multiply. The kernels built on it: fused_mlp.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from jspeed.base.jax_versions import smem_layout
from jspeed.model.custom_kernels import Call, Price, Refused, label
from jspeed.model.fp8 import E4M3, E5M2

ROWS, COLUMNS = 128, 128  # of the output, for one warpgroup; two lie side by side
STRIP = 64  # columns per epilogue step
WARPGROUPS = 2
WIDE = WARPGROUPS * COLUMNS
LINE = 128  # bytes of the contracted dimension loaded at once, the widest swizzle
IN_FLIGHT = 3  # such loads; four would need 242 of an SM's 227 kB
SMS = 132  # streaming multiprocessors of an H100 or H200
PTX_TYPES = {jnp.dtype(E4M3): "e4m3", jnp.dtype(E5M2): "e5m2"}


def matmul(
    a_NK: jax.Array,
    b_FK: jax.Array,
    scalars: jax.Array,
    outputs: Sequence[tuple[str, Any]],
    epilogue: Callable[..., tuple[jax.Array, ...]],
    *,
    epilogue_input_NF: jax.Array | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Multiply ``a_NK`` with the transpose of ``b_FK``, both FP8, and write the results of
    ``epilogue``.

    ``outputs`` are layouts and dtypes: ``NF`` is a matrix, ``FN`` its transpose (8-bit only),
    ``GN`` one number for each STRIP columns. ``epilogue(product, scalars, block)`` gets fp32
    ``[ROWS, STRIP]`` of the product, each of ``scalars`` ``[n]`` and a block of
    ``epilogue_input_NF``, if given. It returns a block of each output: ``[ROWS, STRIP]`` for ``NF``
    and ``FN``, in fp32 for ``FN``, and ``[ROWS]`` for ``GN``. Operands may be of two FP8 dtypes.
    Raises Refused unless N and K are multiples of 128 and F of 256.
    """
    (n, k), f, b = a_NK.shape, b_FK.shape[0], b_FK
    for what, size, unit in (
        ("rows", n, ROWS),
        ("columns", f, WIDE),
        ("contracted", k, LINE),
    ):
        if size % unit:
            raise Refused(
                f"fused matmul: {what} must be a multiple of {unit}, found {size}; use the"
                " reference in plain JAX"
            )
    mixed = None
    if interpret and a_NK.dtype != b.dtype:  # exact: bf16 has all numbers of both FP8 types
        a_NK, b = a_NK.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    elif a_NK.dtype != b.dtype and jax.__version_info__ < (0, 11):  # whose Pallas refuses two types
        mixed = a_NK.dtype, b.dtype
        b = lax.bitcast_convert_type(b, a_NK.dtype)
    b_in_rows = not interpret  # the interpreter knows no transposed operand of wgmma
    b = b if b_in_rows else b.T
    line = LINE // a_NK.dtype.itemsize
    shapes = {"NF": (n, f), "FN": (f, n), "GN": (f // STRIP, n)}
    blocks = {"NF": (ROWS, STRIP), "FN": (STRIP, ROWS)}
    tiled = _tiled(a_NK.dtype, line)
    strips = range(COLUMNS // STRIP)
    beside = [] if epilogue_input_NF is None else [epilogue_input_NF]
    # else XLA makes one array of them, by a kernel
    apart = [scalars[n : n + 1] for n in range(scalars.size)]

    def loads(multiply: Any, context: Any) -> Any:
        b_shape, b_index = (
            ((WIDE, line), lambda s: (0, s)) if b_in_rows else ((line, WIDE), lambda s: (s, 0))
        )
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
        first, last = len(apart), len(apart) + len(beside)
        refs, read, results = rest[:first], rest[first:last], rest[last:]

        def scope(allocations: Any, slots: Any, besides: Any, barriers: Any) -> None:
            wg = lax.axis_index("wg")

            def tile(loop: plgpu.NDLoopInfo) -> None:
                row, column = loop.index
                rows = pl.ds(row * ROWS, ROWS)

                def columns_of(strip: int) -> Any:
                    return pl.ds(column * WIDE + wg * COLUMNS + strip * STRIP, STRIP)

                def load(strip: int) -> None:
                    for source, slot in zip(read, besides, strict=True):
                        at = source.at[rows, columns_of(strip)]
                        plgpu.copy_gmem_to_smem(at, slot.at[wg], barriers.at[wg])

                def loaded() -> list[jax.Array]:
                    if besides:
                        plgpu.barrier_wait(barriers.at[wg])
                    return [slot.at[wg][...] for slot in besides]

                def write(strip: int, made: Sequence[jax.Array]) -> None:
                    free, copies = iter(slots), []
                    for (place, dtype), result, value in zip(outputs, results, made, strict=True):
                        if place == "GN":
                            result[(column * WIDE + wg * COLUMNS) // STRIP + strip, rows] = value
                            continue
                        slot = next(free).at[wg]
                        if place == "NF":
                            slot[...] = value.astype(dtype)
                        else:
                            _store_transposed(slot, value, dtype, interpret)
                        at = (
                            (rows, columns_of(strip))
                            if place == "NF"
                            else (columns_of(strip), rows)
                        )
                        copies.append((slot, result.at[at]))
                    plgpu.commit_smem()
                    for slot, target in copies:
                        plgpu.copy_smem_to_gmem(slot, target)

                def context(run: Any) -> None:
                    def with_sum(acc: Any) -> None:
                        load(0)
                        run(acc)
                        product = acc[...]
                        for strip in strips:
                            # Slots are free again once the copies out of them, of the strip before,
                            # have been read.
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                            part = product[:, strip * STRIP : (strip + 1) * STRIP]
                            write(strip, epilogue(part, [ref[0] for ref in refs], *loaded()))
                            if strip + 1 in strips:  # commit_smem was since the one before was read
                                load(strip + 1)

                    pl.run_scoped(with_sum, plgpu.ACC((ROWS, COLUMNS), jnp.float32))

                def multiply(_: Any, a_smem: Any, b_smem: Any, acc: Any) -> Any:
                    mine = pl.ds(wg * COLUMNS, COLUMNS)
                    b_part = b_smem.at[mine].transpose((1, 0)) if b_in_rows else b_smem.at[:, mine]
                    plgpu.wgmma(acc, a_smem, b_part)
                    if mixed:
                        _mix_types(*mixed)
                    plgpu.wgmma_wait(0)
                    return acc

                columns = pl.ds(column * WIDE, WIDE)
                b_tile = b_gmem.at[columns, :] if b_in_rows else b_gmem.at[:, columns]
                loads(multiply, context)(a_gmem.at[rows, :], b_tile, allocations=allocations)

            plgpu.nd_loop((n // ROWS, f // WIDE), collective_axes="sm")(tile)

        nothing = lambda *_, **__: None
        # allocations do not depend on the body of a pipeline
        pl.run_scoped(
            scope,
            loads(nothing, nothing).get_allocations(a_gmem, b_gmem),
            [_slot(blocks[place], dtype) for place, dtype in outputs if place in blocks],
            [_slot(blocks["NF"], array.dtype) for array in beside],
            plgpu.Barrier(num_barriers=WARPGROUPS),
            collective_axes="wg",
        )
        plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(shapes[place], dtype) for place, dtype in outputs],
        grid=(1 if interpret else SMS,),
        grid_names=("sm",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        interpret=interpret,
    )
    with jax.named_scope(label("fused_matmul", "matmul")):
        return run(a_NK, b, *apart, *beside)


def price(call: Call) -> Price:
    """A matmul of ``[N, K]`` and ``[F, K]``."""
    (rows, contracted), (columns, _) = (operand.dims for operand in call.operands[:2])
    flops = 2.0 * rows * contracted * columns
    return Price("fp8_matmul", flops, dtype="f8", dims=(1, rows, contracted, columns))


def _slot(block: tuple[int, int], dtype: Any) -> Any:
    return plgpu.SMEM((WARPGROUPS, *block), dtype, transforms=_tiled(dtype, block[1]))


def _tiled(dtype: Any, columns: int) -> tuple[Any, ...]:
    """How TMA lays rows of ``columns`` entries in shared memory so that wgmma reads them without
    conflicts."""
    line = columns * jnp.dtype(dtype).itemsize
    return smem_layout(8, columns, min(line, LINE))


def _store_transposed(slot: Any, value: jax.Array, dtype: Any, interpret: Any) -> None:
    """Store fp32 ``[ROWS, STRIP]`` as ``dtype`` into ``slot``, ``[STRIP, ROWS]``, two rows at
    once."""
    if interpret:  # the interpreter knows neither layouts nor transposed references
        slot[...] = value.T.astype(dtype)
    else:
        # Before the cast: Mosaic transposes 16 and 32 bits, between neighbouring lanes of a warp.
        transposed = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
        slot.transpose((1, 0))[...] = transposed.astype(dtype)


def _mix_types(a_type: Any, b_type: Any) -> None:
    """Give the preceding wgmma operands of two FP8 dtypes, as Pallas writes it from JAX 0.11 on.

    Older Pallas rejects mixed operands: ``b`` is bitcast to ``a``'s dtype and the instruction's
    text is patched.
    """
    a, b = PTX_TYPES[jnp.dtype(a_type)], PTX_TYPES[jnp.dtype(b_type)]

    @plgpu.inline_mgpu()
    def rename(_: Any) -> None:
        found = 0
        for operation in ir.InsertionPoint.current.block.operations:
            if "asm_string" in operation.attributes:
                text = ir.StringAttr(operation.attributes["asm_string"]).value
                if "wgmma.mma_async" in text and f".{a}.{a} " in text:
                    operation.attributes["asm_string"] = ir.StringAttr.get(
                        text.replace(f".{a}.{a} ", f".{a}.{b} ")
                    )
                    found += 1
        if not found:
            raise Refused(
                "fused matmul: no wgmma to patch, because this JAX writes it otherwise than 0.10.2"
                " does"
            )

    rename()
