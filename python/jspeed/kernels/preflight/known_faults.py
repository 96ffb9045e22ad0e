"""Versions known to be bad on NVIDIA GPUs, each with what it does and the remedy, named when a run
starts."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jspeed.base.compiler import CAS_SCATTERS, scalar_scatters
from jspeed.base.jax_versions import loaded_cudnn
from jspeed.record.provenance import installed_version
from jspeed.run.compute.device import GPUS, Device

KEYS = re.compile(
    r'fmhaSoftmaxBackward.*?"intermediate_tensor_shape".*?"dimensions": *\[(?:"\d+", *){3}"(\d+)"\]'
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


NEWER_CUDNN = "pip install -U nvidia-cudnn-cu12 (or -cu13), or --attention triton"
# cuDNN's are TransformerEngine's list, transformer_engine/common/fused_attn.
FAULTS = (
    Fault("jaxlib", *CAS_SCATTERS, adds_scalars,
          "adds single fp32 numbers by compare-and-swap (jax issue 38806): slow where many go to \
one place, as in this step",
          "install jaxlib 0.11.1 or newer (Python 3.12), or add in rows of 4 or more; jspeed plan \
RECIPE says where"),
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
