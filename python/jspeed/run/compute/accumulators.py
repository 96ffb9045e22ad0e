"""Gathered copies and accumulated gradients of parameters that are updated every few steps, carried between steps.

Such parameters are all-gathered once, and their gradients reduce-scattered once, between two updates. Until then each
device carries the gathered copies and its accumulated gradients, both in the compute dtype.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jspeed.parallel.layout import owned, partitions
from jspeed.recipe import Context, ParamSpec, Recipe, leaves

Carry = dict[str, dict[str, Any]]


def zeros(recipe: Recipe, layout: str, mesh: Mesh | None) -> Carry:
    """Return zeros: gathered copies (``whole``), and gradients (``sums``) with a leading axis of devices.

    Empty if every parameter is updated at every step.
    """

    def whole(spec: ParamSpec, cut: PartitionSpec) -> jax.Array:
        return jnp.zeros(spec.shape, spec.compute or spec.dtype)

    def sums(spec: ParamSpec, cut: PartitionSpec) -> jax.Array:
        devices = mesh.shape["data"] if mesh else 1
        first, rest = spec.shape[:1], spec.shape[1:]
        first = tuple(size // devices for size in first) if owned(spec, cut) else first
        return jnp.zeros((devices, *first, *rest), spec.compute or spec.dtype)

    return _both(recipe, layout, mesh, whole, sums)


def specs(recipe: Recipe, layout: str, mesh: Mesh) -> Carry:
    """Return the :class:`PartitionSpec` of each array of :func:`zeros` on ``mesh``."""

    def whole(spec: ParamSpec, cut: PartitionSpec) -> PartitionSpec:
        return cut if owned(spec, cut) else PartitionSpec()

    return _both(recipe, layout, mesh, whole, lambda *_: PartitionSpec("data"))


def without(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state without the carry, which the first step of a period does not read: what a checkpoint keeps."""
    return {name: part for name, part in state.items() if name != "carry"}


def load(recipe: Recipe, ctx: Context, carried: Carry, whole: Any) -> Any:
    """Inside ``shard_map``: replace slow parameters by their carried copies, except in the first step after an update.

    Nothing then reads their all-gather, so XLA removes it.
    """
    if ctx.phase == 0:
        return whole
    return _merge(recipe, whole, carried["whole"], lambda new, old: old)


def accumulate(recipe: Recipe, ctx: Context, carried: Carry, whole: Any, grads: Any) -> tuple[Any, Carry]:
    """Inside ``shard_map``: return (gradients, for slow parameters summed since their last update; the next carry).

    A step that updates them returns the carry that it was given; the next step does not read it.
    """
    if ctx.phase > 0:
        grads = _merge(recipe, grads, carried["sums"], lambda new, old: old[0] + new)
    if ctx.phase == recipe.period - 1:
        return grads, carried
    slow = [path for path, spec in leaves(recipe.parameters) if spec.every > 1]
    found = [dict(zip(_paths(recipe), jax.tree.leaves(tree), strict=True)) for tree in (whole, grads)]
    return grads, {"whole": {p: found[0][p] for p in slow}, "sums": {p: found[1][p][None] for p in slow}}


def _both(recipe: Recipe, layout: str, mesh: Mesh | None, whole: Callable, sums: Callable) -> Carry:
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
