"""Tables in the host's memory: what a run asks of them, and what its programs are given.

Such a table is no array of the state. A program is given the rows that its tokens name, as the host
has found them, and returns their gradients.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jspeed.base import processes
from jspeed.errors import BadInput
from jspeed.parallel.mesh import batch_rows
from jspeed.parallel.sparse_rows import Given
from jspeed.recipe import Recipe, map_specs
from jspeed.run.compute.accumulators import by_path, from_paths
from jspeed.run.compute.device import Placement

BUFFERS = 3  # of rows, in turn: at most two steps are in flight, and the third is gathered
# of its rows that a table has room for, the first that fits
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
Rows = dict[str, Any]
"""Rows of the tables on the host that tokens ``[B, T]`` name, ``[B, sparse_rows x T, D]``, by path;
or their gradients."""


class HostTables(Protocol):
    """The tables of a run that lie in the host's memory (``Recipe.on_host``)."""

    def serve(self, recipe: Recipe, placement: Any, program: Any) -> Any:
        """Return ``program`` with ``calls``, ``init`` and evaluations that give and take rows."""
        ...

    def rows(self, tokens_BT: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows that inputs name in each table, ``[B, ids, D]``."""
        ...

    def wait(self) -> None:
        """Wait until they have had every update of the steps that were called."""
        ...

    def save(self, folder: Path) -> None:
        """Write the tables into ``folder``, between two updates."""
        ...

    def load(self, folder: Path) -> None:
        """Put those that were saved in their place."""
        ...

    def whole(self) -> dict[str, np.ndarray]:
        """Return each by its path, as a parameter on the devices would be."""
        ...


def tables_on_host(recipe: Recipe) -> Recipe:
    """Return ``recipe`` with the tables that are updated lazily in the host's memory."""
    parameters = map_specs(lambda spec: replace(spec, on_host=spec.sparse), recipe.parameters)
    return replace(recipe, parameters=parameters)


def choose(
    recipe: Recipe,
    asked: str | None,
    given: bool,
    placed: Callable[[Recipe], Placement],
    make: Callable[[Recipe], HostTables],
) -> tuple[Recipe, Placement]:
    """Return ``recipe`` with its tables on the devices or on the host, as ``asked`` by --table, and
    where it is ``placed``; None: on the host where that refuses the devices and ``make`` finds
    memory for them.

    ``given``: the run starts from parameters that were given. Raises :class:`BadInput`.
    """
    why_not = problem(recipe, given)
    if asked != "host":
        try:
            return recipe, placed(recipe)
        except BadInput as error:
            if asked == "device" or why_not:
                raise
            try:
                make(tables_on_host(recipe))
            except BadInput as nor:
                raise BadInput(
                    f"{error}; nor do its tables fit this machine's memory: {nor}"
                ) from None
    elif why_not:
        raise BadInput(f"--table host: {why_not}")
    moved = tables_on_host(recipe)
    return moved, placed(moved)


def file_of(folder: Path, path: str) -> Path:
    """Return the file of the table at ``path`` of the parameters: rows that were ever updated."""
    return folder / f"{path.replace('/', '-')}.safetensors"


def place_of(recipe: Recipe) -> dict[str, str]:
    """Return what a checkpoint says of where such tables lie; nothing of a recipe without any."""
    if recipe.on_host:
        return {"table": "host"}
    return {"table": "device"} if recipe.sparse else {}


def opening(recipe: Recipe) -> list[tuple[str, str, str]]:
    """Return what a run says at its start of each table on the host: a word, what it is, size."""
    return [
        ("table", f"{path}, in this machine's memory", f"{2 * spec.size / 1e9:,.1f} GB")
        for path, spec in recipe.on_host.items()
    ]


def problem(recipe: Recipe, given: bool) -> str | None:
    """Return why the tables of ``recipe`` cannot lie in the host's memory, None where they can."""
    if not recipe.sparse:
        return f"recipe {recipe.name} has no table that is updated row by row; leave it out"
    if unnamed := [path for path in recipe.sparse if path not in recipe.named_rows]:
        return (
            f"named_rows of recipe {recipe.name} does not say which rows of {unnamed[0]} it reads"
        )
    if processes.count() > 1:
        return "one process serves all rows, and there are several; start one for all devices"
    if given:
        return "the rows start at zero, and --init-from gives others; leave one of them out"
    return None


def given_shapes(recipe: Recipe, rows: int, length: int, mesh: Mesh) -> tuple[Rows, ...]:
    """Return what a program is given of tables on the host, for ``rows`` of ``length`` tokens:
    nothing where there is none."""
    found = {
        path: jax.ShapeDtypeStruct(
            (rows, spec.sparse_rows * length, spec.shape[1]), spec.dtype, sharding=batch_rows(mesh)
        )
        for path, spec in recipe.on_host.items()
    }
    return (found,) if found else ()


def with_given(recipe: Recipe, params: Any, given: Rows) -> Any:
    """Return ``params`` with the rows that the host has ``given`` in the place of its tables."""
    if not given:
        return params
    of_host = {path: Given(rows) for path, rows in given.items()}
    return from_paths(recipe, by_path(recipe, params) | of_host)
