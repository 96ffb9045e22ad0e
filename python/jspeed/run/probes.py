"""Validity probes after the final evaluation: what a loss must satisfy to count as a language-model loss."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.recipe import Context, Recipe
from jspeed.run.evaluate import validation_loss
from jspeed.run.prepare import Setup
from jspeed.run.step import State, eval_stage

Verdict = dict[str, Any]


def run_all(setup: Setup, state: State, loss: float) -> dict[str, Verdict]:
    """Return the verdicts (``passed`` and what was measured) on the run that ended in ``state`` with ``loss``."""
    recipe, params = setup.recipe, state["params"]
    row = np.asarray(jax.device_get(setup.validation.rows[0]))
    before = fingerprint(state)
    again = validation_loss(setup.program.evaluate, params, setup.validation)
    return {
        "causality": causality(recipe, params, row),
        "normalisation": normalisation(recipe, params, row),
        "evaluation_leaves_state": {"passed": fingerprint(state) == before},
        "evaluation_repeats": {"passed": again == loss, "again": again},
    }


def fingerprint(state: Any) -> str:
    """Return the SHA-256 over the bytes of every array in ``state``, in pytree order."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(state)):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def causality(recipe: Recipe, params: Any, row: np.ndarray) -> Verdict:
    """Change the second half of ``row`` (uint16 ``[eval_len + 1]``): the losses before it must not move."""
    ctx = Context(eval_stage(recipe), training=False)
    cut = recipe.eval_len // 2

    @jax.jit
    def losses(tokens: jax.Array) -> jax.Array:
        ones = jnp.ones((1, recipe.eval_len), jnp.float32)
        return recipe.loss(params, tokens[:, :-1], tokens[:, 1:], ones, ctx)[1]

    tokens = row[None].astype(np.int32)
    changed = tokens.copy()
    changed[:, cut + 1 :] = (changed[:, cut + 1 :] + 1) % recipe.data.vocab_size
    before, after = (np.asarray(jax.device_get(losses(jnp.asarray(t)))) for t in (tokens, changed))
    leak = float(np.max(np.abs(before - after)[:, :cut]))
    moved = float(np.max(np.abs(before - after)[:, cut:]))
    return {"passed": leak <= 1e-6 and moved > 0, "leak": leak, "moved": moved}


def normalisation(recipe: Recipe, params: Any, row: np.ndarray) -> Verdict:
    """Compare the loss with the log-softmax of ``forward``'s logits: it must be one over the whole vocabulary."""
    ctx = Context(eval_stage(recipe), training=False)
    length = min(recipe.eval_len, 128)

    @jax.jit
    def both(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        log_p = jax.nn.log_softmax(recipe.forward(params, inputs, ctx).astype(jnp.float32), axis=-1)
        expected = -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
        return recipe.loss(params, inputs, targets, jnp.ones(inputs.shape, jnp.float32), ctx)[1], expected

    found, expected = jax.device_get(both(jnp.asarray(row[None, : length + 1].astype(np.int32))))
    error = float(np.max(np.abs(found - expected)))
    return {"passed": error <= 1e-3, "error": error}
