"""jspeed2 equals r89 in every number and in evaluation; only its training softmax scores fewer
tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed import recipe as r
from jspeed import sizes
from jspeed.model.kernels import composed_heads, own_value
from jspeed.model.kernels.qk_norm import norm_and_rotate
from jspeed.model.sampled import candidates
from jspeed.recipe import OWN_KERNELS
from jspeed.recipes import jspeed2, r89
from jspeed.run.find_recipe import find

from ..model import dense
from ..run.compute.steps import batches, mesh_of, run
from ..toys import TOYS

OWN = {"EXACT_TOKENS", "SAMPLED_ONE_IN", "CANDIDATES", "FP8_GRADIENTS", "FP8_PROJECTIONS"}
EVERYTHING = ["EXACT_TOKENS=64", "SAMPLED_ONE_IN=1"]  # through the sampled softmax
BANKS = "queries_keys", "values_outs", "mlp"
PREFIXES = np.random.default_rng(0).integers(-100, 272, size=272).clip(-1).astype(np.int32)


@pytest.fixture
def toy(monkeypatch):
    """A recipe at toy size, with a made-up prefix of every token in place of GPT-2's."""

    def found(name, *sets):
        with monkeypatch.context() as patch:
            patch.setattr("jspeed.model.prefixes.gpt2_prefixes", lambda ordinary, size: PREFIXES)
            return find(name, [*TOYS[name], "PREFIX_SHARE={0:0.25,5:0.0}", "FP8=off", *sets]).recipe

    return found


def test_all_other_numbers_are_those_of_r89():
    ours, theirs = (find(name, trace=False).fields for name in ("jspeed2", "r89"))
    assert {name: value for name, value in ours.items() if name not in OWN} == theirs | {
        "OWN_KERNELS": "auto"
    }
    assert [dataclasses.replace(stage, scored=None) for stage in jspeed2.STAGES] == list(r89.STAGES)
    specs = [
        {path: (s.shape, s.axes, s.group, s.compute, s.every) for path, s in each.items()}
        for each in (jspeed2.PARAMETERS, r89.PARAMETERS)
    ]
    assert {path for path in specs[0] if specs[0][path] != specs[1].get(path)} == {
        "word_counts",
        "largest",
    }


def test_a_sixth_of_the_head_is_scored():
    """In whole blocks of 128, as FP8 products want them."""
    assert [stage.scored for stage in jspeed2.STAGES] == [5248 + 2816] * 4
    assert 5248 % 128 == 0 == 2816 % 128 and (50_304 - 5248) % 16 == 0
    for stage, own in zip(r89.STAGES, jspeed2.STAGES, strict=True):
        saved = sizes.flops_per_token(r89.RECIPE, stage) - sizes.flops_per_token(
            jspeed2.RECIPE, own
        )
        assert saved == 6 * 768 * (50_304 - own.scored)


