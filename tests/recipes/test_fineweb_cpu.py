"""Sampled softmax in fineweb-cpu: same sample on any device count, in training only, its FLOPs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.model.sampled import by_frequency
from jspeed.recipe import Context
from jspeed.record import sizes
from jspeed.run.compute import score
from jspeed.run.find_recipe import find

from ..run.compute.steps import batches, mesh_of, run
from ..toys import TOYS, matmul_parameters


@functools.cache
def toy(*more):
    return find("fineweb-cpu", [*TOYS["fineweb-cpu"], "LAYERS=1", *more]).recipe


@functools.cache
def losses_on_one_device():
    return run(toy(), mesh_of(1), None, batches(toy(), 6))[1]


@pytest.mark.parametrize(
    ("devices", "lanes_at_once"),
    [pytest.param(*way, marks=pytest.mark.slow) for way in ((2, 1), (4, None), (8, None))],
)
def test_any_devices_and_micro_batches_draw_the_same_sample(devices, lanes_at_once):
    """Samples of their own would move losses by 0.01 and more, as would another draw."""
    found = run(toy(), mesh_of(devices), lanes_at_once, batches(toy(), 6))[1]
    np.testing.assert_allclose(found, losses_on_one_device(), atol=1e-5)
    if devices == 8:
        other = run(toy("EXACT_TOKENS=63"), mesh_of(8), None, batches(toy(), 6))[1]
        assert np.abs(np.subtract(other, found)).max() > 1e-3


def test_in_training_alone_and_no_position_sees_the_future():
    """Evaluation is the same program whatever is sampled, over everything; a training loss is that
    of its position."""
    recipe, other = toy(), toy("EXACT_TOKENS=9", "SAMPLED_ONE_IN=17")
    params = {
        name: 0.3 * jax.random.normal(jax.random.key(n), spec.shape)
        for n, (name, spec) in enumerate(recipe.parameters.items())
    }
    tokens = jax.random.randint(jax.random.key(99), (2, 17), 6, 257)
    inputs, targets, ones = tokens[:, :-1], tokens[:, 1:], jnp.ones((2, 16))

    def loss(recipe, ctx, inputs):
        if ctx.training:
            return recipe.loss(params, inputs, targets, ones, ctx)[1]
        return score.losses(recipe, params, inputs, targets, ctx)

    evaluating, training = (
        Context(recipe.stages[0], training=training, step=5) for training in (False, True)
    )
    programs = [
        jax.jit(functools.partial(loss, r, evaluating)).lower(inputs).as_text()
        for r in (recipe, other)
    ]
    assert programs[0] == programs[1]
    log_p = jax.nn.log_softmax(
        jax.jit(lambda t: recipe.forward(params, t, evaluating))(inputs), axis=-1
    )
    expected = -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    trained = jax.jit(functools.partial(loss, recipe, training))
    full, sampled = jax.jit(functools.partial(loss, recipe, evaluating))(inputs), trained(inputs)
    np.testing.assert_allclose(full, expected, atol=1e-5)
    assert 1e-3 < np.abs(sampled - full).mean() < 0.3
    changed = trained(inputs.at[:, 9:].add(1))
    np.testing.assert_allclose(changed[:, :9], sampled[:, :9], atol=1e-6)
    assert np.any(np.abs(changed - sampled)[:, 9:] > 1e-3)


@pytest.mark.parametrize(
    ("devices", "lanes_at_once"), [(1, None), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_counts_are_those_of_all_targets_so_far(devices, lanes_at_once):
    tokens = batches(toy(), 3)
    state, _ = run(toy(), mesh_of(devices), lanes_at_once, tokens)
    expected = np.bincount(
        np.concatenate([batch[:, 1:].ravel() for batch in tokens]), minlength=272
    )
    np.testing.assert_array_equal(state["params"]["counts"], expected)
    ranked = sorted(range(272), key=lambda token: (-expected[token], token))
    np.testing.assert_array_equal(by_frequency(state["params"]["counts"]), ranked)


def test_flops_count_the_rows_that_are_scored():
    recipe = find("fineweb-cpu", trace=False).recipe
    blocks, keys = 4 * (4 * 128 * 128 + 2 * 128 * 512), sum(range(1, 129)) / 128
    assert matmul_parameters(recipe.parameters) == blocks + 50_304 * 128
    assert (
        sizes.flops_per_token(recipe, recipe.stages[0])
        == 6 * (blocks + 8348 * 128) + 4 * 12 * 128 * keys
    )
