"""Compile for absent GPUs without machine code, which nothing of a plan reads.

Kernels, memory and schedule are decided before XLA writes code. It is stopped there, and what a
plan reads is in the file that XLA keeps of the program at that point.
"""

import atexit
import importlib.util
import os
import re
import shlex
import shutil
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jspeed.base import compiler
from jspeed.base.jax_versions import hlo_text
from jspeed.run.compute.device import Device

CUDA = ("cuda_nvcc", "cu13")  # folders of NVIDIA's wheels, for CUDA 12 and 13, with the assembler
ASSEMBLER = """#!/bin/sh
[ "$1" = --version ] && exec {ptxas} --version
while [ $# -gt 0 ]; do
    [ "$1" = -o ] && : > "$2"
    shift
done
"""
# What XLA keeps of a program: an HloProto, which has its schedule and buffers, and its settings.
KEPT, SETTINGS = "*_gpu_after_optimizations.hlo.pb", "*.config.pbtxt"
# Numbers of fields: HloProto's, BufferAssignmentProto's, and those of a BufferAllocationProto.
MODULE, BUFFERS, ALLOCATIONS = 1, 3, 3
SIZE = 2
THREAD_LOCAL, ARGUMENT = 3, 5
LIVE_OUT, CONSTANT = 7, 12


class Sizes(NamedTuple):
    """Bytes of a device that a program needs, by the names of its ``memory_analysis()``."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int


class Stopped(NamedTuple):
    """A program without machine code, with what a plan asks of a compiled one."""

    text: str
    sizes: Sizes
    input_shardings: tuple[()] = ()

    def as_text(self) -> str:
        """Its optimised HLO."""
        return self.text

    def memory_analysis(self) -> Sizes:
        """What the compiler assigned."""
        return self.sizes


def compiled(lowered: jax.stages.Lowered, device: Device) -> jax.stages.Compiled:
    """:func:`.compiler.compiled` with the options of a run, but for a GPU no machine code, and
    :class:`Stopped` in the place of what is compiled.

    A file of compiled kernels that cannot be read stops XLA where it would begin with code. A
    release of XLA that does not stop there, or keeps no program, compiles as
    :func:`without_machine_code` says; so it does where XLA_FLAGS keeps programs.
    """
    if "--xla_dump" not in os.environ.get("XLA_FLAGS", ""):
        with tempfile.TemporaryDirectory(prefix="jspeed-plan-") as name:
            folder = Path(name)
            unreadable = folder / "kernels"
            unreadable.write_text("none")
            stop = {
                "xla_gpu_kernel_cache_file": str(unreadable),
                "xla_dump_to": name,
                "xla_dump_hlo_as_proto": True,
            }
            try:
                return compiler.compiled(lowered, device, without_machine_code() | stop)
            except jax.errors.JaxRuntimeError:
                if found := read(folder):
                    return found
    return compiler.compiled(lowered, device, without_machine_code())


def read(folder: Path) -> Any:
    """Return the :class:`Stopped` program that XLA kept in ``folder``. None where there is none, or
    this JAX writes no text of it."""
    kept, settings = [*folder.glob(KEPT)], [*folder.glob(SETTINGS)]
    if len(kept) != 1 or len(settings) != 1:
        return None
    parts = dict(fields(kept[0].read_bytes()))
    devices = re.search(r"^num_partitions: (\d+)$", settings[0].read_text(), re.MULTILINE)
    text = hlo_text(parts[MODULE])
    if text is None or devices is None:
        return None
    header, rest = text.split("\n", 1)
    sums = dict.fromkeys(Sizes._fields, 0)
    for number, allocation in fields(parts[BUFFERS]):
        if number != ALLOCATIONS:
            continue
        said = dict(fields(allocation))
        uses = {
            "argument": said.get(ARGUMENT),
            "output": said.get(LIVE_OUT),
            "alias": said.get(ARGUMENT) and said.get(LIVE_OUT),
            "temp": not any(map(said.get, (ARGUMENT, LIVE_OUT, THREAD_LOCAL, CONSTANT))),
        }
        for use, is_used in uses.items():
            sums[f"{use}_size_in_bytes"] += said.get(SIZE, 0) if is_used else 0
    return Stopped(f"{header}, num_partitions={devices[1]}\n{rest}", Sizes(**sums))


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of the fields of a protocol buffer that has no fixed-size ones: whole
    numbers, and bytes of what has a length."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key, value = number(), number()
        if key & 7 == 2:  # the number was a length
            yield key >> 3, message[at : at + value]
            at += value
        else:
            yield key >> 3, value


def without_machine_code() -> dict[str, Any]:
    """Return XLA's options for as little machine code as a whole compilation can have.

    A script that writes nothing takes the place of NVIDIA's assembler, ptxas. LLVM does not
    optimise. A kernel that an earlier program of this thread has is taken from a file. Options
    that XLA_FLAGS sets are left out; all are where NVIDIA's wheel is not found.
    """
    if (folder := _pretended_cuda()) is None:
        return {}
    wanted = {
        "xla_gpu_cuda_data_dir": str(folder),
        "xla_backend_optimization_level": 0,
        "xla_gpu_kernel_cache_file": str(folder / f"kernels-{threading.get_ident()}"),
    }
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in wanted.items() if not re.search(rf"--{name}\b", flags)}


@cache
def _pretended_cuda() -> Path | None:
    """A folder like CUDA's, with LLVM's library for devices and the pretended assembler; removed at
    exit."""
    spec = importlib.util.find_spec("nvidia")
    roots = [
        Path(path, name)
        for path in (spec and spec.submodule_search_locations) or ()
        for name in CUDA
    ]
    found = [
        root
        for root in roots
        if (root / "bin/ptxas").is_file() and (root / "nvvm/libdevice").is_dir()
    ]
    if not found:
        return None
    folder = Path(tempfile.mkdtemp(prefix="jspeed-plan-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("bin", "nvvm"):
        (folder / name).mkdir()
    (folder / "nvvm/libdevice").symlink_to(found[0] / "nvvm/libdevice")
    script = folder / "bin/ptxas"
    script.write_text(ASSEMBLER.format(ptxas=shlex.quote(str(found[0] / "bin/ptxas"))))
    script.chmod(0o755)
    return folder
