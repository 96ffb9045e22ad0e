"""Gathered copies and accumulated gradients of parameters that are updated every few steps, carried
between steps.

Such parameters are all-gathered once, and their gradients reduce-scattered once, between two
updates. Until then each device carries the gathered copies, where they are not the parameter
itself, and its accumulated gradients, both in the compute dtype. Gradients of tables that are
``summed`` are fp32, and a step adds its rows to them in place. Of lazily updated tables it carries
the rows that the steps have named and their gradients, one list for each step (``Pending`` of
:mod:`jspeed.parallel.lazy_table`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate as running_sums
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jspeed.model.layers import Summed
from jspeed.parallel.layout import owned, partitions, sharded_dim
from jspeed.parallel.lazy_table import Pending, pending, sink_size
from jspeed.recipe import ParamSpec, Recipe, Stage, leaves, map_specs

Carry = dict[str, dict[str, Any]]


def zeros(recipe: Recipe, layout: str, mesh: Mesh | None) -> Carry:
    """Return zeros: gathered copies (``whole``), and gradients (``sums``) with a leading axis of
    devices.

    Empty if every parameter is updated at every step.
    """
    devices = mesh.shape["data"] if mesh else 1

    def copy(spec: ParamSpec, cut: PartitionSpec) -> Any:
        return jnp.zeros(spec.shape, spec.compute or spec.dtype)

    def gradients(spec: ParamSpec, cut: PartitionSpec) -> Any:
        shape = spec.shape
        if spec.lookups:
            size = waiting_rows(recipe, spec, cut, devices)
            grads = jnp.zeros((devices, size, shape[1]), spec.compute or spec.dtype)
            return [
                Pending(jnp.zeros((devices, size), jnp.int32), grads) for _ in range(spec.every - 1)
            ]
        if owned(spec, cut):
            shape = shape[0] // devices, *shape[1:]
        return jnp.zeros(
            (devices, *shape), jnp.float32 if spec.summed else spec.compute or spec.dtype
        )

    return _carry(recipe, layout, mesh, copy, gradients)


def specs(recipe: Recipe, layout: str, mesh: Mesh) -> Carry:
    """Return the :class:`PartitionSpec` of each array of :func:`zeros` on ``mesh``."""
    waiting: Any = Pending  # of arrays, here of their PartitionSpecs

    def copy(spec: ParamSpec, cut: PartitionSpec) -> Any:
        return cut if owned(spec, cut) else PartitionSpec()

    def gradients(spec: ParamSpec, cut: PartitionSpec) -> Any:
        each = PartitionSpec("data")
        return [waiting(each, each)] * (spec.every - 1) if spec.lookups else each

    return _carry(recipe, layout, mesh, copy, gradients)


def waiting_rows(recipe: Recipe, spec: ParamSpec, cut: PartitionSpec, devices: int) -> int:
    """Return how many rows of a lazily updated table one step may leave on a device."""
    owners = devices if owned(spec, cut) else 1
    ids = recipe.lanes * max(stage.lane_len for stage in recipe.stages) * spec.lookups // devices
    return sink_size(ids, spec.shape[0] // owners, owners)


def without_carry(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state without the carry, which the first step of a period does not read: what a
    checkpoint keeps."""
    return {name: part for name, part in state.items() if name != "carry"}


def load(recipe: Recipe, stage: Stage, phase: int, carried: Carry, whole: Any) -> Any:
    """Inside ``shard_map``: replace slow parameters by their carried copies, except in the first
    step after an update.

    Nothing then reads their all-gather, so XLA removes it. Summed tables get the sums of their
    gradients, then zeros.
    """
    kept = {
        path: old
        for path, old in carried.get("whole", {}).items()
        if _age(recipe, stage, phase, path) > 0
    }
    copies = by_path(recipe, whole) | kept
    for path, spec in leaves(recipe.parameters):
        if spec.summed:
            sums = jnp.zeros(spec.shape, jnp.float32)
            if carried and _age(recipe, stage, phase, path) > 0:
                sums = carried["sums"][path][0]
            copies[path] = Summed(copies[path], sums)
    return from_paths(recipe, copies)


