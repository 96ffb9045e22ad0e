"""Meshes and layouts: which mesh axis each logical axis of a parameter lies on."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jspeed.errors import BadInput, nearest
from jspeed.recipe import ParamSpec, map_specs

# Layout -> logical axis -> mesh axis. A logical axis that is not named stays whole on every device.
LAYOUTS: dict[str, dict[str, str]] = {"dp": {}}


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
    """Let the CPU appear as as many devices as ``axes`` need; call before anything asks JAX for devices.

    Without effect on GPUs, and where XLA_FLAGS or JAX_NUM_CPU_DEVICES already say how many there are.
    """
    count = math.prod(axes.values())
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


def batch_rows(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: rows (the first axis) spread over the ``data`` axis, in lane order."""
    return NamedSharding(mesh, PartitionSpec("data"))


def parameter_shardings(parameters: Mapping[str, Any], layout: str, mesh: Mesh) -> Any:
    """Return the tree of ``NamedSharding`` that ``layout`` gives a parameter table on ``mesh``."""
    if layout not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise BadInput(f"--layout {layout} is unknown{nearest(layout, LAYOUTS)}; known layouts: {known}")
    rules = LAYOUTS[layout]

    def sharding(spec: ParamSpec) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(rules.get(axis) for axis in spec.axes)))

    return map_specs(sharding, parameters)
