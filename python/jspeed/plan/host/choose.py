"""Where a plan has tables that are updated row by row: on the devices, or in the host's memory."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jspeed.errors import BadInput
from jspeed.plan.compile import TargetPlacement
from jspeed.plan.host.cost import Host, buffer_bytes, host_of, row_bytes, table_bytes
from jspeed.plan.schema import HostMemory
from jspeed.plan.target import Cluster
from jspeed.recipe import Recipe
from jspeed.run.compute.host_tables import SHARES, problem, tables_on_host
from jspeed.run.compute.program import check_state_fits
from jspeed.run.find_recipe import LoadedRecipe
from jspeed.run.options import check_place


def choose(
    loaded: LoadedRecipe,
    cluster: Cluster,
    asked: str | None,
    placed: Callable[[Recipe], TargetPlacement],
    table: str | None = None,
) -> tuple[LoadedRecipe, TargetPlacement]:
    """Return a recipe and where it is ``placed``, as a run chooses: its tables in the host's memory
    where its state does not fit the devices, or where ``table``, of --table, says. ``asked``: of
    the host, by --host.

    Raises :class:`BadInput` where tables fit neither, or not the place that was asked for.
    """
    check_place(table)
    recipe, placement = loaded.recipe, placed(loaded.recipe)
    host = host_of(cluster, asked)
    why_not = problem(recipe, given=False)
    if table == "host" and not host:
        why_not = why_not or f"nothing is known of the host of {cluster.target.name}; give --host"
    if table == "host" and why_not:
        raise BadInput(f"--table host: {why_not}")
    if table == "device":
        why_not = why_not or "--table device keeps tables there"
    if not why_not and host:
        error = "--table host" if table else refusal(recipe, placement, loaded.fields)
        if error:
            moved = tables_on_host(recipe)
            check_fits(moved, host, loaded.fields, error)
            return replace(loaded, recipe=moved), replace(placed(moved), host=host)
        why_not = f"the tables of {recipe.name} fit {cluster.name}"
    if asked:
        raise BadInput(f"--host {asked} would have no effect: {why_not}; leave it out")
    return loaded, placement


def refusal(recipe: Recipe, placement: TargetPlacement, fields: Mapping[str, Any]) -> str | None:
    """Return why the state of ``recipe`` does not fit the devices; None where it does."""
    try:
        check_state_fits(recipe, placement, fields)
    except BadInput as error:
        return str(error)
    return None


def share_of(recipe: Recipe, host: Host, changed: Mapping[str, int] | None = None) -> float | None:
    """Return the share of the rows of each table, as many as it has or as ``changed`` says, for
    which a host has memory; None for less than half."""
    sizes = {path: spec.shape[0] for path, spec in recipe.on_host.items()} | dict(changed or {})
    left = host.nodes * host.memory_bytes - buffer_bytes(recipe)
    whole = sum(size * row_bytes(recipe.on_host[path]) for path, size in sizes.items())
    return next((share for share in SHARES if share * whole <= left), None)


def check_fits(recipe: Recipe, host: Host, fields: Mapping[str, Any], error: str) -> None:
    """Raise :class:`BadInput`, after the ``error`` of the devices, where the host has no room for
    half of the rows; with a number of rows that fits whole, where one of the ``fields`` gives
    it."""
    if share_of(recipe, host):
        return
    tables = recipe.on_host
    largest = max(tables, key=lambda path: table_bytes(tables[path]))
    rows, less = tables[largest].shape[0], "use a host with more (--host memory=GB)"
    field = next((name for name, value in fields.items() if value == rows), None)
    while field and rows % 2 == 0 and rows > 2:
        rows //= 2
        if share_of(recipe, host, {largest: rows}) == 1:
            less += f", or --set {field}={rows}, which is another model"
            break
    half, buffers = (
        size / host.nodes / 1e9 for size in (table_bytes(tables[largest]) / 2, buffer_bytes(recipe))
    )
    raise BadInput(
        f"{error}; nor do its tables fit the host: half of the rows of {largest} take"
        f" {half:.1f} GB beside {buffers:.1f} GB of buffers, and it has"
        f" {host.memory_bytes / 1e9:.1f} GB; {less}"
    )


def memory_of(recipe: Recipe, host: Host, exposed: float) -> HostMemory:
    """Return what a plan says of the host; ``exposed``: the share of its seconds."""
    share = share_of(recipe, host)
    assert share
    return {
        "cores": host.cores,
        "memory_bytes": host.memory_bytes,
        "link_bytes_per_second": host.link_bytes_per_second,
        "table_bytes": sum(map(table_bytes, recipe.on_host.values())) // host.nodes,
        "share": share,
        "buffer_bytes": buffer_bytes(recipe) // host.nodes,
        "exposed": exposed,
    }
