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
    devices = mesh.shape["data"] if mesh else 1

    def gradients(spec: ParamSpec, cut: PartitionSpec) -> jax.Array:
        shape = spec.shape
        if owned(spec, cut):
            shape = shape[0] // devices, *shape[1:]
        return jnp.zeros((devices, *shape), spec.compute or spec.dtype)

    slow = _slow(recipe, layout, mesh)
    return slow and {
        "whole": {path: jnp.zeros(spec.shape, spec.compute or spec.dtype) for path, (spec, _) in slow.items()},
        "sums": {path: gradients(spec, cut) for path, (spec, cut) in slow.items()},
    }


def specs(recipe: Recipe, layout: str, mesh: Mesh) -> Carry:
    """Return the :class:`PartitionSpec` of each array of :func:`zeros` on ``mesh``."""
    slow = _slow(recipe, layout, mesh)
    return slow and {
        "whole": {path: cut if owned(spec, cut) else PartitionSpec() for path, (spec, cut) in slow.items()},
        "sums": {path: PartitionSpec("data") for path in slow},
    }


def without(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state without the carry, which the first step of a period does not read: what a checkpoint keeps."""
    return {name: part for name, part in state.items() if name != "carry"}


def load(recipe: Recipe, ctx: Context, carried: Carry, whole: Any) -> Any:
    """Inside ``shard_map``: replace slow parameters by their carried copies, except in the first step after an update.

    Nothing then reads their all-gather, so XLA removes it.
    """
    if ctx.phase == 0:
        return whole
    return _merge(whole, carried["whole"], lambda new, old: old)


def accumulate(recipe: Recipe, ctx: Context, carried: Carry, whole: Any, grads: Any) -> tuple[Any, Carry]:
    """Inside ``shard_map``: return (gradients, for slow parameters summed since their last update; the next carry).

    A step that updates them returns the carry that it was given; the next step does not read it.
    """
    if ctx.phase > 0:
        grads = _merge(grads, carried["sums"], lambda new, old: old[0] + new)
    if ctx.phase == recipe.period - 1:
        return grads, carried
    slow = [path for path, spec in leaves(recipe.parameters) if spec.every > 1]
    copies, sums = dict(leaves(whole)), dict(leaves(grads))
    return grads, {"whole": {path: copies[path] for path in slow}, "sums": {path: sums[path][None] for path in slow}}


def _slow(recipe: Recipe, layout: str, mesh: Mesh | None) -> dict[str, Any]:
    """Return spec and PartitionSpec of each slow parameter by its path."""
    cuts = dict(leaves(partitions(recipe.parameters, layout, mesh))) if mesh else {}
    every = leaves(recipe.parameters)
    return {path: (spec, cuts.get(path, PartitionSpec())) for path, spec in every if spec.every > 1}


def _merge(tree: Any, kept: dict[str, jax.Array], join: Callable[[jax.Array, jax.Array], jax.Array]) -> Any:
    merged = [join(new, kept[path]) if path in kept else new for path, new in leaves(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), merged)
