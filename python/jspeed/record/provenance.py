"""Where a run's numbers come from: initial state, versions, commit, devices and their clocks,
flags, packages."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from jspeed.base.cores import cores
from jspeed.base.files import sha256_of
from jspeed.errors import type_and_line
from jspeed.record.schema import Announced, Code, Devices, Git, Gpu, Gpus, Versions

UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
Sums = Callable[[list[jax.Array]], list[jax.Array]]
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
    code: Code
    gpus: list[Gpu] | None
    announced: Announced | None


class Provenance(TypedDict):
    """The fields of run.json on where a run ran, and in what code."""

    devices: Devices
    versions: Versions
    xla_flags: str
    git: Git
    code: Code
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
        "code": start.code,
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


PACKAGE = Path(__file__).parents[1]


def git(folder: Path = PACKAGE) -> Git:
    """Commit that holds the Python files in ``folder``, and whether they or other tracked files
    differ from it; ``None`` where they are in none, as in somebody's ``.venv``, or git cannot
    tell."""
    listed = _git(folder, "ls-files", "-v", "-z", "--", "*.py")
    known = {each[2:]: each[0] for each in (listed or "").split("\0") if each}
    here = {str(path.relative_to(folder)) for path in folder.rglob("*.py")}
    if here and here.isdisjoint(known):
        return {"commit": None, "dirty": None}
    # of any other tag than H git was told not to look for changes
    unseen = any(known.get(name) != "H" for name in here)
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {
        "commit": _git(folder, "rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status) or unseen,
    }


def code() -> Code:
    """Hash the files of jspeed's modules that are loaded now, and its extension."""
    digest, count = hashlib.sha256(), 0
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    extension = ""
    for name, path in sorted(files.items()):
        if path and name.partition(".")[0] == "jspeed":
            each = ""  # of a file that is gone: nobody can say what ran
            with suppress(OSError):
                each = sha256_of(Path(path))
            digest.update(f"{name} {each}\n".encode())
            count += 1
            if name == "jspeed._dataloader":
                extension = each
    return {"modules": count, "sha256": digest.hexdigest(), "extension": extension}


def why_no_commit(found: Git, folder: Path = PACKAGE) -> str | None:
    """Return a line on why git has not told the commit of a checkout; None where it has, or
    ``folder`` is in none of ours."""
    if None not in found.values() or not (folder.parents[1] / ".git").exists():
        return None
    try:
        done = subprocess.run(**_call(folder, "status", "--porcelain", "--untracked-files=no"))
        why = (done.stderr.strip().splitlines() or ["it knows none of the files"])[0]
    except (OSError, subprocess.TimeoutExpired) as error:
        why = type_and_line(error)
    return f"the commit of this checkout is unknown, and no record of this run will count: {why}"


