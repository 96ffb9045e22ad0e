"""Settings that depend on the devices: attention backend, FP8, micro-batch. Recipes never ask for
hardware."""

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh

from jspeed.base import accelerators
from jspeed.base.accelerators import visible_gpus
from jspeed.errors import BadInput, nearest
from jspeed.model import custom_kernels
from jspeed.model.custom_kernels import Attending, Chip
from jspeed.recipe import Recipe
from jspeed.record.provenance import installed_version

# of the allocator's pool: what fragmentation, NCCL and cuBLAS take is not in the compiler's figure
USABLE = 0.95
# tokens; the quickest of 512, 1024, 2048 and 4096 for a stdlib-sized step on two cores
CPU_MICRO_BATCH = 512
GPU_MICRO_BATCH = 65_536  # tokens; the share of one of eight GPUs in the records' largest batch
# of a micro-batch of a 124M recipe: record 29 needs 35 GB for a lane of 49,152 tokens
BYTES_PER_TOKEN = 900_000
NATIVE_FP8 = (8, 9)  # compute capability of the first GPUs that multiply e4m3 and e5m2 matrices
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # glibc's malloc.h
GPUS = ("gpu", "cuda")  # what JAX calls the platform of GPUs that are here, and of absent ones


@dataclass(frozen=True)
class Device:
    """One kind of device: ``memory`` is in bytes (None: unknown), ``micro_batch`` is the largest,
    in tokens.

    Where the backend ``attention`` does not work, ``fallbacks`` are tried in order; there are none
    where it was ``asked`` for. ``note`` is what a user should know of a device that is used without
    kernels of its own. ``custom_kernels``: jspeed's, that may replace parts of the recipe
    (OWN_KERNELS).
    """

    platform: str
    attention: str
    fp8: str
    micro_batch: int
    memory: int | None = None
    fallbacks: tuple[str, ...] = ()
    asked: bool = False
    note: str | None = None
    custom_kernels: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Placement:
    """Where a program runs: on the devices of ``mesh``, which all are like ``device``, its state
    sharded by ``layout``.

    ``micro_batches``: for the recipe of a run (:func:`jspeed.run.compute.division.place`), the
    numbers of micro-batches that a step of each stage is tried with, in order. ``traces`` keeps
    what steps of several phases have in common (:func:`.gradients.traced_once`).
    """

    mesh: Mesh
    layout: str
    device: Device
    micro_batches: tuple[tuple[int, ...], ...] = field(default=(), kw_only=True)
    traces: dict[Any, Any] = field(default_factory=dict, kw_only=True, compare=False, repr=False)

    @property
    def parts(self) -> tuple[int, ...]:
        """The number of micro-batches that each stage is tried with first."""
        return tuple(numbers[0] for numbers in self.micro_batches)


def device_of(
    mesh: Mesh,
    attention: str | None = None,
    memory: int | None = None,
    recipe: Recipe | None = None,
) -> Device:
    """Return what the devices of ``mesh`` can do; ``attention`` overrides the choice of backend.

    ``memory`` is what an absent device has, in bytes. ``recipe`` says whether lanes hold documents
    to attend within; without one they may. A device that is not known gets what runs everywhere,
    and a note. Raises :class:`BadInput` for a backend that is unknown, or that these devices do not
    have.
    """
    first = mesh.devices.flat[0]
    chip = chip_of(first)
    known = []
    if first.platform != "cpu":
        known = [n for n, one in custom_kernels.backends().items() if one.runs_on(chip)]
    known.append("xla")
    if attention is not None and attention not in known:
        raise BadInput(
            f"--attention {attention}: on {first.platform} devices the backends are"
            f" {', '.join(known)}{nearest(attention, known)}; give one of these"
        )
    if first.platform == "cpu":
        return Device(
            "cpu", attention or "xla", "emulated", CPU_MICRO_BATCH, asked=attention is not None
        )
    # memory_stats works on devices of this process only.
    own = next((d for d in mesh.devices.flat if d.process_index == jax.process_index()), first)
    memory = memory or memory_of(own)
    asks = Attending(True)
    if recipe is not None:
        packed, bounded = has_document_masks(recipe), has_bounded_documents(recipe)
        asks = Attending(packed, bounded, head_width(recipe))
    there = custom_kernels.available(chip, asks)
    best, *rest = [attention] if attention else there.attention
    notes = None if chip.capability else device_note(first), there.lacking
    return Device(
        platform=first.platform,
        attention=best,
        fp8="native" if (chip.capability or (0, 0)) >= NATIVE_FP8 else "missing",
        micro_batch=micro_batch_of(memory),
        memory=memory,
        fallbacks=tuple(rest),
        asked=attention is not None,
        note="; ".join(filter(None, notes)) or None,
        custom_kernels=there.custom,
    )


