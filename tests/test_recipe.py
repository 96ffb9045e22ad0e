"""The Recipe type: parameter counts, FLOPs, hashes, and which recipes are refused."""

import ast
import dataclasses
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed import recipe as r
from jspeed.board.records.remarks import RECORDS
from jspeed.fields import as_json, recipe_hash
from jspeed.recipes import known_recipes
from jspeed.record import sizes
from jspeed.record.schema import count_parameters
from jspeed.run.check_recipe import check_recipe
from jspeed.run.compute import score
from jspeed.run.find_recipe import find

from .refusals import refused
from .toys import ALIKE, SAME, TOYS, first_parameters, matmul_parameters, moved_parameters


@pytest.fixture(scope="module", params=known_recipes())
def recipe(request):
    return find(request.param, TOYS[request.param]).recipe


def test_count_equals_the_arrays(recipe):
    arrays = jax.eval_shape(lambda: r.init_parameters(recipe.parameters, jax.random.key(0)))
    padding = sum(spec.padding * np.prod(spec.shape[1:]) for _, spec in r.leaves(recipe.parameters))
    stored = sum(a.size for a in jax.tree.leaves(arrays))
    assert sizes.parameter_count(recipe.parameters) + padding == stored


SMALL = ["WIDTH=64", "LAYERS=3", "HEADS=2", "MLP_WIDTH=256", "VOCAB=272"]
SMALL_BLOCKS = 3 * (4 * 64 * 64 + 2 * 64 * 256)


def test_stdlib_numbers_by_hand():
    recipe, blocks = find("stdlib", [*SMALL, "LANE_LEN=128"]).recipe, SMALL_BLOCKS
    assert sizes.parameter_count(recipe.parameters) == blocks + 2 * 272 * 64
    assert matmul_parameters(recipe.parameters) == blocks + 272 * 64
    keys = sum(range(1, 129)) / 128
    flops = 6 * (blocks + 272 * 64) + 3 * 12 * 64 * keys
    assert sizes.flops_per_token(recipe, recipe.stages[0]) == flops


def test_total_and_active_parameters_by_hand():
    blocks, table_of = SMALL_BLOCKS, sizes.parameter_table
    counts = lambda name, *more: count_parameters(table_of(find(name, [*SMALL, *more]).recipe))
    # active are a row of the embedding and all of the head
    assert counts("stdlib") == (blocks + 2 * 272 * 64, blocks + 64 + 272 * 64)
    total, active = counts("shakespeare-char", "ROWS=512", "ORDERS=(2,3)")
    assert (total, active) == (blocks + 2 * 272 * 64 + 512 * 64, blocks + 64 + 272 * 64 + 2 * 64)
    assert counts("shakespeare-char", "ROWS=512", "ORDERS=(2,3,4)") == (total, active + 64)


def test_every_recipe_reads_its_tables_and_counts_what_it_stores(recipe):
    table = sizes.parameter_table(recipe)
    assert count_parameters(table)[0] == sizes.parameter_count(recipe.parameters)
    for path, spec in r.leaves(recipe.parameters):
        if "row" in spec.axes:
            reads = table[path]["reads"]
            assert reads == spec.sparse_rows if spec.sparse_rows else reads >= 1


def test_a_cast_table_is_known_by_its_shape():
    found = find("shakespeare-char", TOYS["shakespeare-char"]).recipe
    cast = lambda p, t, ctx: found.forward(p | {"ngrams": p["ngrams"].astype(jnp.bfloat16)}, t, ctx)
    in_bf16 = dataclasses.replace(found, forward=cast)
    assert sizes.parameter_table(in_bf16) == sizes.parameter_table(found)


def test_mean_context_by_counting():
    for length, document, window in [(16, None, None), (16, 5, None), (16, None, 4), (16, 5, 3)]:
        stage = r.Stage(steps=1, lane_len=length, max_doc_len=document)
        piece = min(length, document or length)
        seen = [min(t + 1, window or piece) for t in range(piece)]
        assert sizes.mean_context(stage, window) == pytest.approx(np.mean(seen))


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


