"""Generation: KV cache against whole forward passes, sampling against its definition, stop and
length rules."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed import recipe as r
from jspeed.corpus import tokenizers
from jspeed.inference.generate import (
    NOT_A_NUMBER,
    STOPPED,
    Generator,
    Sampling,
    context_length,
    draw,
    joined,
    sample,
    write,
)
from jspeed.inference.trained import Model
from jspeed.model.kv_cache import advance, empty
from jspeed.model.layers import token_before
from jspeed.parallel.layout import partitions
from jspeed.parallel.mesh import make_mesh, put
from jspeed.recipes import known_recipes
from jspeed.run.compute.device import device_of
from jspeed.run.compute.program import eval_context
from jspeed.run.find_recipe import find

from ..refusals import refused
from ..toys import ALIKE, TOYS

GREEDY = Sampling(temperature=0)
BYTES = tokenizers.bytes_tokenizer().facts


def one_device():
    return make_mesh({"data": 1}, jax.devices()[:1])


def noisy(recipe):
    """Parameters of about the size of trained ones, drawn by NumPy, which compiles nothing."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: r.init_parameters(recipe.parameters, jax.random.key(0)))
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(0, 0.2, s.shape), s.dtype), shapes)


def toy(name, *sets, facts=BYTES, mesh=None):
    found = find(name, [*TOYS[name], *sets])
    return Model(found, noisy(found.recipe), mesh or one_device(), facts)


def whole_forward(model):
    """Greedy choice after each token of a row, by the recipe's own forward pass of a lane."""
    recipe, length = model.recipe, model.recipe.eval_len
    context = eval_context(recipe, device_of(model.mesh, "xla"))
    run = jax.jit(
        lambda tokens: jnp.argmax(recipe.forward(model.params, tokens, context)[..., :257], -1)
    )

    def chosen(text):
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(text)] = text
        return int(run(padded)[0, len(text) - 1])

    return chosen


SEEN = "r29", "microgpt-names"
OTHERS = [name for name in known_recipes() if name not in (*ALIKE, *SEEN)]


