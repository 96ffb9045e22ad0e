"""Record 92 against the numbers of its source: sizes, stages, schedules, hashes, averages; and
candidates."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed import recipe as r
from jspeed.kernels import CUSTOM, attention_backends
from jspeed.model.attention import Documents, attention, find_documents
from jspeed.model.custom_kernels import custom_kernel
from jspeed.model.positions import frequencies, yarn
from jspeed.optim.schedules import jumps, through
from jspeed.recipes import r92
from jspeed.record import sizes
from jspeed.run.check_recipe import check_recipe
from jspeed.run.compute import score
from jspeed.run.find_recipe import find
from jspeed.speedrun.candidates import candidates
from jspeed.speedrun.mudd import blend, coefficients, grouped_coefficients, named
from jspeed.speedrun.ngrams import bigram_rows, sign_rows, trigram_rows

from ..model import dense
from ..toys import TOYS, first_parameters
from .test_r62_r89 import TABLE, by_group


def test_parameters_by_group():
    assert by_group(r92.PARAMETERS) == {
        "words": 2 * TABLE,
        "tables": 4 * TABLE,
        "ngrams": 84_602_880 * 768,
        "queries_keys": 42 * 256 * 768,
        "values_outs": 14 * 768**2,
        "mlp": 22 * 768 * 2816,
        "value_gates": 3 * 6 * 12,
        "smear": 12,
        "scalars": 2 * 11 + 2,
        "layer_scales": 22,
        "post_scales": 22,
        "mudd": 2 * 64 * 768 + 2 * 14 * 64 + 10 * 12 * 64,
        "mudd_bias": 2 * 14,
        "gates": 2 * 64 * 768 + 2 * 23 * 64,
        "gates_bias": 2 * 23 + 1,
        "largest": 11 * 5,  # measurements, no parameters
    }
    assert sizes.parameter_count(r92.PARAMETERS) == pytest.approx(65.27e9, rel=1e-3)
    assert {
        name: spec.shape[0] for name, spec in r92.PARAMETERS.items() if spec.axes[:1] == ("matrix",)
    } == {"queries_keys": 48, "values_outs": 16, "mlp": 24}


def test_flops():
    """Matmul weights that a token meets, in millions, as tabulated for the reference recipe
    (section 0), and attention by hand: 3 layers of 576 channels and 2 of 384 in the short window, 2
    of 768 in the long one."""
    stages = [r92.RECIPE.stages[number] for number in (0, 3, 4, 6)]
    for stage, expected in zip(stages, (67.8, 71.0, 78.8, 98.6), strict=True):
        assert sizes.active_matmul_parameters(r92.RECIPE, stage) / 1e6 == pytest.approx(
            expected, abs=0.35
        )
    short, long = (sizes.mean_context(stages[0], window) for window in (129, 385))
    whole = 6 * sizes.active_matmul_parameters(r92.RECIPE, stages[0]) + 12 * (
        2496 * short + 1536 * long
    )
    assert sizes.flops_per_token(r92.RECIPE, stages[0]) == pytest.approx(whole)


def test_stages():
    found = r92.RECIPE
    ends = np.cumsum([stage.steps for stage in found.stages])
    assert list(ends) == [320, 336, 681, 965, 1107, 1174, 1194]
    assert (found.steps, found.tokens, found.period) == (1194, 328_663_040, 4)
    assert r92.LAST_TIED == 1174 | 1
    windows = (3, 7, 7, 11, 11, 11, 13), (1, 3, 3, 5, 5, 5, 6)
    for stage, long, short in zip(found.stages, *windows, strict=True):
        wanted = (1 + 128 * (long if layer in (3, 10) else short) for layer in range(11))
        assert stage.windows == tuple(wanted)
    assert (found.eval_windows[10], found.eval_windows[9]) == (2561, 769)
    assert list(r92.UPDATES[:3]) == [1, 3, 5] and list(r92.UPDATES[166:170]) == [333, 335, 339, 343]
    assert all(stage.scored % 2048 == 0 for stage in found.stages[:5])


RATES = {0: 1, 233: 1, 234: 1, 319: 0.936702, 320: 1.408383, 336: 1.387617, 514: 1.156596}
RATES |= {680: 0.941149, 681: 1.049989, 896: 0.722915, 965: 0.617947, 1106: 0.403447}
RATES |= {1107: 0.391182, 1173: 0.301361, 1174: 0.3, 1193: 0.3}
MOMENTUM = {0: 0.85, 120: 0.89, 240: 0.93, 1144: 0.93, 1145: 0.9284, 1193: 0.8516}
PREFIXES = {0: 0.25, 319: 0.25, 320: 0.2, 411: 0.15, 501: 0.1, 591: 0.05, 680: 0.05, 681: 0}


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        (r92.rate, RATES),
        (through(r92.MOMENTUM), MOMENTUM),
        (through(r92.SHARES[1]), {160: 0.5, 319: 0.5, 500: 0.25069, 680: 0.00139}),
        (through(r92.SHARES[2]), {160: 0.125, 319: 0.00078}),
        (jumps(r92.PREFIX_SHARE), PREFIXES),
        (r92.of_pairs(lambda pairs: 0.95**pairs), {0: 0.95, 167: 0.95, 168: 0.9025, 381: 0.9025}),
        (r92.of_tables, {0: 0.56, 168: 0.56 * 1.383721}),
    ],
)
def test_schedules(schedule, points):
    """As tabulated for the reference recipe (appendix A)."""
    for step, value in points.items():
        assert float(schedule(step)) == pytest.approx(value, abs=6e-6)


def test_scales_of_attention():
    narrow = 0.13, 0.15856, 0.15856, 0.17476, 0.17476, 0.17476, 0.18114
    wide = 0.085, 0.09940, 0.09940, 0.10839, 0.10839, 0.10839, 0.11201
    for start, windows, ends in (
        (r92.NARROW_SCALE, r92.SHORT_WINDOWS, narrow),
        (r92.WIDE_SCALE, r92.LONG_WINDOWS, wide),
    ):
        for stage, end in enumerate(ends):
            chain = [128 * n for n in windows[: stage + 1]]
            assert yarn(frequencies(32), start, chain)[1] == pytest.approx(end, abs=6e-6)


def test_hashes_of_the_record():
    tokens = jnp.array([[50256, 464, 2159, 318, 257, 1643]])
    half = r92.NGRAMS // 2
    expected = [42301439, 30057605, 31937192, 21659224, 890507, 23037573]
    np.testing.assert_array_equal(bigram_rows(tokens, half)[0], expected)
    expected = [84602879, 84602879, 77435831, 71736975, 78693949, 67888422]
    np.testing.assert_array_equal(half + trigram_rows(tokens, half)[0], expected)
    signs = [0, 3392, 241, 5431, 5317, 6654], [0, 0, 7077, 1047, 6158, 3556]
    for which, expected in zip(r92.SIGNS, signs, strict=True):
        np.testing.assert_array_equal(sign_rows(tokens, which)[0], expected)


def test_averages_of_the_record():
    """First and last step, how many, and how old on average what they hold is (docs of the record,
    section 5)."""
    facts = [(896, 1193, 150, 128.7), (945, 1193, 63, 48.6), (947, 1191, 62, None)]
    facts += [(897, 1193, 76, 122.9)]
    for average, (first, last, count, age) in zip(r92.averages(), facts, strict=True):
        ticks = np.flatnonzero(average.rates)
        assert (ticks[0], ticks[-1], len(ticks)) == (first, last, count)
        assert average.rates[first] == 1
        if age:
            rates = average.rates[ticks]
            left = rates * np.append(np.cumprod(1 - rates[:0:-1])[::-1], 1)
            assert np.sum(left) == pytest.approx(1)
            assert np.sum(left * (1193 - ticks)) == pytest.approx(age, abs=0.05)


def test_gates_and_mixtures_at_the_start():
    assert [sum(gates.values()) for gates in r92.GATES] == [23, 13]
    assert {layer for gates in r92.GATES for kind, layer in gates if kind == "own value"} == {1, 3}
    x = jnp.ones((1, 1, 8))
    params = dict(
        mudd_up=jnp.ones((2, 8, 4)), mudd_down=jnp.zeros((2, 4, 14)), mudd_bias=r92.MIX_STARTS / 0.1
    )
    params["mudd_groups"] = jnp.zeros((4, 10, 12))
    starts = [0] * 6 + [2, 2, 1.1**0.5, 1, 0, 0.05, 1.1**0.5, 1]
    np.testing.assert_allclose(coefficients(x, params, "mudd", 0, 0.1)[0, 0], starts, rtol=1e-6)
    grouped = np.asarray(grouped_coefficients(x, params, "mudd", 1, 0.1)[0, 0])
    expected = np.tile(np.array([0, -0.5] + [0] * 8)[:, None], 12)
    np.testing.assert_allclose(grouped, expected, rtol=1e-6)
    assert set(named(jnp.zeros((1, 1, 13)), r92.GATES[1])) == set(r92.GATES[1])


def test_a_mixture_of_groups_is_one_for_each_group_of_channels():
    rng = np.random.default_rng(0)
    c, x, y = (rng.normal(size=(2, 3, width)).astype(np.float32) for width in (4, 12, 12))
    expected = x + np.repeat(c, 3, axis=-1) * y
    np.testing.assert_allclose(blend((1, x), (jnp.asarray(c), y)), expected, rtol=1e-6)


def test_candidates_are_targets_and_the_next_of_a_permutation():
    rng = np.random.default_rng(0)
    vocabulary, count, start = 272, 96, 1234
    targets = rng.integers(0, vocabulary, 40)
    ids, place = (np.asarray(a) for a in candidates(jnp.asarray(targets), vocabulary, count, start))
    order = 20_011 * ((start + np.arange(vocabulary)) % vocabulary) % vocabulary
    own = set(targets.tolist())
    others = [x for x in order if x not in own][: count - len(own)]
    np.testing.assert_array_equal(ids, sorted([*own, *others]))
    np.testing.assert_array_equal(ids[place[targets]], targets)
    assert candidates(jnp.arange(100), vocabulary, count, 0)[0][0] == -1


def test_segments_cut_documents_for_attention_alone():
    tokens = jnp.array([[5, 1, 1, 1, 1, 1, 1, 5, 1, 1, 5, 1]])
    found = find_documents(tokens, 5, 8, 7, 3)
    np.testing.assert_array_equal(found.ids[0], [0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 4, 4])
    np.testing.assert_array_equal(found.offsets[0], [0, 3, 6, 7, 10, 12, 12, 12, 12])
    assert found.longest == 3


@pytest.mark.parametrize("backend", ["xla", "splash"])
def test_narrow_queries_and_keys(backend, monkeypatch):
    """Against a plain softmax in float64; kernels get zeros at their end, and outputs as wide as
    values."""

    def splash(q, k, v, *, scale, ids_BT, window):
        return attention(q, k, v, scale=scale, documents=documents, window=window)

    monkeypatch.setattr(attention_backends, "splash", splash)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 9, 2, width)).astype(np.float32) for width in (4, 4, 8))
    documents = find_documents(jnp.array([[5, 1, 1, 1, 5, 1, 1, 1, 1]]), 5)
    found = attention(
        *map(jnp.asarray, (q, k, v)), scale=0.3, documents=documents, window=3, backend=backend
    )
    ids, t = np.asarray(documents.ids[0]), np.arange(9)
    seen = (t[:, None] >= t) & (t[:, None] - t < 3) & (ids[:, None] == ids)
    scores = np.where(seen, 0.3 * np.einsum("thk,shk->hts", q[0], k[0], dtype=np.float64), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hts,shk->thk", p / p.sum(-1, keepdims=True), v[0])
    np.testing.assert_allclose(found[0], expected, atol=1e-6)


def test_cadences_that_do_not_fit_are_refused():
    stages = [dataclasses.replace(r92.STAGES[1], steps=15), *r92.STAGES[2:]]
    recipe = dataclasses.replace(r92.RECIPE, stages=(r92.STAGES[0], *stages))
    with pytest.raises(r.BadInput, match="let that stage start with a multiple of both"):
        check_recipe(recipe)


def test_canonical_evaluation():
    """By one field: impossible logits are -60 after the cap, in what the losses say."""
    found = find("r92", [*TOYS["r92"], "CANONICAL=True"], trace=False).recipe
    assert found.canonical and not r92.RECIPE.canonical
    rng = np.random.default_rng(0)
    x_BTD, head_VD = (
        jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((2, 24, 32), (272, 32))
    )
    parameters = {"head": found.parameters["head"]}
    given = dataclasses.replace(found, parameters=parameters, hidden=lambda *_: x_BTD)
    tokens = rng.integers(0, 272, size=(2, 25))
    bits = rng.uniform(size=(384, 384)) < 0.3
    bits[tokens[:, :-1], tokens[:, 1:]] = False
    tokenizer_mask = jnp.asarray(np.packbits(bits, axis=1, bitorder="little"))
    losses = []
    for known in (None, tokenizer_mask):
        ctx = r.Context(found.stages[-1], training=False, tokenizer_mask=known)
        arguments = jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:]), ctx
        losses.append(np.asarray(score.losses(given, {"head": head_VD}, *arguments), np.float64))
    z = np.asarray(found.logits({"head": head_VD}, x_BTD, ctx), np.float64)
    assert 0 < z.min() and z.max() < 23
    z = np.where(bits[tokens[:, :-1]][..., :272], -60.0, z)
    own = np.take_along_axis(z, tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(losses[1], np.log(np.exp(z).sum(-1)) - own, atol=1e-5)
    assert np.all(losses[1] < losses[0])


@pytest.mark.parametrize("asked", ["auto", "off"])
def test_the_field_for_custom_kernels_holds_for_n_grams_too(asked):
    recipe = find("r92", [f"OWN_KERNELS={asked}"]).recipe
    assert [each.custom_kernels for each in recipe.row_optimizers().values()] == [asked]


INTERPRETED = "queries and keys", "XSA", "gradient of a norm"


@pytest.mark.slow
def test_custom_kernels_around_attention_change_no_gradient(monkeypatch):
    """In JAX's interpreter of kernels; where heads have tags of documents, cuDNN's stand-in masks
    none."""
    called, kernels = [], {name: custom_kernel(name).kernel for name in CUSTOM}

    def interpreted(name):
        run = kernels[name].run

        def call(*args):
            called.append(name)
            return run(*args, interpret=True)

        kernels[name] = kernels[name]._replace(run=call)

    for name in INTERPRETED:
        interpreted(name)

    def stand_in(q, k, v, *, scale, offsets_BO, window, longest=None):
        called.append("masked" if offsets_BO is not None else "tagged")
        documents = None
        if offsets_BO is not None:
            documents = Documents(attention_backends.token_bounds(offsets_BO, q.shape[1])[0])
        return attention(q, k, v, scale=scale, documents=documents, window=window)

    monkeypatch.setattr(attention_backends, "cudnn", stand_in)
    sizes_ = "WIDTH=256 HEADS=2 MLP_WIDTH=256 GATE_WIDTH=12 COMPUTE=bfloat16 FP8=off".split()
    sizes_ += ["LANE_LENS=(16,32)"]
    found = []
    for way in ("off", "on"):
        recipe = find("r92", [*TOYS["r92"], *sizes_, f"OWN_KERNELS={way}"]).recipe
        draw = np.random.default_rng(0)
        params = first_parameters(recipe)
        banks = "queries_keys", "values_outs", "mlp"
        params |= {name: 0.1 * draw.normal(size=params[name].shape) for name in banks}
        for path, spec in recipe.parameters.items():
            params[path] = np.asarray(params[path]).astype(spec.compute or np.float32)
        tokens = jax.random.randint(jax.random.key(1), (1, 33), 6, 257)
        tokens = tokens.at[:, ::11].set(recipe.data.bos_id)
        arrays = tokens[:, :-1], tokens[:, 1:], jnp.full((1, 32), 1 / 32)
        how = dict(step=jnp.int32(5), attention="cudnn", fp8="native", kernels=kernels)
        ctx = r.Context(recipe.stages[1], training=True, **how)
        loss = functools.partial(recipe.loss, ctx=ctx)
        found.append(jax.jit(jax.value_and_grad(loss, has_aux=True))(params, *arrays))
        if way == "off":
            assert set(called) == {"masked"}
            called.clear()
    assert set(called) == {*INTERPRETED, "masked", "tagged"}
    ((value, _), grads), ((expected, _), wanted) = found[1], found[0]
    assert float(value) == pytest.approx(float(expected), rel=2e-3)
    for name in (*banks, "head", "values", "layer_scales", "post_scales", "attention_scales"):
        assert dense.distance(grads[name], wanted[name]) < 0.03, name