def test_gpt2_weights_have_the_spread_that_gpt2_s_have():
    """Radford et al.: 0.02, and what adds to the residual stream 1 / sqrt(2 layers) of it; no two
    layers are equal."""
    parameters = find("llmc", [*TOYS["llmc"], "LAYERS=8"], trace=False).recipe.parameters
    drawn = jax.jit(lambda: r.init_parameters(parameters, jax.random.key(0)))()
    spread = {"embed": 0.02, "qkv": 0.02, "up": 0.02, "out": 0.005, "down": 0.005}
    for name, std in spread.items():
        assert float(jnp.std(drawn[name])) == pytest.approx(std, rel=0.05), name
        layers = np.asarray(drawn[name]).reshape(8, -1)
        assert np.abs(np.corrcoef(layers) - np.eye(8)).max() < 0.15
    for name in drawn.keys() - spread.keys() - {"positions"}:
        assert float(jnp.std(drawn[name])) == 0, name


KEPT = [*RECORDS.glob("ideas/*.py"), *RECORDS.glob("*/*/*/recipe-*.py")]


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recipes_of_records_and_ideas_can_be_run(path):
    """They call functions of the house as it was when they were written."""
    find(str(path))


@pytest.mark.parametrize("name", known_recipes())
def test_fields_come_back_from_json(name):
    """Records and model folders hold fields as JSON; a run is reproduced, and a model read, with
    them as --set."""
    found = find(name, trace=False)
    fields = as_json(found.fields)
    assert recipe_hash(found.source, fields) == found.hash
    again = find(name, [f"{field}={value!r}" for field, value in fields.items()], trace=False)
    assert again.fields == found.fields and again.hash == found.hash


def test_every_track_that_a_recipe_names_has_rules():
    tracks = {name: find(name, trace=False).recipe.track for name in known_recipes()}
    assert all((RECORDS / track / "track.toml").is_file() for track in tracks.values() if track)
    assert tracks["gpt2"] is None


def test_reading_a_recipe_starts_no_backend():
    """Processes join, and CPU devices are asked for, after the recipe has been read and before JAX
    has any device."""
    lines = "from jax._src import xla_bridge; from jspeed.run.find_recipe import find"
    lines += "; from jspeed.recipes import known_recipes"
    lines += (
        "; [find(name, trace=False).recipe.optimizer() for name in known_recipes()];"
        " print(xla_bridge._backends)"
    )
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert done.stdout == "{}\n", done.stderr


@pytest.mark.parametrize(("name", "other"), ALIKE.items())
def test_recipes_said_to_be_alike_are(name, other):
    ours, theirs = (find(each, trace=False).source for each in (name, other))
    begin, end, their_end = {"gpt2": ("def hidden(", "def optimizer(", "def schedule(")}.get(
        name, ("def hidden(", "def falling(", "def falling(")
    )
    ours = ours[ours.index(begin) : ours.index(end)]
    theirs = theirs[theirs.index(begin) : theirs.index(their_end)]
    # one of them is as wide as when its runs were recorded
    words = [ast.unparse(ast.parse(code)).split() for code in (ours, theirs)]
    assert words[0] == words[1]


def context(recipe, length):
    """A stage of the recipe's last windows and ``length`` tokens."""
    stage = dataclasses.replace(
        recipe.stages[-1], steps=1, lane_len=length, max_doc_len=None, max_docs=length
    )
    return r.Context(stage, training=False)


# Of programs that are one in two recipes one is compiled by default.
each_program = pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SAME)) for name in known_recipes()],
    indirect=True,
)


