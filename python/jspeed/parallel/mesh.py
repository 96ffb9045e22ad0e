"""Meshes and layouts: which mesh axis each logical axis of a parameter lies on."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jspeed.errors import BadInput, nearest
from jspeed.parallel.distributed import process_count
from jspeed.recipe import ParamSpec, map_specs

# Layout -> logical axes that may be cut over the data axis. An array is cut along the first of them that it has, if
# that divides; else it is whole on every device.
#   dp     every device holds every parameter and the whole optimizer state
#   zero1  every device holds an equal part of parameters and optimizer state; a step gathers what it computes with
LAYOUTS: dict[str, tuple[str, ...]] = {"dp": (), "zero1": ("matrix", "row", "token", "vocab", "model")}
DEFAULT_LAYOUT = "zero1"
SMALL = 65_536  # elements; smaller arrays are not worth a reduce-scatter and a gather of their own


def parse_mesh(text: str) -> dict[str, int]:
    """Read ``data=4,model=2`` into axis sizes, in that order; one size may be -1 (all remaining devices)."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        try:
            axes[name.strip()] = int(size)
        except ValueError:
            raise BadInput(
                f"--mesh {text}: '{part}' is not NAME=SIZE with a whole number; write for example data=8"
            ) from None
    if "data" not in axes:
        raise BadInput(f"--mesh {text}: there is no 'data' axis; write for example data=8")
    if any(size < 1 and size != -1 for size in axes.values()) or list(axes.values()).count(-1) > 1:
        raise BadInput(f"--mesh {text}: sizes must be positive, and at most one -1 (all remaining devices)")
    return axes


def request_cpu_devices(axes: Mapping[str, int]) -> None:
    """Let the CPU appear as as many devices as ``axes`` need of each process; call before anything asks for devices.

    Without effect on GPUs, and where XLA_FLAGS or JAX_NUM_CPU_DEVICES already say how many there are.
    """
    count = math.prod(axes.values()) // process_count()
    told = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if count > 1 and not told and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", count)


def make_mesh(axes: Mapping[str, int] | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Build a mesh over ``devices`` (all of them): ``axes`` in order, or one ``data`` axis. Axes are of type Auto."""
    devices = jax.devices() if devices is None else devices
    available = len(devices)
    sizes = dict(axes or {"data": available})
    known = math.prod(size for size in sizes.values() if size != -1)
    sizes = {name: available // known if size == -1 else size for name, size in sizes.items()}
    if math.prod(sizes.values()) != available:
        asked = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise BadInput(
            f"--mesh {asked} needs {math.prod(sizes.values())} devices but JAX has {available} "
            f"({devices[0].platform}); give sizes whose product is {available}"
        )
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that is whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Put an array that every process holds whole on the devices."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def batch_rows(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: rows (the first axis) spread over the ``data`` axis, in lane order."""
    return NamedSharding(mesh, PartitionSpec("data"))


def check_layout(layout: str, mesh: Mesh) -> None:
    """Raise :class:`BadInput` for an unknown ``layout``, or one that leaves an axis of ``mesh`` without work."""
    if layout not in LAYOUTS:
        raise BadInput(f"--layout {layout} is unknown{nearest(layout, LAYOUTS)}; known layouts: {', '.join(LAYOUTS)}")
    idle = [name for name, size in mesh.shape.items() if name != "data" and size > 1]
    if idle:
        raise BadInput(
            f"--layout {layout} works along the 'data' axis only, so the mesh axis '{idle[0]}' of size "
            f"{mesh.shape[idle[0]]} would repeat the same work; give --mesh data={mesh.size}"
        )


def partition(spec: ParamSpec, layout: str, mesh: Mesh) -> PartitionSpec:
    """Return how ``layout`` cuts one parameter over the ``data`` axis: along one dimension or not at all."""
    for axis in LAYOUTS[layout]:
        if axis in spec.axes:
            dim = spec.axes.index(axis)
            if spec.shape[dim] % mesh.shape["data"] or spec.size < SMALL:
                break
            return PartitionSpec(*[None] * dim, "data")
    return PartitionSpec()


def partitions(parameters: Mapping[str, Any], layout: str, mesh: Mesh) -> Any:
    """Return the tree of :func:`partition` over a parameter table."""
    return map_specs(lambda spec: partition(spec, layout, mesh), parameters)


def gather(x: jax.Array, cut: PartitionSpec) -> jax.Array:
    """Inside ``shard_map``: the whole array from the part each device holds."""
    dim = cut_dim(cut)
    return x if dim is None else jax.lax.all_gather(x, "data", axis=dim, tiled=True)


def reduce(x: jax.Array, cut: PartitionSpec) -> jax.Array:
    """Inside ``shard_map``: the sum over devices, of which each keeps the part that ``cut`` gives it."""
    dim = cut_dim(cut)
    if dim is None:
        return jax.lax.psum(x, "data")
    return jax.lax.psum_scatter(x, "data", scatter_dimension=dim, tiled=True)


def owned(spec: ParamSpec, cut: PartitionSpec) -> bool:
    """Whether rows of a table are asked of their owners, so that nobody gathers it (:mod:`jspeed.parallel.rows`)."""
    return "row" in spec.axes and cut_dim(cut) is not None


def cut_dim(cut: PartitionSpec) -> int | None:
    """The dimension that lies along ``data``, or None."""
    return tuple(cut).index("data") if "data" in tuple(cut) else None