@pytest.mark.parametrize(
    "name", [*SEEN, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_cached_tokens_are_those_of_whole_forward_passes(name):
    """Prompts of unlike lengths, a mark inside one, windows: all as without a cache."""
    model = toy(name, facts=BYTES | {"bos_id": 5})
    prompts = [[7, 99, 200, 5, 31], [88]]
    generator = Generator(model, 2, GREEDY)
    steps = list(generator(prompts, context_length(model.recipe) - 6))
    chosen = whole_forward(model)
    for row, prompt in enumerate(prompts):
        text = [5, *prompt]
        for step in steps:
            if step[row] != STOPPED:
                assert step[row] == chosen(text)
                text.append(int(step[row]))
        assert len(text) > 4
    assert generator.decode._cache_size() == generator.prefill._cache_size() == 1


@pytest.mark.parametrize("name", ["gpt2", "stdlib"])
def test_a_token_reads_weights_where_they_lie(name):
    """No operation of the program makes a layer of a bank, which would be a copy of it."""
    model = toy(name, facts=BYTES | {"bos_id": 5})
    generator = Generator(model, 1, GREEDY)
    made = re.compile(r"= (\w+\[[\d,]*\])\S* (?:fusion|copy|slice)\(")
    one = np.ones(1, np.int32)
    cache, _ = generator._prefill([[7, 9]])
    program = generator.decode.lower(generator._params, cache, one, one, np.int32(0)).compile()
    entry = program.as_text().partition("\nENTRY")[2]
    shapes = {spec.shape[1:] for _, spec in r.leaves(model.recipe.parameters) if spec.stacks_layers}
    layers = {f"f32[{','.join(map(str, shape))}]" for shape in shapes if len(shape) > 1}
    assert layers and not layers & set(made.findall(entry))


def test_a_text_longer_than_the_context_keeps_its_later_half():
    model = toy("microgpt-names", facts=BYTES | {"bos_id": None})
    chosen, text = whole_forward(model), [9, 8, 7]
    seen = list(text)
    for (token,) in Generator(model, 1, GREEDY)([text], 40):
        seen = seen[-8:] if len(seen) > 16 else seen
        assert token == chosen(seen)
        seen.append(int(token))


# r89: pairs, composed and shifted heads, hashed pairs of tokens
@pytest.mark.parametrize("name", ["fineweb-cpu", pytest.param("r89", marks=pytest.mark.slow)])
def test_logits_with_a_cache_in_any_pieces(name):
    recipe = find(name, TOYS[name]).recipe
    params, ctx = noisy(recipe), eval_context(recipe, device_of(one_device()))
    # BOS is 5: many documents
    tokens = np.random.default_rng(0).integers(0, 9, (2, 16)).astype(np.int32)
    expected = jax.jit(lambda t: recipe.forward(params, t, ctx))(tokens)
    go_on = jax.jit(
        lambda *arguments: advance(lambda t: recipe.forward(params, t, ctx), *arguments)
    )
    for cuts in ([16], [1] * 16, [1, 8, 7]) if name == "fineweb-cpu" else ([4] * 4, [1] * 16):
        cache, start, found = empty(lambda t: recipe.forward(params, t, ctx), 2, 20), 0, []
        for cut in cuts:
            cache, logits = go_on(
                cache, np.full(2, start, np.int32), tokens[:, start : start + cut]
            )
            found.append(logits)
            start += cut
        np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=2e-5)


def test_previous_tokens_with_and_without_a_cache():
    tokens = np.int32([[4, 5, 6, 7], [8, 9, 1, 2]])
    expected = np.array([[0, 0, 4, 5], [0, 0, 8, 9]])
    np.testing.assert_array_equal(token_before(tokens, 2, 0), expected)

    def forward(tokens):
        kept = token_before(tokens, 2, 0)
        return kept

    cache = empty(lambda t: attention_and(forward, t), 2, 4)
    found, go_on = [], jax.jit(lambda *given: advance(lambda t: attention_and(forward, t), *given))
    for start, cut in ((0, 1), (1, 2), (3, 1)):
        cache, out = go_on(cache, np.full(2, start, np.int32), tokens[:, start : start + cut])
        found.append(out)
    np.testing.assert_array_equal(np.concatenate(found, axis=1), expected)


def attention_and(forward, tokens):
    from jspeed.model.attention import attention

    x = jnp.ones((*tokens.shape, 1, 2))
    attention(x, x, x, scale=1.0)
    return forward(tokens)


def test_positions_mixed_outside_the_primitives_are_refused(tmp_path):
    source = find("stdlib").source.replace(
        "    a_BTD = rms_norm(x_BTD)\n",
        "    x_BTD += jnp.pad(x_BTD, ((0, 0), (1, 0), (0, 0)))[:, :-1]\n    a_BTD ="
        " rms_norm(x_BTD)\n",
    )
    (tmp_path / "mine.py").write_text(source)
    found = find(str(tmp_path / "mine.py"), TOYS["stdlib"])
    model = Model(found, noisy(found.recipe), one_device(), BYTES)
    refused("positions outside the primitives", list, Generator(model, 1, GREEDY)([[1, 2, 3]], 2))


def test_a_recipe_that_caches_nothing_is_checked_too(tmp_path):
    source = (Path(__file__).parents[1] / "host_table" / "bigrams.py").read_text()
    last = "found_BTD.astype(jnp.float32) + "
    mixed = source.replace(last, last + "jnp.cumsum(found_BTD.astype(jnp.float32), 1) + ")
    assert source != mixed

    def written(text):
        (tmp_path / "mine.py").write_text(text)
        found = find(str(tmp_path / "mine.py"))
        model = Model(found, noisy(found.recipe), one_device(), BYTES)
        return model, Generator(model, 2, GREEDY)([[1, 2], [3]], 3)

    model, steps = written(source)
    text_BT = np.array([[256, 1, 2], [256, 3, 0]])
    context = eval_context(model.recipe, device_of(model.mesh))
    logits_BTV = model.recipe.forward(model.compute_params, text_BT, context)
    expected = np.argmax(logits_BTV[np.arange(2), [2, 1], :257], axis=-1)
    assert list(steps)[0].tolist() == expected.tolist()
    refused("positions outside the primitives", list, written(mixed)[1])


def test_a_step_costs_less_than_a_third_of_a_whole_forward_pass():
    model = toy("stdlib", "LANE_LEN=256", "EVAL_LEN=256", "EVAL_TOKENS=256")
    generator = Generator(model, 1, GREEDY)
    cache, lengths = generator._prefill([[256, 1]])
    arguments = (generator._params, cache, lengths - 1, np.zeros(1, np.int32), np.int32(0))
    step = generator.decode.lower(*arguments).compile().cost_analysis()["flops"]
    context = eval_context(model.recipe, device_of(model.mesh))
    tokens = jax.ShapeDtypeStruct((1, 256), jnp.int32)
    whole = (
        jax.jit(lambda t: model.recipe.forward(model.params, t, context)).lower(tokens).compile()
    )
    assert 3 * step < whole.cost_analysis()["flops"]


# Drawing


def keys(count):
    return jax.random.split(jax.random.key(0), count)


def test_draws_follow_the_probabilities_of_the_top_five():
    logits = jnp.asarray([0.3, 2.0, -1.0, 1.5, 0.0, 1.0, 0.5, -3.0])
    count, temperature = 10_000, 0.7
    many = jnp.broadcast_to(logits, (count, 8))
    drawn = np.asarray(draw(Sampling(temperature, top_k=5), keys(count), many))
    best = np.argsort(-logits)[:5]
    p = np.exp(np.asarray(logits)[best] / temperature)
    p /= p.sum()
    found = np.array([(drawn == token).sum() for token in best])
    assert found.sum() == count
    assert np.all(np.abs(found - count * p) < 3 * np.sqrt(count * p * (1 - p)))


def test_top_p_takes_the_fewest_that_reach_it():
    p = np.array([0.1, 0.45, 0.05, 0.25, 0.15])
    many = jnp.broadcast_to(jnp.log(p), (2000, 5))
    for top_p, expected in (
        (0.4, {1}),
        (0.5, {1, 3}),
        (0.7, {1, 3}),
        (0.71, {1, 3, 4}),
        (1.0, {0, 1, 2, 3, 4}),
    ):
        assert (
            set(np.asarray(draw(Sampling(1.0, top_p=top_p), keys(2000), many)).tolist()) == expected
        )
    assert set(np.asarray(draw(Sampling(1.0, top_k=2, top_p=1.0), keys(2000), many)).tolist()) == {
        1,
        3,
    }


def test_top_k_of_one_and_temperature_zero_are_the_argmax():
    logits = jax.random.normal(jax.random.key(1), (50, 30))
    for sampling in (Sampling(1.3, top_k=1), GREEDY, Sampling(1.0, top_p=1e-9)):
        np.testing.assert_array_equal(draw(sampling, keys(50), logits), jnp.argmax(logits, -1))


# Texts


@pytest.mark.slow
def test_seeds_rows_and_meshes():
    """A seed gives the same text, alone, among others, and from parameters over devices."""
    model = toy("stdlib")
    prompts = ["abc", "x", "hello wor"]
    texts = sample(model, prompts, 8, Sampling(1.0, seed=3))
    assert texts == sample(model, prompts, 8, Sampling(1.0, seed=3))
    assert texts != sample(model, prompts, 8, Sampling(1.0, seed=4))
    assert texts[0] == sample(model, prompts[:1], 8, Sampling(1.0, seed=3))[0]
    assert all(text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True))
    mesh = make_mesh({"data": 4, "model": 2})
    cuts = partitions(model.recipe.parameters, "zero1", mesh)
    spread = jax.tree.map(
        lambda array, cut: put(np.asarray(array), jax.NamedSharding(mesh, cut)), model.params, cuts
    )
    assert (
        sample(Model(model.found, spread, mesh, BYTES), prompts, 8, Sampling(1.0, seed=3)) == texts
    )