@each_program
def test_first_loss_is_log_of_vocabulary_where_the_head_is_zero(recipe):
    params = first_parameters(recipe)
    tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, 257)
    ctx = context(recipe, 16)
    losses = jax.jit(lambda p, t: score.losses(recipe, p, t[:, :-1], t[:, 1:], ctx))
    loss_BT = losses(params, tokens)
    vocabulary = params["embed"].shape[0]
    if not np.any(params.get("head", 1)):
        np.testing.assert_allclose(loss_BT, np.log(vocabulary), rtol=1e-5)
    else:
        # microgpt's head starts larger: 3.67 with 28 ids, where log(28) is 3.33.
        near = 0.5 if "head" in params else 0.1
        assert float(loss_BT.mean()) == pytest.approx(np.log(vocabulary), abs=near)


@each_program
def test_no_position_sees_the_future_by_gradient(recipe):
    """Every position gets rows of its own in the tables that are looked up; the gradient is then by
    position."""
    length = 16
    params, ctx, t = moved_parameters(recipe), context(recipe, length), length * 5 // 8
    inputs = jax.random.randint(jax.random.key(1), (2, length), 6, 257)
    specs = dict(r.leaves(recipe.parameters))
    axes = {path: s.axes.index("token") for path, s in specs.items() if "token" in s.axes}
    axes["embed"] = 0

    def picked(shift):
        tables = {}
        for name, axis in axes.items():
            own = jnp.take(params[name], inputs[0], axis=axis)
            own = own + shift if name == "embed" else own
            tables[name] = jnp.concatenate([params[name], own], axis=axis)
        ids = inputs.at[0].set(params["embed"].shape[0] + jnp.arange(length))
        return recipe.forward({**params, **tables}, ids, ctx)[0, t, 3]

    zeros = jnp.zeros((length, params["embed"].shape[1]))
    by_position = np.abs(jax.jit(jax.grad(picked))(zeros)).max(-1)
    assert np.all(by_position[t + 1 :] == 0) and by_position[t] > 0 and by_position[t - 1] > 0


@pytest.mark.slow
def test_no_position_sees_the_future_by_changing_it(recipe):
    length = 16
    params, ctx = moved_parameters(recipe), context(recipe, length)
    tokens = jax.random.randint(jax.random.key(1), (1, length), 6, 257)
    changed = tokens.at[:, 9:].add(1)
    forward = jax.jit(lambda tokens: recipe.forward(params, tokens, ctx))
    before, after = forward(tokens), forward(changed)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert np.any(np.asarray(before[:, 9:] != after[:, 9:]))


def test_scaled_queries_and_keys_change_no_logit():
    """They are normed head by head before they meet."""
    recipe = find("stdlib", TOYS["stdlib"]).recipe
    params, ctx = moved_parameters(recipe), context(recipe, 16)
    tokens = jax.random.randint(jax.random.key(1), (1, 16), 6, 257)
    forward = jax.jit(lambda params: recipe.forward(params, tokens, ctx))
    plain = forward(params)
    for name, most in (("query", 1e-5), ("key", 1e-5), ("value", None)):
        moved = float(jnp.max(jnp.abs(forward(params | {name: 10 * params[name]}) - plain)))
        assert moved <= most if most else moved > 1e-2, (name, moved)


@pytest.mark.parametrize(
    ("name", "inputs"), [("stdlib", ("query", "key", "value")), ("llmc", ("qkv",))]
)
def test_a_head_is_a_run_of_columns(name, inputs):
    """Split to (B, T, H, K), so that devices share whole heads: without its rows of "out", nothing
    is left of a head.

    The other split, to (B, H, T, K), takes a head's numbers from the columns of all.
    """
    x_BTD = np.random.default_rng(0).normal(size=(2, 6, 8))
    x_BTHK, other_BTHK = x_BTD.reshape(2, 6, 2, 4), x_BTD.reshape(2, 2, 6, 4).swapaxes(1, 2)
    np.testing.assert_array_equal(x_BTHK[:, :, 1], x_BTD[..., 4:])
    assert not np.array_equal(other_BTHK, x_BTHK)
    recipe = find(name, [*TOYS[name], "LAYERS=1", "HEADS=2"]).recipe
    params, ctx = moved_parameters(recipe), context(recipe, 16)
    tokens = jax.random.randint(jax.random.key(1), (1, 16), 6, 257)
    forward = jax.jit(lambda params: recipe.forward(params, tokens, ctx))
    rows = params["out"].shape[1] // 2
    params["out"] = params["out"].at[:, rows:].set(0)
    plain = forward(params)
    for bank in inputs:
        columns = params[bank].shape[-1] // 2
        parts = np.s_[:columns], np.s_[columns:]
        first, second = (params[bank].at[..., part].add(0.3) for part in parts)
        np.testing.assert_array_equal(forward(params | {bank: second}), plain)
        assert float(jnp.max(jnp.abs(forward(params | {bank: first}) - plain))) > 1e-3, bank


