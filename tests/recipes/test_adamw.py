"""AdamW recipes: clipping, warm-up, cosine to a floor, weight decay of matrices only."""

import jax
import numpy as np
import optax
import pytest

from jspeed.recipe import leaves
from jspeed.run.find_recipe import find

from ..toys import TOYS, first_parameters


def toy(name, *sets):
    return find(name, [*TOYS[name], *sets], trace=False).recipe


def drawn(recipe):
    return jax.device_get(first_parameters(recipe))


def norm_of(tree):
    return sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(jax.device_get(tree))) ** 0.5


def of_length(params, norm):
    """A gradient of all ``params`` whose norm is ``norm``."""
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params)
    return jax.tree.map(lambda g: g * np.float32(norm / norm_of(grads)), grads)


@pytest.mark.parametrize("name", ["nanogpt", pytest.param("llmc", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("clip", "norm", "seen"),
    [
        (2.0, 5.0, 2.0),
        (1.0, 0.5, 0.5),
        (0.0, 5.0, 5.0),
        pytest.param(1.0, 5.0, 1.0, marks=pytest.mark.slow),
    ],
)
def test_the_gradient_is_clipped_to_a_norm_and_not_by_zero(name, clip, norm, seen):
    recipe = toy(name, f"CLIP={clip}", "BETA1=0.5")
    params = drawn(recipe)
    optimizer = recipe.optimizer()
    _, state = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(
        of_length(params, norm), params
    )
    moments = optax.tree_utils.tree_get(state, "mu")
    assert float(norm_of(moments)) == pytest.approx(0.5 * seen, abs=1e-6 * seen)


def test_the_rate_warms_up_and_falls_to_its_floor():
    """nanoGPT's setting for GPT-2: 6e-4, a warm-up of 2,000 steps, 6e-5 from step 600,000 on."""
    sets = ["LEARNING_RATE=6e-4", "FINAL_RATE=6e-5", "WARMUP=2000", "COOLDOWN=600000"]
    rate = toy("nanogpt", *sets).optimizer.__globals__["schedule"]()
    for step, value in [
        (0, 0),
        (1000, 3e-4),
        (2000, 6e-4),
        (301_000, 3.3e-4),
        (600_000, 6e-5),
        (700_000, 6e-5),
    ]:
        assert float(rate(step)) == pytest.approx(value, abs=1e-9)
    constant = toy("nanogpt", *sets[:3], "COOLDOWN=0").optimizer.__globals__["schedule"]()
    assert [float(constant(step)) for step in (1000, 2000, 600_000)] == pytest.approx(
        [3e-4, 6e-4, 6e-4], abs=1e-9
    )


def after_three_steps(*sets):
    recipe = toy("nanogpt", "LEARNING_RATE=0.01", "WARMUP=1", "COOLDOWN=4", *sets)
    params, optimizer = drawn(recipe), recipe.optimizer()
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(state, params, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for norm in (30.0, 0.5, 2.0):
        params, state = step(state, params, of_length(params, norm))
    return params


@pytest.mark.slow
def test_every_setting_changes_what_is_trained():
    base = after_three_steps()
    for change in (
        "WEIGHT_DECAY=0.0",
        "CLIP=0.0",
        "COOLDOWN=0",
        "FINAL_RATE=0.005",
        "WARMUP=2",
        "BETA1=0.8",
        "BETA2=0.9",
    ):
        assert norm_of(jax.tree.map(np.subtract, base, after_three_steps(change))) > 1e-4, change


@pytest.mark.parametrize("name", ["nanogpt", pytest.param("llmc", marks=pytest.mark.slow)])
def test_matrices_and_tables_decay_and_vectors_do_not(name):
    recipe = toy(name, "LEARNING_RATE=0.01", "WEIGHT_DECAY=0.5")
    params, optimizer = drawn(recipe), recipe.optimizer()
    state = jax.jit(optimizer.init)(params)
    nothing = jax.tree.map(np.zeros_like, params)
    update = jax.jit(optimizer.update)
    for _ in range(4 if "WARMUP" in str(TOYS[name]) else 1):  # the rate is full after the warm-up
        _, state = update(nothing, state, params)
    updates, _ = update(nothing, state, params)
    kinds = set()
    for path, spec in leaves(recipe.parameters):
        kinds.add(spec.group)
        expected = -0.01 * 0.5 * np.asarray(params[path]) if spec.group == "decay" else 0
        np.testing.assert_allclose(
            updates[path], np.broadcast_to(expected, spec.shape), atol=1e-8, err_msg=path
        )
    assert kinds == {"decay", "vectors"}
