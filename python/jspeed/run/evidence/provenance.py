"""Where a run's numbers come from: versions, commit, devices and their clocks, flags, packages, machine."""

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import jax

from jspeed.cores import cores
from jspeed.record.schema import Devices, Git, Gpus, Versions


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
    """Commit of the checkout around ``folder`` and whether tracked files differ from it; ``None`` outside one."""
    status = _ask("git", "status", "--porcelain", "--untracked-files=no", cwd=folder)
    return {"commit": _ask("git", "rev-parse", "HEAD", cwd=folder), "dirty": None if status is None else bool(status)}


def _ask(*words: str, cwd: Path | None = None) -> str | None:
    """The output of a program, or None where it is missing, fails or takes longer than ten seconds."""
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
    """Name, power limit (W), clocks (MHz) and temperature of each GPU of this machine now; None without nvidia-smi."""
    listed = _ask("nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader,nounits")
    if listed is None:
        return None
    return [dict(zip(GPU_FACTS.values(), map(_number, line.split(", ")), strict=False)) for line in listed.splitlines()]


def gpu_facts(before: list[dict[str, Any]] | None) -> Gpus | None:
    """Return run.json's ``gpus``: driver, CUDA, links, and each GPU as it was ``before`` the clock and is now."""
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


def environment() -> str:
    """SHA-256 over the sorted names and versions of all installed packages, one ``name==version`` a line."""
    listed = {f"{found.name}=={found.version}".lower() for found in importlib.metadata.distributions()}
    return hashlib.sha256("\n".join(sorted(listed)).encode()).hexdigest()


def machine() -> str | None:
    """Twelve hexadecimal digits, equal on one machine until it reboots, and anonymous; None off Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return None
    return hashlib.sha256(boot).hexdigest()[:12]


def container() -> str | None:
    """The digest of the container's image, where whoever started it gave it as JSPEED_CONTAINER."""
    return os.environ.get("JSPEED_CONTAINER") or None


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


def xla_flags() -> str:
    """The XLA_FLAGS this process runs under."""
    return os.environ.get("XLA_FLAGS", "")
