"""What of the devices a run computes with, and what of it was checked. Checks are a satellite's,
``jspeed/kernels/preflight``; without it a run takes what XLA compiles by itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from jspeed.base.compiler import custom_calls
from jspeed.base.processes import gather
from jspeed.errors import BadInput
from jspeed.recipe import Recipe
from jspeed.record.schema import Kernels
from jspeed.run.compute.device import Device, Placement
from jspeed.run.compute.program import Program
from jspeed.run.console import waiting

NOBODY = "jspeed.kernels, which checks that before the clock, is not installed"
Build = Callable[[Placement], Program]  # compiles, or finds what was compiled


@dataclass(frozen=True)
class Preflight:
    """What was found: ``placement`` has the settings that work, ``checks`` are the names of what
    passed, ``refused`` those of what did not, with the reasons. ``calls``: what the last stage's
    program calls (:func:`jspeed.base.compiler.custom_calls`); None before it is compiled.
    """

    placement: Placement
    checks: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    calls: Mapping[str, int] | None = None

    @property
    def device(self) -> Device:
        """The device, with the settings that work."""
        return self.placement.device

    def with_device(self, **settings: Any) -> "Preflight":
        """Return this with other ``settings`` of the device."""
        return replace(
            self, placement=replace(self.placement, device=replace(self.device, **settings))
        )

    def record(self) -> Kernels:
        """What run.json says of it."""
        said: Kernels = {
            "attention": self.device.attention,
            "fp8": self.device.fp8,
            "own": bool(self.device.custom_kernels),
            "checked": list(self.checks),
            "refused": list(self.refused),
        }
        return said if self.calls is None else said | {"calls": dict(self.calls)}


def unchecked(
    recipe: Recipe, placement: Placement, fields: Mapping[str, Any], console: Console
) -> Preflight:
    """Return ``placement`` with XLA's attention and without custom kernels and FP8 matmuls, which
    nobody here checks; say so where the device has them and the recipe's ``fields`` take them.

    Raises :class:`BadInput` where they were asked for (``--attention``, ``FP8=on``,
    ``OWN_KERNELS=on``).
    """
    device, fp8, own = placement.device, fields.get("FP8"), fields.get("OWN_KERNELS")
    taken = device.fp8 == "native" and fp8 in ("auto", "on")
    parts = (
        (f"attention {device.attention}", device.attention != "xla", device.asked),
        ("custom kernels", bool(device.custom_kernels), own == "on"),
        ("FP8 matmuls", taken, fp8 == "on"),
    )
    lost = [name for name, there, _ in parts if there]
    if not lost:
        return Preflight(placement)
    if asked := [name for name, there, asked in parts if there and asked]:
        raise BadInput(
            f"{asked[0]}: {NOBODY}; do not ask for it, or give --no-preflight to run without this"
            " check"
        )
    console.print(f"note: without {', '.join(lost)}: {NOBODY}", markup=False, soft_wrap=True)
    refused = tuple(f"{name}: {NOBODY}" for name in lost)
    plain = {"attention": "xla", "fallbacks": (), "custom_kernels": frozenset[str]()}
    fp8 = "missing" if taken else device.fp8
    return Preflight(placement, refused=refused).with_device(fp8=fp8, **plain)


def compile_together(
    recipe: Recipe, checked: Preflight, fields: Mapping[str, Any], console: Console, build: Build
) -> tuple[Program, Preflight]:
    """Make the run's program by ``build``; return ``checked`` with what it calls.

    No process continues before all have compiled: gloo collectives time out after 30 s. Raises what
    ``build`` raises.
    """
    with waiting(console, "compiling"):
        program = build(checked.placement)
    gather("compiled", None)
    calls = [custom_calls(step) for step in program.compiled]  # none without jit
    return program, replace(checked, calls=calls[-1]) if calls else checked
