"""What followed a context, at the sizes of jspeed3's longest step, compiled for an absent H100 but
not run."""

from functools import partial

import jax
import jax.numpy as jnp

from jspeed.base.compiler import options_for
from jspeed.plan import cost
from jspeed.recipes import jspeed3
from jspeed.retrieval import Matches
from jspeed.retrieval.inputs import number_of_cells, terms
from jspeed.speedrun.mudd import blend

from .custom_calls import array_on, compiled

TOKENS, TOP, LENGTHS = max(jspeed3.LANE_LENS), 4, (3, 4, 6, 10)
D, VOCAB, CELLS = jspeed3.WIDTH, jspeed3.VOCAB, number_of_cells(LENGTHS)


def test_gradients_of_scales_are_sums_and_the_table_gets_none(mesh):
    """No scatter: one would add the gradients of a step's scales one by one. The rows that followed
    are read once."""
    array = partial(array_on, mesh(1))
    kinds = (1, TOKENS, TOP), (1, TOKENS, TOP), (1, TOKENS), (1, TOKENS)
    matches = Matches(*(array(shape, jnp.int32) for shape in kinds))

    def loss(scales_CN, table_VD, x_BTD, matches):
        return jnp.sum(
            blend((1.0, x_BTD), *terms(scales_CN, table_VD, matches, LENGTHS)).astype(jnp.float32)
            ** 2
        )

    x = array((1, TOKENS, D), jnp.bfloat16)
    arrays = array((CELLS, 2), jnp.float32), array((VOCAB, D), jnp.bfloat16), x, matches
    gradients = jax.grad(loss, argnums=(0, 1, 2))
    text = compiled(gradients, *arrays, **options_for("cuda")).as_text()
    assert " scatter(" not in text
    moved = sum(kernel.bytes for kernel in cost.kernels(text))
    rows, own = 2 * TOKENS * TOP * D, 2 * TOKENS * D
    assert moved < rows + 2 * VOCAB * D + 8 * own
