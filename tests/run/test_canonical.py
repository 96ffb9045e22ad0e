"""A canonical recipe, from text to its record: evaluations give what GPT-2 never writes no
probability."""

import json
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed.cli.satellites import hooks
from jspeed.corpus import tokenise
from jspeed.errors import BadInput
from jspeed.inference import score
from jspeed.inference.trained import load_model
from jspeed.parallel.mesh import make_mesh, put, replicated
from jspeed.run import evaluate, setup, train
from jspeed.run.compute import program
from jspeed.run.compute.device import Placement, device_of
from jspeed.run.find_recipe import find
from jspeed.run.hooks import Hooks
from jspeed.run.options import Options

from ..refusals import refused
from ..toys import first_parameters

RECIPE = '''
"""Pairs of GPT-2's tokens."""
from functools import partial

import jax.numpy as jnp
import optax
from jax.nn import initializers

from jspeed.model.losses import cross_entropy, sigmoid_cap, softcap
from jspeed.recipe import Data, ParamSpec, Recipe, Stage

VOCAB = 50_304
CANONICAL = True
CAP = sigmoid_cap(15.0)
PARAMETERS = {
    "embed": ParamSpec((VOCAB, 4), ("token", "model"), initializers.normal(1.0), "all"),
    "head": ParamSpec((VOCAB, 4), ("vocab", "model"), initializers.normal(1.0), "all"),
}


def logits(head, x_BTD):
    return x_BTD @ head.T


def forward(params, tokens_BT, ctx):
    return softcap(logits(params["head"], params["embed"][tokens_BT]), CAP)


def loss(params, tokens_BT, targets_BT, weights_BT, ctx):
    arguments = logits, params["head"], params["embed"][tokens_BT], targets_BT, weights_BT
    return cross_entropy(*arguments, cap=CAP)


RECIPE = Recipe(
    "pairs", None, Data("mine", vocab_size=50_257, bos_id=50_256), 20.0, PARAMETERS, forward, loss,
    partial(optax.adam, 0.03), (Stage(6, 16),), lanes=4, eval_every=2, eval_tokens=256, eval_len=32,
    attention_width=1, layers=1, canonical=CANONICAL, track="own",
)
'''


@pytest.fixture
def case(tmp_path, monkeypatch, gpt2_vocabulary):
    """(recipe, folder of GPT-2's tokens); one device, because each holds 316 MB."""
    monkeypatch.setattr(setup, "make_mesh", lambda: make_mesh({"data": 1}, jax.devices()[:1]))
    words = "the internationalisation of un-believable 12345 things isn't what they'd said, \
\"it's\" ".split()
    texts = [" ".join(words[(n + k * n) % len(words)] for k in range(40)) for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "pairs.py").write_text(RECIPE)
    return str(tmp_path / "pairs.py"), tokenise.prepare_text(
        [tmp_path / "a.jsonl"], tmp_path / "data", tokenise.Tokenising(val_fraction=0.3)
    )


def test_from_text_to_the_record(case, tmp_path, monkeypatch):
    recipe, data = case
    threads = []
    real = train.tokenizer_mask
    monkeypatch.setattr(
        train, "tokenizer_mask", lambda *a: threads.append(threading.current_thread()) or real(*a)
    )
    runs = {}
    for canonical in (True, False):
        run_dir = tmp_path / str(canonical)
        options = Options(
            recipe,
            data=data,
            run_dir=run_dir,
            set_=(f"CANONICAL={canonical}",),
            progress=False,
            sample=False,
        )
        assert train.train(options, hooks()) in (0, 1)
        runs[canonical] = json.loads((run_dir / "run.json").read_text())
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
    for run in runs.values():
        assert all(
            probe["passed"] for name, probe in run["probes"].items() if name != "no_overlap"
        ), run["probes"]
    ours, plain = (
        np.array([point["val_loss"] for point in runs[key]["curve"]]) for key in (True, False)
    )
    # Before the first step nothing is known to be impossible; then the same training has lower
    # losses.
    assert ours[0] == plain[0] and np.all(ours[1:] < plain[1:] - 1e-3) and len(ours) == 4
    model = load_model(tmp_path / "True")
    assert score.validate(model, data).loss == pytest.approx(runs[True]["val_loss"], abs=1e-5)


def test_only_gpt2_tokens_can_be_canonical(case, tmp_path):
    recipe, _ = case
    data = tokenise.prepare_text(
        [tmp_path / "a.jsonl"], tmp_path / "bytes", tokenise.Tokenising("bytes", 0.3)
    )
    options = Options(recipe, data=data, run_dir=tmp_path / "run", progress=False)
    refused("needs tokens of gpt2, and the data hold those of bytes", train.train, options)
    assert not (tmp_path / "run").exists()


def test_the_vocabulary_must_be_there(case, tmp_path, monkeypatch):
    recipe, data = case
    with pytest.raises(BadInput, match="pairs .* the vocabulary: not here, or --set CANONICAL="):
        train.train(
            Options(recipe, data=data, run_dir=tmp_path / "run", progress=False),
            Hooks(gpt2_byte_pairs=absent),
        )
    assert not (tmp_path / "run").exists()


def absent():
    raise BadInput("not here")


def test_the_loss_is_the_same_on_any_number_of_devices(tmp_path):
    """Against float64; of few ids, because each device holds a bit for each pair of them."""
    (tmp_path / "pairs.py").write_text(RECIPE)
    found = find(str(tmp_path / "pairs.py"), ["VOCAB=272"], trace=False).recipe
    recipe = replace(found, data=replace(found.data, vocab_size=272, bos_id=5))
    rng = np.random.default_rng(0)
    rows, bits = (
        rng.integers(0, 272, size=(10, 33), dtype=np.uint16),
        rng.uniform(size=(384, 384)) < 0.3,
    )
    bits[rows[:, :-1], rows[:, 1:]] = False
    params = first_parameters(recipe)
    logits = np.asarray(
        recipe.forward(params, jnp.asarray(rows[:, :-1], jnp.int32), None), np.float64
    )
    logits = np.where(bits[rows[:, :-1]][..., :272], -np.inf, logits)
    own = np.take_along_axis(logits, rows[:, 1:, None].astype(int), -1)[..., 0]
    expected = np.mean(np.log(np.exp(logits).sum(-1)) - own)
    for devices in (1, 8):
        mesh = make_mesh({"data": devices}, jax.devices()[:devices])
        padded, traced = program.trace_evaluation(
            recipe, Placement(mesh, "zero1", device_of(mesh)), 32, len(rows)
        )
        validation = evaluate.to_devices(rows, padded, recipe, mesh)
        placed = jax.device_put(params, program.state_shardings(recipe, "zero1", mesh)[1]["params"])
        compiled = traced.lower().compile()
        assert evaluate.validation_loss(compiled, placed, validation) > expected + 0.01
        validation.tokenizer_mask = put(
            np.packbits(bits, axis=1, bitorder="little"), replicated(mesh)
        )
        assert evaluate.validation_loss(compiled, placed, validation) == pytest.approx(
            expected, abs=1e-5
        )
