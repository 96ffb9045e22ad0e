"""Versions known to be bad on NVIDIA GPUs, each with what it does and the remedy, named when a run
starts."""

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jspeed.base.jax_versions import loaded_cudnn
from jspeed.record.provenance import installed_version
from jspeed.run.compute.device import GPUS, Device

MIN_SCATTER_UPDATES = 4096  # scalar updates of one scatter
RESULT = re.compile(r"%?([\w.-]+) = f32\[([\d,]*)\]")
KEYS = re.compile(
    r'fmhaSoftmaxBackward.*?"intermediate_tensor_shape".*?"dimensions": *\[(?:"\d+", *){3}"(\d+)"\]'
)
SCATTER = re.compile(
    r"%?([\w.-]+) = f32\[[\d,]*\]\S* scatter\(.*?([\w.-]+)\),"
    r" .*?update_window_dims=\{([\d,]*)\}(.*)"
)


class Use(NamedTuple):
    """What a run does that a fault may touch."""

    attention: str  # the backend
    packed: bool  # whether attention is within documents
    program: Callable[[], Iterator[str]]  # optimised HLO of its steps


class Fault(NamedTuple):
    """Releases from ``first`` to before ``fixed`` of ``library`` that are bad for a ``Use`` that it
    ``concerns``."""

    library: str
    first: tuple[int, ...]
    fixed: tuple[int, ...]
    concerns: Callable[[Use], bool]
    what: str
    remedy: str


def uses_cudnn(use: Use) -> bool:
    """Whether attention is cuDNN's, by either of its backends."""
    return use.attention.startswith("cudnn")


def keys_not_in_128s(use: Use) -> bool:
    """Whether a backward call of cuDNN's attention has a number of keys that is no multiple of
    128."""
    return any(int(match[1]) % 128 for text in use.program() for match in KEYS.finditer(text))


def adds_scalars(use: Use) -> bool:
    """Whether a step scatters many single fp32 numbers."""
    return any(any(scalar_scatters(text)) for text in use.program())


CAS = Fault(
    "jaxlib", (0, 10, 2), (0, 11, 1), adds_scalars,
    "adds single fp32 numbers by compare-and-swap (jax issue 38806): slow where many go to one \
place, as in this step",
    "install jaxlib 0.11.1 or newer (Python 3.12), or add in rows of 4 or more; jspeed plan RECIPE \
says where",
)  # fmt: skip
NEWER_CUDNN = "pip install -U nvidia-cudnn-cu12 (or -cu13), or --attention triton"
# cuDNN's are TransformerEngine's list, transformer_engine/common/fused_attn.
FAULTS = (
    CAS,
    Fault("cuDNN", (9, 10, 0), (9, 10, 2), uses_cudnn,
          "computes 16-bit attention wrongly", NEWER_CUDNN),
    Fault("cuDNN", (9, 14, 0), (9, 14, 1), lambda use: uses_cudnn(use) and use.packed,
          "computes windows within documents wrongly from 1,025 keys on", NEWER_CUDNN),
    Fault("cuDNN", (9, 0, 0), (9, 15, 1), lambda use: uses_cudnn(use) and keys_not_in_128s(use),
          "computes gradients wrongly in CUDA graphs where the keys are no multiple of 128",
          NEWER_CUDNN),
)  # fmt: skip


def version_of(library: str) -> tuple[int, ...] | None:
    """The version of a library that JAX has loaded, as far as it is numbers; None where it is not
    there."""
    if library == "cuDNN":
        return loaded_cudnn()
    return tuple(map(int, re.findall(r"\d+", installed_version(library) or "")[:3])) or None


def known_faults(
    device: Device,
    packed: bool,
    program: Callable[[], Iterator[str]],
    versions: Callable[[str], tuple[int, ...] | None] = version_of,
) -> list[str]:
    """Return a line for each fault of the installed ``versions`` that a run on ``device`` meets."""
    if device.platform not in GPUS:
        return []
    use, lines = Use(device.attention, packed, program), []
    for fault in FAULTS:
        version = versions(fault.library)
        if version and fault.first <= version < fault.fixed and fault.concerns(use):
            lines.append(
                f"{fault.library} {'.'.join(map(str, version))} {fault.what}; {fault.remedy}"
            )
    return lines


def has_cas_scatter() -> bool:
    """Whether the installed jaxlib compiles what :func:`scalar_scatters` finds to loops of
    compare-and-swap."""
    version = version_of(CAS.library)
    return version is not None and CAS.first <= version < CAS.fixed


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
