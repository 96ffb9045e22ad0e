"""Recipes as tables: counts, FLOPs, hashes and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed import recipe as r
from jspeed.errors import BadInput
from jspeed.run.find import find, known_recipes


@pytest.fixture(params=known_recipes())
def recipe(request):
    return find(request.param).recipe


def test_count_equals_the_arrays(recipe):
    arrays = jax.eval_shape(lambda: r.init_parameters(recipe.parameters, jax.random.key(0)))
    assert r.parameter_count(recipe.parameters) == sum(a.size for a in jax.tree.leaves(arrays))


def test_stdlib_numbers_by_hand():
    found = find("stdlib", ["WIDTH=64", "LAYERS=3", "HEADS=2", "MLP_WIDTH=256", "VOCAB=272", "LANE_LEN=128"])
    recipe = found.recipe
    blocks = 3 * (4 * 64 * 64 + 2 * 64 * 256)
    assert r.parameter_count(recipe.parameters) == blocks + 2 * 272 * 64
    assert r.matmul_parameters(recipe.parameters) == blocks + 272 * 64
    keys = sum(range(1, 129)) / 128
    assert r.flops_per_token(recipe, recipe.stages[0]) == 6 * (blocks + 272 * 64) + 3 * 12 * 64 * keys


def test_mean_context_by_counting():
    for length, document, window in [(16, None, None), (16, 5, None), (16, None, 4), (16, 5, 3)]:
        stage = r.Stage(steps=1, lane_len=length, max_doc_len=document)
        piece = min(length, document or length)
        seen = [min(t + 1, window or piece) for t in range(piece)]
        assert r.mean_context(stage, window) == pytest.approx(np.mean(seen))


def test_same_seed_same_arrays_and_layers_differ():
    parameters = find("stdlib").recipe.parameters
    one, two = (r.init_parameters(parameters, jax.random.key(3)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert not np.array_equal(one["up"][0], one["up"][1])
    assert not np.array_equal(one["query"], one["key"])
    assert not np.any(one["out"]) and not np.any(one["down"]) and not np.any(one["head"])
    # std 0.5 / sqrt(fan_in), uniform
    bound = 0.5 * (3 / one["up"].shape[1]) ** 0.5
    assert float(jnp.max(jnp.abs(one["up"]))) <= bound
    assert float(jnp.std(one["up"])) == pytest.approx(bound / 3**0.5, rel=0.02)


def test_first_loss_is_log_of_vocabulary_and_only_the_past_counts(recipe):
    params = r.init_parameters(recipe.parameters, jax.random.key(0))
    stage = r.Stage(steps=1, lane_len=32)
    ctx = r.Context(stage, training=False)
    tokens = jax.random.randint(jax.random.key(1), (2, 33), 0, recipe.data.vocab_size)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    loss_BT = recipe.loss(params, inputs, targets, jnp.ones((2, 32)), ctx)[1]
    vocabulary = dict(r.leaves(recipe.parameters))["head"].shape[0]
    np.testing.assert_allclose(loss_BT, np.log(vocabulary), rtol=1e-5)

    noisy = jax.tree.map(lambda p: p + 0.05 * jax.random.normal(jax.random.key(2), p.shape), params)

    def picked(embedded_shift):
        table = noisy["embed"]
        rows = table[inputs] + embedded_shift
        # Look up position t of row 0 in a table of its own, so that the gradient is by position.
        own = jnp.concatenate([table, rows[0]])
        ids = inputs.at[0].set(table.shape[0] + jnp.arange(32))
        return recipe.forward({**noisy, "embed": own}, ids, ctx)[0, 20, 3]

    by_position = jnp.abs(jax.grad(picked)(jnp.zeros((2, 32, params["embed"].shape[1]))))[0].max(-1)
    # A document border may cut the past; the future must be cut in any case.
    assert np.all(np.asarray(by_position[21:]) == 0) and float(by_position[20]) > 0


def test_hash_follows_source_and_fields():
    base = find("stdlib").hash
    assert find("stdlib").hash == base
    assert find("stdlib", ["STEPS=3"]).hash != base


def test_describe_names_the_total():
    rows = dict((name, value) for name, _, value in r.describe(find("stdlib").recipe))
    assert rows["tokens"].replace(",", "") == str(find("stdlib").recipe.tokens)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lanes": 0}, "lanes=0"),
        ({"stages": ()}, "STAGES is empty"),
        ({"stages": (r.Stage(steps=1, lane_len=100),)}, "not a multiple of the lane length 100"),
        ({"stages": (r.Stage(steps=1, lane_len=128, windows=(3,)),)}, "1 attention windows for"),
        (
            {"parameters": {"w": r.ParamSpec((2, 3), ("model",), jax.nn.initializers.zeros, "g")}},
            "names 1 axes",
        ),
    ],
)
def test_refuses(change, words):
    with pytest.raises(BadInput, match=words):
        r.replace(find("stdlib").recipe, **change).validate()
