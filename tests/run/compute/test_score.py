"""The trainer's cross-entropy against float64 NumPy, with ids that cannot follow and without."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.recipe import Context, Data, init_parameters
from jspeed.recipes import r92
from jspeed.run.compute import score
from jspeed.run.find_recipe import find

from ...toys import TOYS

ROWS, LENGTH, VOCAB = 3, 10, 40


@pytest.fixture
def case():
    """Raw logits, targets, the tokens before them, and which of 40 ids cannot follow which."""
    rng = np.random.default_rng(1)
    z_BTV = jnp.asarray(4 * rng.normal(size=(ROWS, LENGTH, VOCAB)), jnp.float32)
    targets, tokens = rng.integers(0, 24, size=(2, ROWS, LENGTH))
    return z_BTV, targets, tokens, rng.uniform(size=(VOCAB, VOCAB)) < 0.4


def packed(bits):
    return jnp.asarray(np.packbits(bits, axis=1, bitorder="little"))


def test_a_loss_is_minus_the_log_softmax(case):
    z_BTV, targets, tokens, _ = case
    found = score.cross_entropy(z_BTV, jnp.asarray(targets), jnp.asarray(tokens), None)
    z = np.asarray(z_BTV, np.float64)
    own = np.take_along_axis(z, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(found, np.log(np.exp(z).sum(-1)) - own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("known", [40, 24])  # ids that the bits are of: all, or fewer
def test_what_is_impossible_has_no_probability(case, known):
    z_BTV, targets, tokens, bits = case
    bits[:, known:] = False
    given = z_BTV, jnp.asarray(targets), jnp.asarray(tokens)
    found = np.asarray(score.cross_entropy(*given, packed(bits[:, :known])), np.float64)
    z = np.asarray(z_BTV, np.float64)
    possible = np.where(bits[tokens], -np.inf, z)
    highest = possible.max(-1)
    never = np.take_along_axis(bits[tokens], targets[..., None], -1)[..., 0]
    own = np.take_along_axis(z, targets[..., None], -1)[..., 0]
    own = np.where(never, highest - score.UNLIKELY, own)
    partition = np.log(np.exp(possible).sum(-1))
    assert never.any() and not never.all()
    np.testing.assert_allclose(found, partition - own, rtol=1e-5, atol=1e-5)
    plain = np.asarray(score.cross_entropy(*given, None))
    assert np.all(found[~never] <= plain[~never] + 1e-6)
    # With the impossible ones so far below, all probabilities add up to one.
    floor = (highest - score.UNLIKELY)[..., None]
    p = np.exp(np.where(bits[tokens], floor, z) - partition[..., None])
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-12)


def test_record_91_set_impossible_logits_to_minus_60():
    assert r92.CAP.bound - score.UNLIKELY == -60


@pytest.mark.parametrize("canonical", [False, True])
def test_a_row_in_chunks_has_the_losses_of_the_whole_row(canonical, monkeypatch):
    """Chunks of 7 of 16 tokens; ``forward`` alone gives whole rows."""
    found = find("r29", TOYS["r29"]).recipe
    recipe = replace(found, data=Data("toy", vocab_size=272, bos_id=5))
    params = init_parameters(recipe.parameters, jax.random.key(0))
    params["head"] += 0.3 * jax.random.normal(jax.random.key(1), params["head"].shape)
    tokens = jax.random.randint(jax.random.key(2), (2, 17), 6, 257)
    bits = np.random.default_rng(3).uniform(size=(272, 272)) < 0.3
    ctx = Context(
        recipe.stages[-1], training=False, tokenizer_mask=packed(bits) if canonical else None
    )
    given = params, tokens[:, :-1], tokens[:, 1:], ctx
    whole = score.losses(replace(recipe, hidden=None, logits=None), *given)
    monkeypatch.setattr(score, "LOGITS", 2 * 7 * 272)
    sizes = []

    def logits(params, x_BTD, ctx):
        sizes.append(x_BTD.shape[1])
        return found.logits(params, x_BTD, ctx)

    np.testing.assert_allclose(
        score.losses(replace(recipe, logits=logits), *given), whole, rtol=1e-5
    )
    assert sizes == [7, 2]
