"""Check attention, FP8, custom kernels and collectives before the clock; fall back to the next
backend where one fails.

A kernel can be refused when its plan is built, or be wrong in one version of a library: both are
seen here, on a small example, and the run takes the next backend. The examples are in
:mod:`jspeed.kernels.preflight.checks`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from rich.console import Console

from jspeed.base.compiler import FP8_CALL, custom_calls, out_of_memory
from jspeed.base.processes import gather
from jspeed.errors import BadInput, first_line, type_and_line
from jspeed.kernels.preflight import checks
from jspeed.model.custom_kernels import Refused
from jspeed.recipe import Recipe
from jspeed.run.compute.checked import Build, with_calls
from jspeed.run.compute.device import (
    Device,
    Placement,
    attending_of,
    takes,
)
from jspeed.run.compute.program import Program
from jspeed.run.console import waiting


class Feature(NamedTuple):
    """A feature that a device may have: the recipe's field for it, its name, its checks by theirs,
    the device's settings without it, and what is used instead."""

    field: str
    name: str
    checks: Mapping[str, Callable[[], str | None]]
    without: Callable[[Device], dict[str, Any]]
    instead: str


def preflight(recipe: Recipe, placement: Placement, console: Console) -> Placement:
    """Return ``placement`` with what of its device works, in the order of its ``attention`` and
    ``fallbacks``.

    Where there is nothing to choose between (a CPU), nothing is checked. All processes must call
    this and agree. Raises :class:`BadInput` when no backend works, when what was asked for
    (``--attention``, ``FP8=on``, ``OWN_KERNELS=on``) does not, or when a collective returns a wrong
    sum.
    """
    mesh, device, asked = placement.mesh, placement.device, placement.device.asked
    of_field = {"FP8": asked.fp8, "OWN_KERNELS": asked.custom_kernels}
    native = device.fp8 == "native" and takes(asked.fp8)
    own = device.custom_kernels and takes(asked.custom_kernels)
    if device.platform == "cpu" and device.attention == "xla" and not (native or own):
        return placement
    result = working_attention(recipe, placement)
    passed, refused, instead = [*result.device.checks], [*result.device.refused], ""
    for feature in [
        *[fp8_matmuls()] * native,
        *(custom_kernels(recipe, result.device) if own else ()),
    ]:
        reasons = (failure_of(name, check) for name, check in feature.checks.items())
        reason = next((text for text in reasons if text), None)
        if reason is None:
            passed += feature.checks
        elif of_field[feature.field] == "on":
            raise BadInput(
                f"field {feature.field} is 'on' but the preflight refuses {feature.name}: {reason};"
                f" set {feature.field}=auto or {feature.field}=off"
            )
        else:
            refused.append(f"{feature.name}: {reason}")
            instead += f"; {feature.instead}"
            result = result.with_device(**feature.without(result.device))
    if mesh.size > 1:
        name = f"all-reduce and reduce-scatter over {mesh.size} devices"
        if reason := failure_of(name, partial(checks.collectives_error, mesh)):
            raise BadInput(
                f"{name}: {reason}; see NCCL_DEBUG=INFO, or use one device (CUDA_VISIBLE_DEVICES=0)"
            )
        passed.append(name)
    if refused:
        said = f"preflight: {'; '.join(refused)}; attention by {result.device.attention}{instead}"
        console.print(said, markup=False, soft_wrap=True)
    return result.with_device(checks=tuple(passed), refused=tuple(refused))


def fp8_matmuls() -> Feature:
    """FP8 on tensor cores."""
    its = {"FP8 matmuls": checks.fp8_error}
    instead = "matmuls in the compute dtype instead of FP8"
    return Feature("FP8", "FP8 matmuls", its, lambda _: {"fp8": "missing"}, instead)


def custom_kernels(recipe: Recipe, device: Device) -> list[Feature]:
    """The custom kernels of ``device``, each by itself."""
    found, asks = [], attending_of(recipe)
    for kernel in sorted(device.custom_kernels):
        name = f"custom kernel {kernel}"
        its = {name: partial(checks.custom_kernel_error, kernel)}
        if kernel == "queries and keys" and device.attention == "cudnn" and asks.bounded:
            width = asks.width or 128
            check = partial(checks.attention_error, "cudnn", width, packed=True, doc_tagged=True)
            its[f"attention cudnn, packed, documents tagged, heads of {width}"] = check
        found.append(
            Feature("OWN_KERNELS", name, its, partial(_without, kernel), f"XLA's instead of {name}")
        )
    return found


def _without(kernel: str, device: Device) -> dict[str, Any]:
    return {"custom_kernels": device.custom_kernels - {kernel}}


def working_attention(recipe: Recipe, before: Placement) -> Placement:
    """Return ``before`` with the first of its device's attention backends that computes what it
    should, checked.

    Raises :class:`BadInput` when none does.
    """
    packed, bounded, width = attending_of(recipe)
    width = width or 128
    backends: Sequence[str] = (before.device.attention, *before.device.fallbacks)
    others = tuple(name for name in before.device.checks if not name.startswith("attention "))
    refused: list[str] = []
    for used, backend in enumerate(backends, start=1):
        kinds: dict[str, dict[str, bool]] = {"packed" if packed else "causal": {}}
        # Evaluation's documents may be as long as its rows, so that cuDNN has to do both.
        if backend == "cudnn" and bounded:
            kinds["packed, a longest document"] = {"bounded": True}
        names, reason = [], None
        for kind, how in kinds.items():
            names.append(f"attention {backend}, {kind}, heads of {width}")
            check = partial(checks.attention_error, backend, width, packed, **how)
            reason = reason or failure_of(names[-1], check)
        if reason is None:
            return before.with_device(
                attention=backend,
                fallbacks=tuple(backends[used:]),
                checks=(*names, *others),
                refused=(*before.device.refused, *refused),
            )
        refused.append(f"attention {backend}: {reason}")
    # --attention NAME: reason
    what = (
        "--" if before.device.asked.attention else "no attention backend works on these devices: "
    )
    raise BadInput(
        f"{what}{'; '.join(refused)}; update the driver, JAX or cuDNN, choose another --attention,"
        " or give --no-preflight to run without this check"
    )


