"""A CPU's gradients of weights are matmuls of two axes, with the numbers of JAX's own."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from tests.recipes.golden import small
from tests.run.compute.steps import mesh_of

from jspeed.run.compute import program
from jspeed.run.compute.device import Placement, device_of
from jspeed.run.compute.flat_dots import flattened

TWO_AXES = "contracting_dims = [0, 1] x [0, 1]"


def test_loops_and_calls_are_flattened_and_compute_the_same():
    draw = np.random.default_rng(0).standard_normal
    w_DF, x_LBTD = draw((6, 5)).astype("f"), draw((3, 4, 7, 6)).astype("f")

    def loss(w_DF, x_BTD):
        scores_BTT = jnp.einsum("btd,bsd->bts", x_BTD, x_BTD)  # has a batch axis: stays as it is
        y_BTF = jax.jit(jnp.matmul)(scores_BTT @ x_BTD, w_DF)
        return jnp.sum(jax.nn.silu(y_BTF) ** 2)

    def grads(w_DF, x_LBTD):
        first = jax.grad(loss)(w_DF, x_LBTD[0])
        return lax.scan(lambda sum_, x: (sum_ + jax.grad(loss)(w_DF, x), None), first, x_LBTD)[0]

    traced = jax.make_jaxpr(grads)(w_DF, x_LBTD)
    flat = jaxpr_as_fun(flattened(traced))
    texts = [jax.jit(f).lower(w_DF, x_LBTD).as_text() for f in (grads, flat)]
    assert [TWO_AXES in text for text in texts] == [True, False]
    assert "batching_dims = [0] x [0]" in texts[1]
    np.testing.assert_allclose(flat(w_DF, x_LBTD)[0], grads(w_DF, x_LBTD), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("platform", "left"), [("cpu", False), ("cuda", True)])
def test_only_a_step_on_cpus_is_flattened(platform, left):
    recipe, mesh = small("track3"), mesh_of(1)
    device = replace(device_of(mesh), platform=platform)
    step = program.trace_step(recipe, recipe.stages[0], Placement(mesh, "zero1", device), 2, 0)
    assert (TWO_AXES in step.lower().as_text()) == left
