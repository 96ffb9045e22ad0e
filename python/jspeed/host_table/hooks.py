"""What this room adds to a run: tables in the host's memory."""

from dataclasses import replace

from jax.sharding import Mesh

from jspeed.recipe import Recipe
from jspeed.run.compute.host_tables import HostTables
from jspeed.run.hooks import Hooks


def tables(recipe: Recipe, mesh: Mesh) -> HostTables:
    """Make the tables of ``recipe.on_host``, or this process's share of them, for ``mesh``."""
    from jspeed.host_table.in_run import TablesOfRun

    return TablesOfRun(recipe, mesh)


def add(hooks: Hooks) -> Hooks:
    """Return ``hooks`` with this room's."""
    return replace(hooks, host_tables=tables)
