"""A recipe's step, run on virtual devices on made-up tokens."""

import functools

import jax
import numpy as np

from jspeed.parallel.mesh import batch_lanes, make_mesh
from jspeed.run.compute import accumulators, program, step
from jspeed.run.compute.device import Placement, device_of
from jspeed.run.compute.division import micro_batches
from jspeed.run.train import every_step


def mesh_of(count=0, **axes):
    """The first ``count`` devices along ``data``, or a mesh of ``axes``."""
    axes = axes or {"data": count}
    return make_mesh(axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])


def batches(recipe, count, seed=0):
    rng = np.random.default_rng(seed)
    lengths = [stage.lane_len for stage in recipe.stages for _ in range(stage.steps)]
    return [
        rng.integers(0, 257, size=(recipe.lanes, n + 1), dtype=np.uint16) for n in lengths[:count]
    ]


def start(recipe, mesh, layout="zero1", seed=1):
    _, shardings = program.state_shardings(recipe, layout, mesh)
    return jax.jit(lambda s: step.init_state(recipe, s, layout, mesh), out_shardings=shardings)(
        np.uint32(seed)
    )


def run(recipe, mesh, lanes_at_once, tokens, layout="zero1", seed=1, state=None, head_chunk=None):
    """Train on ``tokens`` through all stages, from ``state`` or the first one, and return (state,
    losses)."""
    state, losses = state or start(recipe, mesh, layout, seed), []
    at_once = [lanes_at_once and int(lanes_at_once * stage.lane_len) for stage in recipe.stages]
    numbers = [
        micro_batches(recipe, stage, mesh, device_of(mesh, micro_batch=n))
        for stage, n in zip(recipe.stages, at_once, strict=True)
    ]
    placement = Placement(mesh, layout, device_of(mesh), micro_batches=tuple(numbers))

    @functools.cache
    def fit(number, phase):
        if head_chunk is None:
            return program.fit(recipe, placement, number, phase)[0]
        stage = recipe.stages[number]
        return (
            program.trace_step(recipe, stage, placement, placement.parts[number], phase, head_chunk)
            .lower()
            .compile()
        )

    jobs = [
        [(number, accumulators.first_alike(recipe, stage, phase)) for phase in range(recipe.period)]
        for number, stage in enumerate(recipe.stages)
    ]
    for batch, (_, job) in zip(tokens, every_step(recipe.stages, jobs), strict=False):
        state, metrics = fit(*job)(state, jax.device_put(batch, batch_lanes(mesh)))
        losses.append(float(jax.block_until_ready(metrics["loss"])))
    return state, losses
