"""Records 62 and 89 against the numbers of their source: sizes by group, stages, schedules, initial
values."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed import recipe as r
from jspeed.optim.schedules import through
from jspeed.recipes import r62, r89
from jspeed.record import sizes
from jspeed.run.find_recipe import find
from jspeed.speedrun.mudd import coefficients, named

from ..toys import TOYS, first_parameters, matmul_parameters

TABLE = 50_304 * 768
TOKENS = [131_072, 262_144, 393_216, 393_216]  # of a step, by stage
BLOCKS = 11 * 2 * 768 * 3072
# Record 62 compares step / 1560 with 1/3 and 2/3 for the peak, and begins to fall at 0.45.
RATES_62 = {0: 1, 520: 1, 521: 1.52, 702: 1.52, 1040: 1.52 - 1.42 * 338 / 858}
RATES_62 |= {1041: 1.73 - 1.63 * 339 / 858, 1560: 0.1, 1599: 0.1}
MOMENTUM_62 = {0: 0.85, 150: 0.9, 300: 0.95, 1550: 0.95, 1575: 0.9, 1599: 0.852}


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
    assert {
        name: spec.shape[0] for name, spec in r62.PARAMETERS.items() if spec.axes[:1] == ("matrix",)
    } == {"attention": 40, "mlp": 24}


def test_r62_stages():
    found = r62.RECIPE
    assert [stage.steps for stage in found.stages] == [520, 520, 520, 40]
    assert [found.tokens_per_step(stage) for stage in found.stages] == TOKENS
    assert found.tokens == 424_673_280
    for stage, long, short in zip(found.stages, (3, 7, 11, 13), (1, 3, 5, 6), strict=True):
        # The record's window of w tokens counts the keys before the query.
        assert set(stage.windows[layer] for layer in (3, 10)) == {128 * long + 1}
        assert set(stage.windows[layer] for layer in (0, 1, 2, 4, 5, 7, 8, 9)) == {128 * short + 1}
    assert found.eval_windows[3] == 20 * 128 + 1 and found.eval_windows[0] == 6 * 128 + 1
    assert r62.LAST_TIED == int(np.ceil(2 / 3 * 1560)) | 1
    assert (r62.VALUE_OF, r62.PAIRED_LAYERS) == ({0: 1, 1: 2, 8: 0, 9: 1, 10: 2}, (0, 2, 5, 9))


def test_r62_rates_of_the_second_of_two_steps():
    """Adam's n-th update is made in step 2n + 1, at that step's rate: sign(gradient) x rate in the
    first one."""
    params = {path: jnp.ones((2,) * len(spec.shape)) for path, spec in r.leaves(r62.PARAMETERS)}
    optimizer = r62.optimizer()
    params["mlp"] = jnp.ones((24, 2, 2))
    state = optimizer.init(params)
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params, due=2)
    rates = dict(head=0.008, embed=0.008, values=0.6, bigrams=0.6, smear_gate=8e-5, skip_gate=4e-4)
    rates |= dict(start_scales=0.04, layer_scales=0.04, attention_gates=0.008, smear_scale=0.04)
    decays = {"head": 150, "embed": 150, "values": 5, "bigrams": 5, "attention_gates": 1}
    for name, rate in rates.items():
        decay = rate**2 * 0.005 * decays.get(name, 0)
        np.testing.assert_allclose(updates[name], -rate - decay, rtol=1e-5)


@pytest.mark.slow
def test_first_loss_of_a_head_that_is_not_zero():
    """Published logs begin at 10.828 to 10.831. Targets are independent of the head: their mean is
    over all of it."""
    full = "WIDTH=768 HEADS=6 VOCAB=50304 BOS=50256 VALUE_TABLES=1 VALUE_OF={0:0,1:0,3:0}".split()
    recipe = find("r89", [*TOYS["r89"], *full]).recipe
    params = first_parameters(recipe)
    np.testing.assert_array_equal(params["embed"], params["head"])
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 50_257)
    ctx = r.Context(recipe.stages[0], training=False)
    z_BTV = np.asarray(jax.jit(lambda p, t: recipe.forward(p, t, ctx))(params, tokens), np.float64)
    losses = np.log(np.exp(z_BTV).sum(-1)) - z_BTV.mean(-1)
    assert 10.828 < losses.mean() < 10.831


def test_r89_parameters_by_group():
    assert by_group(r89.PARAMETERS) == {
        "words": 2 * TABLE,
        "tables": 5 * TABLE + 377_280 * 768,
        "queries_keys": 60 * 256 * 768,
        "values_outs": 20 * 768**2,
        "mlp": BLOCKS,
        "value_gates": 5 * 6 * 12,
        "smear": 12,
        "scalars": 2 * 11 + 2,
        "layer_scales": 22,
        "post_scales": 22,
        "mudd": 2 * 64 * 768 + 2 * 14 * 64,
        "mudd_bias": 2 * 14,
        "gates": 2 * 64 * 768 + 2 * 41 * 64,
        "gates_bias": 2 * 41 + 1,
        "largest": 11,  # measurements, no parameters
    }
    stored = sum(int(np.prod(spec.shape)) for spec in r89.PARAMETERS.values()) - 11
    padding = 4 * 256 * 768 + 4 * 768**2 + 2 * 768 * 3072
    assert stored == sizes.parameter_count(r89.PARAMETERS) - 11 + padding
    assert stored == pytest.approx(643.5e6, rel=1e-3)
    assert 6 * matmul_parameters(r89.PARAMETERS) == pytest.approx(685e6, rel=0.01)


def test_r89_stages():
    found = r89.RECIPE
    assert [stage.steps for stage in found.stages] == [423, 424, 423, 15]
    assert [found.tokens_per_step(stage) for stage in found.stages] == TOKENS
    assert [stage.max_doc_len for stage in found.stages] == [896, 2048, 2048, 2048]
    assert (found.steps, found.tokens) == (1285, 338_821_120)
    windows = (384, 896, 1408, 1664), (128, 384, 640, 768)
    for stage, long, short in zip(found.stages, *windows, strict=True):
        wanted = (1 + (long if layer in (3, 10) else short) for layer in range(11))
        assert stage.windows == tuple(wanted)
    assert (found.eval_windows[10], found.eval_windows[9]) == (2561, 769)


@pytest.mark.parametrize(
    ("schedule", "points", "near"),
    [
        (r62.rate, RATES_62, 1e-6),
        (through(r62.MOMENTUM), MOMENTUM_62, 1e-6),
        (through(r62.SHARES[1]), {0: 0.5, 520: 0.5, 780: 0.25, 1040: 0}, 1e-6),
        (through(r62.SHARES[2]), {0: 0.25, 260: 0.125, 520: 0, 1040: 0}, 1e-6),
        (r89.rate, {0: 1, 423: 1.52, 700: 1.1748, 847: 1.0271, 1269: 0.1521, 1284: 0.15}, 6e-5),
        (through(r89.MOMENTUM), {150: 0.90, 300: 0.95, 1235: 0.95, 1269: 0.882, 1284: 0.852}, 6e-5),
        (through(r89.SHARES[1]), {150: 0.5, 300: 0.5, 508: 0.3998, 700: 0.1733, 847: 0}, 6e-5),
        (through(r89.SHARES[2]), {150: 0.1613, 300: 0.0727, 423: 0}, 6e-5),
        (through(r89.PREFIX_SHARE), {0: 0.25, 423: 0.25, 508: 0.1999, 700: 0.0867, 847: 0}, 6e-5),
    ],
)
def test_schedules(schedule, points, near):
    """As tabulated for the reference recipe (appendix A), to four digits in record 89."""
    for step, value in points.items():
        assert float(schedule(step)) == pytest.approx(value, abs=near)


def test_r89_starts_with_the_published_coefficients():
    """Gates and mixtures of a fresh model, for any token: they are set by their biases alone."""
    sets = "WIDTH=48 MLP_WIDTH=16 VOCAB=272 BIGRAMS=512 BOS=5 PREFIX_SHARE={}".split()
    recipe = find("r89", sets).recipe
    params = first_parameters(recipe)
    x = jax.random.normal(jax.random.key(1), (1, 2, 48))
    early, late = (
        named(coefficients(x, params, "gates", n, params["gates_scale"]), r89.GATES[n])
        for n in range(2)
    )
    assert [sum(gates.values()) for gates in r89.GATES] == [26, 41]
    assert {layer for name, layer in [*early, *late] if name == "own value"} == {1, 3, 4, 7}
    starts = {"heads": 0.25, "bigram": 0.05, "skip": 0.5, "take": 1}
    for (name, _), found in (early | late).items():
        np.testing.assert_allclose(found, starts.get(name, 0), atol=2e-3)
    mixtures = [0] * 6 + [2, 2, 1.1**0.5, 1, 0, 0.05, 1.1**0.5, 1], [0, -0.5] + [0] * 12
    for n, starts in enumerate(mixtures):
        np.testing.assert_allclose(coefficients(x, params, "mudd", n, 0.1)[0, 1], starts, atol=4e-3)


@pytest.mark.slow
def test_r89_counts_the_longest_prefix_of_the_next_token(monkeypatch):
    """Against the plain sum of the record, in the first two stages and not in the third."""
    prefixes = np.random.default_rng(0).integers(-100, 272, size=272).astype(np.int32)
    toy = [*TOYS["r89"], "PREFIX_SHARE={0:0.25,5:0.0}", "FP8=off"]
    given = lambda ordinary, size: np.maximum(prefixes, -1)
    with monkeypatch.context() as patch:
        patch.setattr("jspeed.model.prefixes.gpt2_prefixes", given)
        recipe = find("r89", toy).recipe
    params = first_parameters(recipe)
    tokens = jax.random.randint(jax.random.key(1), (1, 25), 6, 257)
    for stage, counted in zip(recipe.stages, (True, False), strict=True):
        batch = tokens[:, : stage.lane_len + 1]
        ctx = r.Context(stage, training=True, step=jnp.int32(2))
        weights = jnp.full((1, stage.lane_len), 1 / stage.lane_len)

        @jax.jit
        def both(params, batch, weights=weights, ctx=ctx):
            total = recipe.loss(params, batch[:, :-1], batch[:, 1:], weights, ctx)[0]
            return total, recipe.forward(params, batch[:, :-1], ctx)

        total, z = both(params, batch)
        z = np.asarray(z, np.float64)[0]
        lse, targets = np.log(np.exp(z).sum(-1)), np.asarray(batch[0, 1:])
        expected = 0.0
        for t in range(stage.lane_len):
            shares = (1, 0.5, 0.25 * 3 / 5)[: 3 if counted else 2]
            for share, target in zip(shares, targets[t:], strict=False):
                expected += share * (lse[t] - z[t, target])
            prefix = prefixes[targets[t]]
            expected += 0.25 * 3 / 5 * (lse[t] - z[t, prefix]) * (prefix >= 0) * counted
        assert float(total) == pytest.approx(expected, rel=1e-5)
