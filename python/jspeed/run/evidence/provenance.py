"""Where a run's numbers come from: initial state, versions, commit, devices and their clocks,
flags, packages."""

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from jspeed.cores import cores
from jspeed.record.schema import Devices, Git, Gpus, PlaceInPlan, Versions

UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
ODD = (0x9E3779B1, 0x85EBCA77)  # one multiplier for each half of a checksum (xxHash's primes)


@dataclass(frozen=True)
class StartEvidence:
    """Checksums of the state drawn from the seed before and after the warm-up, and which
    preregistered run this is.

    ``git`` is of the start, when Python read the code: what is committed during a run has not run
    in it.
    """

    initial_checksum: str
    after_warm_up: str
    git: Git
    gpus: list[dict[str, Any]] | None
    plan: PlaceInPlan | None


class Provenance(TypedDict):
    """The fields of run.json on where a run ran, and in what code."""

    devices: Devices
    versions: Versions
    xla_flags: str
    git: Git
    machine: str | None
    gpus: Gpus | None
    container: str | None
    environment: str


def collect(start: StartEvidence) -> Provenance:
    """Return where this run ran, with what was seen at its ``start``."""
    return {
        "devices": devices(),
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "git": start.git,
        "machine": machine(),
        "gpus": gpu_facts(start.gpus),
        # the digest of its image, from whoever started it
        "container": os.environ.get("JSPEED_CONTAINER") or None,
        "environment": environment(),
    }


def versions() -> Versions:
    """Versions of Python and of the packages whose behaviour shows in the numbers."""
    return {
        "python": platform.python_version(), "jax": _version("jax"), "jaxlib": _version("jaxlib"),
        "numpy": _version("numpy"), "optax": _version("optax"), "jspeed": _version("jspeed"),
    }  # fmt: skip


def installed_version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version(package: str) -> str:
    return installed_version(package) or "unknown"


def git(folder: Path = Path(__file__).parent) -> Git:
    """Commit of the checkout around ``folder`` and whether tracked files differ from it; ``None``
    outside one."""
    status = _ask("git", "status", "--porcelain", "--untracked-files=no", cwd=folder)
    return {
        "commit": _ask("git", "rev-parse", "HEAD", cwd=folder),
        "dirty": None if status is None else bool(status),
    }


def _ask(*words: str, cwd: Path | None = None) -> str | None:
    """The output of a program, or None where it is missing, fails or takes longer than ten
    seconds."""
    try:
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# nvidia-smi's name -> ours, with the unit
GPU_FACTS = {
    "name": "name",
    "power.limit": "power_limit_watts",
    "clocks.sm": "sm_mhz",
    "clocks.max.sm": "max_sm_mhz",
    "clocks.mem": "memory_mhz",
    "temperature.gpu": "celsius",
}


def gpus() -> list[dict[str, Any]] | None:
    """Name, power limit (W), clocks (MHz) and temperature of each GPU of this machine now; None
    without nvidia-smi."""
    listed = _ask(
        "nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader,nounits"
    )
    if listed is None:
        return None
    return [
        dict(zip(GPU_FACTS.values(), map(_number, line.split(", ")), strict=False))
        for line in listed.splitlines()
    ]


def gpu_facts(before: list[dict[str, Any]] | None) -> Gpus | None:
    """Return run.json's ``gpus``: driver, CUDA, links, and each GPU as it was ``before`` the clock
    and is now."""
    after = gpus()
    if before is None or after is None:
        return None
    driver = _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"
    cuda = re.search(r"CUDA Version: *([\d.]+)", _ask("nvidia-smi") or "")
    rows = re.findall(r"^GPU\d+\s.*$", _ask("nvidia-smi", "topo", "-m") or "", re.MULTILINE)
    links = {cell for row in rows for cell in re.findall(r"\b(NV\d+|PIX|PXB|PHB|NODE|SYS)\b", row)}
    return {
        "driver": driver.splitlines()[0],
        "cuda": cuda[1] if cuda else None,
        "links": sorted(links),
        "before": before,
        "after": after,
    }


def _number(text: str) -> float | str | None:
    """A number where nvidia-smi gives one, None where it has none, else its text."""
    try:
        return float(text)
    except ValueError:
        return None if text.startswith("[") else text


@functools.cache
def environment() -> str:
    """SHA-256 over the sorted names and versions of all installed packages, one ``name==version`` a
    line."""
    listed = {
        f"{found.name}=={found.version}".lower() for found in importlib.metadata.distributions()
    }
    return hashlib.sha256("\n".join(sorted(listed)).encode()).hexdigest()


def machine() -> str | None:
    """Twelve hexadecimal digits, equal on one machine until it reboots, and anonymous; None off
    Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return None
    return hashlib.sha256(boot).hexdigest()[:12]


def devices() -> Devices:
    """Kind, number and platform of the devices, and the number of processes."""
    first = jax.devices()[0]
    kind = first.device_kind if first.platform != "cpu" else _cpu_name()
    return {
        "kind": kind,
        "count": jax.device_count(),
        "processes": jax.process_count(),
        "platform": first.platform,
    }


def _cpu_name() -> str:
    name = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name} ({cores()} cores)"


def checksum(state: Any) -> str:
    """Return 16 hexadecimal digits over every bit of every array in ``state``, whatever its
    sharding.

    Two sums modulo 2^32 of all elements, each times an odd number that depends on its index, so
    that no change of a single element goes unseen. The devices compute them; with several processes
    each must call this.
    """
    halves = jax.device_get(_sums(jax.tree.leaves(state)))
    return "".join(f"{int(half):08x}" for half in halves)


@jax.jit
def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    return [
        sum((_sum(array, odd * (2 * n + 1)) for n, array in enumerate(arrays)), jnp.uint32(0))
        for odd in ODD
    ]


def _sum(array: jax.Array, multiplier: int) -> jax.Array:
    if array.dtype == bool:
        bits = array.astype(jnp.uint32)
    else:
        bits = jax.lax.bitcast_convert_type(array, UNSIGNED[array.dtype.itemsize]).astype(
            jnp.uint32
        )
    index = jnp.full(array.shape, 1, jnp.uint32)
    for axis, size in enumerate(array.shape):
        index = index * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(
            jnp.uint32, array.shape, axis
        )
    weight = (index * jnp.uint32(multiplier % 2**32)) | jnp.uint32(1)
    return jnp.sum(bits * weight, dtype=jnp.uint32)
