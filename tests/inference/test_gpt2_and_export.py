"""Import and export of safetensors: GPT-2 against a NumPy forward pass on Hugging Face's names;
hashes; refusals."""

import json
import math
import os
import resource
import shlex
import struct
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jspeed import recipe as r
from jspeed.board.records.remarks import RECORDS
from jspeed.corpus import gpt2_tokenizer
from jspeed.errors import BadInput
from jspeed.inference import gpt2, model_config
from jspeed.inference.commands import export as export_command
from jspeed.inference.commands.sample import sample
from jspeed.inference.generate import Generator, Sampling
from jspeed.inference.model_config import read_parameters
from jspeed.inference.trained import load_model
from jspeed.record import sizes
from jspeed.run import export
from jspeed.run.checkpoint import Checkpoints
from jspeed.run.compute.step import init_state
from jspeed.run.find_recipe import find

from ..refusals import refused
from ..toys import TOYS, first_parameters

LAYERS = 2
HEADS = 2
WIDTH = 32
VOCAB = 272
BLOCK = 16
TINY = ["SIZES={'124M': (2, 2, 32)}", "VOCAB=272", "BOS=5", "LANE_LEN=16", "COMPUTE=float32"]
CONFIG = dict(model_type="gpt2", n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, vocab_size=VOCAB)
CONFIG |= {"n_positions": BLOCK, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
CONFIG |= {"tokenizer": {"tokenizer": "bytes", "vocab_size": 257, "bos_id": 256}}


def random_gpt2(seed=0):
    """Random tensors under the names that transformers' GPT2LMHeadModel saves."""
    rng, d = np.random.default_rng(seed), WIDTH
    shapes = {
        "wte.weight": (VOCAB, d),
        "wpe.weight": (BLOCK, d),
        "ln_f.weight": (d,),
        "ln_f.bias": (d,),
    }
    for n in range(LAYERS):
        shapes |= {
            f"h.{n}.ln_1.weight": (d,),
            f"h.{n}.ln_1.bias": (d,),
            f"h.{n}.attn.c_attn.weight": (d, 3 * d),
            f"h.{n}.attn.c_attn.bias": (3 * d,),
            f"h.{n}.attn.c_proj.weight": (d, d),
            f"h.{n}.attn.c_proj.bias": (d,),
            f"h.{n}.ln_2.weight": (d,),
            f"h.{n}.ln_2.bias": (d,),
            f"h.{n}.mlp.c_fc.weight": (d, 4 * d),
            f"h.{n}.mlp.c_fc.bias": (4 * d,),
            f"h.{n}.mlp.c_proj.weight": (4 * d, d),
            f"h.{n}.mlp.c_proj.bias": (d,),
        }
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def gpt2_forward(w, tokens, heads=HEADS, epsilon=1e-5, act=None, scale=None):
    """Logits of GPT-2 in float64, from Radford et al. 2019 and the names above; or of one of
    another config."""
    w = {name: array.astype(np.float64) for name, array in w.items()}

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def conv(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][tokens] + w["wpe.weight"][: len(tokens)]
    for n in range(LAYERS):
        q, k, v = np.split(conv(norm(x, f"h.{n}.ln_1"), f"h.{n}.attn.c_attn"), 3, axis=-1)
        mixed = []
        for part in np.split(np.arange(WIDTH), heads):
            scores = q[:, part] @ k[:, part].T * (scale(n) if scale else len(part) ** -0.5)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(p / p.sum(-1, keepdims=True) @ v[:, part])
        x = x + conv(np.concatenate(mixed, -1), f"h.{n}.attn.c_proj")
        h = conv(norm(x, f"h.{n}.ln_2"), f"h.{n}.mlp.c_fc")
        h = act(h) if act else 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + conv(h, f"h.{n}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def folder_of(path, tensors, config=CONFIG):
    path.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def recipe_of(*sets):
    return find("gpt2", [*TINY, *sets]).recipe


def logits_of(recipe, params, tokens):
    ctx = r.Context(recipe.stages[0], training=False)
    return np.asarray(jax.jit(partial(recipe.forward, ctx=ctx))(params, tokens[None]))[0]


TOKENS = np.random.default_rng(1).integers(0, VOCAB, BLOCK)


PASSED_OVER = dict(
    activation_function="gelu_pytorch_tanh", reorder_and_upcast_attn=True, resid_pdrop=0.3
)
PASSED_OVER |= dict(summary_type="mean", n_inner=4 * WIDTH, tie_word_embeddings=False, of_my_own=3)


@pytest.mark.parametrize(
    ("fields", "twice", "heads"),
    [({}, [], HEADS), ({"n_head": 4}, [], 4), (PASSED_OVER, ["lm_head.weight"], HEADS)],
    ids=["as it is", "other heads", "what changes nothing"],
)
def test_logits_are_those_of_gpt2(tmp_path, fields, twice, heads):
    tensors = random_gpt2()
    more = {name: tensors["wte.weight"] for name in twice}
    path = folder_of(tmp_path / "gpt2", tensors | more, CONFIG | fields)
    model = load_model(path)
    assert model.recipe.layers == LAYERS
    assert model.recipe.parameters["embed"].shape == (VOCAB, WIDTH)
    found = logits_of(model.recipe, model.params, TOKENS)
    np.testing.assert_allclose(found, gpt2_forward(tensors, TOKENS, heads=heads), atol=1e-4)
    if heads == HEADS:
        in_a_run = logits_of(recipe_of(), read_parameters(path, recipe_of()), TOKENS)
        np.testing.assert_allclose(in_a_run, found, atol=1e-6)


def test_a_prompt_is_continued_after_bos_which_is_said_or_alone(tmp_path, capsys):
    """The greedy text of a GPT-2 was another than other tools', without a word."""
    tensors = random_gpt2()
    path = folder_of(tmp_path / "gpt2", tensors)
    for bos in (True, False):
        wanted = [256] * bos + [*b"ab"]
        for _ in range(3):
            wanted.append(int(np.argmax(gpt2_forward(tensors, np.array(wanted))[-1, :257])))
        generator = Generator(load_model(path), 1, Sampling(0, bos=bos))
        assert [int(token) for (token,) in generator([[*b"ab"]], 3)] == wanted[-3:]
        sample(path, prompt="ab", tokens=1, bos=bos)
        note = (
            "note: token 256 comes before the prompt, as before a document in training; --no-bos"
            " leaves it out\n"
        )
        assert capsys.readouterr().err == note * bos
    sample(path, prompt="", tokens=1)
    assert capsys.readouterr().err == ""  # there is no prompt that it could change
    refused("without a BOS token .* give a --prompt", sample, path, prompt="", bos=False)
    for given in ({"top_k": 3}, {"top_p": 0.5}, {"seed": 2}):
        refused("--temperature 0 draws nothing", sample, path, prompt="a", temperature=0.0, **given)


def test_gradient_of_the_tied_table_is_that_of_both_of_its_uses(tmp_path):
    """Finite differences in float64 along random directions of the whole table, whose rows are
    looked up and scored."""
    tensors, recipe, rng = random_gpt2(), recipe_of(), np.random.default_rng(2)
    inputs, targets = TOKENS[None, :-1], TOKENS[None, 1:]
    params = jax.tree.map(
        jnp.asarray, read_parameters(folder_of(tmp_path / "gpt2", tensors), recipe)
    )
    ctx = r.Context(recipe.stages[0], training=True)
    weights = jnp.full(targets.shape, 1 / targets.size)
    gradient = jax.jit(jax.grad(lambda p: recipe.loss(p, inputs, targets, weights, ctx)[0]))(
        params
    )["embed"]

    def loss(table):
        logits = gpt2_forward(tensors | {"wte.weight": table}, inputs[0])
        return np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(targets.size), targets[0]])

    table = tensors["wte.weight"].astype(np.float64)
    for _ in range(3):
        direction = rng.normal(size=table.shape)
        slope = (loss(table + 1e-5 * direction) - loss(table - 1e-5 * direction)) / 2e-5
        assert float(np.sum(gradient * direction)) == pytest.approx(slope, rel=1e-3)


