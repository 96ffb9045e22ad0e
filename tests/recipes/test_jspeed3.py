"""Recipe jspeed3: what it has besides r92."""

import difflib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed import recipe as r
from jspeed.kernels import CUSTOM
from jspeed.model.custom_kernels import custom_kernel
from jspeed.recipes import jspeed3, r92
from jspeed.run.find_recipe import find

from ..toys import TOYS

SIZES = (
    "WIDTH=256 HEADS=2 MLP_WIDTH=256 POINTER_WIDTH=16 COMPUTE=bfloat16 LANE_LENS=(16,32)".split()
)


@pytest.mark.parametrize(
    ("training", "there", "used"),
    [
        (True, set(CUSTOM), True),
        (True, CUSTOM.keys() - {"pointer"}, False),
        (False, set(CUSTOM), False),
    ],
)
def test_the_pointer_is_a_custom_kernel_where_a_device_has_it(training, there, used):
    """In the traced loss, at sizes that custom kernels take; numbers are in tests/kernels."""
    recipe = find("jspeed3", [*TOYS["jspeed3"], *SIZES]).recipe
    shape = partial(jax.ShapeDtypeStruct, (1, 32))
    params = {
        path: jax.ShapeDtypeStruct(spec.shape, spec.compute or jnp.float32)
        for path, spec in recipe.parameters.items()
    }
    kernels = {name: custom_kernel(name).kernel for name in there}
    ctx = r.Context(recipe.stages[1], training, fp8="missing", kernels=kernels)
    arguments = params, shape(jnp.int32), shape(jnp.int32), shape(jnp.float32)
    traced = str(jax.make_jaxpr(partial(recipe.loss, ctx=ctx))(*arguments))
    assert ("pointer_attention__forward__width16__window12" in traced) == used


def test_all_that_is_counted_in_steps_is_086_of_r92s():
    """A border of stages stays one in every schedule, and stages begin with a whole period where
    r92's do."""
    assert jspeed3.TOTAL / r92.TOTAL == pytest.approx(0.86, abs=0.001)
    of_r92 = dict(zip(r92.STARTS, jspeed3.STARTS, strict=True))
    for ours, theirs in ((jspeed3.STARTS, r92.STARTS), (jspeed3.LAST_STEPS, r92.LAST_STEPS)):
        np.testing.assert_allclose(ours, 0.86 * np.array(theirs), atol=1.5)
    schedules = [(jspeed3.MOMENTUM, r92.MOMENTUM), (jspeed3.COOLDOWN, r92.COOLDOWN)]
    schedules += [
        (jspeed3.PREFIX_SHARE, r92.PREFIX_SHARE),
        *zip(jspeed3.SHARES, r92.SHARES, strict=True),
    ]
    for ours, theirs in schedules:
        assert list(ours.values()) == list(theirs.values())
        assert all(
            of_r92.get(other, step) == step for step, other in zip(ours, theirs, strict=True)
        )
        np.testing.assert_allclose(list(ours), 0.86 * np.array(list(theirs)), atol=1.5)
    assert jspeed3.RAILS[0] == round(0.86 * r92.RAILS[0]) and jspeed3.RAILS[1:] == r92.RAILS[1:]
    assert jspeed3.LAST_TIED == of_r92[1174] | 1 and [step % 4 for step in jspeed3.STARTS[1:3]] == [
        0,
        0,
    ]


def test_its_diff_to_r92_is_its_ideas():
    """What both compute has the same words in the same order."""
    before, after = (Path(module.__file__).read_text().splitlines() for module in (r92, jspeed3))
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert len(changed) <= 130


def near_and_whole():
    """A recipe whose second stage has a window of gradients, and one without."""
    return [
        find("jspeed3", [*TOYS["jspeed3"], f"GRADIENT_WINDOWS=(0,{n})"], trace=False).recipe
        for n in (1, 0)
    ]


def test_gradients_of_attention_end_in_stages_with_a_window():
    """In the program: the first stage's is that of a recipe without."""

    def programs(number):
        for recipe in near_and_whole():
            stage = recipe.stages[number]
            loss = partial(recipe.loss, ctx=r.Context(stage, training=True, step=jnp.int32(2)))
            params = jax.eval_shape(
                partial(r.init_parameters, recipe.parameters), jax.random.key(0)
            )
            shape = partial(jax.ShapeDtypeStruct, (1, stage.lane_len))
            tokens, weights = shape(jnp.int32), shape(jnp.float32)
            yield str(jax.make_jaxpr(loss)(params, tokens, tokens, weights))

    assert len({*programs(0)}) == 1 and len({*programs(1)}) == 2


@pytest.mark.slow
def test_gradients_that_end_at_a_window_have_the_same_loss():
    """The loss is that of a recipe without, and its gradient is another."""
    near, whole = near_and_whole()
    rng = np.random.default_rng(0)

    def gradients(recipe):
        """The loss of stage 2 and its gradient of queries and keys alone."""
        stage = recipe.stages[1]
        ctx = r.Context(stage, training=True, step=jnp.int32(2))
        weights = np.full((1, stage.lane_len), 0.1, np.float32)

        def loss(bank, params, tokens):
            params |= {"queries_keys": bank}
            return recipe.loss(params, tokens[:, :-1], tokens[:, 1:], weights, ctx)[0]

        return jax.jit(jax.value_and_grad(loss))

    params = jax.jit(partial(r.init_parameters, near.parameters))(jax.random.key(0))
    params = {
        name: np.asarray(x) + rng.normal(0, 0.05, x.shape).astype(x.dtype)
        for name, x in params.items()
    }
    tokens = rng.integers(6, 250, (1, near.stages[1].lane_len + 1)).astype(np.int32)
    given = params["queries_keys"], params
    (loss, of_near), (same_loss, of_whole) = (gradients(x)(*given, tokens) for x in (near, whole))
    assert loss == same_loss and not np.array_equal(of_near, of_whole)
