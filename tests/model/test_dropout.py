"""Dropout: its rate; masks depend on seed, step, layer and row, not on devices or micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jspeed.model.layers import dropout, lane_keys
from jspeed.recipe import Context
from jspeed.run.compute import score
from jspeed.run.find_recipe import find

from ..run.compute.steps import mesh_of
from ..toys import TOYS, first_parameters


def masks(rows, step=0, first=0, seed=0, calls=2):
    keys, found = lane_keys(seed, jnp.int32(step), jnp.int32(first), rows), []
    for _ in range(calls):
        x, keys = dropout(jnp.ones((rows, 16, 8)), keys, 0.1)
        found.append(np.asarray(x))
    return found


def test_a_tenth_is_dropped_and_the_rest_makes_up_for_it():
    first, second = masks(100)
    for mask in (first, second):
        assert np.mean(mask > 0) == pytest.approx(0.9, abs=0.02)
        assert set(np.unique(mask)) == {0, np.float32(1 / np.float32(0.9))}
        assert mask.mean() == pytest.approx(1, abs=0.02)


def test_layers_steps_rows_and_seeds_have_masks_of_their_own():
    first, second = masks(2)
    others = [second, masks(2, step=1)[0], masks(2, first=2)[0], masks(2, seed=1)[0], first[::-1]]
    for other in others:
        # Two independent masks agree in 0.9^2 + 0.1^2 of the elements.
        assert np.mean((first > 0) == (other > 0)) == pytest.approx(0.82, abs=0.08)
    np.testing.assert_array_equal(masks(2, first=3)[0], masks(5)[0][3:])


def test_a_sharded_mask_is_that_of_one_device():
    """Rows over ``data`` by ``shard_map``, as the step has them, and channels over ``model`` by the
    compiler."""
    mesh, rows = mesh_of(data=4, model=2), PartitionSpec("data")

    def on_device(x):
        keys = lane_keys(3, jnp.int32(5), 2 * jax.lax.axis_index("data"), 2)
        x, keys = dropout(x, keys, 0.1)
        x = jax.lax.with_sharding_constraint(x, PartitionSpec(None, None, "model"))
        return dropout(x, keys, 0.5)[0]

    spread = jax.shard_map(
        on_device, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"data"}, check_vma=False
    )
    x = jax.random.normal(jax.random.key(0), (8, 16, 64))
    found = jax.jit(spread)(jax.device_put(x, NamedSharding(mesh, rows)))
    x, keys = dropout(x, lane_keys(3, jnp.int32(5), 0, 8), 0.1)
    np.testing.assert_array_equal(found, dropout(x, keys, 0.5)[0])


def test_without_a_rate_nothing_changes():
    x, keys = jnp.ones((2, 4, 3), jnp.bfloat16), lane_keys(0, 0, 0, 2)
    assert dropout(x, keys, 0.0) == (x, keys)
    assert dropout(x, keys, 0.5)[0].dtype == jnp.bfloat16


def test_a_recipe_drops_in_training_and_not_in_evaluation():
    with_it, without = (
        find("nanogpt", [*TOYS["nanogpt"], f"DROPOUT={rate}"]).recipe for rate in (0.2, 0.0)
    )
    params = first_parameters(with_it)
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 257)

    @jax.jit
    def trained_at(step):
        ctx = Context(with_it.stages[0], training=True, step=step)
        return with_it.loss(params, tokens, tokens, jnp.ones((2, 16)), ctx)[1]

    def evaluated_in(recipe, **now):
        ctx = Context(recipe.stages[0], training=False, **now)
        return np.asarray(jax.jit(lambda p: score.losses(recipe, p, tokens, tokens, ctx))(params))

    evaluated = evaluated_in(with_it)
    np.testing.assert_array_equal(evaluated, evaluated_in(with_it, step=7))
    np.testing.assert_array_equal(evaluated, evaluated_in(without))
    trained = [np.asarray(trained_at(step)) for step in (0, 1)]
    assert np.all(trained[0] != evaluated) and np.all(trained[0] != trained[1])
