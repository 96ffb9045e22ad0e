"""Choices that depend on the devices, each with its reason: attention backend, FP8, custom kernels,
micro-batch. Recipes never ask for hardware."""

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import jax
from jax.sharding import Mesh

from jspeed.base import accelerators
from jspeed.base.accelerators import visible_gpus
from jspeed.errors import BadInput, nearest
from jspeed.model import custom_kernels
from jspeed.model.custom_kernels import Attending, Chip
from jspeed.recipe import Recipe
from jspeed.record.provenance import installed_version
from jspeed.record.schema import Kernels

# of the allocator's pool: what fragmentation, NCCL and cuBLAS take is not in the compiler's figure
USABLE = 0.95
# tokens; the quickest of 512, 1024, 2048 and 4096 for a stdlib-sized step on two cores
CPU_MICRO_BATCH = 512
GPU_MICRO_BATCH = 65_536  # tokens; the share of one of eight GPUs in the records' largest batch
# of a micro-batch of a 124M recipe: record 29 needs 35 GB for a lane of 49,152 tokens
BYTES_PER_TOKEN = 900_000
NATIVE_FP8 = (8, 9)  # compute capability of the first GPUs that multiply e4m3 and e5m2 matrices
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # glibc's malloc.h
HEAP = 2**26  # bytes, glibc's HEAP_MAX_SIZE: of a heap of another thread than the first
WHY_ATTENTION = {  # of a GPU, before its compute capability
    "cudnn": "compute capability ",
    "triton": "jspeed's Triton kernels (not yet run): cuDNN packs documents on 9.0 to 11, this is ",
    "xla": "fused kernels need compute capability 8.0, this is ",
}
WHY_FP8 = {
    "native": "on tensor cores, compute capability ",
    "missing": "tensor cores multiply FP8 from compute capability 8.9 on, this is ",
    "emulated": "rounded to FP8, multiplied in the compute dtype: to test recipes, no faster",
}
GPUS = ("gpu", "cuda")  # what JAX calls the platform of GPUs that are here, and of absent ones


class Request(NamedTuple):
    """What was asked of the choices: by flags (None: nothing), and by fields of the recipe (empty:
    it has none)."""

    attention: str | None = None  # --attention
    micro_batch: int | None = None  # --micro-batch, tokens
    fp8: str = ""  # FP8: auto, on, off
    custom_kernels: str = ""  # OWN_KERNELS, likewise


