"""Validation loss on a fixed set of tokens, the same for every batch size and number of devices."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jspeed.data import Shards, TokenLoader
from jspeed.errors import BadInput
from jspeed.parallel.mesh import batch_rows, put
from jspeed.recipe import Recipe
from jspeed.run.compute.program import Program
from jspeed.run.compute.step import mean_weight


@dataclass(frozen=True)
class ValidationSet:
    """The first ``tokens`` validation tokens as rows on the devices: ``[padded rows, eval_len + 1]`` of ``Data.dtype``.

    ``first`` is the first row on the host; ``mean_weight`` is the mean weight of a target in the loss.
    """

    rows: jax.Array
    first: np.ndarray
    count: int
    tokens: int
    mean_weight: float = 1.0


def read_rows(shards: Shards, recipe: Recipe) -> np.ndarray:
    """Read the evaluation rows: ``[rows, eval_len + 1]`` as stored, contiguous, each row's last id only a target.

    All of ``recipe.eval_tokens`` where the shards hold them, else as many whole rows as they do. Raises
    :class:`BadInput` when they hold less than a row.
    """
    wanted = recipe.eval_tokens // recipe.eval_len
    loader = TokenLoader(
        shards,
        lanes=1,
        lane_len=recipe.eval_len,
        bos_id=recipe.data.bos_id,
        vocab_size=recipe.vocab_size,
        prefetch=0,
    )
    with loader:
        rows = [np.array(batch.tokens[0]) for batch in islice(loader, wanted)]
    return np.stack(rows)


def check_documents(rows: np.ndarray, recipe: Recipe, most: int | None) -> None:
    """Raise :class:`BadInput` when a row holds more than ``most`` documents, which attention has no room for."""
    found = 1 + int(np.max(np.sum(rows[:, 1:-1] == recipe.data.bos_id, axis=1)))
    if most and found > most:
        raise BadInput(
            f"recipe {recipe.name}: a validation row of {recipe.eval_len} tokens holds {found} documents but attention "
            f"has room for {most} (its share of MAX_DOCS); --set a larger MAX_DOCS or a shorter EVAL_LEN"
        )


def longest_document(rows: np.ndarray, recipe: Recipe) -> int:
    """Return the tokens of the longest document within a row; a row begins with one, whatever its first token."""
    starts = rows[:, :-1] == recipe.data.bos_id
    starts[:, 0] = True
    return int(np.max(np.diff(np.flatnonzero(starts), append=starts.size)))


def to_devices(rows: np.ndarray, padded: int, recipe: Recipe, mesh: Mesh) -> ValidationSet:
    """Put the rows on the devices, with empty ones after them up to ``padded``."""
    full = np.zeros((padded, rows.shape[1]), recipe.data.dtype)
    full[: len(rows)] = rows
    array = put(full, batch_rows(mesh))
    return ValidationSet(array, full[0], len(rows), len(rows) * recipe.eval_len, float(mean_weight(recipe, rows)))


def validation_loss(evaluate: Callable[[Any, jax.Array], jax.Array], params: Any, validation: ValidationSet) -> float:
    """Return the (weighted) mean loss in nats per token: fp32 within a row, float64 over rows."""
    return _mean(evaluate, params, validation)


def validation_accuracy(program: Program, params: Any, validation: ValidationSet) -> float | None:
    """Return the (weighted) share of targets that the model takes for the most probable; None: not asked for."""
    return program.accuracy and _mean(program.accuracy, params, validation)


def _mean(measure: Callable[[Any, jax.Array], jax.Array], params: Any, validation: ValidationSet) -> float:
    rows = jax.device_get(measure(params, validation.rows))
    return float(np.mean(rows[: validation.count], dtype=np.float64)) / validation.mean_weight
