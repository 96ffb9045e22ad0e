"""Whole runs with an index of trained tokens: what it tells, what it cannot tell, several
processes, a resumed run."""

import json
from dataclasses import replace

import numpy as np
import pytest

from jspeed.corpus.shards.folder import EncodedDocuments, write_folder
from jspeed.inference.commands.evaluate import on_shards
from jspeed.inference.trained import load_model
from jspeed.run.options import Options
from jspeed.run.train import train

from ..multi_process import ended, metrics, places, start, words

BOS = 256
# The head reads the token and what followed its context before. It learns how far to trust that.
RECIPE = '''"""What followed, and no more.

What    A bigram model with retrieval.
Source  tests/retrieval/test_runs.py
"""

import optax
from jax.nn import initializers

from jspeed.model.layers import lookup, rms_norm
from jspeed.speedrun.mudd import blend
from jspeed.recipe import Data, ParamSpec, Recipe, Stage
from jspeed.retrieval import Retrieval, inputs

VOCAB = 272
LENGTHS = (4, 8)
STEPS = 24
CELLS = inputs.number_of_cells(LENGTHS)
PARAMETERS = {
    "embed": ParamSpec((VOCAB, 64), ("token", "model"), initializers.normal(1.0), "all"),
    "head": ParamSpec((VOCAB, 64), ("vocab", "model"), initializers.zeros, "all"),
    "scales": ParamSpec((CELLS, 1), ("in", "out"), initializers.zeros, "all"),
}


def hidden(params, tokens_BT, ctx):
    terms = inputs.terms(params["scales"], params["embed"], ctx.beside, LENGTHS)
    return rms_norm(blend((1.0, lookup(params["embed"], tokens_BT)), *terms))


def forward(params, tokens_BT, ctx):
    return hidden(params, tokens_BT, ctx) @ params["head"].T


def loss(params, tokens_BT, targets_BT, weights_BT, ctx):
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(forward(params, tokens_BT, ctx), \
targets_BT)
    return (weights_BT * losses_BT).sum(), losses_BT


RECIPE = Recipe(
    name="followed",
    parent=None,
    track="toy/retrieval",
    data=Data("toy", vocab_size=257, bos_id=256, align="bos"),
    target_loss=6.0,
    parameters=PARAMETERS,
    forward=forward,
    loss=loss,
    optimizer=lambda: optax.adam(0.05),
    stages=(Stage(STEPS // 2, 96, 96, 97), Stage(STEPS - STEPS // 2, 128, 96, 129)),
    lanes=8,
    eval_every=8,
    eval_tokens=256,
    eval_len=64,
    attention_width=64,
    layers=1,
    beside=Retrieval(LENGTHS, top=2),
)
'''

TWICE = "text is read more than once, whose index knows"
# Of bytes that no other text has; the one before does not say the next.
PASSAGE = np.random.default_rng(9).integers(130, 138, 70)


@pytest.fixture
def made(tmp_path):
    """Makes a run in ``tmp_path`` whose validation shard is a passage alone, which it has trained
    on or not."""
    (tmp_path / "followed.py").write_text(RECIPE)

    def make(name, planted=False, size=16_000, **options):
        folder, text = tmp_path / f"shards-{planted}", np.frombuffer(words(size, 1), np.uint8)
        train_text = np.split(text, np.arange(80, len(text), 80))
        if planted:
            train_text[10::20] = [PASSAGE] * len(train_text[10::20])
        both = [("train", part) for part in train_text] + [("val", PASSAGE)] * 6
        ids = [(split, np.append(BOS, part).astype(np.uint16)) for split, part in both]
        documents = (EncodedDocuments(split, each, np.array([len(each)])) for split, each in ids)
        write_folder(
            folder,
            documents,
            {"tokenizer": "bytes", "vocab_size": 257, "bos_id": BOS, "source": {}},
            "toy",
        )
        given = dict(
            data=folder, recipe=str(tmp_path / "followed.py"), run_dir=tmp_path / name, sample=False
        )
        train(Options(**given | {"progress": False} | options))
        return json.loads((tmp_path / name / "run.json").read_text())

    return make


def evaluated(run_dir, folder, index=True):
    model = load_model(run_dir)
    return on_shards(model if index else replace(model, trained=None), folder, None, False)["loss"]


@pytest.mark.slow
def test_text_of_the_validation_shard_alone_is_never_found(made, tmp_path, capsys):
    """Each of its documents is the same passage; the index knows it where the run has trained on
    it, and only there."""
    unseen = made("unseen")
    assert unseen["status"] == "finished"
    assert all(probe["passed"] for probe in unseen["probes"].values())
    assert TWICE not in capsys.readouterr().out
    assert unseen["retrieval"] == dict(
        lengths=[4, 8], recent=96, top=2, tokens=8 * (12 * 97 + 12 * 129)
    )
    assert unseen["val_loss"] == pytest.approx(
        evaluated(tmp_path / "unseen", tmp_path / "shards-False", False), abs=1e-5
    )
    seen = made("seen", planted=True)
    assert seen["val_loss"] < evaluated(tmp_path / "seen", tmp_path / "shards-True", False) - 0.3
    assert "told that nothing was found" in capsys.readouterr().out
    assert seen["val_loss"] == pytest.approx(
        evaluated(tmp_path / "seen", tmp_path / "shards-True"), abs=1e-5
    )
    assert "loss with an index of what 24 steps with seed 1 read of" in capsys.readouterr().out


def test_a_resumed_run_knows_the_tokens_of_the_steps_before(made, tmp_path):
    made("whole", planted=True)
    made("half", planted=True, steps=14, checkpoint_every=7)
    run = made("half", planted=True, resume=True)
    assert run["resumed"] == [14] and run["steps"] == 24
    for kind in ("train_loss", "val_loss"):
        whole, half = metrics(tmp_path / "whole", kind), metrics(tmp_path / "half", kind)
        np.testing.assert_allclose(list(half.values()), [whole[step] for step in half], atol=1e-6)


def test_text_that_is_read_twice_is_found_and_a_run_says_so(made, capsys):
    made("run", size=4_000, steps=1, preflight=False)
    assert TWICE in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_are_one(made, tmp_path):
    """Each trains on four of eight lanes, and is told what followed in all of them."""
    made("one")
    flags = ["--data", tmp_path / "shards-False", "--run-dir", "two", "--mesh", "data=2"]
    flags += ["--no-sample", "--target-loss", 9]
    two = ended([start(tmp_path, place, "followed.py", *flags) for place in places(2)])
    assert [code for code, _, _ in two] == [0, 0], two
    for kind in ("train_loss", "val_loss"):
        one, several = metrics(tmp_path / "one", kind), metrics(tmp_path / "two", kind)
        assert one.keys() == several.keys()
        np.testing.assert_allclose(list(several.values()), list(one.values()), atol=1e-5)