class Choice(NamedTuple):
    """What was chosen, and why, in the words that the console, run.json and doctor print."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Device:
    """What devices of one kind compute with: what they can, as far as it was asked for, was found
    to work, and fits. :func:`choices` says why.

    Where the backend ``attention`` does not work, ``fallbacks`` are tried in order; there are none
    where it was asked for.
    """

    platform: str
    attention: str
    fp8: str  # native, emulated or missing
    at_once: int  # tokens that a step is tried with first; fewer where they do not fit
    memory: int | None = None  # bytes; None: unknown
    capability: tuple[int, ...] | None = None  # CUDA's, as (9, 0), of NVIDIA GPUs
    fallbacks: tuple[str, ...] = ()
    asked: Request = Request()
    note: str | None = None  # of a kind that is not known, and of kernels that this JAX lacks
    custom_kernels: frozenset[str] = frozenset()  # jspeed's, that may replace parts of the recipe
    checks: tuple[str, ...] = ()  # names of the preflight's that passed
    refused: tuple[str, ...] = ()  # "name: reason" of what was found not to work
    less: tuple[str, ...] = ()  # how steps that are compiled take less memory than was tried first
    # of kernels that XLA did not make, in the last stage's program; None before it is compiled
    calls: Mapping[str, int] | None = field(default=None, compare=False)

    def record(self) -> Kernels:
        """What run.json says of it."""
        said: Kernels = {
            "attention": self.attention,
            "fp8": self.fp8,
            "own": bool(self.custom_kernels),
            "checked": list(self.checks),
            "refused": list(self.refused),
            "why": {choice.name: choice.why for choice in choices(self)},
        }
        return said if self.calls is None else said | {"calls": dict(self.calls)}


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

    def with_device(self, **settings: Any) -> Self:
        """Return this with other ``settings`` of the device."""
        return replace(self, device=replace(self.device, **settings))

    @property
    def parts(self) -> tuple[int, ...]:
        """The number of micro-batches that each stage is tried with first."""
        return tuple(numbers[0] for numbers in self.micro_batches)


def device_of(
    mesh: Mesh,
    attention: str | None = None,
    memory: int | None = None,
    recipe: Recipe | None = None,
    fields: Mapping[str, Any] | None = None,
    micro_batch: int | None = None,
) -> Device:
    """Return what the devices of ``mesh`` can do, of what is asked for: by ``attention`` and
    ``micro_batch``, flags of a run, and by the recipe's ``fields``.

    ``memory`` is what an absent device has, in bytes. ``recipe`` says whether lanes hold documents
    to attend within; without one they may. With ``fields``, there are no custom kernels unless
    OWN_KERNELS takes them. A device that is not known gets what runs everywhere, and a note. Raises
    :class:`BadInput` for a backend that is unknown, or that these devices do not have.
    """
    first, given = mesh.devices.flat[0], fields or {}
    asked = Request(attention, micro_batch, given.get("FP8", ""), given.get("OWN_KERNELS", ""))
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
        return Device("cpu", attention or "xla", "emulated", CPU_MICRO_BATCH, asked=asked)
    memory = memory or memory_of(mesh)
    there = custom_kernels.available(chip, attending_of(recipe) if recipe else Attending(True))
    best, *rest = [attention] if attention else there.attention
    notes = None if chip.capability else device_note(first), there.lacking
    return Device(
        platform=first.platform,
        attention=best,
        fp8="native" if (chip.capability or (0, 0)) >= NATIVE_FP8 else "missing",
        at_once=tokens_at_once(memory),
        memory=memory,
        capability=chip.capability,
        fallbacks=tuple(rest),
        asked=asked,
        note="; ".join(filter(None, notes)) or None,
        custom_kernels=(
            there.custom if fields is None or takes(asked.custom_kernels) else frozenset()
        ),
    )


def takes(field: str) -> bool:
    """Whether a recipe whose FP8 or OWN_KERNELS is ``field`` takes what there is."""
    return field in ("auto", "on")


def choices(device: Device) -> list[Choice]:
    """Return each choice with its reason: attention, FP8 and custom kernels if the recipe has a
    field for them, and the micro-batch."""
    asked, own = device.asked, ", ".join(sorted(device.custom_kernels))
    here = ".".join(map(str, device.capability or ()))

    def why(feature: str, said: str, otherwise: str) -> str:
        refused = (text for text in device.refused if text.startswith(feature))
        return said or "; ".join(refused) or otherwise

    kind = device.note or "the only backend on a CPU"
    if here:
        kind = WHY_ATTENTION.get(device.attention, WHY_ATTENTION["cudnn"]) + here
        kind += f"; {device.note}" if device.note else ""
    said = why("attention", "--attention" if asked.attention else "", kind)
    found = [Choice("attention", device.attention, said)]
    if asked.fp8:
        off = asked.fp8 == "off" or (asked.fp8 == "auto" and device.fp8 != "native")
        kind = WHY_FP8[device.fp8] + here
        if off and not here:
            kind = "FP8=auto, and there are no FP8 matmuls here"
        elif device.fp8 == "missing" and not here:
            kind = device.note or kind
        said = why("FP8", "FP8=off" if asked.fp8 == "off" else "", kind)
        found.append(Choice("FP8", "off" if off else device.fp8, said))
    if asked.custom_kernels:
        kind = f"OWN_KERNELS={asked.custom_kernels}"
        if not own and asked.custom_kernels != "off":
            kind = f"there are none for {device.platform} devices"
        found.append(Choice("custom kernels", own or "none", why("custom kernel", "", kind)))
    said = "to begin with; fewer where they do not fit, and on a CPU a small batch whole"
    if asked.micro_batch:
        said = "--micro-batch"
    tokens = asked.micro_batch or device.at_once
    return [*found, Choice("micro-batch", f"{tokens:,} tokens", "; ".join((said, *device.less)))]


def attending_of(recipe: Recipe) -> Attending:
    """Return what ``recipe`` asks of attention."""
    packed = [stage for stage in recipe.stages if stage.max_docs]
    width = recipe.attention_width // recipe.heads if recipe.heads else None
    return Attending(bool(packed), any(stage.max_doc_len for stage in packed), width)


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


def tokens_at_once(memory: int | None) -> int:
    """Tokens to begin with on a device of ``memory`` bytes: what it holds, at most GPU_MICRO_BATCH.

    Whether they fit is seen when the step is compiled; a start near the answer saves compilations
    that do not fit.
    """
    return (
        GPU_MICRO_BATCH
        if memory is None
        else max(1, min(GPU_MICRO_BATCH, memory // BYTES_PER_TOKEN))
    )


def memory_of(mesh: Mesh) -> int | None:
    """Bytes that a program may need of a device of ``mesh``; None where they are not known (CPU,
    absent devices)."""
    first = mesh.devices.flat[0]
    # memory_stats works on devices of this process only.
    own = next((d for d in mesh.devices.flat if d.process_index == jax.process_index()), first)
    try:
        stats = own.memory_stats()
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    limit = stats.get("bytes_limit") if stats else None
    return int(USABLE * limit) if limit and own.platform in GPUS else limit


def keep_freed_memory() -> None:
    """Speed up steps on a CPU: tell glibc never to give freed memory back to the kernel. Elsewhere
    do nothing.

    XLA allocates a program's temporaries anew at every call. By default each such block is a fresh
    mapping whose pages fault in one by one: 13 to 24 % of a stdlib-sized step (benchmarks/cpu.md).
    A thread's empty heap would go back too, but not where a heap's size is to be kept free. One
    arena for all threads is no answer: a process that has compiled then takes up to twice as long
    for a step (lab/2026-11-30-cores-as-devices.md).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(M_TOP_PAD, HEAP)


def give_back_memory() -> None:
    """Give what is free back to the kernel, after :func:`keep_freed_memory`; the process may go on
    to something else."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