class Scripted:
    """A generator that says what it is told to, in place of a model."""

    tokenizer = staticmethod(tokenizers.bytes_tokenizer)

    def __init__(self, rows):
        self.rows = rows

    def __call__(self, prompts, tokens):
        for step in range(max(map(len, self.rows))):
            yield np.array([row[step] if step < len(row) else STOPPED for row in self.rows])


def written(*rows, stops=()):
    return [list(step) for step in write(Scripted(rows), [""] * len(rows), 99, stops)]


def test_characters_come_whole():
    steps = written(list("é€".encode()), [0xFF, 65])
    assert [step[0] for step in steps] == ["", "é", "", "", "€", ""]
    assert "".join(step[1] for step in steps) == "\ufffdA"
    assert "".join(step[0] for step in written([65, 0xC3])) == "A\ufffd"


@pytest.mark.parametrize("stops", [["\n\n"], ["three", "\n\n", "threes"]])
def test_a_text_ends_before_its_stop(stops):
    steps = written(list(b"one\ntwo\n\nthree"), list(b"a\n"), stops=stops)
    assert ["".join(column) for column in zip(*steps, strict=True)] == ["one\ntwo", "a\n"]
    assert all("\n\n" not in step[0] for step in steps)


def test_a_row_ends_at_bos_or_at_the_tokenizer_s_end_ids():
    model = toy("stdlib")
    # every id is equally probable: BOS comes, soon or late
    params = model.params | {"head": jnp.zeros_like(model.params["head"])}

    def drawn(**facts):
        made = Model(model.found, params, model.mesh, BYTES | facts)
        return np.array(list(Generator(made, 8, Sampling(1.0))([[]] * 8, 200)))

    steps = drawn(vocab_size=4, bos_id=3)
    ends = [np.flatnonzero(steps[:, row] == STOPPED)[0] for row in range(8)]
    assert len(set(ends)) > 2 and len(steps) == max(ends) + 1
    for row, end in enumerate(ends):
        assert np.all(steps[end:, row] == STOPPED) and np.all(steps[:end, row] < 3)
    assert {*drawn(vocab_size=5, bos_id=4, end_ids=[1, 3]).flat} == {0, 2, 4, STOPPED}


