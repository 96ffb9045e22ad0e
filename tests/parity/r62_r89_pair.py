"""Build record 62's or 89's script and our recipe with equal parameters and data."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from jspeed.recipe import Recipe
from jspeed.run.find_recipe import find

from ..recipes.r62_r89_golden import Size, filled
from . import r62_r89_runs as runs
from .ours import Tree, batches
from .r62_r89_names import names
from .r62_r89_scripts import script
from .synthetic import documents, write_shards


class Pair:
    """The record's script (``script``), our recipe (``recipe``) and which of our elements are which
    of its.

    ``own_losses``: of each token's own target, one array for every lane the script's model has
    trained on.
    """

    def __init__(self, name: str, clone: str, folder: Path, size: Size, **more: Any):
        self.name, self.size, self.folder = name, size, folder
        self.script, self.own_losses = script(name, clone, folder, size, **more)
        fp8 = "off" if more.get("fp8") is None else "on"
        self.recipe: Recipe = find(name, [*size.sets(name), f"FP8={fp8}"], trace=False).recipe
        self.names = names(name, self.script.shapes(), self.recipe)
        if name == "r89":
            runs.give_signs(self.script, size.width)
        self.compiled = runs.Ours(self.recipe)

    def start(self, apart: bool = False) -> Tree:
        """Give both the same parameters; ``apart``: the embedding is not the head's."""
        params = filled(self.recipe)
        if apart:
            params["embed"] = filled(self.recipe, 1)["embed"]
        self.script.load(self.names.theirs(params))
        return params

    def mine(self, theirs: Any) -> Tree:
        """Parameters or gradients of the record as ours, without what is none of its."""
        return without_maxima(self.names.ours(theirs))

    def batches(self, split: str, count: int) -> list[np.ndarray]:
        """Our batches of the shards."""
        return batches(self.recipe, self.folder, split, count)


def without_maxima(tree: Tree) -> Tree:
    """Leave out what r89 keeps among its parameters for FP8."""
    return {name: value for name, value in tree.items() if name != "largest"}


def write_small_shards(folder: Path, size: Size) -> None:
    """Three training shards and one of validation, of documents that the records cut and of shorter
    ones."""
    rng = np.random.default_rng(0)
    write_shards(folder, "train", [documents(rng, size.bos, 60_000, 200) for _ in range(3)])
    write_shards(folder, "val", [documents(rng, size.bos, 9 * size.eval_len, 200)])


def with_wider_window(script: Any, layer_calls: slice) -> Any:
    """Make the record's attention see one key more in some of the calls of a forward pass."""
    flash = script["flash_attn_interface"]
    plain, calls = flash.flash_attn_varlen_func, [0]
    wide = set(range(10)[layer_calls])

    def attention(*args: Any, window_size: Any, **rest: Any) -> Any:
        more = calls[0] % 10 in wide
        calls[0] += 1
        return plain(*args, window_size=(window_size[0] + more, 0), **rest)

    flash.flash_attn_varlen_func = attention
    return lambda: setattr(flash, "flash_attn_varlen_func", plain)


def full_stages(recipe: Recipe, steps: tuple[int, ...]) -> list[Any]:
    """The recipe's first stages with other numbers of steps."""
    return [
        dataclasses.replace(stage, steps=n) for stage, n in zip(recipe.stages, steps, strict=False)
    ]
