"""What JAX keeps private or has changed between its releases 0.10 and 0.12: a function each, and
nowhere else.

Every function says which releases it was read in or run with; `tests/test_architecture.py` keeps
private names of JAX out of all other files, and docs/reference/device_choices.md lists the
deprecated API that is still in use. JAX is imported when a function is called: the rooms that
never load it may import this one.
"""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any
from unittest import mock


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """Return (constants, carried values) of a ``scan`` equation's operands, which come in this
    order.

    JAX 0.10 counts them in ``num_consts`` and ``num_carry``; from 0.11 on ``ft_in`` is a tree of
    three parts.
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    constants, carried, _ = eqn.params["ft_in"].unpack()
    return len(constants), len(carried)


def literals(variables: list[Any]) -> Iterator[Any]:
    """Yield the values of those ``variables`` of a jaxpr that are constants. JAX 0.10 to 0.12."""
    from jax.extend.core import Literal

    yield from (each.val for each in variables if isinstance(each, Literal))


def source_line(eqn: Any) -> str:
    """Return file:line of the user's frame that made an equation; empty if unknown. JAX 0.10 to
    0.12."""
    from jax._src import source_info_util

    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return f"{frame.file_name}:{frame.start_line}" if frame else ""


def cudnn_attention() -> Any:
    """The module of JAX's calls of cuDNN's attention, whose public face has no offsets of documents
    (jax 29731).

    Its function and its primitives take the same arguments in 0.10 to 0.12 but for those of
    :func:`no_score_mod`.
    """
    return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")


def no_score_mod() -> dict[str, None]:
    """What the primitives of :func:`cudnn_attention` also take from JAX 0.12 on: no change of the
    scores."""
    lowering = cudnn_attention()._dot_product_attention_fwd_cuda_lowering
    names = inspect.signature(lowering).parameters.keys() & {"score_mod_name", "score_mod_jaxpr"}
    return dict.fromkeys(names)


def reserve_workspace(lowered: Any, bytes_of: Callable[[int, int, int, int], int]) -> None:
    """Give each backward call of cuDNN's attention in a lowered program ``bytes_of(documents,
    heads, length, width)``.

    JAX writes 0 bytes, which XLA replaces by what cuDNN asks for; a compiler without a GPU
    asks nobody. JAX 0.10 to 0.12: the workspace is the call's last result, which nothing reads.
    """
    from jax.extend.mlir import ir

    def visit(operation: Any) -> None:
        for inner in (o for region in operation.regions for block in region for o in block):
            visit(call := inner.operation)
            if call.name != "stablehlo.custom_call":
                continue
            if "fmhaSoftmaxBackward" in ir.StringAttr(call.attributes["call_target_name"]).value:
                config = json.loads(ir.StringAttr(call.attributes["backend_config"]).value)[
                    "cudnn_fmha_backend_config"
                ]
                lanes, heads, length, _ = map(
                    int, config["intermediate_tensor_shape"]["dimensions"]
                )
                width = ir.RankedTensorType(call.results[0].type).shape[-1]
                size = bytes_of(lanes * int(config["max_seg_per_batch"]), heads, length, width)
                with call.context:
                    call.results[len(call.results) - 1].set_type(
                        ir.Type.parse(f"tensor<{size}xui8>")
                    )

    visit(lowered.compiler_ir("stablehlo").operation)


@cache
def lower_kernels_once() -> "weakref.WeakKeyDictionary[Any, dict[Any, Any]]":
    """Keep what JAX lowers a Pallas kernel for a GPU to, and take it where the same jaxpr is
    lowered again, in another program.

    A kernel becomes one custom call, which is kept as text, for as long as the jaxpr lives. What is
    no single call of the operands in their order is lowered each time. Returns what is kept: of
    each jaxpr, by all that it was lowered with. JAX 0.10 to 0.12: two primitives, whose rules are
    private.
    """
    from jax.extend.mlir import ir
    from jax.interpreters import mlir

    kept: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    def once(rule: Callable[..., Any]) -> Callable[..., Any]:
        def lowered(ctx: Any, *operands: Any, **params: Any) -> Any:
            module = ctx.module_context
            jaxpr = params["jaxpr"] if "jaxpr" in params else params["jaxprs"][0]
            others = [each for name, each in params.items() if name not in ("jaxpr", "jaxprs")]
            context = tuple(module.platforms), repr(module.axis_context), ctx.avals_in
            calls = kept.setdefault(jaxpr, {})
            key = str(context), tuple(map(id, others))
            if key in calls:
                types, attributes, _ = calls[key]
                return ir.Operation.create(
                    "stablehlo.custom_call",
                    results=[ir.Type.parse(each) for each in types],
                    operands=operands,
                    attributes={n: ir.Attribute.parse(text) for n, text in attributes.items()},
                ).results
            results = [*rule(ctx, *operands, **params)]
            call = results[0].owner if results and isinstance(results[0], ir.Value) else None
            if (
                isinstance(call, ir.OpView | ir.Operation)
                and call.operation.name == "stablehlo.custom_call"
                and [*call.operation.operands] == [*operands]
                and [*call.operation.results] == results
            ):
                types = [str(each.type) for each in results]
                named = call.operation.attributes  # iterates over pairs, or names
                names = [getattr(each, "name", each) for each in named]
                attributes = {name: str(named[name]) for name in names}
                calls[key] = types, attributes, others  # they live as long as their numbers
            return results

        return lowered

    for file, name in (("pallas_call", "pallas_call_p"), ("mpmd", "mpmd_map_p")):
        with suppress(ImportError, AttributeError, KeyError):
            primitive = getattr(importlib.import_module(f"jax._src.pallas.{file}"), name)
            rules = importlib.import_module("jax._src.interpreters.mlir")._lowerings
            mlir.register_lowering(primitive, once(rules[primitive].rule))
    return kept


def loaded_cudnn() -> tuple[int, int, int] | None:
    """The version of the cuDNN that JAX has loaded, which need not be the installed package's; None
    without one."""
    try:
        from jax._src.lib import cuda_versions

        number = cuda_versions.cudnn_get_version() if cuda_versions else None
    except (ImportError, AttributeError, RuntimeError):
        return None
    return number and (number // 10_000, number // 100 % 100, number % 100)


def key_value_store() -> Any:
    """The client of the key-value store that joined processes share. JAX 0.10 to 0.12."""
    from jax._src import distributed

    return distributed.global_state.client


def hlo_text(module: bytes) -> str | None:
    """Return the text of an ``HloModuleProto``; None where this JAX's class for it is elsewhere.
    JAX 0.10."""
    try:
        modules = importlib.import_module("jaxlib._hlo").HloModule
    except (ImportError, AttributeError):
        return None
    return modules.from_serialized_hlo_module_proto(module).to_string()


def ask_again_for_compile_cache() -> None:
    """Let JAX heed ``jax_enable_compilation_cache`` again, which it asks for once in a process."""
    importlib.import_module("jax.experimental.compilation_cache.compilation_cache").reset_cache()


def machine_code(executable: Any) -> tuple[Any, ...]:
    """Return a ``jax.stages.Compiled`` as what can be pickled; raises where its backend has no way.
    Run with JAX 0.10 and 0.12."""
    from jax.experimental.serialize_executable import serialize

    return serialize(executable)


def from_machine_code(kept: tuple[Any, ...], devices: list[Any]) -> Any:
    """Return the executable that :func:`machine_code` gave, for ``devices`` in the order of their
    mesh."""
    from jax.experimental.serialize_executable import deserialize_and_load

    code, arguments, results = kept
    if b"lapack_" in code:
        find_lapack()
    return deserialize_and_load(code, arguments, results, execution_devices=devices)


@cache
def find_lapack() -> None:
    """Let JAX find LAPACK's functions, which it does where one of them is lowered: machine code
    that a process loads without that calls a null pointer. Seen with JAX 0.10 and 0.12."""
    import jax

    one = jax.ShapeDtypeStruct((1, 1), "float32")
    jax.jit(jax.lax.linalg.cholesky).trace(one).lower(lowering_platforms=("cpu",))


@cache
def xla_flags_fault(flags: str) -> str | None:
    """What XLA says against these XLA_FLAGS, at which it would end a process; None where it takes
    them.

    Asked of XLA's own parser, which knows the flags of its release. Its only face is XLA's first
    use, in a process of a third of a second. jaxlib 0.10 to 0.12.
    """
    code = "from jaxlib import xla_client; xla_client.CompileOptions()"
    asked = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        errors="replace",
    )
    said = re.search(r"^[EF]\d{4} .*?\] (.*)", asked.stderr, re.MULTILINE)
    return said[1] if asked.returncode and said else None


def smem_layout(rows: int, columns: int, swizzle: int) -> tuple[Any, ...]:
    """Tiling and swizzle (bytes) of a block in shared memory. Mosaic GPU of JAX 0.10 to 0.12.

    The stubs of JAX 0.11 call both classes abstract, which they are not.
    """
    plgpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    return plgpu.TilingTransform((rows, columns)), plgpu.SwizzleTransform(swizzle)


def register_gpus_with_pallas() -> None:
    """Tell Pallas' Triton backend what the GPUs of this process are.

    JAX 0.11.0 refuses those that are not in its table (RTX 3090, L40S); 0.10 has no table, later
    ones ask the device.
    """
    import jax

    if (gpu_info := _gpu_info()) is None:
        return
    for device in jax.local_devices():
        major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
        if major.isdecimal() and minor.isdecimal():
            gpu_info.registry[device.device_kind] = _constant(
                _described(gpu_info, (int(major), int(minor)))
            )


@contextmanager
def pretend_gpu(capability: tuple[int, int], cudnn_version: int) -> Iterator[None]:
    """Let JAX's questions about the live GPU be answered for an absent one while code is traced and
    lowered.

    ``capability`` is CUDA's compute capability as (9, 0), ``cudnn_version`` is 91002 for 9.10.2.

    Covers cuDNN's attention, whose library need not be installed, and what Pallas' Triton backend
    compiles for, which JAX 0.10 takes from the mesh. What cuDNN really supports is checked on the
    GPU, when it is built there.
    """

    def version(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    cudnn = cudnn_attention()
    with ExitStack() as patches:
        for module, name, answer in (
            (cudnn, "check_compute_capability", lambda least: capability >= version(least)),
            (cudnn, "is_cuda_compute_capability_equal", lambda one: capability == version(one)),
            (cudnn, "check_cudnn_version", lambda: cudnn_version),
        ):
            patches.enter_context(mock.patch.object(module, name, answer))
        if gpu_info := _gpu_info():
            answer = _constant(_described(gpu_info, capability))
            patches.enter_context(mock.patch.object(gpu_info, "get_gpu_info", answer))
        yield


def _gpu_info() -> Any:
    """Pallas' module of GPU kinds, from JAX 0.11 on; else None."""
    try:
        return importlib.import_module("jax._src.pallas.triton.gpu_info")
    except ImportError:
        return None


def _described(gpu_info: Any, capability: tuple[int, int]) -> Any:
    major, minor = capability
    number = 10 * major + minor
    return gpu_info.GpuInfo(
        gpu_version=None, arch_name=f"{major}.{minor}", compute_capability=number
    )


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value
