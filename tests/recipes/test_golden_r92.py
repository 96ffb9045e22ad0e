"""A small r92 against stored losses and gradients of record 92's formulas, executed by PyTorch in
fp32.

Its script is executed with kernels as plain operations, without FP8 and bf16
(``tests/parity/test_r92.py``): eleven layers, a lane of 112 tokens whose documents attention cuts
at 40, candidates, several targets, prefixes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspeed import recipe as r
from jspeed.run.find_recipe import find

from .golden import NUMBERS
from .r62_r89_golden import filled

pytestmark = pytest.mark.slow  # two gradients of eleven layers to compile

VOCAB = 512
BOS = 500
LENGTH = 112
LIMIT = 2e-5
FIELDS = dict(VOCAB=VOCAB, BOS=BOS, WIDTH=96, MLP_WIDTH=64, NGRAMS=64, BLOCK=8, MUDD_WIDTH=16)
FIELDS |= {"COMPUTE": "float32", "FP8": "off", "OWN_KERNELS": "off", "SEGMENT": 40}
FIELDS |= {"EVAL_LEN": 256, "EVAL_TOKENS": 2048}
FIELDS |= {"LANE_LENS": (LENGTH,) * 7, "MAX_DOC_LENS": (96,) * 7, "MAX_DOCS": (64,) * 7}
FIELDS |= {"COLUMNS": (192, 192, 192, 224, 256, 512, 512)}
# Stage and step: the mean loss of next tokens, what is descended on, the norm of each parameter's
# gradient.
GOLDEN = {case: NUMBERS["r92, stage {}, step {}".format(*case)] for case in ((0, 100), (4, 1000))}


def lane(seed: int) -> np.ndarray:
    """Tokens ``[1, T + 1]`` that start with a document, as does every sixteenth or so."""
    rng = np.random.RandomState(seed)
    row = np.where(rng.random_sample(LENGTH + 1) < 1 / 16, BOS, rng.randint(0, BOS, LENGTH + 1))
    row[0] = BOS
    return row[None].astype(np.int32)


def prefixes() -> np.ndarray:
    """In place of the longest prefixes of GPT-2's tokens: -1 for about two in five."""
    return np.maximum(np.random.RandomState(1).randint(-200, BOS, VOCAB), -1).astype(np.int32)


def parameters(recipe: r.Recipe) -> dict[str, np.ndarray]:
    """Drawn ones, the embedding apart from the head."""
    params = filled(recipe) | {"embed": filled(recipe, 1)["embed"]}
    params["mudd_groups"] = params["mudd_groups"] / 6
    drawn = params["values"]  # for the record's tables, one after the other
    params["values"] = drawn.reshape(drawn.shape[1], VOCAB, -1).swapaxes(0, 1)
    return params


@pytest.mark.parametrize(("stage", "step"), GOLDEN)
def test_losses_and_gradients_are_those_of_the_record(stage, step, monkeypatch):
    sets = [f"{name}={value}" for name, value in FIELDS.items()]
    with monkeypatch.context() as patch:
        patch.setattr("jspeed.model.prefixes.gpt2_prefixes", lambda ordinary, size: prefixes())
        recipe = find("r92", sets, trace=False).recipe
    params = parameters(recipe)
    tokens, ctx = lane(stage), r.Context(recipe.stages[stage], training=True, step=jnp.int32(step))
    weights = jnp.full((1, LENGTH), 1 / LENGTH)

    @jax.jit
    def run(params, tokens):
        def total(params):
            return recipe.loss(params, tokens[:, :-1], tokens[:, 1:], weights, ctx)

        return jax.value_and_grad(total, has_aux=True)(params)

    (total, losses), grads = run(params, tokens)
    expected = GOLDEN[stage, step]
    assert float(total) == pytest.approx(expected["total"], rel=LIMIT)
    assert float(jnp.mean(losses)) == pytest.approx(expected["mean"], rel=LIMIT)
    found = {name: float(jnp.linalg.norm(grads[name])) for name in expected["gradients"]}
    assert found == pytest.approx(expected["gradients"], rel=LIMIT)
    assert not np.any(grads["embed"])  # one table with the head until the last stage