@pytest.mark.parametrize(
    ("size", "count"),
    # seeds.md, and the parameter counts that transformers reports for gpt2, -medium, -large, -xl.
    [("124M", 124_439_808), ("350M", 354_823_168), ("774M", 774_030_080), ("1.5B", 1_557_611_200)],
)
def test_four_sizes(size, count):
    recipe = find("gpt2", [f"SIZE={size}"], trace=False).recipe
    assert sizes.parameter_count(recipe.parameters) == count
    arrays = jax.eval_shape(lambda: r.init_parameters(recipe.parameters, jax.random.key(0)))
    assert sum(array.size for array in jax.tree.leaves(arrays)) == count
    assert recipe.heads == {"124M": 12, "350M": 16, "774M": 20, "1.5B": 25}[size]


def test_an_unknown_size():
    refused("field SIZE is '1B'; .* 30M, .* 1.5B", find, "gpt2", ["SIZE=1B"])


def test_round_trip_is_equal_to_the_bit(tmp_path):
    tensors = random_gpt2()
    path = folder_of(tmp_path / "gpt2", tensors)
    ours = dict(r.leaves(read_parameters(path, recipe_of())))
    export.save(tmp_path / "back.safetensors", gpt2.to_gpt2(ours), {"format": "pt"})
    assert (tmp_path / "back.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
    assert load_model(path).tensors().keys() == ours.keys()
    config = gpt2.gpt2_config(recipe_of(), CONFIG["tokenizer"])
    assert {name: config[name] for name in CONFIG} == CONFIG


@pytest.mark.parametrize(
    ("name", "at_hand", "says"),
    [
        ("gpt2", True, ""),
        ("gpt2", False, "AutoTokenizer.from_pretrained('gpt2').save_pretrained('{out}')"),
        ("bytes", True, "the text's tokenizer is bytes, which transformers has not"),
    ],
)
def test_an_export_has_gpt2_s_tokenizer_or_says_what_is_missing(
    tmp_path, monkeypatch, capsys, name, at_hand, says
):
    def file():
        if at_hand:
            return "{}\n"
        raise BadInput("tiktoken cannot fetch it")

    monkeypatch.setattr(gpt2_tokenizer, "gpt2_tokenizer_file", file)
    facts = {"tokenizer": name, "vocab_size": 257, "bos_id": 256}
    config, out = CONFIG | {"tokenizer": facts}, tmp_path / "out"
    export_command.export(folder_of(tmp_path / "gpt2", random_gpt2(), config), out)
    _, *missing = capsys.readouterr().out.splitlines()
    assert [says.format(out=out) in line for line in missing] == [True] * bool(says)
    assert (out / "tokenizer.json").exists() is (not says)
    assert json.loads((out / "config.json").read_text())["model_type"] == "gpt2"


def test_files_with_queries_keys_and_values_side_by_side(tmp_path):
    """Hugging Face's, and our own of a recipe gpt2 that had them in one axis, which runs keep a
    copy of."""
    tensors, recipe = random_gpt2(), recipe_of()
    ours = dict(r.leaves(read_parameters(folder_of(tmp_path / "gpt2", tensors), recipe)))
    old = ours | {"qkv": ours["qkv"].reshape(LAYERS, WIDTH, 3 * WIDTH)}
    for name in range(LAYERS):
        np.testing.assert_array_equal(old["qkv"][name], tensors[f"h.{name}.attn.c_attn.weight"])
        for part in range(3):
            columns = slice(part * WIDTH, (part + 1) * WIDTH)
            np.testing.assert_array_equal(ours["qkv"][name, :, part], old["qkv"][name][:, columns])
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
    export.save(tmp_path / "old" / "model.safetensors", old, export.OWN)
    export.save(tmp_path / "new" / "model.safetensors", ours, export.OWN)
    spec = replace(recipe.parameters["qkv"], shape=old["qkv"].shape, axes=("layer", "model", "qkv"))
    older = replace(recipe, parameters={**recipe.parameters, "qkv": spec})
    for folder in ("old", "new", "gpt2"):
        jax.tree.map(
            np.testing.assert_array_equal, read_parameters(tmp_path / folder, recipe), ours
        )
        jax.tree.map(np.testing.assert_array_equal, read_parameters(tmp_path / folder, older), old)
    jax.tree.map(np.testing.assert_array_equal, gpt2.to_gpt2(old), tensors)


def test_older_files_and_several_of_them(tmp_path):
    """Prefixes, causal masks among the parameters, the head a second time or instead, two files and
    their index."""
    tensors = random_gpt2()
    expected = read_parameters(folder_of(tmp_path / "a", tensors), recipe_of())

    def loads(path):
        jax.tree.map(np.testing.assert_array_equal, read_parameters(path, recipe_of()), expected)

    for number, prefix in enumerate(
        ("transformer.", "_orig_mod.transformer.", "module._orig_mod.transformer.")
    ):
        old = {f"{prefix}{name}": array for name, array in tensors.items()}
        old |= {f"{prefix.removesuffix('transformer.')}lm_head.weight": tensors["wte.weight"]}
        old |= {
            f"{prefix}h.{n}.attn.bias": np.ones((1, 1, 4, 4), "?" if n else "f4")
            for n in range(LAYERS)
        }
        loads(folder_of(tmp_path / str(number), old))
    halves = [dict(list(old.items())[::2]), dict(list(old.items())[1::2])]
    several = folder_of(tmp_path / "several", tensors)
    (several / "model.safetensors").unlink()
    for number, half in enumerate(halves):
        safetensors.numpy.save_file(half, several / f"{number}.safetensors")
    weight_map = {
        name: f"{number}.safetensors" for number, half in enumerate(halves) for name in half
    }
    (several / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loads(several)
    # safetensors.torch.save_model keeps the first name of an array that has two, and says so.
    once = folder_of(tmp_path / "once", tensors)
    kept = without(tensors, "wte.weight") | {"lm_head.weight": tensors["wte.weight"]}
    named = {"format": "pt", "transformer.wte.weight": "lm_head.weight"}
    safetensors.numpy.save_file(kept, once / "model.safetensors", named)
    loads(once)


def erf_gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / 2**0.5))


