"""Speed up CPU steps: keep the memory that a step frees in the process for the next step."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Tell glibc never to give freed memory back to the kernel; elsewhere do nothing.

    XLA allocates a program's temporaries anew at every call. By default each such block is a fresh mapping whose
    pages fault in one by one: 13 to 24 % of a stdlib-sized step (benchmarks/cpu.md). Call it
    before other threads allocate.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(M_ARENA_MAX, 1)