def failure_of(name: str, check: Callable[[], str | None]) -> str | None:
    """Return why ``check`` failed on any process; None where it passed on all."""
    try:
        reason = check()
    except Exception as error:  # whatever a library raises, its message is the reason
        reason = type_and_line(error)
    return next((text for text in gather(f"checked: {name}", reason) if text), None)


def compile_or_fall_back(
    recipe: Recipe, placement: Placement, console: Console, build: Build
) -> tuple[Program, Placement]:
    """Make the run's program by ``build``. If that fails at the real shapes, drop custom kernels,
    then try the next backend. What it calls is counted (:func:`count_kernels`).

    All processes use the same backend, and none continues before all have compiled: gloo
    collectives time out after 30 s. Raises :class:`BadInput` for a backend or custom kernels that
    were asked for, and what ``build`` raises.
    """
    while True:
        device = placement.device
        program, failure, error = None, None, None
        with waiting(console, "compiling"):
            try:
                program = build(placement)
            except (Refused, jax.errors.JaxRuntimeError) as caught:
                if (device.attention == "xla" and not device.custom_kernels) or out_of_memory(
                    caught
                ):
                    raise
                error, failure = caught, first_line(caught)
        tried = (
            f"compiled with {device.attention}, custom kernels"
            f" {', '.join(sorted(device.custom_kernels)) or 'none'}"
        )
        reason = next((text for text in gather(tried, failure) if text), None)
        if program and reason is None:
            return program, count_kernels(program, placement, console)
        own = bool(device.custom_kernels)
        check_may_drop(device, reason, error)
        refused = (
            f"{'custom kernels' if own else f'attention {device.attention}'}: the step cannot be"
            f" compiled with {'them' if own else 'it'} ({reason})"
        )
        placement = with_less(recipe, placement, refused)
        all_refused, attention = placement.device.refused, placement.device.attention
        said = "; ".join(all_refused[all_refused.index(refused) :])
        instead = "XLA's instead of custom kernels" if own else f"attention by {attention}"
        console.print(f"{said}; {instead}", markup=False, soft_wrap=True)


def check_may_drop(device: Device, reason: str | None, error: Exception | None) -> None:
    """Raise :class:`BadInput`, for a ``reason``, where custom kernels or a backend were asked
    for."""
    if device.custom_kernels and device.asked.custom_kernels == "on":
        raise BadInput(
            "field OWN_KERNELS is 'on' but the step cannot be compiled with custom kernels"
            f" ({reason}); set OWN_KERNELS=auto or OWN_KERNELS=off"
        ) from error
    if not device.custom_kernels and not device.fallbacks:
        raise BadInput(
            f"--attention {device.attention}: the step cannot be compiled with it ({reason});"
            " choose another one, or leave the flag out"
        ) from error


def with_less(recipe: Recipe, placement: Placement, refused: str) -> Placement:
    """Return ``placement`` without custom kernels, or if there are none with the next backend that
    works; ``refused`` says why."""
    device, own = placement.device, bool(placement.device.custom_kernels)
    dropped = "custom kernel" if own else f"attention {device.attention}"
    less: dict[str, Any] = {"custom_kernels": frozenset()}
    if not own:
        less = {"attention": device.fallbacks[0], "fallbacks": device.fallbacks[1:]}
    placement = placement.with_device(
        checks=tuple(name for name in device.checks if not name.startswith(dropped)),
        refused=(*device.refused, refused),
        **less,
    )
    again = device.checks and not own  # not with --no-preflight
    return working_attention(recipe, placement) if again else placement


def count_kernels(program: Program, placement: Placement, console: Console) -> Placement:
    """Return ``placement`` with what the compiled steps call; say so where FP8 matmuls should be
    among it and are not.

    XLA may multiply in bf16 what was to be multiplied in FP8; the result differs by rounding, so
    that no check of numbers shows it. Raises :class:`BadInput` then if the recipe's FP8 is ``on``.
    """
    placement, fp8 = with_calls(program, placement), placement.device.asked.fp8
    calls = [custom_calls(step) for step in program.compiled]  # none without jit
    without = sum(FP8_CALL not in each for each in calls)
    if placement.device.fp8 != "native" or not takes(fp8) or not without:
        return placement
    lost = f"XLA compiled {without} of {len(calls)} training programs without an FP8 matmul"
    flags = f"; XLA_FLAGS is {os.environ['XLA_FLAGS']!r}" if os.environ.get("XLA_FLAGS") else ""
    if fp8 == "on":
        raise BadInput(f"field FP8 is 'on' but {lost}{flags}; set FP8=auto or FP8=off")
    console.print(
        f"note: {lost}: no faster than the compute dtype{flags}", markup=False, soft_wrap=True
    )
    refused = (*placement.device.refused, f"FP8 matmuls: {lost}{flags}")
    return placement.with_device(fp8="emulated", refused=refused)
