"""What of the devices a run computes with is checked by a satellite, ``jspeed/kernels/preflight``;
without it a run takes what XLA compiles by itself."""

from collections.abc import Callable
from typing import TypeAlias

from rich.console import Console

from jspeed.base.compiler import custom_calls
from jspeed.base.processes import gather
from jspeed.errors import BadInput
from jspeed.recipe import Recipe
from jspeed.run.compute.device import Placement, takes
from jspeed.run.compute.program import Program
from jspeed.run.console import waiting

NOBODY = "jspeed.kernels, which checks that before the clock, is not installed"
Build: TypeAlias = Callable[[Placement], Program]  # compiles, or finds what was compiled


def unchecked(recipe: Recipe, placement: Placement, console: Console) -> Placement:
    """Return ``placement`` with XLA's attention and without custom kernels and FP8 matmuls, which
    nobody here checks; say so where the device has them and they are taken.

    Raises :class:`BadInput` where they were asked for (``--attention``, ``FP8=on``,
    ``OWN_KERNELS=on``).
    """
    device, asked = placement.device, placement.device.asked
    taken = device.fp8 == "native" and takes(asked.fp8)
    parts = (
        (f"attention {device.attention}", device.attention != "xla", asked.attention is not None),
        ("custom kernels", bool(device.custom_kernels), asked.custom_kernels == "on"),
        ("FP8 matmuls", taken, asked.fp8 == "on"),
    )
    lost = [name for name, there, _ in parts if there]
    if not lost:
        return placement
    if named := [name for name, there, asked_for in parts if there and asked_for]:
        raise BadInput(
            f"{named[0]}: {NOBODY}; do not ask for it, or give --no-preflight to run without this"
            " check"
        )
    console.print(f"note: without {', '.join(lost)}: {NOBODY}", markup=False, soft_wrap=True)
    return placement.with_device(
        attention="xla",
        fallbacks=(),
        custom_kernels=frozenset[str](),
        fp8="missing" if taken else device.fp8,
        refused=tuple(f"{name}: {NOBODY}" for name in lost),
    )


def compile_together(
    recipe: Recipe, placement: Placement, console: Console, build: Build
) -> tuple[Program, Placement]:
    """Make the run's program by ``build``; return ``placement`` with what it calls.

    No process continues before all have compiled: gloo collectives time out after 30 s. Raises what
    ``build`` raises.
    """
    with waiting(console, "compiling"):
        program = build(placement)
    gather("compiled", None)
    return program, with_calls(program, placement)


def with_calls(program: Program, placement: Placement) -> Placement:
    """Return ``placement`` with what the last of the compiled steps calls; as it is without jit."""
    if not program.compiled:
        return placement
    return placement.with_device(calls=custom_calls(program.compiled[-1]))