def test_joined():
    assert joined(["ann\n", "bo"]) == "ann\nbo"
    assert joined(["a\nb", "c"]) == f"a\nb\n{'-' * 15}\nc"


def test_a_long_prompt_without_bos_keeps_its_end():
    generator = Generator(toy("stdlib", "LANE_LEN=16", facts=BYTES | {"bos_id": None}), 1, GREEDY)
    assert generator._with_bos(range(20)) == list(range(4, 20))
    generator.bos_id = 256
    assert generator._with_bos(range(20)) == [256, *range(5, 20)]


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30, 1e-7])
def test_a_tiny_temperature_is_the_argmax(temperature):
    """Divided by it logits were infinite, and their softmax NaN: '!!!!!!', with exit code 0."""
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 5, (8, 50)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 8)
    found = draw(Sampling(temperature=temperature), keys, logits)
    np.testing.assert_array_equal(found, jnp.argmax(logits, axis=-1))
    assert not np.array_equal(draw(Sampling(temperature=5.0), keys, logits), found)


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(0.8), Sampling(0.8, top_k=3), Sampling(0.8, top_p=0.5)]
)
def test_logits_that_are_not_numbers_are_no_text(sampling):
    logits = np.zeros((3, 10), np.float32)
    logits[1, 4] = np.nan
    found = draw(sampling, jax.random.split(jax.random.key(0), 3), logits)
    assert found[1] == NOT_A_NUMBER and (found[0], found[2]) >= (0, 0)


def test_a_model_whose_logits_are_not_numbers_is_bad_input():
    model = toy("stdlib")
    params = jax.tree.map(lambda p: p * jnp.nan, model.params)
    broken = Model(model.found, params, model.mesh, BYTES)
    refused("not numbers after 0 tokens", sample, broken, ["a"], 3, Sampling(0.8, top_p=0.5))


def test_no_bos_and_no_prompt():
    generator = Generator(toy("stdlib", facts=BYTES | {"bos_id": None}), 1, GREEDY)
    refused("give a --prompt", list, generator([[]], 2))
