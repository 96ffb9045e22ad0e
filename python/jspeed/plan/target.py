"""Absent GPUs and TPUs: published specifications, a mesh to compile for, patches of JAX's device
queries."""

import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jspeed.base.jax_versions import pretend_gpu
from jspeed.base.standard_streams import without_logs
from jspeed.errors import BadInput, nearest
from jspeed.parallel.mesh import MOST_DEVICES, make_mesh
from jspeed.record.provenance import installed
from jspeed.run.compute.device import USABLE

# What JAX lets its allocator take of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
MEMORY_FRACTION = 0.75
TPU_MEMORY_FRACTION = 0.93  # a guess: the runtime keeps about a sixteenth
TARGETS = Path(__file__).with_name("targets")
MEASURED = Path(__file__).with_name("measured") / "fractions"  # scripts/gpu_day.sh plan writes it
PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


class DataSheet(NamedTuple):
    """Peak rates and sizes of one kind of GPU or TPU, each with its public source."""

    per_node: int  # devices that NVLink (ICI, PCIe) joins
    hbm_bytes: int
    hbm_bytes_per_second: float
    # within a node, one direction; ICI of TPUs, PCIe where there is no NVLink
    nvlink_bytes_per_second: float
    network_bytes_per_second: float  # one direction, a GPU
    dollars_per_hour: float
    peak_flops: dict[str, float]  # dense, by dtype: bf16, f8 (where there is any), tf32, f32
    sources: dict[str, str]
    # of a usual one, a device's share: cores, memory_bytes, link_bytes_per_second (one direction);
    # empty where nothing is known
    host: dict[str, float] = {}
    # of these rates that kernels reach, where they were measured; else assumed.FRACTIONS
    fractions: dict[str, float] = {}


class Target(NamedTuple):
    """One kind of GPU or TPU, as passed to the compiler."""

    name: str
    data_sheet: DataSheet
    text: str = ""  # of a GPU: stream_executor.GpuTargetConfigProto as text
    capability: tuple[int, int] = (0, 0)  # of a GPU: compute capability, (9, 0)
    cudnn: int = 0  # of a GPU, as cuDNN numbers its versions: 91002 is 9.10.2
    # of a TPU: its kind, and the topology of each number of chips
    tpu: dict[str, Any] | None = None

    @property
    def cores(self) -> int:
        """Streaming multiprocessors of a GPU."""
        return int(device_numbers(self.text)["core_count"])

    @property
    def device_kind(self) -> str:
        """What JAX calls the device."""
        if self.tpu:
            return self.tpu["kind"]
        return re.findall(r'device_description_str: "([^"]*)"', self.text)[0]


