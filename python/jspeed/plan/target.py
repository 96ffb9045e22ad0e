"""GPUs that are not here: their facts, a mesh of them to compile for, and JAX's checks answered for them."""

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import topologies
from jax.sharding import Mesh

from jspeed.errors import BadInput, nearest
from jspeed.parallel.mesh import make_mesh

TARGETS = Path(__file__).with_name("targets")
PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")

# Without a GPU nothing can be autotuned, and matmuls fall to Triton with a default tile that no real run would use.
# Where autotuning is possible it chooses cuBLASLt for most plain bf16 and FP8 matmuls on this hardware.
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


class Target(NamedTuple):
    """One kind of GPU, as the compiler is told of it."""

    name: str
    text: str  # stream_executor.GpuTargetConfigProto as text
    capability: tuple[int, int]  # compute capability: (9, 0)
    cudnn: int  # as cuDNN numbers its versions: 91002 is 9.10.2


def load_target(name: str) -> Target:
    """Return the target called ``name``. Raises :class:`BadInput` with the names there are."""
    known = sorted(path.stem for path in TARGETS.glob("*.txtpb"))
    if name not in known:
        raise BadInput(f"target {name} is unknown{nearest(name, known)}; known targets: {', '.join(known)}")
    text = (TARGETS / f"{name}.txtpb").read_text()
    major, minor = _fields(text, "cuda_compute_capability", "major", "minor")
    dnn = _fields(text, "dnn_version_info", "major", "minor", "patch")
    return Target(name, text, (major, minor), dnn[0] * 10000 + dnn[1] * 100 + dnn[2])


def missing() -> str | None:
    """Say in one sentence why nothing can be compiled for a GPU here, or return None."""
    if any(_installed(plugin) for plugin in PLUGINS):
        return None
    return "no CUDA plugin of JAX is installed here, so nothing can be compiled for a GPU; run make test-aot"


def target_mesh(target: Target, devices: int = 8) -> Mesh:
    """Return a mesh of ``devices`` absent GPUs of one host on one ``data`` axis; arrays cannot be put on it.

    Set ``jax_platforms`` to ``cpu`` before anything asks JAX for devices: with the plugin and no GPU, JAX would fail
    to start CUDA and then not know it. Raises :class:`BadInput` when there is no plugin.
    """
    if reason := missing():
        raise BadInput(reason)
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=target.text,
        topology=f"1x1x{devices}",  # slices x hosts of each x devices of each
    )
    return make_mesh({"data": devices}, topology.devices)


@contextmanager
def pretend(target: Target) -> Iterator[None]:
    """Let code that asks the live backend what it can do hear about ``target`` instead, while it is traced and lowered.

    Covers cuDNN attention: its compute capability and its version (the library need not be installed; the check
    of what it really supports is made when a plan is built, on the GPU).
    """

    def version(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    with (
        mock.patch.object(cudnn, "check_compute_capability", lambda least: target.capability >= version(least)),
        mock.patch.object(cudnn, "is_cuda_compute_capability_equal", lambda one: target.capability == version(one)),
        mock.patch.object(cudnn, "check_cudnn_version", lambda: target.cudnn),
    ):
        yield


def _fields(text: str, message: str, *names: str) -> list[int]:
    """Whole numbers in a message of a text proto that has none inside it; what is not set is 0."""
    found = re.search(message + r"\s*\{([^}]*)\}", text)
    inside = found[1] if found else ""
    numbers = dict(re.findall(r"(\w+):\s*(\d+)", inside))
    return [int(numbers.get(name, 0)) for name in names]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package above it
        return False
