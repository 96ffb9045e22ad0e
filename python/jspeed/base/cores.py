"""How many CPU cores this process may use, of those that the machine has."""

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
    """Yield the whole cores of each quota of cgroup v2, this process's own and those above it."""
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        groups = root / "sys/fs/cgroup"
        for own in (
            groups / line.removeprefix("0::/") for line in lines if line.startswith("0::/")
        ):
            for folder in (own, *own.parents[: len(own.parts) - len(groups.parts)]):
                # the root has no file; without a quota it says "max"
                with suppress(OSError, ValueError):
                    quota, period = map(int, (folder / "cpu.max").read_text().split())
                    yield quota // period