@pytest.mark.parametrize(
    ("fields", "forward"),
    [
        ({"activation_function": "gelu"}, {"act": erf_gelu}),
        ({"activation_function": "relu"}, {"act": lambda x: np.maximum(x, 0)}),
        ({"activation_function": "silu"}, {"act": lambda x: x / (1 + np.exp(-x))}),
        ({"layer_norm_epsilon": 1e-2}, {"epsilon": 1e-2}),
        ({"scale_attn_weights": False}, {"scale": lambda layer: 1}),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            {"scale": lambda layer: (WIDTH / HEADS) ** -0.5 / (layer + 1)},
        ),
        ({"n_head": 5}, None),
        ({"n_inner": 64}, None),
        ({"tie_word_embeddings": False}, None),
        ({"add_cross_attention": True}, None),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, None),
        ({"pruned_heads": {"0": [1]}}, None),
        ({"per_layer_config": {"1": {"n_head": 4}}}, None),
    ],
)
def test_what_changes_a_gpt2_is_refused_by_name(tmp_path, fields, forward):
    """In a run as in other commands. By NumPy the logits are others than recipe gpt2's with the
    fields left out."""
    tensors, (name,) = random_gpt2(), fields
    path = folder_of(tmp_path / "gpt2", tensors, CONFIG | fields)
    for load_it in (lambda: read_parameters(path, recipe_of()), lambda: load_model(path)):
        refused(name, load_it)
    if forward:
        assert (
            np.abs(gpt2_forward(tensors, TOKENS, **forward) - gpt2_forward(tensors, TOKENS)).max()
            > 2e-4
        )


