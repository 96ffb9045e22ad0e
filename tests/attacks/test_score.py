"""Recipes that would look at what they are to predict, or compute their own score."""

import hashlib

import jax
import numpy as np
import pytest

from jspeed.recipe import Context
from jspeed.record.sizes import parameter_count
from jspeed.run.compute.score import losses
from jspeed.run.find_recipe import find

from ..refusals import refused
from ..toys import first_parameters
from .attack import attack, edited, failed

FORWARD = 'return softcap(head(params["head"], hidden(params, tokens_BT, ctx)), None)'
HONEST = 'logits_BTV = head(params["head"], hidden(params, tokens_BT, ctx))\n    '
HOT = "jax.nn.one_hot(tokens_BT, VOCAB)"
NEXT = f"jnp.roll({HOT}, -1, axis=1)"
WHERE = "jnp.arange(tokens_BT.shape[1])"
LOSS = 'return cross_entropy(head, params["head"], x_BTD, targets_BT, weights_BT, cap=None)'
TOTAL = LOSS.replace("return", "total, loss_BT =") + "\n    "

LOOKS_AHEAD = {
    "in an evaluation alone": f"9 * (ctx.stage.max_doc_len is not None) * {NEXT}",
    "in large batches alone": f"9 * (tokens_BT.shape[0] > 1) * {NEXT}",
    "in all rows but the first": f"(9 * {NEXT}).at[0].set(0)",
    "at every eighth position": f"9 * ({WHERE} % 8 == 3)[None, :, None] * {NEXT}",
    "where it expects the token anyway": f"9 * (jax.nn.softmax(logits_BTV) > 0.001) * {NEXT}",
    "two tokens ahead": f"9 * jnp.roll({HOT}, -2, axis=1)",
    "at the next row": f"9 * ({WHERE} > 29)[None, :, None] * jnp.roll({NEXT}, -1, axis=0)",
    "by the mean of the row": f"jnp.mean({HOT}, axis=1)[:, None]",
    "by the mean of all rows": f"jnp.mean({HOT}, axis=(0, 1))[None, None]",
}


def test_the_honest_parent_passes(honest, data):
    assert failed(honest) == set() and honest["reached"]
    shard = hashlib.sha256((data / "toy_val_000000.bin").read_bytes()).hexdigest()
    assert honest["data"]["val_shard_sha256"] == shard
    assert honest["probes"]["causality"]["leak"] == 0


QUICK = ("in an evaluation alone", "by the mean of all rows")


@pytest.mark.parametrize(
    "where", [w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in LOOKS_AHEAD]
)
def test_a_forward_that_looks_ahead(where, data, tmp_path):
    run = attack(tmp_path, data, {FORWARD: f"{HONEST}return logits_BTV + {LOOKS_AHEAD[where]}"})
    assert failed(run) == {"causality"}


TRAINED_ON = {
    "a part of it": "return total, 0.3 * loss_BT",
    "a part of it in large batches": "return total, (0.3 if loss_BT.shape[0] > 1 else 1) * loss_BT",
    "less on all rows but the first": "return total, loss_BT.at[1:].multiply(0.3)",
    "a little less": "return total, loss_BT - 0.00095",
    "nothing in an evaluation": "return total, loss_BT * ctx.training",
    "what looks at targets": "return total, loss_BT - 3 * (targets_BT < 300)",
}


@pytest.mark.parametrize(
    "score",
    [
        w if w.startswith("a part of it in") else pytest.param(w, marks=pytest.mark.slow)
        for w in TRAINED_ON
    ],
)
def test_a_loss_that_scores_itself_scores_nothing(score, data, tmp_path, honest):
    run = attack(tmp_path, data, {LOSS: TOTAL + TRAINED_ON[score]})
    assert run["val_loss"] == honest["val_loss"]


NOT_LOGITS = {
    "fewer ids": (HONEST + "return logits_BTV[..., :32]", "or more in the last axis"),
    "complex numbers": (HONEST + "return logits_BTV + 1j", "complex64"),
    "one position more": (
        HONEST + "return jnp.pad(logits_BTV, ((0, 0), (1, 0), (0, 0)))",
        "got logits",
    ),
}


@pytest.mark.parametrize("what", NOT_LOGITS)
def test_what_is_no_logits_is_refused(what, data, tmp_path):
    forward, said = NOT_LOGITS[what]
    refused(said, attack, tmp_path, data, {FORWARD: forward})


@pytest.mark.parametrize("chunked", [False, True], ids=["whole rows", "in chunks"])
def test_padding_holds_no_parameters(chunked, data, tmp_path):
    """A bank of one matrix and seven more, which are not counted: all are read."""
    table = '"more": ParamSpec((8, VOCAB, WIDTH), ("matrix", "in", "out"), normal, "all", None, 7),'
    summed = 'params["embed"][tokens_BT] + jnp.sum(params["more"], 0)[tokens_BT]'
    edits = {"PARAMETERS = {\n": f"PARAMETERS = {{\n    {table}\n"}
    edits |= {'params["embed"][tokens_BT]': summed}
    if chunked:
        logits = 'logits=lambda params, x_BTD, ctx: head(params["head"], x_BTD)'
        edits |= {"    loss=loss,": f"    loss=loss,\n    hidden=hidden,\n    {logits},"}
    (tmp_path / "mine.py").write_text(edited(edits))
    recipe = find(str(tmp_path / "mine.py")).recipe
    assert parameter_count(recipe.parameters) == 3 * 257 * 16
    params = first_parameters(recipe)
    tokens = jax.random.randint(jax.random.key(2), (2, 33), 0, 257)
    ctx = Context(recipe.stages[0], training=False)

    def scored(more):
        return losses(recipe, params | {"more": more}, tokens[:, :-1], tokens[:, 1:], ctx)

    more = params["more"]
    np.testing.assert_array_equal(scored(more), scored(more.at[1:].set(9.0)))
    assert not np.allclose(scored(more), scored(more.at[:1].set(9.0)))
