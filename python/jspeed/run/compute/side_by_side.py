"""Compile several programs at a time."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import jax

from jspeed.base.compiler import out_of_memory
from jspeed.base.cores import cores
from jspeed.run.compute.device import GPUS, Device
from jspeed.run.compute.division import Attempt

GPU_COMPILES = 2  # at a time
Made = TypeVar("Made")
Job = tuple[int, int]  # the number of a stage, and the phase of its steps


def beside(call: Callable[[], Made], device: Device) -> Callable[[], Made]:
    """Begin to compile in a thread; return what waits for it. On GPUs compile at once, for the
    reasons of :func:`compile_all`."""
    if device.platform in GPUS:
        made = call()
        return lambda: made
    pool = ThreadPoolExecutor(1)
    begun = pool.submit(call)
    pool.shutdown(wait=False)
    return begun.result


def compile_all(
    compile_one: Callable[[Job, threading.Event], Attempt], jobs: Sequence[Job], device: Device
) -> list[Attempt]:
    """Compile side by side on a CPU, two at a time on GPUs.

    XLA tries kernels on the GPU with arrays as large as the program's: several programs at once can
    be more than it holds, and XLA's tuning has had deadlocks (openxla PRs 41399, 42415). What runs
    out of memory is compiled again, alone. Any other error is raised at once: its event tells jobs
    that have begun to end, and the rest do not begin.
    """
    stop = threading.Event()

    def alone(error: BaseException | None) -> bool:
        return (
            isinstance(error, jax.errors.JaxRuntimeError) and len(jobs) > 1 and out_of_memory(error)
        )

    with ThreadPoolExecutor(GPU_COMPILES if device.platform in GPUS else cores()) as pool:
        started = [pool.submit(compile_one, job, stop) for job in jobs]
        for one in as_completed(started):
            if (error := one.exception()) and not alone(error):
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise error
    return [
        compile_one(job, stop) if alone(one.exception()) else one.result()
        for job, one in zip(jobs, started, strict=True)
    ]
