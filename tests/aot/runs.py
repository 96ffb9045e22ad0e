"""Helper: the programs of a run at full size, compiled exactly as a run on these devices compiles
them."""

from jax.sharding import Mesh

from jspeed.run.compute import program
from jspeed.run.compute.device import Device, device_of
from jspeed.run.compute.division import Attempt, place
from jspeed.run.find_recipe import LoadedRecipe, find

MEMORY = int(0.75 * 85.0e9)  # bytes of an H100 that JAX takes


def device_for(found: LoadedRecipe, mesh: Mesh) -> Device:
    """What a run of the recipe takes the devices of ``mesh`` for, before its preflight."""
    return device_of(mesh, memory=MEMORY, recipe=found.recipe, fields=found.fields)


def step_of_a_run(mesh: Mesh, name: str, number: int = -1, phase: int = -1) -> Attempt:
    """The step of a stage, by its number, whose number is ``phase`` modulo the recipe's period."""
    found = find(name)
    return program.fit(
        found.recipe, place(found.recipe, mesh, "zero1", device_for(found, mesh)), number, phase
    )
