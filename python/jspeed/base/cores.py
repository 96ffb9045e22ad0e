"""How many CPU cores this process may use, of those that the machine has; its control groups."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def cores(root: Path = Path("/")) -> int:
    """Return how many CPU cores this process may use: by its affinity (``taskset``) and the quotas
    of its cgroups.

    Of a quota (``docker run --cpus 1.5``) whole cores count, at least one, as Rust's
    ``available_parallelism`` does. ``root`` is where the files of Linux lie.
    """
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min([allowed, *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    """Yield the whole cores of each quota of cgroup v2."""
    for folder in control_groups(root):
        # the root has no file; without a quota it says "max"
        with suppress(OSError, ValueError):
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            yield quota // period


def control_groups(root: Path, kind: str = "") -> Iterator[Path]:
    """Yield the folders of this process's control group and of those above it: of version 2, or of
    a ``kind`` of version 1 (``memory``)."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kind in kinds.split(","):
                groups = root / "sys/fs/cgroup" / kind
                own = groups / path.lstrip("/")
                yield from (own, *own.parents[: len(own.parts) - len(groups.parts)])
