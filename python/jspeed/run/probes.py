"""Validity probes after the final evaluation: what a loss must satisfy to count as a language-model loss."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspeed.parallel.mesh import place, replicated
from jspeed.recipe import Context
from jspeed.run.evaluate import validation_loss
from jspeed.run.prepare import Setup
from jspeed.run.program import eval_context
from jspeed.run.step import State, on_one_row

Verdict = dict[str, Any]


def run_all(setup: Setup, state: State, loss: float) -> dict[str, Verdict]:
    """Return the verdicts (``passed`` and what was measured) on the run that ended in ``state`` with ``loss``."""
    params = state["params"]
    row = setup.validation.first
    before = fingerprint(state)
    again = validation_loss(setup.program.evaluate, params, setup.validation)
    return {
        "causality": causality(setup, params, row),
        "normalisation": normalisation(setup, params, row),
        "evaluation_leaves_state": {"passed": fingerprint(state) == before},
        "evaluation_repeats": {"passed": again == loss, "again": again},
    }


def fingerprint(state: Any) -> str:
    """Return the SHA-256 over the bytes of what this process holds of every array in ``state``, in pytree order."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            digest.update(np.ascontiguousarray(jax.device_get(shard.data)).tobytes())
    return digest.hexdigest()


def causality(setup: Setup, params: Any, row: np.ndarray) -> Verdict:
    """Change the second half of ``row`` (uint16 ``[eval_len + 1]``): the losses before it must not move."""
    recipe, cut = setup.recipe, setup.recipe.eval_len // 2
    ctx = eval_context(recipe, setup.device)

    def losses(whole: Any, tokens: jax.Array, ctx: Context) -> jax.Array:
        ones = jnp.ones((1, recipe.eval_len), jnp.float32)
        return recipe.loss(whole, tokens[:, :-1], tokens[:, 1:], ones, ctx)[1]

    probe = on_one_row(recipe, ctx, setup.options.layout, setup.mesh, losses)
    tokens = row[None].astype(np.int32)
    changed = tokens.copy()
    changed[:, cut + 1 :] = (changed[:, cut + 1 :] + 1) % recipe.data.vocab_size
    whole = replicated(setup.mesh)
    before, after = (jax.device_get(probe(params, place(t, whole))) for t in (tokens, changed))
    leak = float(np.max(np.abs(before - after)[:, :cut]))
    moved = float(np.max(np.abs(before - after)[:, cut:]))
    return {"passed": leak <= 1e-6 and moved > 0, "leak": leak, "moved": moved}


def normalisation(setup: Setup, params: Any, row: np.ndarray) -> Verdict:
    """Compare the loss with the log-softmax of ``forward``'s logits: it must be one over the whole vocabulary.

    Means over 128 tokens are compared, because bf16 logits of single tokens depend on the matmul's shape.
    """
    recipe, length = setup.recipe, min(setup.recipe.eval_len, 128)
    ctx = eval_context(recipe, setup.device)

    def both(whole: Any, tokens: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        log_p = jax.nn.log_softmax(recipe.forward(whole, inputs, ctx).astype(jnp.float32), axis=-1)
        expected = -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
        found = recipe.loss(whole, inputs, targets, jnp.ones(inputs.shape, jnp.float32), ctx)[1]
        return jnp.mean(found), jnp.mean(expected)

    probe = on_one_row(recipe, ctx, setup.options.layout, setup.mesh, both)
    tokens = place(row[None, : length + 1].astype(np.int32), replicated(setup.mesh))
    found, expected = jax.device_get(probe(params, tokens))
    error = abs(float(found - expected))
    return {"passed": error <= 1e-3, "error": error}