def accumulate(
    recipe: Recipe, stage: Stage, phase: int, carried: Carry, whole: Any, grads: Any
) -> tuple[Any, Carry]:
    """Inside ``shard_map``: return (gradients, for slow parameters summed since their last update;
    the next carry).

    The carry of a parameter that a step updates means nothing; the next step does not read it. The
    gradient of a lazily updated table becomes the lists of all steps since its last update.
    """
    if not carried:
        return grads, carried
    sums, whole_carried = dict(carried["sums"]), dict(carried["whole"])
    copies, summed = by_path(recipe, whole), by_path(recipe, grads)
    for path, spec in leaves(recipe.parameters):
        if spec.every == 1 or spec.on_host:
            continue
        age, old = _age(recipe, stage, phase, path), sums[path]
        due = age == spec.updated_after(stage) - 1
        if spec.lookups:
            # the same in all steps of a stage
            size = min(len(summed[path].rows_R2), old[0].rows_R.shape[-1])
            new = pending(summed[path], copies[path].shape[0], size)
            summed[path] = [*(Pending(*(a[0, :size] for a in each)) for each in old[:age]), new]
            if not due:
                last = Pending(*(a.at[0, :size].set(b) for a, b in zip(old[age], new, strict=True)))
                sums[path] = [*old[:age], last, *old[age + 1 :]]
            continue
        copy = copies[path]
        # the sums before are in the gradient, and in its place whether or not the next step reads
        # it
        if spec.summed:
            copy, sums[path] = copy.tables_VND, summed[path][None]
            summed[path] = summed[path].astype(copy.dtype)
        else:
            summed[path] = old[0] + summed[path] if age else summed[path]
            sums[path] = old if due else summed[path][None]
        if not due and path in whole_carried:
            whole_carried[path] = copy
    return from_paths(recipe, summed), {"whole": whole_carried, "sums": sums}


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
    """Return what ``tree`` holds for each row of the parameter table, by its path."""
    parts: list[Any] = []
    map_specs(lambda _, part: parts.append(part), recipe.parameters, tree)
    return dict(zip((path for path, _ in leaves(recipe.parameters)), parts, strict=True))


def from_paths(recipe: Recipe, parts: dict[str, Any]) -> Any:
    """Undo :func:`by_path`."""
    return jax.tree.unflatten(
        jax.tree.structure(map_specs(lambda _: 0, recipe.parameters)), list(parts.values())
    )


def _age(recipe: Recipe, stage: Stage, phase: int, path: str) -> int:
    """Steps since a parameter's last update."""
    return phase % dict(leaves(recipe.parameters))[path].updated_after(stage)


def _carry(
    recipe: Recipe,
    layout: str,
    mesh: Mesh | None,
    whole: Callable[..., Any],
    sums: Callable[..., Any],
) -> Carry:
    """Return ``whole`` and ``sums`` of (spec, PartitionSpec) of each slow parameter, by its path;
    of one that all devices have in its compute dtype, no ``whole``: steps read the parameter."""
    cuts = dict(leaves(partitions(recipe.parameters, layout, mesh))) if mesh else {}
    every = leaves(recipe.parameters)
    slow = [
        (path, spec, cuts.get(path, PartitionSpec()))
        for path, spec in every
        if spec.every > 1 and not spec.on_host
    ]
    copies = {
        path: whole(spec, cut)
        for path, spec, cut in slow
        if not spec.lookups
        and (sharded_dim(cut) is not None or (spec.compute or spec.dtype) != spec.dtype)
    }
    return (
        {"whole": copies, "sums": {path: sums(spec, cut) for path, spec, cut in slow}}
        if slow
        else {}
    )
