"""Gathered copies and accumulated gradients of slow parameters, which are updated every few steps,
carried between steps. Without any, as in ``r29``, both are empty.

Slow parameters are all-gathered once, and their gradients reduce-scattered once, between two
updates. Until then each device carries the gathered copies, where they are not the parameter
itself, and its accumulated gradients, both in the compute dtype. Gradients of tables that are
``grad_accum_fp32`` are fp32, and a step adds its rows to them in place. Of sparse tables it
carries the rows that the steps have named and their gradients, one list for each step (``Pending``
of :mod:`jspeed.parallel.sparse_rows`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate as running_sums
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jspeed.parallel.kinds import kind_of
from jspeed.parallel.layout import owned, partitions
from jspeed.recipe import Recipe, Stage, leaves, map_specs

AccumulatorState = dict[str, dict[str, Any]]


def zeros(recipe: Recipe, layout: str, mesh: Mesh | None) -> AccumulatorState:
    """Return zeros: gathered copies (``whole``), and gradients (``sums``) with a leading axis of
    devices.

    Empty if every parameter is updated at every step.
    """
    devices = mesh.shape["data"] if mesh else 1
    most = recipe.lanes * max(stage.lane_len for stage in recipe.stages)
    return _state(
        recipe,
        layout,
        mesh,
        lambda kind, cut: jnp.zeros(kind.spec.shape, kind.dtype),
        lambda kind, cut: kind.zeros(cut, devices, most),
    )


def specs(recipe: Recipe, layout: str, mesh: Mesh) -> AccumulatorState:
    """Return the :class:`PartitionSpec` of each array of :func:`zeros` on ``mesh``."""
    return _state(
        recipe,
        layout,
        mesh,
        lambda kind, cut: cut if owned(kind.spec, cut) else PartitionSpec(),
        lambda kind, cut: kind.specs,
    )


def without_accumulators(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state without accumulators, which the first step of a period does not read: what a
    checkpoint keeps."""
    return {name: part for name, part in state.items() if name != "accumulators"}


def load(recipe: Recipe, stage: Stage, phase: int, held: AccumulatorState, whole: Any) -> Any:
    """Inside ``shard_map``: replace slow parameters by their carried copies, except in the first
    step after an update.

    Nothing then reads their all-gather, so XLA removes it. Fp32-accumulated tables get the sums of
    their gradients, then zeros.
    """
    kept = _held(recipe, stage, phase, held.get("whole", {}))
    sums = _held(recipe, stage, phase, held.get("sums", {}))
    copies = by_path(recipe, whole) | kept
    kinds = by_path(recipe, map_specs(kind_of, recipe.parameters))
    loaded = {path: kinds[path].loaded(copy, sums.get(path)) for path, copy in copies.items()}
    return from_paths(recipe, loaded)


def accumulate(
    recipe: Recipe, stage: Stage, phase: int, held: AccumulatorState, whole: Any, grads: Any
) -> tuple[Any, AccumulatorState]:
    """Inside ``shard_map``: return (gradients, for slow parameters summed since their last update;
    the next accumulators).

    After an update the accumulators of a parameter are stale; the next step does not read them. The
    gradient of a sparse table becomes the lists of all steps since its last update.
    """
    if not held:
        return grads, held
    sums, copies = dict(held["sums"]), dict(held["whole"])
    loaded, summed = by_path(recipe, whole), by_path(recipe, grads)
    for path, spec in leaves(recipe.parameters):
        kind = kind_of(spec)
        if not kind.accumulates:
            continue
        age = phase % spec.updated_after(stage)
        due = age == spec.updated_after(stage) - 1
        summed[path], sums[path] = kind.accumulated(
            loaded[path], sums[path], summed[path], age, due
        )
        if not due and path in copies:
            copies[path] = kind.copy_of(loaded[path])
    return from_paths(recipe, summed), {"whole": copies, "sums": sums}


def number_due(recipe: Recipe, stage: Stage, phase: int) -> int:
    """Return the number by which a step's updates are due: of the parameters whose ``every``
    divides it."""
    last = (phase + 1) % (stage.every or recipe.period) == 0
    return recipe.period if last else phase + 1


def first_alike(recipe: Recipe, stage: Stage, phase: int) -> int:
    """Return the first phase whose step is the same program as that of ``phase``: for every
    parameter it is as long since the last update, and the same ones are due."""
    own = updates(recipe, stage, phase)
    return next(n for n in range(phase + 1) if updates(recipe, stage, n) == own)


def updates(recipe: Recipe, stage: Stage, phase: int) -> tuple[tuple[int, bool], ...]:
    """Return for each parameter (steps since its last update, whether this step updates it)."""
    due = number_due(recipe, stage, phase)
    every = leaves(recipe.parameters)
    return tuple((phase % spec.updated_after(stage), due % spec.every == 0) for _, spec in every)


def steps_of(recipe: Recipe, stage: Stage, phase: int) -> list[int]:
    """Return the steps, from 0, of the program of ``phase`` in all stages that are ``stage`` but
    for their length."""
    phases = [
        n
        for n in range(recipe.period)
        if first_alike(recipe, stage, n) == first_alike(recipe, stage, phase)
    ]
    ends = zip(recipe.stages, running_sums(each.steps for each in recipe.stages), strict=True)
    spans = [
        range(end - each.steps, end)
        for each, end in ends
        if replace(each, steps=stage.steps) == stage
    ]
    return [step for span in spans for step in span if step % recipe.period in phases]


def by_path(recipe: Recipe, tree: Any) -> dict[str, Any]:
    """Return what ``tree`` holds for each ParamSpec, by its path."""
    parts: list[Any] = []
    map_specs(lambda _, part: parts.append(part), recipe.parameters, tree)
    return dict(zip((path for path, _ in leaves(recipe.parameters)), parts, strict=True))


def from_paths(recipe: Recipe, parts: dict[str, Any]) -> Any:
    """Undo :func:`by_path`."""
    return jax.tree.unflatten(
        jax.tree.structure(map_specs(lambda _: 0, recipe.parameters)), list(parts.values())
    )


def _held(recipe: Recipe, stage: Stage, phase: int, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the ``parts`` of parameters that no step has updated just before."""
    specs = dict(leaves(recipe.parameters))
    return {path: old for path, old in parts.items() if phase % specs[path].updated_after(stage)}


def _state(
    recipe: Recipe,
    layout: str,
    mesh: Mesh | None,
    whole: Callable[..., Any],
    sums: Callable[..., Any],
) -> AccumulatorState:
    """Return ``whole`` and ``sums`` of (kind, PartitionSpec) of each slow parameter, by its path;
    of one that all devices have in its compute dtype, no ``whole``: steps read the parameter."""
    cuts = dict(leaves(partitions(recipe.parameters, layout, mesh))) if mesh else {}
    kinds = ((path, kind_of(spec)) for path, spec in leaves(recipe.parameters))
    slow = [
        (path, kind, cuts.get(path, PartitionSpec())) for path, kind in kinds if kind.accumulates
    ]
    if not slow:
        return {}
    copies = {path: whole(kind, cut) for path, kind, cut in slow if kind.keeps_copy(cut)}
    return {"whole": copies, "sums": {path: sums(kind, cut) for path, kind, cut in slow}}
