"""What steps of several phases have in common is traced once, and kernels are lowered once."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.extend.core import jaxpr_as_fun
from tests.recipes.golden import small
from tests.run.compute.steps import mesh_of

from jspeed.base.jax_versions import lower_kernels_once, pretend_gpu
from jspeed.run.compute import program
from jspeed.run.compute.device import Placement, device_of


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_loss_is_traced_once_for_all_phases_of_a_stage(parts):
    recipe, calls = small("r29"), []
    slow = {"embed": replace(recipe.parameters["embed"], every=2)}

    def loss(*args):
        calls.append(1)
        return recipe.loss(*args)

    counted, mesh = replace(recipe, loss=loss, parameters=recipe.parameters | slow), mesh_of(1)

    def text(placement, phase, stage=0):
        stage = counted.stages[stage]
        return program.trace_step(counted, stage, placement, parts, phase).lower().as_text()

    fresh, kept = (Placement(mesh, "zero1", device_of(mesh)) for _ in range(2))
    texts = [text(kept, phase) for phase in (0, 1)]
    assert len(calls) == 1
    assert texts[0] != texts[1]
    assert texts[1] == text(fresh, 1)
    assert len(calls) == 2
    text(kept, 0, stage=-1)
    assert len(calls) == 3


def test_a_kernel_is_lowered_once_for_all_programs():
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    def twice(x):
        return pl.pallas_call(kernel, shape, compiler_params=triton.CompilerParams())(x)

    x, shape = jnp.zeros((8, 128)), jax.ShapeDtypeStruct((8, 128), jnp.float32)
    kept = lower_kernels_once()
    equations = jax.make_jaxpr(twice)(x)
    (jaxpr,) = (eqn.params["jaxpr"] for eqn in equations.eqns)

    def call(change):
        program = jax.jit(lambda x: change(jaxpr_as_fun(equations)(x)[0]))
        with pretend_gpu((9, 0), 91002):
            text = program.trace(x).lower(lowering_platforms=("cuda",)).as_text()
        (line,) = (line for line in text.splitlines() if "triton" in line)
        return line.partition("custom_call")[2]

    first = call(jnp.sin)
    ((_, attributes, _),) = kept[jaxpr].values()
    assert call(jnp.cos) == first
    attributes["marked"] = "true"
    assert "marked = true" in call(jnp.tan)
    assert len(kept[jaxpr]) == 1