@pytest.mark.parametrize("name", ["fineweb-cpu", "r21", "r29"])
def test_a_document_does_not_see_another(name):
    recipe = find(name, TOYS[name]).recipe
    params, ctx = moved_parameters(recipe), context(recipe, 16)
    tokens = jax.random.randint(jax.random.key(1), (1, 16), 6, 257).at[:, 9].set(5)
    changed = tokens.at[:, :9].add(1)
    forward = jax.jit(lambda tokens: recipe.forward(params, tokens, ctx))
    before, after = forward(tokens), forward(changed)
    np.testing.assert_allclose(before[:, 9:], after[:, 9:], atol=1e-6)
    assert np.any(np.abs(np.asarray(before - after))[:, :9] > 1e-3)


@pytest.mark.parametrize("looks_back", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", ["r62", pytest.param("r89", marks=pytest.mark.slow)])
def test_what_leaks_over_a_document_border_is_one_position(name, looks_back):
    """As the records have it: smear and bigram read the last token before the border, keys that
    look back its state."""
    layers = "LONG_LAYERS=(1,)" if looks_back else "LONG_LAYERS=()"
    recipe = find(name, [*TOYS[name], layers]).recipe
    params, ctx = moved_parameters(recipe), context(recipe, 16)
    tokens = jax.random.randint(jax.random.key(1), (1, 16), 6, 257).at[:, 9].set(5)
    forward = jax.jit(lambda tokens: recipe.forward(params, tokens, ctx))
    last = forward(tokens.at[:, 8].add(1)) - forward(tokens)
    others = forward(tokens.at[:, :8].add(1)) - forward(tokens)
    assert np.any(np.abs(np.asarray(last))[:, 9] > 1e-3)
    np.testing.assert_array_equal(np.asarray(last)[:, :8], 0)
    assert np.any(np.abs(np.asarray(others))[:, :9] > 1e-3)
    assert np.any(np.abs(np.asarray(others))[:, 9:] > 1e-6) == looks_back


def test_hash_follows_source_and_fields():
    assert find("stdlib").hash == find("stdlib").hash != find("stdlib", ["STEPS=3"]).hash


def test_describe_names_the_total():
    rows = dict((name, value) for name, _, value in sizes.describe(find("stdlib").recipe))
    assert rows["tokens"].replace(",", "") == str(find("stdlib").recipe.tokens)


def spec(shape, axes, **more):
    return r.ParamSpec(shape, axes, jax.nn.initializers.zeros, "g", **more)


def test_stacks_of_two_lengths_do_not_run_fewer_layers():
    table = {"a": spec((4, 2), ("layer", "model")), "b": spec((4, 2), ("layer", "model"))}
    with pytest.raises(ValueError, match="unpack"):
        r.run_blocks(lambda p, x: x, table, 4, {"a": jnp.zeros((4, 2)), "b": jnp.zeros((2, 2))}, 0)


def test_flops_of_stages_are_summed():
    """FLOPs/token are those of the last stage, so tokens x FLOPs/token is another number."""
    described = sizes.describe(find("r21", trace=False).recipe)
    formulas = {name: formula for name, formula, _ in described}
    assert formulas["FLOPs"] == "sum over stages of tokens x FLOPs/token"
    assert formulas["FLOPs/token"].endswith("in the last stage")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lanes": 0}, "lanes is 0 .int.; expected a whole number from 1"),
        ({"lanes": 64.0}, "lanes is 64.0 .float."),
        ({"eval_every": 0}, "eval_every is 0"),
        ({"eval_every": -3}, "eval_every is -3"),
        ({"target_loss": math.nan}, "target_loss is nan .float.; expected a finite number"),
        ({"target_loss": math.inf}, "target_loss is inf"),
        ({"name": 7}, "name is 7"),
        ({"name": ""}, "name is ''; expected .* letters"),
        ({"name": "../../evil"}, "name is '../../evil'"),
        ({"name": "<script>"}, "name is '<script>'"),
        ({"track": "a/../../b"}, "track is 'a/../../b'"),
        ({"layers": 10**9}, "layers is 1000000000"),
        ({"loss": None}, "loss is None; expected a function"),
        ({"parameters": None}, "parameters is None"),
        ({"parameters": {"w": 3}}, "parameter w is 3 .int.; expected a ParamSpec"),
        ({"parameters": {"w": [3]}}, r"parameter w/\[0\] is 3"),
        ({"parameters": {"w": spec((2.0,), ("model",))}}, r"parameter w.shape\[0\] is 2.0"),
        ({"data": r.Data("../x", 257, 256)}, "data.name is '../x'"),
        ({"data": r.Data("x", 2**31, 256)}, "data.vocab_size is 2147483648"),
        ({"data": r.Data("x", 257, 256, align="eos")}, "data.align is 'eos'"),
        ({"data": r.Data("x", 257, 256, windows="all")}, "data.windows is 'all'"),
        ({"data": r.Data("x", 257, 256, windows="random", shuffle_block=128)}, "windows='random'"),
        ({"sample": r.Sample(temperature=-1)}, "sample.temperature is -1"),
        ({"stages": (r.Stage(steps=2.5, lane_len=128),)}, r"stages\[0\].steps is 2.5"),
        ({"stages": (r.Stage(steps=0, lane_len=128),)}, r"stages\[0\].steps is 0"),
        ({"eval_len": 512, "eval_tokens": 100}, "eval_tokens is 100"),
        ({"stages": ()}, "STAGES is empty"),
        ({"stages": (r.Stage(steps=1, lane_len=100),)}, "not a multiple of the lane length 100"),
        ({"stages": (r.Stage(steps=1, lane_len=128, windows=(3,)),)}, "1 attention windows for"),
        ({"stages": (r.Stage(steps=1, lane_len=128, windows=(9, 129, 9, 9)),)}, "of 129 tokens"),
        ({"stages": (r.Stage(steps=1, lane_len=128, max_doc_len=200),)}, "cuts documents at 200"),
        ({"parameters": {"w": spec((2, 3), ("model",))}}, "names 1 axes"),
        ({"eval_windows": (3,)}, "eval_windows lists 1 attention windows for 4 layers"),
        ({"data": r.Data("x", 257, 4000)}, "data.bos_id is 4000, but ids are below vocab_size=257"),
        ({"parameters": {"w": spec((2, 2), ("model", "model"))}}, "names 1 axes"),
        ({"parameters": {"w": spec((2,), ("model",), compute="bf16")}}, "parameter w has compute"),
        ({"parameters": {"w": spec((2,), ("model",), dtype="int32")}}, "parameter w has dtype"),
        *(
            (
                {"parameters": {"w": spec((rows, 2), ("layer", "model"), padding=padding)}},
                f"w stacks {rows} entries",
            )
            for rows, padding in ((5, 0), (6, 0), (2, 0), (0, 0), (8, 4))
        ),
    ],
)
def test_refuses(change, words):
    refused(words, check_recipe, dataclasses.replace(find("stdlib").recipe, **change))
