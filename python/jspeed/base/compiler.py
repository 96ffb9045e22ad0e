"""Compile a lowered program with jspeed's XLA options, and measure the memory that it needs of a
device."""

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jspeed.errors import BadInput
from jspeed.run.compute.device import GPUS, Device

# XLA options for GPUs, each with its reason; all others keep XLA's default. XLA_FLAGS goes before
# them.
GPU_OPTIONS: dict[str, Any] = {
    # Every bank and table is large enough for a transfer of its own: combined, they all wait for
    # the last gradient; apart, the first bank is orthogonalised while the next is on its way.
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**20,
    # Else a rounding to bf16 that is undone at once is left out, and the fp32 numbers, twice the
    # bytes, go through memory: 10 of the 183 GB that record 89's last stages move in a step. So it
    # rounds as written, as PyTorch does.
    "xla_allow_excess_precision": False,
    # Else matmuls become Triton fusions, into which XLA takes what makes their operands: where that
    # is a cast from FP8, it multiplies in bf16. Record 29's head has three FP8 matmuls without and
    # none with them. cuBLASLt has the rest.
    "xla_gpu_enable_triton_gemm": False,
    # Else matmuls that read the same array become one where operands and result of either are
    # small: jaxlib 0.10.2 merges what 64 MB here merges, and not what 32 does. That one multiplies
    # FP8 values in bf16: 28 of 89 FP8 matmuls of r92's first stage.
    "xla_gpu_dot_merger_threshold_mb": 0,
}
# Else processes share the tuning of a program and wait for each other's results, for up to a day:
# one that finds the program in its own cache, as on the one node of several that has compiled it
# before, gives none.
SHARDED_TUNING = "xla_gpu_shard_autotuning"
Compile = Callable[[jax.stages.Lowered], jax.stages.Compiled]
Build = Callable[[jax.stages.Lowered, Compile], jax.stages.Compiled]  # or finds what was compiled
FP8_CALL = "__cublas$lt$matmul$f8"  # the custom call of an FP8 matmul

# libtpu's least optimisation effort, XLA's EffortLevel O0, unless EFFORT is set: a core then
# compiles track3 for eight v6e in a minute; with libtpu's own default it had not after two hours.
TPU_OPTIONS: dict[str, Any] = {"optimization_level": 9}
EFFORT = "JAX_OPTIMIZATION_LEVEL"

# releases of jaxlib, from the first to before the fixed one, that add single fp32 numbers on a GPU
# by compare-and-swap (jax issue 38806)
CAS_SCATTERS = (0, 10, 2), (0, 11, 1)
MIN_SCATTER_UPDATES = 4096  # scalar updates of one scatter
RESULT = re.compile(r"%?([\w.-]+) = f32\[([\d,]*)\]")
SCATTER = re.compile(
    r"%?([\w.-]+) = f32\[[\d,]*\]\S* scatter\(.*?([\w.-]+)\),"
    r" .*?update_window_dims=\{([\d,]*)\}(.*)"
)


class DoesNotFit(BadInput):
    """A TPU's compiler refuses a program of more ``bytes`` than the device has; other compilers do
    not check."""

    def __init__(self, needed: int) -> None:
        super().__init__(
            f"a program needs {needed / 1e9:.1f} GB of a device, more than there are; use more or"
            " larger devices"
        )
        self.bytes = needed


def out_of_memory(error: Exception) -> bool:
    """Whether XLA found no room in a device's memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def options_for(platform: str) -> dict[str, Any] | None:
    """The XLA options of this file that ``platform`` takes, without those that the environment
    sets."""
    if platform == "tpu":
        return None if EFFORT in os.environ else TPU_OPTIONS
    flags = os.environ.get("XLA_FLAGS", "")
    given = {
        name: value for name, value in GPU_OPTIONS.items() if not re.search(rf"--{name}\b", flags)
    }
    if jax.process_count() > 1 and SHARDED_TUNING not in flags:
        given[SHARDED_TUNING] = False
    return given if platform in GPUS else None


def compiled(
    lowered: jax.stages.Lowered, device: Device, more: Mapping[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compile for ``device`` with the options of this file, and ``more`` on a GPU.

    Raises :class:`DoesNotFit` where the compiler says so.
    """
    options = options_for(device.platform)
    if more and device.platform in GPUS:
        options = {**(options or {}), **more}
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        needed = re.search(
            r"RESOURCE_EXHAUSTED.*?\bhbm\b.*?([\d.]+)G\b", str(error), re.IGNORECASE | re.DOTALL
        )
        if device.platform != "tpu" or needed is None:
            raise
        raise DoesNotFit(int(float(needed[1]) * 2**30)) from error


def anew(lowered: jax.stages.Lowered, how: Compile) -> jax.stages.Compiled:
    """A :data:`Build` that compiles, whatever there is."""
    return how(lowered)


def need_and_step(
    build: Callable[[jax.stages.Lowered], jax.stages.Compiled], lowered: jax.stages.Lowered
) -> tuple[int, jax.stages.Compiled | None]:
    """Return (bytes of a device that a step needs, step); no step where ``build`` raises
    :class:`DoesNotFit`."""
    try:
        step = build(lowered)
    except DoesNotFit as refused:
        return refused.bytes, None
    return memory_needed(step), step


def custom_calls(step: jax.stages.Compiled) -> Counter[str]:
    """How often the program of ``step`` calls what XLA does not compile itself (kernels of
    libraries, own ones), by target. A call in a loop is one."""
    return Counter(re.findall(r'custom_call_target="([^"]+)"', str(step.as_text())))


def memory_needed(step: jax.stages.Compiled) -> int:
    """Bytes of one device that ``step`` needs: arguments, results that are no donated argument,
    scratch."""
    sizes: Any = step.memory_analysis()
    shardings = jax.tree.leaves(step.input_shardings)
    # whose temporaries are not in the others
    if shardings and next(iter(shardings[0].device_set)).platform == "tpu":
        return sizes.peak_memory_in_bytes
    arrays = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return arrays + sizes.temp_size_in_bytes


def has_cas_scatter() -> bool:
    """Whether the installed jaxlib compiles what :func:`scalar_scatters` finds to loops of
    compare-and-swap."""
    first, fixed = CAS_SCATTERS
    return first <= tuple(map(int, re.findall(r"\d+", jax.lib.__version__)[:3])) < fixed


def scalar_scatters(text: str) -> Iterator[tuple[str, int]]:
    """Yield (name, updates) of the scatters of many single fp32 numbers in optimised HLO, of which
    several may meet."""
    # The text has megabytes of kernels, in which a pattern would begin at every word.
    lines = [line for line in text.splitlines() if " = f32[" in line]
    scatters = [SCATTER.search(line) for line in lines if " scatter(" in line]
    if not scatters:
        return
    results = filter(None, map(RESULT.search, lines))
    shapes = {
        name: tuple(map(int, filter(None, dims.split(","))))
        for name, dims in (each.groups() for each in results)
    }
    for name, update, window, rest in (each.groups() for each in scatters if each):
        dims = shapes.get(update, ())
        updates, at_once = (
            math.prod(dims),
            math.prod(dims[int(dim)] for dim in window.split(",") if dim),
        )
        if at_once == 1 and updates >= MIN_SCATTER_UPDATES and "unique_indices=true" not in rest:
            yield name, updates
