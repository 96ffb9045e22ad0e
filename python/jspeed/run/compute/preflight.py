"""Check attention, FP8, own kernels and collectives before the clock; fall back to the next backend where one fails.

A kernel can be refused when its plan is built, or be wrong in one version of a library: both are seen here, on a small
example, and a run goes on with the next backend. What passed is remembered in the cache folder, for one kind of device
and one set of versions; what failed is tried again in every run. The examples are in
:mod:`jspeed.run.compute.preflight_checks`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from jspeed.cluster.distributed import gather
from jspeed.errors import BadInput
from jspeed.files import cache_folder, read_json, write_whole
from jspeed.model.kernels import attention_backends
from jspeed.model.kernels.attention_backends import Refused
from jspeed.recipe import Recipe
from jspeed.record.schema import Kernels
from jspeed.run.compute import preflight_checks
from jspeed.run.compute.device import Device, head_width, packs
from jspeed.run.compute.program import Program, compile_program
from jspeed.run.evidence.provenance import installed_version
from jspeed.run.output.console import waiting

OPTIONAL: dict[str, tuple[str, Callable[[], str | None], dict[str, Any], str]] = {
    "FP8": (
        "FP8 matmuls",
        preflight_checks.fp8_error,
        {"fp8": "missing"},
        "matmuls in the compute dtype instead of FP8",
    ),
    "OWN_KERNELS": (
        "own kernels",
        preflight_checks.own_kernels_error,
        {"own_kernels": False},
        "XLA's instead of own kernels",
    ),
}
"""A recipe's fields for what a device may have: its name, its check, the device without it, what is used instead."""


@dataclass(frozen=True)
class Preflight:
    """What was found: ``checks`` are the names of what passed, ``refused`` those of what did not, with the reasons."""

    device: Device
    checks: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def record(self) -> Kernels:
        """What run.json says of it."""
        return {
            "attention": self.device.attention,
            "fp8": self.device.fp8,
            "own": self.device.own_kernels,
            "checked": list(self.checks),
            "refused": list(self.refused),
        }


def preflight(recipe: Recipe, mesh: Mesh, device: Device, fields: Mapping[str, Any], console: Console) -> Preflight:
    """Return what of ``device`` works, in the order of ``device.attention`` and ``device.fallbacks``.

    Of the recipe's ``fields`` FP8 and OWN_KERNELS count. Where there is nothing to choose between (a CPU), nothing is
    checked. All processes must call this and agree. Raises :class:`BadInput` when no backend works, when what was asked
    for (``--attention``, ``FP8=on``, ``OWN_KERNELS=on``) does not, or when the devices add up wrongly.
    """
    there = {"FP8": device.fp8 == "native", "OWN_KERNELS": device.own_kernels}
    wanted = [field for field in OPTIONAL if there[field] and fields.get(field) in ("auto", "on")]
    if device.platform == "cpu" and device.attention == "xla" and not wanted:
        return Preflight(device)
    remembered = Remembered(mesh)
    found = working_attention(recipe, device, remembered)
    device, passed, refused, instead = found.device, [*found.checks], [*found.refused], ""
    for field in wanted:
        name, check, without, other = OPTIONAL[field]
        reason = outcome(name, check, remembered)
        if reason is None:
            passed.append(name)
        elif fields[field] == "on":
            raise BadInput(f"field {field} is 'on' but {name} fail here: {reason}; set {field}=auto or {field}=off")
        else:
            refused.append(f"{name}: {reason}")
            instead += f"; {other}"
            device = replace(device, **without)
    if mesh.size > 1:
        name = f"all-reduce and reduce-scatter over {mesh.size} devices"
        if reason := outcome(name, partial(preflight_checks.collectives_error, mesh)):
            raise BadInput(f"{name}: {reason}; see NCCL_DEBUG=INFO, or use one device (CUDA_VISIBLE_DEVICES=0)")
        passed.append(name)
    if refused:
        said = f"preflight: {'; '.join(refused)}; attention by {device.attention}{instead}"
        console.print(said, markup=False, soft_wrap=True)
    remembered.write()
    return Preflight(device, tuple(passed), tuple(refused))


def working_attention(recipe: Recipe, device: Device, remembered: "Remembered") -> Preflight:
    """Return ``device`` with the first of its attention backends that computes what it should.

    Raises :class:`BadInput` when none does.
    """
    width = head_width(recipe) or 128
    packed = packs(recipe)
    backends: Sequence[str] = (device.attention, *device.fallbacks)
    refused: list[str] = []
    for used, backend in enumerate(backends, start=1):
        name = f"attention {backend}, {'packed' if packed else 'causal'}, heads of {width}"
        reason = outcome(name, partial(preflight_checks.attention_error, backend, width, packed), remembered)
        if reason is None:
            device = replace(device, attention=backend, fallbacks=tuple(backends[used:]))
            return Preflight(device, (name,), tuple(refused))
        refused.append(f"attention {backend}: {reason}")
    what = "--" if device.asked else "no attention backend works on these devices: "
    raise BadInput(
        f"{what}{'; '.join(refused)}; update the driver, JAX or cuDNN, choose another --attention, or give "
        "--no-preflight to run without this check"
    )


