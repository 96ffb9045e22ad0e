"""Run every program once before the clock starts."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jspeed.base.compiler import out_of_memory
from jspeed.base.processes import gather
from jspeed.parallel.mesh import batch_lanes, put
from jspeed.recipe import Recipe
from jspeed.run.compute.program import Program
from jspeed.run.compute.step import State

WARM_UPS = 2  # of each executable; on a CPU one: the step after it takes no longer than later ones


def warm_up_fits(
    program: Program, state: State, recipe: Recipe, mesh: Mesh, *evaluated: Any
) -> bool:
    """Warm up; return False, on all processes, where one runs out of memory that no other waits for
    in a collective."""
    failure = None
    try:
        warm_up(program, state, recipe, mesh, *evaluated)
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        failure = str(error)
    return not any(gather("out of memory in warm-up", failure))


def warm_ups(mesh: Mesh) -> int:
    """Return how often every step is run before the clock starts."""
    return 1 if mesh.devices.flat[0].platform == "cpu" else WARM_UPS


def warm_up(program: Program, state: State, recipe: Recipe, mesh: Mesh, *evaluated: Any) -> None:
    """Run every step on dummy tokens, so that no one-time cost falls on the first one of the run.

    The first ``state`` is donated. ``evaluated``: what an evaluation takes besides parameters, if
    one is to be tried."""
    for stage, steps in zip(recipe.stages, program.calls or program.steps, strict=True):
        dummy = np.zeros((recipe.lanes, recipe.lane_words(stage.lane_len)), recipe.data.dtype)
        for step in warm_ups(mesh) * steps:
            batch = dummy if program.calls else put(dummy, batch_lanes(mesh))
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
    state = program.at_end(state)
    if evaluated:
        evaluations = [each for each in (program.evaluate, program.accuracy) if each]
        jax.block_until_ready([each(state["params"], *evaluated) for each in evaluations])
