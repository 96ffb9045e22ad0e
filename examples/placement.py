"""Sharding rules: shard parameters by their paths and sizes, on any nested dictionary of arrays.

jspeed itself names the axes of each parameter and cuts by these names (`speedrun.py --layout`,
`--show-layout`). Other code often goes by paths: a list of (pattern, axes) whose first match
decides. This is such a list done with care: an array is only asked about axes that it has, what
does not divide stays whole, what is small stays whole, and whatever no rule names is reported
instead of silently copied to every device.

    python examples/placement.py        # eight virtual CPU devices, a mesh of data=4, model=2
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Rule = tuple[str, tuple[str | None, ...]]
"""A regular expression that a slash-joined path must match whole, and the mesh axis of each
dimension of the array."""


class Placed(NamedTuple):
    """What a rule made of one array; ``why`` says what stayed whole and the reason, ``rule`` is
    None for no match."""

    path: str
    shape: tuple[int, ...]
    rule: str | None
    spec: PartitionSpec
    why: str


def place(tree: Any, rules: Sequence[Rule], mesh: Mesh, smallest: int = 0) -> list[Placed]:
    """Return where each array of ``tree`` lies, in pytree order; arrays of fewer than ``smallest``
    elements stay whole.

    Raises ValueError for an axis that the mesh has not, and for a rule that names it twice.
    """
    for pattern, axes in rules:
        named = [axis for axis in axes if axis]
        if unknown := set(named) - set(mesh.shape):
            raise ValueError(
                f"rule {pattern!r} names {unknown.pop()!r}; the mesh has {', '.join(mesh.shape)}"
            )
        if len(set(named)) < len(named):
            raise ValueError(
                f"rule {pattern!r} cuts two dimensions over one axis; name each axis once"
            )
    leaves, _ = jax.tree.flatten_with_path(tree)
    return [_placed(_path(path), leaf.shape, rules, mesh, smallest) for path, leaf in leaves]


def _placed(
    path: str, shape: tuple[int, ...], rules: Sequence[Rule], mesh: Mesh, smallest: int
) -> Placed:
    for pattern, axes in rules:
        if not re.fullmatch(pattern, path):
            continue
        if len(axes) != len(shape):
            return Placed(
                path, shape, pattern, PartitionSpec(), f"the rule is for {len(axes)} dimensions"
            )
        if math.prod(shape) < smallest:
            return Placed(path, shape, pattern, PartitionSpec(), f"fewer than {smallest} elements")
        fits = [
            axis if axis and size % mesh.shape[axis] == 0 else None
            for axis, size in zip(axes, shape, strict=True)
        ]
        asked = zip(axes, fits, shape, strict=True)
        odd = [f"{size} is no multiple of {axis}" for axis, fit, size in asked if axis != fit]
        return Placed(path, shape, pattern, PartitionSpec(*fits), ", ".join(odd))
    return Placed(path, shape, None, PartitionSpec(), "NO RULE")


def _path(path: Any) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def put(tree: Any, placed: Sequence[Placed], mesh: Mesh) -> Any:
    """Return ``tree`` with its arrays where ``placed`` says."""
    leaves, structure = jax.tree.flatten(tree)
    there = [
        jax.device_put(leaf, NamedSharding(mesh, one.spec))
        for leaf, one in zip(leaves, placed, strict=True)
    ]
    return jax.tree.unflatten(structure, there)


# Column, then row: queries, keys, values and `up` are cut by columns, what comes after them by
# rows, so that a block communicates twice.
RULES: list[Rule] = [
    (r"(embed|positions)", (None, "model")),
    (r"layers/\d+/(query|key|value|up)", (None, "model")),
    (r"layers/\d+/(out|down)", ("model", None)),
    (r"head", (None, "model")),
]


def parameters(
    layers: int = 4, width: int = 64, words: int = 28, positions: int = 32
) -> Mapping[str, Any]:
    """A small transformer's parameters: 27 arrays for four layers."""
    shapes = {name: (width, width) for name in ("query", "key", "value", "out")}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    tree = {"embed": (words, width), "positions": (positions, width), "head": (width, words)}
    tree |= {"layers": [dict(shapes) for _ in range(layers)]}
    return jax.tree.map(
        lambda shape: jax.numpy.ones(shape), tree, is_leaf=lambda x: isinstance(x, tuple)
    )


def main() -> None:
    """Print a plan, with one array that no rule names and one that is too small to cut."""
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tree = {**parameters(), "gain": jax.numpy.ones(64)}
    placed = place(tree, RULES, mesh, smallest=2048)
    arrays = jax.tree.leaves(put(tree, placed, mesh))
    for one, array in zip(placed, arrays, strict=True):
        local = array.addressable_shards[0].data
        print(
            f"{one.path:18} {one.shape!s:10} on {tuple(one.spec)!s:18} {local.nbytes / 1e3:7.2f} kB"
            f"  {one.why}"
        )
    unmatched = [one.path for one in placed if one.rule is None]
    print(f"{len(placed)} arrays, {len(unmatched)} without a rule: {', '.join(unmatched)}")


if __name__ == "__main__":
    main()