def outcome(name: str, check: Callable[[], str | None], remembered: "Remembered | None" = None) -> str | None:
    """Return why ``check`` failed on any process; None where it passed on all, now or in an earlier run."""
    if remembered and all(gather(f"remembered: {name}", name in remembered.passed)):
        return None
    try:
        reason = check()
    except Exception as error:  # whatever a library raises, its message is the reason
        reason = f"{type(error).__name__}: {_first_line(error)}"
    first = next((text for text in gather(f"checked: {name}", reason) if text), None)
    if first is None and remembered:
        remembered.passed.add(name)
    return first


class Remembered:
    """What passed in earlier runs on such devices with these versions of driver and libraries."""

    def __init__(self, mesh: Mesh) -> None:
        key = hashlib.sha256(json.dumps(versions(mesh)).encode()).hexdigest()[:16]
        self._path = cache_folder() / "preflight" / f"{key}.json"
        try:
            self._before = set(read_json(self._path))
        except (OSError, ValueError, TypeError):
            self._before = set()
        self.passed = set(self._before)

    def write(self) -> None:
        """Keep what passed; a cache folder that cannot be written is no reason to stop."""
        if self.passed != self._before:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._path, json.dumps(sorted(self.passed)))
            except (OSError, BadInput):
                pass


def versions(mesh: Mesh) -> list[str]:
    """What the outcome depends on: kind of device, driver, packages whose kernels are checked, our calls of them."""
    first = mesh.devices.flat[0]
    driver = Path("/proc/driver/nvidia/version")
    found = [first.device_kind, str(getattr(first.client, "platform_version", ""))]
    found.append(driver.read_text().splitlines()[0] if driver.is_file() else "")
    try:
        from jax._src.lib import cuda_versions  # of the cuDNN that was loaded, which need not be the installed one

        found.append(str(cuda_versions.cudnn_get_version()) if cuda_versions else "")
    except (ImportError, AttributeError, RuntimeError):
        found.append("")
    packages = "jax", "jaxlib", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "fa4-jax"
    # Not imported: a JAX may lack what they import, and few runs want all.
    kernels = Path(attention_backends.__file__).parent
    callers = (kernels.parent / f"{name}.py" for name in ("attention", "fp8", "heads", "positions"))
    sources = [path.read_text() for path in (*sorted(kernels.glob("*.py")), *callers, Path(preflight_checks.__file__))]
    return found + [installed_version(package) or "" for package in packages] + sources


def compile_or_fall_back(
    recipe: Recipe,
    mesh: Mesh,
    layout: str,
    micro_batch: int | None,
    rows: int,
    checked: Preflight,
    console: Console,
) -> tuple[Program, Preflight]:
    """Compile the run's program; where it is refused at its real shapes own kernels, then attention backends, make way.

    All processes go on with the same backend, and none before all have compiled: whoever runs a collective first waits
    for the others 30 s only, with gloo. Raises :class:`BadInput` for a backend that was asked for, and what
    :func:`compile_program` raises.
    """
    while True:
        device = checked.device
        program, failure, error = None, None, None
        with waiting(console, "compiling"):
            try:
                program = compile_program(recipe, mesh, layout, micro_batch, rows, device)
            except (Refused, jax.errors.JaxRuntimeError) as caught:
                if (device.attention == "xla" and not device.own_kernels) or "RESOURCE_EXHAUSTED" in str(caught):
                    raise
                error, failure = caught, _first_line(caught)
        tried = f"compiled with {device.attention}, own kernels {device.own_kernels}"
        reason = next((text for text in gather(tried, failure) if text), None)
        if program and reason is None:
            return program, checked
        if device.own_kernels:
            others = tuple(name for name in checked.checks if name != "own kernels")
            refused = f"own kernels: the step cannot be compiled with them ({reason})"
            checked = Preflight(replace(device, own_kernels=False), others, (*checked.refused, refused))
            console.print(f"{refused}; {OPTIONAL['OWN_KERNELS'][-1]}", markup=False, soft_wrap=True)
            continue
        if not device.fallbacks:
            raise BadInput(
                f"--attention {device.attention}: the step cannot be compiled with it ({reason}); choose another one, "
                "or leave the flag out"
            ) from error
        refused = f"attention {device.attention}: the step cannot be compiled with it ({reason})"
        device = replace(device, attention=device.fallbacks[0], fallbacks=device.fallbacks[1:])
        checked = replace(checked, device=device, refused=(*checked.refused, refused))
        if checked.checks:  # not with --no-preflight
            rest = working_attention(recipe, device, remembered := Remembered(mesh))
            remembered.write()
            others = tuple(name for name in checked.checks if not name.startswith("attention "))
            checked = Preflight(rest.device, rest.checks + others, checked.refused + rest.refused)
        said = "; ".join(checked.refused[checked.refused.index(refused) :])
        console.print(f"{said}; attention by {checked.device.attention}", markup=False, soft_wrap=True)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
