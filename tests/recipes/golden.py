"""Inputs and computation for test_golden.py: random parameters and tokens from a NumPy seed.

golden.json has the numbers of all records, which the tests of parity compute anew.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspeed.recipe import Context, Recipe, leaves, map_specs
from jspeed.run.find_recipe import find

NUMBERS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("golden.json").read_text())
BLOCK = 8
COMMON = {"WIDTH": 48, "MLP_WIDTH": 192, "HEADS": 6, "VOCAB": 384, "BOS": 256, "COMPUTE": "float32"}
PACKED = COMMON | dict(
    LANE_LEN=16 * BLOCK, EVAL_LEN=32 * BLOCK, EVAL_TOKENS=8 * 32 * BLOCK, BLOCK=BLOCK
)
PACKED |= {"MAX_DOCS": 16 * BLOCK + 1, "FP8": "off"}
SMALL: dict[str, dict[str, Any]] = {
    "r21": PACKED | {"WINDOW": 1728 * BLOCK // 128},
    "r29": PACKED | {"MAX_DOC_LEN": 5 * BLOCK},
    "track3": COMMON | {"LANES": 32, "LANE_LEN": 32, "EVAL_LEN": 32, "EVAL_TOKENS": 1024},
}
SMALL["track3-soap"] = SMALL["track3"]
ROWS = {"r21": 2, "r29": 2, "track3": 8}
# tokens a row; record 21's windows, ours and the record's, are all wider in its last stage
LENGTH = 48
STEPS = 3


def small(name: str, **fields: Any) -> Recipe:
    """The recipe with every layer, at the size of the golden numbers."""
    sets = [f"{field}={value!r}" for field, value in (SMALL[name] | fields).items()]
    return find(name, sets, trace=False).recipe


def fill(recipe: Recipe, seed: int = 0) -> dict[str, Any]:
    """Return fp32 parameters of the sizes that training gives them: none is zero but padding."""
    rng = np.random.RandomState(seed)  # its numbers never change
    arrays = []
    for _, spec in leaves(recipe.parameters):
        array = rng.standard_normal(spec.shape)
        if "matrix" in spec.axes:
            array /= np.sqrt(spec.shape[-2])
            array[spec.shape[0] - spec.padding :] = 0
        elif spec.axes[0] == "vocab" and len(spec.shape) == 2:
            array *= 2 / np.sqrt(spec.shape[1])
        elif not {"token", "row"} & set(spec.axes):
            array = 0.6 + 0.2 * array
        arrays.append(array.astype(np.float32))
    return jax.tree.unflatten(jax.tree.structure(map_specs(lambda _: 0, recipe.parameters)), arrays)


def draw_tokens(name: str, recipe: Recipe, seed: int = 0) -> np.ndarray:
    """Return uint16 ``[rows, LENGTH + 1]``: rows start with a document, as does every twentieth
    token or so."""
    rng = np.random.RandomState(seed)
    tokens = rng.randint(0, recipe.data.bos_id, (ROWS[name], LENGTH + 1))
    starts = rng.random_sample(tokens.shape) < 0.05
    starts[:, 0] = True
    return np.where(starts, recipe.data.bos_id, tokens).astype(np.uint16)


def summary(losses: Any, gradients: Any, params: list[Any]) -> dict[str, Any]:
    """Return the golden numbers: of losses ``[rows, tokens]``, first gradients, and parameters
    before every step."""

    def norms(tree: Any) -> dict[str, float]:
        norm = lambda array: float(np.linalg.norm(np.asarray(array, np.float64)))
        return {key: norm(array) for key, array in sorted(tree.items())}

    def moved(after: Any) -> dict[str, float]:
        return norms({key: np.float64(after[key]) - params[0][key] for key in after})

    losses = np.asarray(losses, np.float64)
    return {
        "losses": [float(loss) for loss in losses[0, [0, 1, 23, 47]]],
        "mean": float(losses.mean()),
        "gradients": norms(gradients),
        "first update": moved(params[1]),
        "three updates": moved(params[STEPS]),
    }


def measure(name: str) -> dict[str, Any]:
    """Return the golden numbers of our recipe: steps 0, 1 and 2 on one batch, in the last stage."""
    recipe = small(name)
    tokens = jnp.asarray(draw_tokens(name, recipe), jnp.int32)
    weights = jnp.full((tokens.shape[0], LENGTH), 1 / (tokens.shape[0] * LENGTH))
    ctx = Context(recipe.stages[-1], training=True)
    optimizer = recipe.optimizer()

    @jax.jit
    def gradients(params: Any) -> Any:
        loss = lambda p: recipe.loss(p, tokens[:, :-1], tokens[:, 1:], weights, ctx)
        return jax.grad(loss, has_aux=True)(params)

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = [fill(recipe)]
    state = optimizer.init(params[0])
    first = None
    for _ in range(STEPS):
        grads, losses = gradients(params[-1])
        first = first or (losses, grads)
        after, state = step(params[-1], state, grads)
        params.append(after)
    return summary(*first, params)
