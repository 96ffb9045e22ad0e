"""Records 62 and 89 against the numbers of their source: sizes by group, stages, schedules, initial values."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed import recipe as r
from jspeed.optim.schedules import through
from jspeed.recipes import r62
from jspeed.run.find import find

from ..toys import TOYS

TABLE = 50_304 * 768
BLOCKS = 11 * 2 * 768 * 3072


def by_group(parameters):
    sizes = Counter()
    for _, spec in r.leaves(parameters):
        sizes[spec.group] += spec.size
    return dict(sizes)


def test_r62_parameters_by_group():
    assert by_group(r62.PARAMETERS) == {
        "words": 2 * TABLE,
        "tables": 3 * TABLE + 5 * TABLE,
        "attention": 40 * 768**2,
        "mlp": BLOCKS,
        "gates": 10 * 12 * 6 + 5 * 12 * 6,
        "smear": 12,
        "skip": 12,
        "scalars": 11 + 2 * 11 + 11 + 3,
        "start": 11,
    }
    assert {name: spec.shape[0] for name, spec in r62.PARAMETERS.items() if spec.axes[:1] == ("matrix",)} == {
        "attention": 40,
        "mlp": 24,
    }


def test_r62_stages():
    found = r62.RECIPE
    assert [stage.steps for stage in found.stages] == [520, 520, 520, 40]
    assert [found.tokens_per_step(stage) for stage in found.stages] == [131_072, 262_144, 393_216, 393_216]
    assert found.tokens == 424_673_280
    for stage, long, short in zip(found.stages, (3, 7, 11, 13), (1, 3, 5, 6), strict=True):
        # The record's window of w tokens counts the keys before the query.
        assert set(stage.windows[layer] for layer in (3, 10)) == {128 * long + 1}
        assert set(stage.windows[layer] for layer in (0, 1, 2, 4, 5, 7, 8, 9)) == {128 * short + 1}
    assert found.eval_windows[3] == 20 * 128 + 1 and found.eval_windows[0] == 6 * 128 + 1
    assert r62.LAST_TIED == int(np.ceil(2 / 3 * 1560)) | 1
    assert (r62.VALUE_OF, r62.PAIRED_LAYERS) == ({0: 1, 1: 2, 8: 0, 9: 1, 10: 2}, (0, 2, 5, 9))


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        (r62.rate, {0: 1, 519: 1, 520: 1.52, 701: 1.52, 1040: 1.73 - 1.63 * 339 / 859, 1560: 0.1, 1599: 0.1}),
        (through(r62.MOMENTUM), {0: 0.85, 150: 0.90, 300: 0.95, 1550: 0.95, 1575: 0.9, 1599: 0.852}),
        (through(r62.SHARES[1]), {0: 0.5, 520: 0.5, 780: 0.25, 1040: 0}),
        (through(r62.SHARES[2]), {0: 0.25, 260: 0.125, 520: 0, 1040: 0}),
    ],
)
def test_r62_schedules(schedule, points):
    for step, value in points.items():
        assert float(schedule(step)) == pytest.approx(value, rel=1e-5, abs=1e-7)


def test_r62_rates_of_the_second_of_two_steps():
    """Adam's n-th update is made in step 2n + 1, at that step's rate: sign(gradient) x rate in the first one."""
    params = {path: jnp.ones((2,) * len(spec.shape)) for path, spec in r.leaves(r62.PARAMETERS)}
    optimizer = r62.optimizer()
    params["mlp"] = jnp.ones((24, 2, 2))
    state = optimizer.init(params)
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params, due=True)
    rates = {"head": 0.008, "embed": 0.008, "values": 0.6, "bigrams": 0.6, "smear_gate": 8e-5, "skip_gate": 4e-4}
    rates |= {"start_scales": 0.04, "layer_scales": 0.04, "attention_gates": 0.008, "smear_scale": 0.04}
    decays = {"head": 150, "embed": 150, "values": 5, "bigrams": 5, "attention_gates": 1}
    for name, rate in rates.items():
        decay = rate**2 * 0.005 * decays.get(name, 0)
        np.testing.assert_allclose(updates[name], -rate - decay, rtol=1e-5)


@pytest.mark.parametrize("name", ["r62"])
def test_first_loss_of_a_head_that_is_not_zero(name):
    """Published logs begin at 10.828 to 10.831. Targets are independent of the head: their mean is over all of it."""
    full = ["WIDTH=768", "HEADS=6", "VOCAB=50304", "BOS=50256"]
    recipe = find(name, [*TOYS[name], *full]).recipe
    params = jax.jit(lambda: r.init_parameters(recipe.parameters, jax.random.key(0)))()
    np.testing.assert_array_equal(params["embed"], params["head"])
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 50_257)
    ctx = r.Context(recipe.stages[0], training=False)
    z_BTV = np.asarray(jax.jit(lambda p, t: recipe.forward(p, t, ctx))(params, tokens), np.float64)
    losses = np.log(np.exp(z_BTV).sum(-1)) - z_BTV.mean(-1)
    assert 10.828 < losses.mean() < 10.831
