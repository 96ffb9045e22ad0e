"""Check attention, FP8, own kernels and collectives before the clock; fall back to the next backend where one fails.

A kernel can be refused when its plan is built, or be wrong in one version of a library: both are seen here, on a small
example, and the run takes the next backend. What passed is remembered in the cache folder, for one kind of device
and one set of versions; what failed is checked again in every run. The examples are in
:mod:`jspeed.run.compute.preflight_checks`.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from rich.console import Console

from jspeed.cluster.distributed import gather
from jspeed.errors import BadInput, first_line
from jspeed.files import cache_folder, read_json, write_whole
from jspeed.jax_versions import loaded_cudnn
from jspeed.model.kernels import attention_backends
from jspeed.model.kernels.attention_backends import Refused
from jspeed.recipe import Recipe
from jspeed.record.schema import Kernels
from jspeed.run.compute import preflight_checks
from jspeed.run.compute.compiler import FP8_CALL, custom_calls, options_for, out_of_memory
from jspeed.run.compute.device import Device, has_bounded_documents, has_document_masks, head_width
from jspeed.run.compute.program import Program, compile_program
from jspeed.run.evidence.provenance import installed_version
from jspeed.run.output.console import waiting


class Feature(NamedTuple):
    """A feature that a device may have: its name, its check, the device without it, and what is used instead."""

    name: str
    check: Callable[[], str | None]
    without: dict[str, Any]
    instead: str


OPTIONAL_FEATURES = {  # by the recipe's field
    "FP8": Feature(
        "FP8 matmuls",
        preflight_checks.fp8_error,
        {"fp8": "missing"},
        "matmuls in the compute dtype instead of FP8",
    ),
    "OWN_KERNELS": Feature(
        "own kernels",
        preflight_checks.own_kernels_error,
        {"own_kernels": False},
        "XLA's instead of own kernels",
    ),
}


@dataclass(frozen=True)
class Preflight:
    """What was found: ``checks`` are the names of what passed, ``refused`` those of what did not, with the
    reasons. ``own_kernels_asked``: the recipe's field says ``on``, so that there is nothing to fall back to. ``calls``:
    what the last stage's program calls (:func:`jspeed.run.compute.compiler.custom_calls`); None before it is compiled.
    """

    device: Device
    checks: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    own_kernels_asked: bool = False
    calls: Mapping[str, int] | None = None

    def record(self) -> Kernels:
        """What run.json says of it."""
        said: Kernels = {
            "attention": self.device.attention,
            "fp8": self.device.fp8,
            "own": self.device.own_kernels,
            "checked": list(self.checks),
            "refused": list(self.refused),
        }
        return said if self.calls is None else said | {"calls": dict(self.calls)}


def preflight(recipe: Recipe, mesh: Mesh, device: Device, fields: Mapping[str, Any], console: Console) -> Preflight:
    """Return what of ``device`` works, in the order of ``device.attention`` and ``device.fallbacks``.

    Of the recipe's ``fields`` FP8 and OWN_KERNELS count. Where there is nothing to choose between (a CPU), nothing is
    checked. All processes must call this and agree. Raises :class:`BadInput` when no backend works, when what was asked
    for (``--attention``, ``FP8=on``, ``OWN_KERNELS=on``) does not, or when a collective returns a wrong sum.
    """
    there = {"FP8": device.fp8 == "native", "OWN_KERNELS": device.own_kernels}
    wanted = [field for field in OPTIONAL_FEATURES if there[field] and fields.get(field) in ("auto", "on")]
    if device.platform == "cpu" and device.attention == "xla" and not wanted:
        return Preflight(device)
    remembered = PassedChecks(mesh)
    found = working_attention(recipe, device, remembered)
    device, passed, refused, instead = found.device, [*found.checks], [*found.refused], ""
    for field in wanted:
        feature = OPTIONAL_FEATURES[field]
        reason = failure_of(feature.name, feature.check, remembered)
        if reason is None:
            passed.append(feature.name)
        elif fields[field] == "on":
            raise BadInput(
                f"field {field} is 'on' but {feature.name} fail here: {reason}; set {field}=auto or {field}=off"
            )
        else:
            refused.append(f"{feature.name}: {reason}")
            instead += f"; {feature.instead}"
            device = replace(device, **feature.without)
    if mesh.size > 1:
        name = f"all-reduce and reduce-scatter over {mesh.size} devices"
        if reason := failure_of(name, partial(preflight_checks.collectives_error, mesh)):
            raise BadInput(f"{name}: {reason}; see NCCL_DEBUG=INFO, or use one device (CUDA_VISIBLE_DEVICES=0)")
        passed.append(name)
    if refused:
        said = f"preflight: {'; '.join(refused)}; attention by {device.attention}{instead}"
        console.print(said, markup=False, soft_wrap=True)
    remembered.write()
    return Preflight(device, tuple(passed), tuple(refused), fields.get("OWN_KERNELS") == "on")


def working_attention(recipe: Recipe, device: Device, remembered: "PassedChecks") -> Preflight:
    """Return ``device`` with the first of its attention backends that computes what it should.

    Raises :class:`BadInput` when none does.
    """
    width = head_width(recipe) or 128
    packed = has_document_masks(recipe)
    backends: Sequence[str] = (device.attention, *device.fallbacks)
    refused: list[str] = []
    for used, backend in enumerate(backends, start=1):
        # Evaluation's documents may be as long as its rows, so that cuDNN has to do both.
        kinds = [False, True] if backend == "cudnn" and has_bounded_documents(recipe) else [False]
        names, reason = [], None
        for bounded in kinds:
            kind = "packed, a longest document" if bounded else "packed" if packed else "causal"
            names.append(f"attention {backend}, {kind}, heads of {width}")
            check = partial(preflight_checks.attention_error, backend, width, packed, bounded)
            reason = reason or failure_of(names[-1], check, remembered)
        if reason is None:
            device = replace(device, attention=backend, fallbacks=tuple(backends[used:]))
            return Preflight(device, tuple(names), tuple(refused))
        refused.append(f"attention {backend}: {reason}")
    what = "--" if device.asked else "no attention backend works on these devices: "  # --attention NAME: reason
    raise BadInput(
        f"{what}{'; '.join(refused)}; update the driver, JAX or cuDNN, choose another --attention, or give "
        "--no-preflight to run without this check"
    )


def failure_of(name: str, check: Callable[[], str | None], remembered: "PassedChecks | None" = None) -> str | None:
    """Return why ``check`` failed on any process; None where it passed on all, now or in an earlier run."""
    if remembered and all(gather(f"remembered: {name}", name in remembered.passed)):
        return None
    try:
        reason = check()
    except Exception as error:  # whatever a library raises, its message is the reason
        reason = f"{type(error).__name__}: {first_line(error)}"
    first = next((text for text in gather(f"checked: {name}", reason) if text), None)
    if first is None and remembered:
        remembered.passed.add(name)
    return first


class PassedChecks:
    """What passed in earlier runs on such devices with these versions of driver and libraries."""

    def __init__(self, mesh: Mesh) -> None:
        key = hashlib.sha256(json.dumps(versions(mesh)).encode()).hexdigest()[:16]
        self._place = Path("preflight", f"{key}.json")
        try:
            self._before = set(read_json(cache_folder() / self._place))
        except (OSError, ValueError, TypeError, BadInput):
            self._before = set()
        self.passed = set(self._before)

    def write(self) -> None:
        """Keep what passed; a cache folder that cannot be written is no reason to stop."""
        if self.passed != self._before:
            with suppress(OSError, BadInput):
                path = cache_folder() / self._place
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, json.dumps(sorted(self.passed)))


def versions(mesh: Mesh) -> list[str]:
    """What the outcome depends on: kind of device, driver, packages whose kernels are checked, our calls of them, XLA's
    options."""
    first = mesh.devices.flat[0]
    options = json.dumps(options_for(first.platform), sort_keys=True)
    driver = Path("/proc/driver/nvidia/version")
    found = [first.device_kind, str(getattr(first.client, "platform_version", ""))]
    found.append(driver.read_text().splitlines()[0] if driver.is_file() else "")
    found.append(str(loaded_cudnn()))
    packages = "jax", "jaxlib", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "fa4-jax"
    # Not imported: a JAX may lack what they import, and few runs want all.
    kernels = Path(attention_backends.__file__).parent
    callers = (kernels.parent / f"{name}.py" for name in ("attention", "fp8", "heads", "positions"))
    sources = [path.read_text() for path in (*sorted(kernels.glob("*.py")), *callers, Path(preflight_checks.__file__))]
    return found + [installed_version(package) or "" for package in packages] + sources + [options]


def compile_or_fall_back(
    recipe: Recipe,
    mesh: Mesh,
    layout: str,
    micro_batch: int | None,
    rows: int,
    checked: Preflight,
    console: Console,
) -> tuple[Program, Preflight]:
    """Compile the run's program. If that fails at the real shapes, first drop own kernels, then try the next backend.

    All processes use the same backend, and none continues before all have compiled: gloo collectives time out after
    30 s. Raises :class:`BadInput` for a backend that was asked for, and what
    :func:`compile_program` raises.
    """
    while True:
        device = checked.device
        program, failure, error = None, None, None
        with waiting(console, "compiling"):
            try:
                program = compile_program(recipe, mesh, layout, micro_batch, rows, device)
            except (Refused, jax.errors.JaxRuntimeError) as caught:
                if (device.attention == "xla" and not device.own_kernels) or out_of_memory(caught):
                    raise
                error, failure = caught, first_line(caught)
        tried = f"compiled with {device.attention}, own kernels {device.own_kernels}"
        reason = next((text for text in gather(tried, failure) if text), None)
        if program and reason is None:
            return program, checked
        if device.own_kernels:
            if checked.own_kernels_asked:
                raise BadInput(
                    f"field OWN_KERNELS is 'on' but the step cannot be compiled with own kernels ({reason}); set "
                    "OWN_KERNELS=auto or OWN_KERNELS=off"
                ) from error
            others = tuple(name for name in checked.checks if name != "own kernels")
            refused = f"own kernels: the step cannot be compiled with them ({reason})"
            checked = Preflight(replace(device, own_kernels=False), others, (*checked.refused, refused))
            console.print(f"{refused}; {OPTIONAL_FEATURES['OWN_KERNELS'].instead}", markup=False, soft_wrap=True)
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
            rest = working_attention(recipe, device, remembered := PassedChecks(mesh))
            remembered.write()
            others = tuple(name for name in checked.checks if not name.startswith("attention "))
            checked = Preflight(rest.device, rest.checks + others, checked.refused + rest.refused)
        said = "; ".join(checked.refused[checked.refused.index(refused) :])
        console.print(f"{said}; attention by {checked.device.attention}", markup=False, soft_wrap=True)


def count_kernels(program: Program, checked: Preflight, fp8: str | None, console: Console) -> Preflight:
    """Return ``checked`` with what the compiled steps call; say so where FP8 matmuls should be among it and are not.

    ``fp8`` is the recipe's field. XLA may multiply in bf16 what was to be multiplied in FP8; the result differs by
    rounding, so that no check of numbers shows it. Raises :class:`BadInput` then if the field says ``on``.
    """
    found = [custom_calls(step) for steps in program.steps for step in steps if isinstance(step, jax.stages.Compiled)]
    if not found:  # without jit
        return checked
    checked = replace(checked, calls=found[-1])
    without = sum(FP8_CALL not in calls for calls in found)
    if checked.device.fp8 != "native" or fp8 not in ("auto", "on") or not without:
        return checked
    lost = f"XLA compiled {without} of {len(found)} training programs without an FP8 matmul"
    flags = f"; XLA_FLAGS is {os.environ['XLA_FLAGS']!r}" if os.environ.get("XLA_FLAGS") else ""
    if fp8 == "on":
        raise BadInput(f"field FP8 is 'on' but {lost}{flags}; set FP8=auto or FP8=off")
    console.print(f"note: {lost}: no faster than the compute dtype{flags}", markup=False, soft_wrap=True)
    return replace(checked, device=replace(checked.device, fp8="emulated"))
