"""Meshes, and the shardings of a batch on them."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jspeed.base import processes
from jspeed.base.jax_versions import xla_flags_fault
from jspeed.errors import BadInput, first_line, nearest

AXES = ("data", "model", "pipe")
MOST_DEVICES = 2**20
MOST_CPU_DEVICES = 256  # each has threads of its own
LANE_AXES = ("data", "pipe")  # the mesh axes that shard the lanes of a batch


def parse_mesh(text: str) -> dict[str, int]:
    """Read ``data=4,model=2`` into axis sizes, in that order; one size may be -1 (all remaining
    devices)."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if not re.fullmatch("-1|[0-9]{1,9}", size):
            raise BadInput(
                f"--mesh {text}: '{part}' is not NAME=SIZE with a whole number; write for example"
                " data=8"
            )
        if name not in AXES:
            raise BadInput(
                f"--mesh {text}: axis '{name}' is unknown{nearest(name, AXES)}; axes:"
                f" {', '.join(AXES)}"
            )
        if name in axes:
            raise BadInput(f"--mesh {text}: axis '{name}' appears twice; give each axis one size")
        axes[name] = int(size)
    if "data" not in axes:
        raise BadInput(f"--mesh {text}: there is no 'data' axis; write for example data=8")
    if 0 in axes.values() or list(axes.values()).count(-1) > 1:
        raise BadInput(
            f"--mesh {text}: sizes must be positive; give at most one -1, all remaining devices"
        )
    if (known := math.prod(size for size in axes.values() if size != -1)) > MOST_DEVICES:
        raise BadInput(f"--mesh {text}: asks for {known} devices; give at most {MOST_DEVICES}")
    return axes


def request_cpu_devices(axes: Mapping[str, int]) -> None:
    """Configure the virtual CPU devices that each process needs for ``axes``; call before JAX
    initialises its backends.

    No effect on GPUs, or where XLA_FLAGS or JAX_NUM_CPU_DEVICES already set the number. Raises
    :class:`BadInput` for more devices than one process can have.
    """
    count = math.prod(axes.values()) // processes.count()
    if count > MOST_CPU_DEVICES:
        asked = ",".join(f"{name}={size}" for name, size in axes.items())
        raise BadInput(
            f"--mesh {asked} asks for {count} devices of one process; give at most"
            f" {MOST_CPU_DEVICES}, or start more processes (jspeed launch)"
        )
    given = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if count > 1 and not given and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", count)


def check_xla_flags() -> None:
    """Raise BadInput for XLA_FLAGS at which XLA would end the process, as it does without an
    exception."""
    if (flags := os.environ.get("XLA_FLAGS")) and (fault := xla_flags_fault(flags)):
        raise BadInput(
            f"the XLA of jaxlib {version('jaxlib')} does not take these XLA_FLAGS ({fault});"
            " correct them, or leave that flag out: they come and go with XLA's releases"
        )


def find_devices(local: bool = False) -> list[jax.Device]:
    """The devices that JAX finds, or this process's.

    Raises BadInput where JAX can use no platform of JAX_PLATFORMS, and as :func:`check_xla_flags`.
    """
    check_xla_flags()
    try:
        return jax.local_devices() if local else jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that one of them is there
        why = str(error).partition("(set JAX_PLATFORMS")[0].strip() or "no such plugin is installed"
        asked = jax.config.values["jax_platforms"]
        raise BadInput(
            f"JAX_PLATFORMS={asked}: JAX can use none of these here"
            f" ({first_line(RuntimeError(why))}); unset it, or set it to cpu; jspeed doctor says"
            " what this machine has"
        ) from error


def make_mesh(
    axes: Mapping[str, int] | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Build a mesh over ``devices`` (all of them): ``axes`` in order, or one ``data`` axis. Axes
    are of type Auto.

    With several processes ``data`` must come first: the loader gives each process neighbouring
    lanes of the batch.
    """
    devices = find_devices() if devices is None else devices
    available = len(devices)
    sizes = dict(axes or {"data": available})
    known = math.prod(size for size in sizes.values() if size != -1)
    asked = ",".join(f"{name}={size}" for name, size in sizes.items())
    have = f"JAX has {available} ({devices[0].platform})"
    if -1 in sizes.values() and available % known:
        raise BadInput(
            f"--mesh {asked} needs a multiple of {known} devices but {have}; give sizes that divide"
            f" {available}"
        )
    sizes = {name: available // known if size == -1 else size for name, size in sizes.items()}
    if math.prod(sizes.values()) != available:
        raise BadInput(
            f"--mesh {asked} needs {math.prod(sizes.values())} devices but {have}; give sizes whose"
            f" product is {available}"
        )
    if processes.count() > 1 and next(iter(sizes)) != "data":
        data_first = ",".join(f"{name}={sizes[name]}" for name in sorted(sizes))
        raise BadInput(
            f"--mesh {asked}: with several processes the first axis must be 'data'; give --mesh"
            f" {data_first}"
        )
    model, own = sizes.get("model", 1), available // processes.count()
    if processes.count() > 1 and own % model:
        raise BadInput(
            f"--mesh model={model} spreads matrices over several processes, which hold {own}"
            f" devices each; give a size that divides {own}"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=devices,
    )


def mesh_for(text: str | None) -> Mesh | None:
    """Return the mesh of ``--mesh TEXT``, on virtual CPU devices where they are needed; None where
    it is not given."""
    if text is None:
        return None
    axes = parse_mesh(text)
    request_cpu_devices(axes)
    return make_mesh(axes)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Put an array, of which every process has a full copy, on the devices."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def put_lanes(local_lanes: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Put a batch on the devices, of which every process has some of the lanes: ``[lanes of all
    processes, ...]``.

    ``sharding`` must give each process the lanes that its ``process_index`` counts as its own.
    """
    # With several processes JAX does not see that this copy is meant, and a loop's transfer guard
    # would refuse it.
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_process_local_data(sharding, local_lanes)


def whole(array: jax.Array) -> np.ndarray:
    """Return an array on a mesh, whole, on the host; each of its processes must call this."""
    if not array.is_fully_addressable:
        assert isinstance(array.sharding, NamedSharding)
        everywhere = NamedSharding(array.sharding.mesh, PartitionSpec())
        array = jax.jit(_same, out_shardings=everywhere)(array)
    return np.asarray(jax.device_get(array))


def _same(array: jax.Array) -> jax.Array:
    return array


def lanes_spec(mesh: Mesh) -> PartitionSpec:
    """The PartitionSpec of an array of lanes: its first axis over every axis of ``mesh`` that
    shards lanes."""
    axes = tuple(axis for axis in LANE_AXES if axis in mesh.shape)
    return PartitionSpec(axes if len(axes) > 1 else axes[0])


def lane_shards(mesh: Mesh) -> int:
    """Number of shards of the lanes of a batch."""
    return math.prod(mesh.shape.get(axis, 1) for axis in LANE_AXES)


def batch_lanes(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: lanes (the first axis) in lane order."""
    return NamedSharding(mesh, lanes_spec(mesh))
