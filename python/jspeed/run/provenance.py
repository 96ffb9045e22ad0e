"""Where a run's numbers come from: versions, commit, devices, flags."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax


def versions() -> dict[str, str]:
    """Versions of Python and of the packages whose behaviour shows in the numbers."""
    packages = ("jspeed", "jax", "jaxlib", "optax", "numpy")
    found = {name: _version(name) for name in packages}
    return {"python": platform.python_version(), **found}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def git(folder: Path) -> dict[str, Any]:
    """Commit of the checkout around ``folder`` and whether it has uncommitted changes; ``None`` outside one."""

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = ask("status", "--porcelain")
    return {"commit": ask("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def devices() -> dict[str, Any]:
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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name} ({cores} cores)"


def xla_flags() -> str:
    """The XLA_FLAGS this process runs under."""
    return os.environ.get("XLA_FLAGS", "")