@pytest.mark.parametrize(
    ("sizes", "sets"),
    [
        ({"n_head": 4}, ['SIZES={"given": (2, 4, 32)}', "SIZE=given"]),
        ({"n_layer": 24, "n_head": 16, "n_embd": 1024}, ["SIZE=350M"]),
        ({"vocab_size": 300}, ["VOCAB=300", "BOS=299"]),
        ({"n_positions": 8}, ["LANE_LEN=8"]),
    ],
)
def test_a_run_has_the_sizes_that_the_config_says(tmp_path, sizes, sets):
    """Of heads the tensors say nothing: four were trained as two, with exit code 0. What is advised
    fits."""
    path = folder_of(tmp_path / "gpt2", random_gpt2(), CONFIG | sizes)
    with pytest.raises(
        BadInput, match=f"with {next(iter(sizes))} .* but recipe gpt2 has"
    ) as caught:
        read_parameters(path, recipe_of())
    advised = shlex.split(str(caught.value).partition("--set ")[2])
    assert advised == sets
    recipe = find("gpt2", [*TINY[1:], *advised], trace=False).recipe
    config = gpt2.gpt2_config(recipe, CONFIG["tokenizer"])
    assert {name: config[name] for name in sizes} == sizes


def test_half_precision_becomes_single(tmp_path):
    """bf16 as the format's text has it: the upper half of an fp32."""
    values = np.array([[1.0, -2.5], [3.140625, 0.0]], np.float32)
    halves = (values.view("<u4") >> 16).astype("<u2").tobytes()
    header = json.dumps({"x": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + halves)
    found, _ = export.load(tmp_path / "x.safetensors")
    assert found["x"].dtype == np.float32
    np.testing.assert_array_equal(found["x"], values)


def test_block_crop(tmp_path):
    tensors = random_gpt2()
    path = folder_of(tmp_path / "gpt2", tensors)
    recipe = recipe_of("LANE_LEN=8")
    params = read_parameters(path, recipe)
    np.testing.assert_array_equal(params["positions"], tensors["wpe.weight"][:8])
    np.testing.assert_allclose(
        logits_of(recipe, params, TOKENS[:8]), gpt2_forward(tensors, TOKENS[:8]), atol=1e-4
    )


def without(tensors, name):
    return {key: array for key, array in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: without(t, "h.1.ln_2.bias"), r"lacks h\.1\.ln_2\.bias"),
        (lambda t: t | {"h.1.extra": t["ln_f.bias"]}, r"holds h\.1\.extra, which a GPT-2 of 2"),
        (lambda t: t | {"h.2.ln_1.bias": t["ln_f.bias"]}, r"holds h\.2\.ln_1\.bias"),
        (lambda t: t | {"lm_head.weight": t["wte.weight"] + 1}, "lm_head.weight differs from wte"),
        (
            lambda t: t | {"h.1.mlp.c_fc.weight": np.ones((32, 64), "f4")},
            r"h\.1\.mlp.* but .* 128\)",
        ),
        (lambda t: t | {"ln_f.bias": t["ln_f.bias"].astype("i1")}, r"holds ln_f\.bias in I8"),
        (lambda t: t | {n: t[n].T.copy() for n in t if n[:2] == "h."}, r"c_attn.*transpose"),
        (lambda t: t | {"wpe.weight": t["wpe.weight"][:9]}, r"wpe\.weight has shape \(9, 32\) but"),
        (lambda t: {"a": t["ln_f.bias"]}, r"lacks wte\.weight"),
    ],
)
def test_refuses_other_tensors(tmp_path, change, words):
    path = folder_of(tmp_path / "gpt2", change(random_gpt2()))
    refused(words, read_parameters, path, recipe_of())


