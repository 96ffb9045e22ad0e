"""Settings that depend on the devices: attention backend, FP8, micro-batch. Recipes never ask for hardware."""

from dataclasses import dataclass
from importlib.util import find_spec

from jax.sharding import Mesh

from jspeed.errors import BadInput, nearest
from jspeed.parallel.mesh import row_shards
from jspeed.recipe import ATTENTION, Recipe, Stage

CPU_MICRO_BATCH = 512  # tokens; the quickest of 512, 1024, 2048 and 4096 for a stdlib-sized step on two cores
GPU_MICRO_BATCH = 65_536  # tokens; the share of one of eight GPUs in the records' largest batch
NATIVE_FP8 = (8, 9)  # compute capability of the first GPUs that multiply e4m3 and e5m2 matrices
PACKED_CUDNN = (9, 0)  # cuDNN attends within documents from Hopper on


@dataclass(frozen=True)
class Device:
    """One kind of device: ``memory`` is in bytes (None: unknown), ``micro_batch`` is the largest, in tokens."""

    platform: str
    attention: str
    fp8: str
    micro_batch: int
    memory: int | None = None


def device_of(mesh: Mesh, attention: str | None = None) -> Device:
    """Return what the devices of ``mesh`` can do; ``attention`` overrides the choice of backend.

    Raises :class:`BadInput` for a backend that is unknown, or that these devices do not have.
    """
    first = mesh.devices.flat[0]
    known = ATTENTION[:1] if first.platform == "cpu" else ATTENTION
    if attention is not None and attention not in known:
        raise BadInput(
            f"--attention {attention}: on {first.platform} devices the backends are {', '.join(known)}"
            f"{nearest(attention, known)}"
        )
    if first.platform == "cpu":
        return Device("cpu", attention or "xla", "emulated", CPU_MICRO_BATCH)
    capability = tuple(int(part) for part in str(first.compute_capability).split("."))
    best = "xla"
    if capability >= PACKED_CUDNN:
        best = "fa4" if capability == PACKED_CUDNN and find_spec("fa4_jax") else "cudnn"
    return Device(
        platform=first.platform,
        attention=attention or best,
        fp8="native" if capability >= NATIVE_FP8 else "missing",
        micro_batch=GPU_MICRO_BATCH,
        memory=memory_of(first),
    )


def kernels_of(device: Device, fp8: str | None) -> tuple[str, str]:
    """Return (names, explanation) of what computes attention and, with a recipe's FP8 field ``fp8``, FP8 matmuls."""
    if fp8 is None:
        return device.attention, "attention backend"
    if fp8 == "off" or (fp8 == "auto" and device.fp8 != "native"):
        why = "FP8=off" if fp8 == "off" else "FP8=auto, and this device has no FP8 matmuls"
        return f"{device.attention}, FP8 off", f"attention backend; matmuls in the compute dtype ({why})"
    how = "on tensor cores" if device.fp8 == "native" else "rounded to FP8, multiplied in the compute dtype: no faster"
    return f"{device.attention}, FP8 {device.fp8}", f"attention backend; FP8 matmuls, {how}"


def memory_of(device) -> int | None:
    """Bytes the allocator may take on ``device``; None where it is unknown (CPU, absent devices)."""
    try:
        stats = device.memory_stats()
    except (NotImplementedError, RuntimeError):
        return None
    return stats.get("bytes_limit") if stats else None


def lanes_at_once(recipe: Recipe, stage: Stage, mesh: Mesh) -> list[int]:
    """Return the numbers of lanes one device may take at once, largest first.

    Raises :class:`BadInput` when the lanes cannot be divided over the devices.
    """
    devices = row_shards(mesh)
    if recipe.lanes % devices:
        raise BadInput(
            f"global batch of {recipe.tokens_per_step(stage)} tokens ({recipe.lanes} lanes of {stage.lane_len}) cannot "
            f"be divided over {devices} devices on the data axis; use a number of devices that divides {recipe.lanes}"
        )
    lanes = recipe.lanes // mesh.shape["data"]
    return [n for n in range(lanes, 0, -1) if lanes % n == 0]


def micro_batches(recipe: Recipe, stage: Stage, mesh: Mesh, device: Device, micro_batch: int | None) -> int:
    """Number of parts a step is accumulated over when each device takes ``micro_batch`` tokens at a time.

    Without ``micro_batch`` a device takes as many whole lanes as ``device.micro_batch`` tokens hold, but leaves every
    stage of a pipeline a micro-batch. Raises :class:`BadInput` with the numbers when the batch does not divide.
    """
    choices = lanes_at_once(recipe, stage, mesh)
    lanes = choices[0]
    if micro_batch is None:
        most = max(1, min(lanes // mesh.shape.get("pipe", 1), device.micro_batch // stage.lane_len))
        return lanes // next(n for n in choices if n <= most)
    if micro_batch < 1 or micro_batch % stage.lane_len or micro_batch // stage.lane_len not in choices:
        raise BadInput(
            f"--micro-batch {micro_batch}: the global batch of {recipe.tokens_per_step(stage)} tokens ({recipe.lanes} "
            f"lanes of {stage.lane_len}) is not a multiple of {mesh.shape['data']} devices x {micro_batch} tokens in "
            f"whole lanes; give one of {', '.join(str(n * stage.lane_len) for n in reversed(choices))}"
        )
    return lanes * stage.lane_len // micro_batch
