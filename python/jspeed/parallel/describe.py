"""Layouts in words and pictures: how each parameter is sharded, and which devices hold each tile of
an array."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspeed.errors import BadInput
from jspeed.parallel.layout import shard
from jspeed.recipe import Recipe, leaves


def describe_layout(
    recipe: Recipe, layout: str, mesh: Mesh
) -> Iterator[tuple[str, str, str, str, int, str]]:
    """Yield (name, shape, sharding, local shape, bytes on a device, why not sharded further) of
    every parameter."""
    for path, spec in leaves(recipe.parameters):
        dims, why = shard(spec, layout, mesh)
        local = NamedSharding(mesh, PartitionSpec(*dims)).shard_shape(spec.shape)
        cut = (
            " ".join(f"{axis}/{over}" for axis, over in zip(spec.axes, dims, strict=False) if over)
            or "whole"
        )
        size = math.prod(local) * jax.numpy.dtype(spec.dtype).itemsize
        yield path, "x".join(map(str, spec.shape)), cut, "x".join(map(str, local)), size, why


def tiles(shape: tuple[int, ...], sharding: NamedSharding) -> list[list[str]]:
    """Return which devices hold each tile of an array: lines and columns of ids, ``0,4`` where two
    hold the same.

    Lines are the first sharded dimension and columns the last one, or there is one line. Raises
    :class:`BadInput` where more than two are sharded.
    """
    where: dict[tuple[int, ...], list[int]] = {}
    devices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in devices.items():
        where.setdefault(tuple(part.start or 0 for part in index), []).append(device.id)
    starts = [sorted({start[dim] for start in where}) for dim in range(len(shape))]
    dims = [dim for dim, found in enumerate(starts) if len(found) > 1]
    if len(dims) > 2:
        raise BadInput(
            f"an array of shape {shape} is sharded along {len(dims)} dimensions; at most 2 can be"
            " drawn"
        )
    first, last = ([None, None] + dims)[-2:]

    def cell(line: int, column: int) -> str:
        start = tuple(
            line if dim == first else column if dim == last else 0 for dim in range(len(shape))
        )
        return ",".join(map(str, sorted(where[start])))

    columns = starts[last] if last is not None else [0]
    return [
        [cell(line, column) for column in columns]
        for line in (starts[first] if first is not None else [0])
    ]
