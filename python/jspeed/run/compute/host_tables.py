"""Tables in the host's memory: what a run asks of them, and what its programs are given.

Such a table is no array of the state. A program is given the rows that its tokens name, as the host
has found them, and returns their gradients.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jspeed.errors import BadInput
from jspeed.parallel import sharded_table
from jspeed.parallel.mesh import LANE_AXES, batch_lanes, lane_shards
from jspeed.parallel.sharded_table import Slots, capacity, requests, return_gradients
from jspeed.parallel.sparse_rows import Given
from jspeed.recipe import ParamSpec, Recipe, map_specs
from jspeed.run.compute.accumulators import by_path, from_paths
from jspeed.run.compute.device import Placement

BUFFERS = 3  # of rows, in turn: at most two steps are in flight, and the third is gathered
# of its rows that a table has room for, the first that fits
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
Rows = dict[str, Any]
"""Rows of the tables on the host that tokens ``[B, T]`` name, ``[B, sparse_rows x T, D]``, by path;
or their gradients. Where several processes divide a table, :class:`Asked` of it."""


class Asked(NamedTuple):
    """What a program is given of a table whose rows several processes divide between their devices.

    ``ids_BI`` are the rows that tokens name; of each device's, ``rows_ORD`` are those that all
    devices ask it for, ``[owners, owners x room, D]``, cut over the devices by the first axis.
    """

    ids_BI: Any
    rows_ORD: Any


class HostTables(Protocol):
    """The tables of a run that lie in the host's memory (``Recipe.on_host``): of several processes,
    each has a share of the rows, and all call what is here together."""

    def serve(self, recipe: Recipe, placement: Any, program: Any) -> Any:
        """Return ``program`` with ``calls``, ``init`` and evaluations that give and take rows.

        Calls are given batches of all lanes, on the host.
        """
        ...

    def rows(self, tokens_BT: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows that inputs name in each table, ``[B, ids, D]``."""
        ...

    def wait(self) -> None:
        """Wait until they have had every update of the steps that were called."""
        ...

    def save(self, folder: Path) -> None:
        """Write the tables, or this process's share, into ``folder``, between two updates."""
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


def file_of(folder: Path, path: str, process: int = 0) -> Path:
    """Return the file of a process's share of the table at ``path`` of the parameters: rows that
    were ever updated."""
    share = f".{process}" if process else ""
    return folder / f"{path.replace('/', '-')}{share}.safetensors"


def files_of(folder: Path, path: str) -> list[Path]:
    """Return the files in ``folder`` of all shares of the table at ``path``."""
    found: list[Path] = []
    while (file := file_of(folder, path, len(found))).is_file():
        found.append(file)
    return found


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
    if given:
        return "the rows start at zero, and --init-from gives others; leave one of them out"
    return None


def owners_of(mesh: Mesh) -> int:
    """Return between how many devices the rows of a table are divided: 1 where one process has them
    all, and gives each device those of its lanes."""
    several = len({device.process_index for device in mesh.devices.flat}) > 1
    return lane_shards(mesh) if several else 1


def part_of(spec: ParamSpec, owners: int) -> int:
    """Return how many rows of a table one of its ``owners`` has, the last one maybe fewer."""
    return -(-spec.shape[0] // owners)


def rows_of_device(spec: ParamSpec, ids: int, owners: int) -> int:
    """Return how many rows of a table a device is given as its lanes name so many ``ids``."""
    return ids if owners == 1 else owners * capacity(ids, part_of(spec, owners), owners)


def given_shapes(recipe: Recipe, lanes: int, length: int, mesh: Mesh) -> tuple[Rows, ...]:
    """Return what a program is given of tables on the host, for ``lanes`` of ``length`` tokens:
    nothing where there is none."""
    owners = owners_of(mesh)

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=batch_lanes(mesh))

    def of_table(spec: ParamSpec) -> Any:
        ids, width = spec.sparse_rows * length, spec.shape[1]
        if owners == 1:
            return array(spec.dtype, lanes, ids, width)
        asked = rows_of_device(spec, lanes // owners * ids, owners)
        return Asked(array(jnp.int32, lanes, ids), array(spec.dtype, owners, asked, width))

    found = {path: of_table(spec) for path, spec in recipe.on_host.items()}
    return (found,) if found else ()


def delivered(recipe: Recipe, mesh: Mesh, given: Rows) -> tuple[Rows, dict[str, Slots]]:
    """Inside ``shard_map``: return the rows that a device's lanes name, ``[B, ids, D]``, and where
    they came from, if other devices have sent them."""
    owners = owners_of(mesh)
    if owners == 1:
        return given, {}
    rows, found = {}, {}
    for path, (ids_BI, rows_ORD) in given.items():
        part = part_of(recipe.on_host[path], owners)
        found[path], fits = requests(ids_BI.reshape(-1), part, owners)
        sent = rows_ORD.reshape(owners, -1, rows_ORD.shape[-1])
        rows_ND = sharded_table.delivered(sent, found[path], fits, _axes(mesh))
        rows[path] = rows_ND.reshape(*ids_BI.shape, -1)
    return rows, found


def returned(mesh: Mesh, gradients: Rows, slots: dict[str, Slots]) -> Rows:
    """Inside ``shard_map``: return the ``gradients`` of rows to those that have sent them: equal
    rows of a device summed in fp32, ``[1, owners x room, D]``."""

    def one(path: str, grads_BID: jax.Array) -> jax.Array:
        its = return_gradients(slots[path], grads_BID, grads_BID.dtype, _axes(mesh))
        return its.reshape(1, -1, its.shape[-1])

    return {path: one(path, its) for path, its in gradients.items()} if slots else gradients


def _axes(mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in LANE_AXES if axis in mesh.shape)


def with_given(recipe: Recipe, params: Any, given: Rows) -> Any:
    """Return ``params`` with the rows that the host has ``given`` in the place of its tables."""
    if not given:
        return params
    of_host = {path: Given(rows) for path, rows in given.items()}
    return from_paths(recipe, by_path(recipe, params) | of_host)