def test_refuses_what_is_no_model(tmp_path):
    for call, words in (
        (lambda: export.load(tmp_path / "none"), "does not exist"),
        (lambda: export.load(tmp_path), "holds no model.safetensors"),
        (lambda: load_model(tmp_path / "none"), "does not exist"),
        (lambda: load_model(tmp_path), "has no config.json"),
    ):
        refused(words, call)
    for index in ([], None, {"weight_map": 3}, {"weight_map": {"wte.weight": 3}}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        refused("index.json cannot be read", export.load, tmp_path)
    for name in ("../1.safetensors", "/etc/passwd", "a/../../b", ".."):
        index = {"weight_map": {"wte.weight": name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        refused("not a file of its own folder", export.load, tmp_path)
    os.mkfifo(tmp_path / "1.safetensors")
    index = {"weight_map": {"wte.weight": "1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("1.safetensors cannot be read .*not a regular file", export.load, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no such thing" * 9)
    refused("cannot be read as safetensors", export.load, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    refused("neither; expected a run of jspeed or a GPT-2", load_model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "pytorch_model.bin").touch()
    refused(r"model\.safetensors but pytorch_model\.bin", export.load, tmp_path)


@pytest.mark.parametrize("name", ["stdlib", "r21", "microgpt-names", "llmc", "gpt2"])
def test_own_recipes_come_back(tmp_path, name):
    recipe = find(name, TOYS[name]).recipe
    params = first_parameters(recipe)
    tensors = export.gathered(params)
    export.save(tmp_path / "model.safetensors", tensors, export.OWN)
    found = read_parameters(tmp_path, recipe)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert gpt2.is_gpt2(recipe) == (name == "gpt2")
    other = find("track3", TOYS["track3"]).recipe
    refused("(lacks|holds) .* recipe track3", read_parameters, tmp_path, other)


def test_a_run_says_where_it_departs_from_its_parameters(tmp_path):
    """A run on other heads, or other ids, began as well as one on these, without a word."""
    trained = find("stdlib", TOYS["stdlib"])
    facts = {"tokenizer": "bytes", "vocab_size": 257, "bos_id": 256}
    (tmp_path / "config.json").write_text(json.dumps(export.own_config(trained, facts)))
    (tmp_path / "recipe.py").write_text(trained.source)

    def told(*sets, facts=facts, name="stdlib"):
        return [*model_config.departures(tmp_path, find(name, [*TOYS["stdlib"], *sets]), facts)]

    assert not told("STEPS=3", "MUON_LR=0.5", "LANES=16")
    assert not told(facts={}) and not told(name=str(RECORDS / "ideas" / "stdlib_adamw.py"))
    (line,) = told("HEADS=1", "STEPS=3")
    assert "to compute something else (HEADS 2, here 1, STEPS 12, here 3)" in line
    (line,) = told(facts={"tokenizer": "gpt2"})
    assert "are for other ids of text, those of bytes" in line
    (tmp_path / "recipe.py").unlink()
    assert "is not known: " in told()[0] and "no recipe.py" in told()[0]


def test_a_run_on_another_recipe_or_ids_than_gpt2_s_says_so(tmp_path):
    path, found = folder_of(tmp_path / "gpt2", random_gpt2()), find("gpt2", TINY)
    assert not [*model_config.departures(path, found, CONFIG["tokenizer"])]
    mine = tmp_path / "mine.py"
    mine.write_text(
        found.source.replace("jax.nn.gelu(", "jax.nn.silu(").replace(", approximate=True)", ")")
    )
    (line,) = model_config.departures(
        path / "model.safetensors", find(str(mine), TINY), CONFIG["tokenizer"]
    )
    assert "to compute something else (by recipe gpt2)" in line


def test_scalars_come_back_as_scalars(tmp_path):
    """Parameters of shape () and matrices that lie by columns: r62 and r89 have the first."""
    columns = np.asfortranarray(np.arange(6, dtype="f4").reshape(2, 3))
    export.save(
        tmp_path / "model.safetensors", {"scale": np.float32(0.5), "columns": columns}, export.OWN
    )
    found, _ = export.load(tmp_path)
    assert found["scale"].shape == () and found["scale"] == 0.5
    np.testing.assert_array_equal(found["columns"], columns)


def test_a_file_that_is_not_what_was_written_is_refused(tmp_path):
    """A bit flipped, or 100 bytes lost, in header or tensors. Files of others have no hash."""
    path, rng = tmp_path / "model.safetensors", np.random.default_rng(0)
    bf16 = np.asarray(jax.numpy.arange(300, dtype="bfloat16"))
    tensors = {"a": rng.normal(size=(30, 40)).astype("f4"), "b": bf16}
    export.save(path, tensors, export.OWN | {"recipe_hash": "0" * 64})
    whole = path.read_bytes()
    found, about = export.load(path)
    np.testing.assert_array_equal(found["a"], tensors["a"])
    assert about["sha256"] != export.HASH_PLACEHOLDER.decode() and about["recipe_hash"] == "0" * 64
    start = 8 + int.from_bytes(whole[:8], "little")
    for place in (8, start // 2, start - 1, start, (start + len(whole)) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        refused(r"model\.safetensors (is damaged|cannot be read)", export.load, path)
    damaged = bytearray(whole)
    damaged[start + 500 : start + 600] = rng.bytes(100)
    path.write_bytes(damaged)
    refused(r"model\.safetensors is damaged .its SHA-256 differs", export.load, path)
    safetensors.numpy.save_file({"a": tensors["a"]}, path, {"format": "jspeed"})
    np.testing.assert_array_equal(export.load(path)[0]["a"], tensors["a"])


def test_parameters_that_do_not_fit(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(BadInput, match=r"model\.safetensors cannot be written .*too large"):
            export.save(tmp_path / "model.safetensors", {"a": np.zeros(1000, "f4")}, export.OWN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_a_large_table_is_read_from_the_checkpoint(tmp_path, monkeypatch):
    """Record 92's n-grams are 130 GB. Without a checkpoint of the last step one sentence says what
    is missing."""
    found = find("r92", TOYS["r92"])
    recipe = found.recipe
    assert export.large_tables(find("r92").recipe) == ("ngrams",)
    assert not export.large_tables(recipe)
    monkeypatch.setattr(export, "LARGE", 0)
    state = jax.jit(lambda: init_state(recipe, np.uint32(0)))()
    (tmp_path / "config.json").write_text(json.dumps(export.own_config(found, CONFIG["tokenizer"])))
    (tmp_path / "recipe.py").write_text(found.source)
    export.save(
        tmp_path / export.FILE,
        export.to_write(recipe, state["params"]),
        export.run_metadata(found, 4),
    )
    tensors, about = export.load(tmp_path)
    assert "ngrams" not in tensors and (about["left_out"], about["step"]) == ("ngrams", "4")
    refused("lacks ngrams, .* recipe r92; give a checkpoint", load_model, tmp_path)
    with Checkpoints(tmp_path / "checkpoints", 2) as checkpoints:
        for step in (4, 8):
            checkpoints.save(step, state, {})
            state |= {"params": jax.tree.map(lambda p: np.asarray(p) + 1, state["params"])}
    np.testing.assert_array_equal(load_model(tmp_path).tensors()["embed"], tensors["embed"])
    assert "leaves out ngrams, 0.0 GB updated row by" in export.note_on_large_tables(recipe, True)