class Cluster(NamedTuple):
    """Nodes of GPUs of one kind, such as ``h100x8x4``: 4 nodes of 8."""

    name: str
    target: Target
    nodes: int
    per_node: int

    @property
    def devices(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.per_node

    @property
    def usable_bytes(self) -> int:
        """Bytes of one device's memory that a step may take."""
        return int(
            (TPU_MEMORY_FRACTION if self.target.tpu else USABLE * MEMORY_FRACTION)
            * self.target.data_sheet.hbm_bytes
        )


def load_target(name: str) -> Target:
    """Return the target called ``name``, from its files. Raises :class:`BadInput` with the names
    there are."""
    if name not in known_targets():
        known = ", ".join(known_targets())
        raise BadInput(
            f"target {name} is unknown{nearest(name, known_targets())}; known targets: {known}"
        )
    described = tomllib.loads((TARGETS / f"{name}.toml").read_text())
    tpu = described.pop("tpu", None)
    if (path := MEASURED / f"{name}.toml").exists():
        described["fractions"] = tomllib.loads(path.read_text())["fractions"]
    data_sheet = DataSheet(**described)
    if tpu:
        return Target(name, data_sheet, tpu=tpu)
    text = (TARGETS / f"{name}.txtpb").read_text()
    major, minor = _fields(text, "cuda_compute_capability", "major", "minor")
    dnn = _fields(text, "dnn_version_info", "major", "minor", "patch")
    return Target(name, data_sheet, text, (major, minor), dnn[0] * 10000 + dnn[1] * 100 + dnn[2])


def data_sheet_of(device_kind: str) -> DataSheet | None:
    """Return the data sheet of a device by JAX's name of it, whose board counts; None for one that
    is no target."""
    if device_kind == "NVIDIA H200":  # as CUDA calls it; XLA's target config says more
        return load_target("h200").data_sheet
    targets = map(load_target, known_targets())
    return next(
        (target.data_sheet for target in targets if target.device_kind == device_kind), None
    )


def known_targets() -> list[str]:
    """Names of all targets."""
    return sorted(path.stem for path in TARGETS.glob("*.toml"))


def parse_target(text: str) -> Cluster:
    """Read ``h100x8`` (one node of 8) or ``h100x8x4`` (4 nodes of 8).

    More GPUs than one node holds are spread over whole nodes: ``h100x1024`` is ``h100x8x128``.
    Raises :class:`BadInput` for an unknown kind or a count that cannot be.
    """
    # Some names have an x of their own: rtx4090x1.
    named = [name for name in known_targets() if text == name or text.startswith(f"{name}x")]
    kind = max(named, key=len, default=text.split("x")[0] or text)
    counts = text.removeprefix(kind).split("x")[1:]
    target = load_target(kind)
    per_node = target.data_sheet.per_node
    if not 1 <= len(counts) <= 2 or not all(
        re.fullmatch("[1-9][0-9]{0,6}", count) for count in counts
    ):
        raise BadInput(
            f"--target {text} has no number of GPUs; write {kind}x8 for one node of 8 or {kind}x8x4"
            " for 4 nodes of 8"
        )
    devices, nodes = int(counts[0]), int(counts[1]) if len(counts) == 2 else 1
    if devices * nodes > MOST_DEVICES:
        raise BadInput(
            f"--target {text}: asks for {devices * nodes:,} devices; give at most {MOST_DEVICES:,}"
        )
    if target.tpu and (nodes > 1 or str(devices) not in target.tpu["topologies"]):
        sizes = ", ".join(f"{kind}x{chips}" for chips in target.tpu["topologies"])
        raise BadInput(
            f"--target {text}: no such slice of {kind} chips can be planned for; give one of"
            f" {sizes}"
        )
    if devices > per_node:
        if nodes > 1 or devices % per_node:
            whole = -(-devices * nodes // per_node)
            raise BadInput(
                f"--target {text}: a node holds {per_node} {kind} GPUs; write"
                f" {kind}x{per_node}x{whole}"
            )
        nodes, devices = devices // per_node, per_node
    return Cluster(text, target, nodes, devices)


def missing(target: Target | None = None) -> str | None:
    """Return the error message if nothing can be compiled for ``target`` (None: a GPU) here, else
    None."""
    if target and target.tpu:
        if installed("libtpu"):
            return None
        return (
            "libtpu is not installed here, so nothing can be compiled for a TPU; install the one of"
            f" this JAX with pip install 'jax[tpu]=={jax.__version__}' (213 MB to download)"
        )
    if any(installed(plugin) for plugin in PLUGINS):
        return None
    return (
        "no CUDA plugin of JAX is installed here, so nothing can be compiled for a GPU; "
        "install it with pip install 'jspeed[aot]' or make test-aot (223 MB to download)"
    )


def target_mesh(
    target: Target, devices: int = 8, nodes: int = 1, axes: Mapping[str, int] | None = None
) -> Mesh:
    """Return a mesh of ``nodes`` hosts of ``devices`` absent devices on one ``data`` axis; arrays
    cannot be put on it.

    Of TPUs there is one slice of ``devices`` chips. Set ``jax_platforms`` to ``cpu`` before
    anything asks JAX for devices: otherwise JAX tries to initialise CUDA, fails, and no longer
    recognises the platform. Raises :class:`BadInput` without a plugin, and what libtpu raises for a
    slice that it does not know.
    """
    if reason := missing(target):
        raise BadInput(reason)
    if target.tpu:
        # libtpu would ask Google's metadata server what it runs on, and lock the chips of this
        # machine.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        grid = target.tpu["topologies"][str(devices)]
        bounds = tuple(int(size) for size in f"{grid}x1".split("x")[:3])
        given = (
            {"chip_config_name": target.tpu["chip_config"]} if "chip_config" in target.tpu else {}
        )
        # a host has as many chips; 2x2x2 is two hosts of four
        if devices < 8 or grid.count("x") == 1:
            given["chips_per_host_bounds"] = bounds
        slice_ = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{target.name}:{grid}", **given
        )
        return make_mesh(dict(axes or {"data": devices}), slice_.devices)
    with without_logs():
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=target.text,
            topology=f"1x{nodes}x{devices}",  # slices x hosts of each x devices of each
        )
    return make_mesh(dict(axes or {"data": nodes * devices}), topology.devices)


def pretend(target: Target) -> AbstractContextManager[None]:
    """Make JAX's queries about the live GPU answer for ``target`` while code is traced and
    lowered."""
    return pretend_gpu(target.capability, target.cudnn)


def device_numbers(text: str) -> dict[str, float]:
    """The numbers of ``gpu_device_info`` in a target's text, by name."""
    inside = text[text.index("gpu_device_info {") : text.index("\n}")]
    return {
        name: float(value)
        for name, value in re.findall(r"^  (\w+): ([\d.]+)$", inside, re.MULTILINE)
    }


def _fields(text: str, message: str, *names: str) -> list[int]:
    """Whole numbers in a message of a text proto that has none inside it; what is not set is 0."""
    match = re.search(message + r"\s*\{([^}]*)\}", text)
    inside = match[1] if match else ""
    numbers = dict(re.findall(r"(\w+):\s*(\d+)", inside))
    return [int(numbers.get(name, 0)) for name in names]
