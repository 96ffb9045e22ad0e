"""Recipe jspeed3: what it has besides r92."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jspeed import recipe as r
from jspeed.run.find_recipe import find

from ..toys import TOYS

SIZES = ["WIDTH=256", "HEADS=2", "MLP_WIDTH=256", "POINTER_WIDTH=16", "COMPUTE=bfloat16", "LANE_LENS=(16,32)"]


@pytest.mark.parametrize(("training", "has_them"), [(True, True), (True, False), (False, True)])
def test_the_pointer_is_an_own_kernel_in_training_where_a_device_has_them(training, has_them):
    """In the traced loss, at sizes that own kernels take; their numbers are in tests/model/kernels."""
    recipe = find("jspeed3", [*TOYS["jspeed3"], *SIZES]).recipe
    shape = partial(jax.ShapeDtypeStruct, (1, 32))
    params = {
        path: jax.ShapeDtypeStruct(spec.shape, spec.compute or jnp.float32) for path, spec in recipe.parameters.items()
    }
    ctx = r.Context(recipe.stages[1], training, fp8="missing", own_kernels=has_them)
    arguments = params, shape(jnp.int32), shape(jnp.int32), shape(jnp.float32)
    traced = str(jax.make_jaxpr(partial(recipe.loss, ctx=ctx))(*arguments))
    assert ("pointer_forward_16_window12" in traced) == (training and has_them)