def example(recipe, number):
    """Parameters, tokens, targets and weights of one lane of a stage, whose documents are as long
    as they may be."""
    params = r.init_parameters(recipe.parameters, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (1, recipe.stages[number].lane_len + 1), 6, 257)
    tokens = tokens.at[:, :: recipe.stages[number].max_doc_len].set(recipe.data.bos_id)
    return (
        params,
        tokens[:, :-1],
        tokens[:, 1:],
        jnp.full((1, tokens.shape[1] - 1), 1 / (tokens.shape[1] - 1)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_where_everything_is_sampled_the_loss_is_that_of_r89(toy, number):
    """With several targets a token and their prefixes; embedding and head are one table, then
    two."""
    found = []
    for recipe in (toy("jspeed2", *EVERYTHING), toy("r89"), toy("jspeed2")):
        ctx = r.Context(recipe.stages[number], training=True, step=jnp.int32(2))
        found.append(jax.jit(functools.partial(recipe.loss, ctx=ctx))(*example(recipe, number)))
    (total, loss_BT), (expected, expected_BT), (sampled, _) = found
    assert abs(float(sampled) - float(expected)) > 1e-3
    assert float(total) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(loss_BT, expected_BT, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_fp8_where_it_is_asked_for(toy, training):
    """In evaluation nowhere: r89's loss to the bit. In training the loss moves by little, and what
    is measured with it.

    Weights are drawn: with those that start at 0 no gradient would reach what is before them.
    """
    found = {}
    ways = {"off": ("FP8_GRADIENTS=off", "FP8_PROJECTIONS=off"), "on": ()} | (
        {} if training else {"r89": ()}
    )
    for way, sets in ways.items():
        recipe = toy(
            "r89" if way == "r89" else "jspeed2", *EVERYTHING * (way != "r89"), "FP8=on", *sets
        )
        params, *arrays = example(recipe, 1)
        draw = np.random.default_rng(0)
        params |= {
            name: jnp.asarray(0.05 * draw.normal(size=params[name].shape), jnp.float32)
            for name in BANKS
        }
        ctx = r.Context(recipe.stages[1], training=training, step=jnp.int32(2), fp8="emulated")
        found[way] = jax.jit(
            jax.value_and_grad(functools.partial(recipe.loss, ctx=ctx), has_aux=True)
        )(params, *arrays)
    (value, _), grads = found["on"]
    if not training:
        return np.testing.assert_array_equal(
            [found["r89"][0][0], found["off"][0][0]], [value, value]
        )
    assert 0 < abs(value - found["off"][0][0]) < 0.01 * value
    for name in BANKS:
        one, other = (np.asarray(each[name]).ravel() for each in (grads, found["off"][1]))
        assert 0.97 < np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other) < 0.99999
    largest = np.asarray(grads["largest"])
    attending = recipe.layers - 1  # one layer has no attention
    assert (largest[:, :3] > 0).all() and (largest[:, 3:] > 0).all(axis=1).sum() == attending


@pytest.mark.slow
def test_own_kernels_around_attention_give_the_same_loss_and_gradients(toy, monkeypatch):
    """In pairs, with keys that look back, XSA and composed; in JAX's interpreter of kernels, which
    have bf16 alone."""
    called = []

    def interpreted(y_BTE, cos, sin, factor_B, tags_BTF, heads, look_back, padded):
        called.append(look_back)
        return norm_and_rotate(
            y_BTE, cos, sin, factor_B, tags_BTF, heads, look_back, padded, interpret=True
        )

    monkeypatch.setattr("jspeed.model.kernels.qk_norm.norm_and_rotate", interpreted)
    for module, name in (composed_heads, "compose"), (own_value, "subtract_own_value"):
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), interpret=True))
    found = []
    for way in ("off", "on"):
        recipe = toy("jspeed2", *EVERYTHING, "COMPUTE=bfloat16", f"OWN_KERNELS={way}")
        params, *arrays = example(recipe, 1)
        draw = np.random.default_rng(0)
        params |= {
            name: jnp.asarray(0.1 * draw.normal(size=params[name].shape), jnp.float32)
            for name in BANKS
        }
        params = {
            path: params[path].astype(spec.compute or jnp.float32)
            for path, spec in recipe.parameters.items()
        }
        ctx = r.Context(
            recipe.stages[1],
            training=True,
            step=jnp.int32(2),
            fp8="native",
            own_kernels=OWN_KERNELS,
        )
        found.append(
            jax.jit(jax.value_and_grad(functools.partial(recipe.loss, ctx=ctx), has_aux=True))(
                params, *arrays
            )
        )
        # of layers 0, 1 and 3 two look back
        assert called == ([False, True, True] if way == "on" else [])
    ((value, _), grads), ((expected, _), wanted) = found[1], found[0]
    assert float(value) == pytest.approx(float(expected), rel=1e-3)
    for name in BANKS:
        assert dense.distance(grads[name], wanted[name]) < 0.03, name


@pytest.mark.slow
def test_where_everything_is_sampled_training_is_that_of_r89(toy):
    recipe, other = toy("jspeed2", *EVERYTHING), toy("r89")
    tokens = batches(other, 12)
    (state, losses), (_, expected) = (
        run(each, mesh_of(1), None, tokens) for each in (recipe, other)
    )
    np.testing.assert_allclose(losses, expected, atol=1e-4)
    counts = np.bincount(np.concatenate([batch[:, 1:].ravel() for batch in tokens]), minlength=272)
    np.testing.assert_array_equal(state["params"]["word_counts"], counts)


@pytest.mark.slow
def test_any_devices_and_micro_batches_draw_the_same_sample(toy):
    recipe = toy("jspeed2")
    tokens = batches(recipe, 8)
    expected, found = (
        run(recipe, mesh_of(devices), lanes, tokens)[1] for devices, lanes in ((1, None), (4, 1))
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("number", [0, 1])
def test_record_92s_softmax_is_over_candidates_alone(toy, number):
    """Against logits of all tokens: that of the next one and of 96 candidates, each once."""
    recipe = toy("jspeed2", "CANDIDATES=(96,272)", "TARGETS=(1,1)", "PREFIX_SHARE={}")
    assert [stage.scored for stage in recipe.stages] == [96, 272]
    params, tokens, targets, weights = example(recipe, number)
    ctx = r.Context(recipe.stages[number], training=True, step=jnp.int32(2))
    _, found = jax.jit(functools.partial(recipe.loss, ctx=ctx))(params, tokens, targets, weights)
    logits = np.asarray(
        jax.jit(functools.partial(recipe.forward, ctx=ctx))(params, tokens)[0], np.float64
    )
    ids = candidates(targets[0], 272, 96, 2 * 96)[0] if number == 0 else np.arange(272)
    expected = (
        np.log(np.sum(np.exp(logits[:, ids]), axis=1)) - logits[np.arange(len(logits)), targets[0]]
    )
    np.testing.assert_allclose(found[0], expected, rtol=1e-5)