def _call(folder: Path, *words: str) -> dict[str, Any]:
    """Arguments of ``subprocess.run`` for git in ``folder``: of the repository that lies there,
    whatever a hook has set; and of another owner, where it is the one whose code runs here."""
    kept = ("GIT_CONFIG", "GIT_DISCOVERY")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(kept)
    }
    ours = f"safe.directory={PACKAGE.resolve().parents[1]}"
    command = ["git", "--no-optional-locks", "-c", ours, "-c", "core.fsmonitor=false", *words]
    return {
        "args": command,
        "cwd": folder,
        "env": environment,
        "capture_output": True,
        "text": True,
        "timeout": 10,
    }


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(**_call(folder, *words))
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _ask(*words: str) -> str | None:
    """The output of a program, or None where it is missing, fails or takes longer than ten
    seconds."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10)
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


def gpus() -> list[Gpu] | None:
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


def gpu_facts(before: list[Gpu] | None) -> Gpus | None:
    """Return run.json's ``gpus``: driver, CUDA, links, and each GPU as it was ``before`` the clock
    and is now."""
    after = gpus()
    if before is None or after is None:
        return None
    driver = _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"
    cuda = re.search(r"CUDA Version: *([\d.]+)", _ask("nvidia-smi") or "")
    lines = re.findall(r"^GPU\d+\s.*$", _ask("nvidia-smi", "topo", "-m") or "", re.MULTILINE)
    links = {
        cell for line in lines for cell in re.findall(r"\b(NV\d+|PIX|PXB|PHB|NODE|SYS)\b", line)
    }
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
    about = (found.metadata for found in importlib.metadata.distributions())
    listed = {f"{each['Name']}=={each['Version']}".lower() for each in about}
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
    """Kind, number and platform of the devices, and the number of processes. The CPU of a process
    is one, however its cores are divided."""
    first = jax.devices()[0]
    cpu = first.platform == "cpu"
    return {
        "kind": _cpu_name() if cpu else first.device_kind,
        "count": jax.process_count() if cpu else jax.device_count(),
        "processes": jax.process_count(),
        "platform": first.platform,
    }


# of ARM's main ID register (Linux's arch/arm64/include/asm/cputype.h): who makes a core
ARM_MAKERS = {
    0x41: "ARM", 0x42: "Broadcom", 0x43: "Cavium", 0x46: "Fujitsu", 0x48: "HiSilicon",
    0x4E: "NVIDIA", 0x50: "Applied Micro", 0x51: "Qualcomm", 0x61: "Apple", 0x6D: "Microsoft",
    0xC0: "Ampere",
}  # fmt: skip
ARM_CORES = {
    "0xd08": "Cortex-A72", "0xd0b": "Cortex-A76", "0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2", "0xd84": "Neoverse-V3", "0xd8e": "Neoverse-N3",
}  # fmt: skip
# that cores have in /proc/cpuinfo: x86 and new kernels of ARM, POWER, LoongArch, s390, MIPS; RISC-V
CPU_NAMES = ("model name", "cpu", "cpu model", "uarch")


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    name = cpu_model(text) or _ask("sysctl", "-n", "machdep.cpu.brand_string")  # macOS
    return f"{name or platform.machine()} ({cores()} cores)"


def cpu_model(cpuinfo: str) -> str | None:
    """Return the name of the processor that Linux's /proc/cpuinfo describes: as it says, or of ARM,
    which has none there, maker, part and revision of each kind of core."""
    facts: dict[str, list[str]] = {}
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon and value.strip():
            facts.setdefault(name.strip().lower(), []).append(value.strip())
    for name in CPU_NAMES:
        for value in facts.get(name, ()):
            if not value.isdecimal():  # a number is that of the core
                return value
    if (machines := facts.get("vendor_id")) and "processor 0" in facts:  # s390
        found = re.search(r"machine = *(\w+)", facts["processor 0"][0])
        return f"{machines[0]} {found[1] if found else ''}".strip()
    kinds = []
    columns = [facts.get(f"cpu {what}", []) for what in ("implementer", "part", "variant")]
    for implementer, part, variant in zip(*columns, strict=False):
        maker = ARM_MAKERS.get(int(implementer, 16), f"implementer {implementer}")
        core = ARM_CORES.get(part) if maker == "ARM" else None
        kinds.append(f"{maker} {core or f'part {part}'} variant {variant}")
    return " + ".join(dict.fromkeys(kinds)) or None


def checksum(state: Any, sums: Sums | None = None) -> str:
    """Return 16 hexadecimal digits over every bit of every array in ``state``, whatever its
    sharding.

    Two sums modulo 2^32 of all elements, each times an odd number that depends on its index. No
    change of a single element goes unseen. The devices compute them, by ``sums``, which was
    compiled for such a state (:func:`sums_of`), if given; with several processes each must call
    this.
    """
    halves = jax.device_get((sums or sums_of)(jax.tree.leaves(state)))
    return "".join(f"{int(half):08x}" for half in halves)


@jax.jit
def sums_of(arrays: list[jax.Array]) -> list[jax.Array]:
    """Return the two sums of :func:`checksum`: uint32 scalars."""
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


def installed(module: str) -> bool:
    """Return whether a module is there, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package above it
        return False