def with_kernels_asked_for(device: Device, fields: Mapping[str, Any]) -> Device:
    """Return ``device`` without custom kernels unless OWN_KERNELS among the recipe's ``fields``
    asks for them."""
    return (
        device
        if fields.get("OWN_KERNELS") in ("auto", "on")
        else replace(device, custom_kernels=frozenset())
    )


def has_document_masks(recipe: Recipe) -> bool:
    """Whether attention of ``recipe`` is told where documents start."""
    return any(stage.max_docs for stage in recipe.stages)


def has_bounded_documents(recipe: Recipe) -> bool:
    """Whether attention of ``recipe`` is told of the longest document, too."""
    return any(stage.max_docs and stage.max_doc_len for stage in recipe.stages)


def head_width(recipe: Recipe | None) -> int | None:
    """Channels of an attention head; None where the recipe does not say."""
    return recipe.attention_width // recipe.heads if recipe and recipe.heads else None


def chip_of(device: Any) -> Chip:
    """Return what decides which kernels ``device`` has: its CUDA compute capability, if it is an
    NVIDIA GPU."""
    capability = None
    if device.platform in GPUS:
        with suppress(AttributeError, NotImplementedError, ValueError):
            capability = tuple(int(part) for part in str(device.compute_capability).split("."))
    return Chip(device.platform, capability)


def device_note(device: Any) -> str:
    """What a user is told of a device that is no NVIDIA GPU and no CPU."""
    kind = getattr(device, "device_kind", device.platform)
    if device.platform == "tpu":
        return (
            f"{kind}: splash attention, no FP8; jspeed compiles for TPUs but has not been run"
            " on one"
        )
    return (
        f"{kind} ({device.platform}) is an unknown device kind: XLA attention, no FP8, never tested"
    )


def platform_problem(used: str) -> str | None:
    """Why JAX uses no better platform than ``used``, or that slowly, with the remedy; None where it
    was told to."""
    if used == "cpu" and jax.config.values["jax_platforms"]:
        return None
    return accelerators.problem(
        accelerators.find(), used, visible_gpus(os.environ), installed_version
    )


def micro_batch_of(memory: int | None) -> int:
    """Tokens to begin with on a device of ``memory`` bytes: what it holds, at most GPU_MICRO_BATCH.

    Whether they fit is seen when the step is compiled; a start near the answer saves compilations
    that do not fit.
    """
    return (
        GPU_MICRO_BATCH
        if memory is None
        else max(1, min(GPU_MICRO_BATCH, memory // BYTES_PER_TOKEN))
    )


def kernels_of(device: Device, fp8: str | None) -> tuple[str, str]:
    """Return (names, explanation) of what computes attention, with a recipe's FP8 field ``fp8`` FP8
    matmuls, and what has custom kernels."""
    names, words = [device.attention], ["attention backend"]
    if fp8 == "off" or (fp8 == "auto" and device.fp8 != "native"):
        names.append("FP8 off")
        why = "FP8=off" if fp8 == "off" else "FP8=auto, and there are no FP8 matmuls here"
        words.append(f"matmuls in the compute dtype ({why})")
    elif fp8 is not None:
        names.append(f"FP8 {device.fp8}")
        emulated = "rounded to FP8, multiplied in the compute dtype: no faster"
        words.append(f"FP8 matmuls, {'on tensor cores' if device.fp8 == 'native' else emulated}")
    if device.custom_kernels:
        names.append("custom kernels")
        words.append("parts of the recipe in jspeed's custom kernels")
    return ", ".join(names), "; ".join(words)


def memory_of(device: Any) -> int | None:
    """Bytes that a program may need of ``device``; None where they are not known (CPU, absent
    devices)."""
    try:
        stats = device.memory_stats()
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    limit = stats.get("bytes_limit") if stats else None
    return int(USABLE * limit) if limit and device.platform in GPUS else limit


def keep_freed_memory() -> None:
    """Speed up steps on a CPU: tell glibc never to give freed memory back to the kernel. Elsewhere
    do nothing.

    XLA allocates a program's temporaries anew at every call. By default each such block is a fresh
    mapping whose pages fault in one by one: 13 to 24 % of a stdlib-sized step (benchmarks/cpu.md).
    Call it before other threads allocate.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(M_ARENA_MAX, 1)


def give_back_memory() -> None:
    """Give what is free back to the kernel, after :func:`keep_freed_memory`; the process may go on
    to something else."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
