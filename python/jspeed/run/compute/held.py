"""What a step leaves for the next where some parameters are updated every few steps: whole copies and gradients.

Their gradients travel once between two updates and so do they: each device keeps the copies it gathered and the sum
of the gradients it computed, both in the compute dtype, until the step that updates them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jspeed.parallel.layout import owned, partitions
from jspeed.recipe import Context, ParamSpec, Recipe, leaves

Held = dict[str, dict[str, Any]]


def nothing(recipe: Recipe, layout: str, mesh: Mesh | None) -> Held:
    """Return zeros: ``whole`` copies, and ``sums`` with a leading axis of devices. Empty if nothing is slow."""

    def whole(spec: ParamSpec, cut: PartitionSpec) -> jax.Array:
        return jnp.zeros(spec.shape, spec.compute or spec.dtype)

    def sums(spec: ParamSpec, cut: PartitionSpec) -> jax.Array:
        devices = mesh.shape["data"] if mesh else 1
        first, rest = spec.shape[:1], spec.shape[1:]
        first = tuple(size // devices for size in first) if owned(spec, cut) else first
        return jnp.zeros((devices, *first, *rest), spec.compute or spec.dtype)

    return _both(recipe, layout, mesh, whole, sums)


def cuts(recipe: Recipe, layout: str, mesh: Mesh) -> Held:
    """Return how each array of :func:`nothing` lies on ``mesh``."""

    def whole(spec: ParamSpec, cut: PartitionSpec) -> PartitionSpec:
        return cut if owned(spec, cut) else PartitionSpec()

    return _both(recipe, layout, mesh, whole, lambda *_: PartitionSpec("data"))


def without(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state without what is held: all there is to keep where the next step is the first of a period."""
    return {name: part for name, part in state.items() if name != "held"}


def recall(recipe: Recipe, ctx: Context, held: Held, whole: Any) -> Any:
    """Inside ``shard_map``: take the slow parameters from where they are held, but in the first step after an update.

    What was gathered for them is then read by nobody, and so is not gathered.
    """
    if ctx.phase == 0:
        return whole
    return _merge(recipe, whole, held["whole"], lambda new, old: old)


def add(recipe: Recipe, ctx: Context, held: Held, whole: Any, grads: Any) -> tuple[Any, Held]:
    """Inside ``shard_map``: return (gradients, those of slow parameters of all steps since their update; what to hold).

    A step that updates them hands on what it was given, for nobody to read.
    """
    if ctx.phase > 0:
        grads = _merge(recipe, grads, held["sums"], lambda new, old: old[0] + new)
    if ctx.phase == recipe.period - 1:
        return grads, held
    slow = [path for path, spec in leaves(recipe.parameters) if spec.every > 1]
    found = [dict(zip(_paths(recipe), jax.tree.leaves(tree), strict=True)) for tree in (whole, grads)]
    return grads, {"whole": {p: found[0][p] for p in slow}, "sums": {p: found[1][p][None] for p in slow}}


def _both(recipe: Recipe, layout: str, mesh: Mesh | None, whole: Callable, sums: Callable) -> Held:
    every = leaves(recipe.parameters)
    lies = [PartitionSpec()] * len(every)
    if mesh:
        lies = jax.tree.leaves(
            partitions(recipe.parameters, layout, mesh), is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
    slow = [(path, spec, cut) for (path, spec), cut in zip(every, lies, strict=True) if spec.every > 1]
    if not slow:
        return {}
    return {
        "whole": {path: whole(spec, cut) for path, spec, cut in slow},
        "sums": {path: sums(spec, cut) for path, spec, cut in slow},
    }


def _merge(recipe: Recipe, tree: Any, kept: dict[str, jax.Array], join: Callable) -> Any:
    flat, structure = jax.tree.flatten(tree)
    merged = [join(new, kept[path]) if path in kept else new for path, new in zip(_paths(recipe), flat, strict=True)]
    return jax.tree.unflatten(structure, merged)


def _paths(recipe: Recipe) -> list[str]:
    return [path for path, _ in leaves(recipe.parameters)]
