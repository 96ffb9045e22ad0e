"""Validation loss on a fixed set of tokens, the same for every batch size and number of devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from jspeed.base.beside import Knowing
from jspeed.data import Shards, TokenLoader, canonical_mask
from jspeed.data.tokens import GPT2, GPT2_BOS
from jspeed.errors import BadInput
from jspeed.parallel.mesh import batch_lanes, put, replicated
from jspeed.recipe import Recipe
from jspeed.run.compute import program
from jspeed.run.compute.device import Placement
from jspeed.run.compute.program import Program, tokenizer_mask_shape
from jspeed.run.compute.score import hits
from jspeed.run.compute.step import eval_step, mean_weight, without_jit


@dataclass
class ValidationSet:
    """Lanes of validation tokens on the devices: ``[padded lanes, Recipe.lane_words(eval_len)]`` of
    ``Data.dtype``, and their ``targets`` ``[padded lanes, eval_len]``.

    The first ``count`` hold ``tokens`` to score in all; ``mean_weight`` is the mean weight of a
    target in the loss. ``tokenizer_mask`` is that of :class:`~jspeed.recipe.Context` for a
    canonical recipe; until it is known nothing is impossible.
    """

    lanes: jax.Array
    targets: jax.Array
    count: int
    tokens: int
    mean_weight: float = 1.0
    tokenizer_mask: jax.Array | None = None

    @property
    def evaluated(self) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """What an evaluation takes besides parameters."""
        return self.lanes, self.targets, self.tokenizer_mask


class HoldoutLanes(NamedTuple):
    """Lanes of a second range of the validation tokens, ``[lanes, eval_len + 1]``, from token
    ``first`` on."""

    first: int
    lanes: np.ndarray

    @property
    def note(self) -> str | None:
        """What to say where the shards end before it."""
        if len(self.lanes):
            return None
        return (
            f"the validation shards end before token {self.first:,}: the track's second range is"
            " not evaluated"
        )


def read_holdout(shards: Shards, recipe: Recipe, first: int | None) -> HoldoutLanes | None:
    """Return a second range, from token ``first`` on and as long as the first; None: none.

    Nothing is trained, stopped or chosen by this range: its loss is computed once, after the clock
    has stopped.
    """
    if first is None:
        return None
    skipped = -(-max(first, recipe.eval_tokens) // recipe.eval_len)
    return HoldoutLanes(skipped * recipe.eval_len, read_lanes(shards, recipe, skipped))


def read_lanes(shards: Shards, recipe: Recipe, skipped: int = 0) -> np.ndarray:
    """Read the evaluation lanes: ``[lanes, eval_len + 1]`` as stored, contiguous, each lane's last
    id only a target.

    All of ``recipe.eval_tokens`` where the shards hold them after ``skipped`` lanes, else as many
    whole lanes as they do. Raises :class:`BadInput` when they hold less than a lane in all.
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
        lanes = [np.array(batch.tokens[0]) for batch in islice(loader, skipped, skipped + wanted)]
    return np.stack(lanes) if lanes else np.empty((0, recipe.eval_len + 1), shards.dtype)


def check_documents(lanes: np.ndarray, recipe: Recipe, most: int | None) -> None:
    """Raise :class:`BadInput` when a lane holds more than ``most`` documents, which attention has
    no room for."""
    documents = 1 + int(np.max(np.sum(lanes[:, 1:-1] == recipe.data.bos_id, axis=1)))
    if most and documents > most:
        raise BadInput(
            f"recipe {recipe.name}: a validation lane of {recipe.eval_len} tokens holds {documents}"
            f" documents but attention has room for {most} (its share of MAX_DOCS); --set a larger"
            " MAX_DOCS or a shorter EVAL_LEN"
        )


def longest_document(lanes: np.ndarray, recipe: Recipe) -> int:
    """Return the tokens of the longest document within a lane; a lane begins with one, whatever its
    first token."""
    starts = lanes[:, :-1] == recipe.data.bos_id
    starts[:, 0] = True
    return int(np.max(np.diff(np.flatnonzero(starts), append=starts.size)))


def to_devices(lanes: np.ndarray, padded: int, recipe: Recipe, mesh: Mesh) -> ValidationSet:
    """Put the lanes on the devices, with empty ones after them up to ``padded``, and zeros behind
    tokens alone."""
    shape = padded, recipe.lane_words(recipe.eval_len)
    array = put_padded(lanes, shape, recipe.data.dtype, mesh)
    wanted = lanes[:, 1 : recipe.eval_len + 1]
    targets = put_padded(wanted, (padded, recipe.eval_len), recipe.data.dtype, mesh)
    mean = float(mean_weight(recipe, lanes[:, : recipe.eval_len + 1]))
    nothing = None
    if recipe.canonical:
        zeros = jax.jit(
            partial(jnp.zeros, tokenizer_mask_shape(recipe), jnp.uint8),
            out_shardings=replicated(mesh),
        )
        nothing = zeros()
    return ValidationSet(array, targets, len(lanes), len(lanes) * recipe.eval_len, mean, nothing)


def look_up(validation: ValidationSet, lanes: np.ndarray, loader: Any, mesh: Mesh) -> None:
    """Put what ``loader`` knows so far of validation ``lanes`` behind them on the devices; without
    such a loader, nothing."""
    if isinstance(loader, Knowing):
        with jax.transfer_guard("allow"):
            validation.lanes = put_padded(
                loader.looked_up(lanes), validation.lanes.shape, validation.lanes.dtype, mesh
            )


def put_padded(
    lanes: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any], mesh: Mesh
) -> jax.Array:
    """Put ``lanes`` on the devices as the first ones of an array of this ``shape``, with zeros
    after and behind them."""
    full = np.zeros(shape, dtype)
    full[: len(lanes), : lanes.shape[1]] = lanes
    return put(full, batch_lanes(mesh))


def byte_pairs(
    recipe: Recipe, tokenizer: str | None, vocabulary: Callable[[], Sequence[bytes]]
) -> Sequence[bytes]:
    """Return GPT-2's tokens, which ``vocabulary`` gives, if ``recipe`` is canonical, else none.

    Raises :class:`BadInput` where they cannot be had, and for data of another ``tokenizer`` or
    separator.
    """
    if not recipe.canonical:
        return ()
    what = f"recipe {recipe.name} is canonical, which needs"
    if tokenizer != GPT2["tokenizer"]:
        raise BadInput(
            f"{what} tokens of gpt2, and the data hold those of"
            f" {tokenizer or 'an unknown tokenizer'}; prepare them with --tokenizer gpt2, or --set"
            " CANONICAL=False"
        )
    if recipe.data.bos_id != GPT2_BOS:
        raise BadInput(
            f"{what} separator {GPT2_BOS} and it has {recipe.data.bos_id}; --set BOS={GPT2_BOS}"
        )
    try:
        return vocabulary()
    except BadInput as error:
        raise BadInput(f"{what} the vocabulary: {error}, or --set CANONICAL=False") from None


def tokenizer_mask(recipe: Recipe, pairs: Sequence[bytes], mesh: Mesh) -> jax.Array:
    """Return on all devices what GPT-2's tokenizer never writes: uint8 ``[V, V / 8]``, made by one
    core in Rust.

    It has 316 MB for GPT-2's vocabulary. May run in a thread of its own: most of the time without
    Python's lock.
    """
    return jax.block_until_ready(
        put(canonical_mask(pairs, tokenizer_mask_shape(recipe)[0]), replicated(mesh))
    )


def token_losses(
    evaluate: Callable[..., jax.Array], params: Any, validation: ValidationSet
) -> NDArray[np.float32]:
    """Return what ``evaluate`` finds for each target of the lanes that hold tokens, on the host:
    ``[count, T]``."""
    found: NDArray[np.float32] = jax.device_get(evaluate(params, *validation.evaluated))
    return found[: validation.count]


def validation_loss(
    evaluate: Callable[..., jax.Array], params: Any, validation: ValidationSet
) -> float:
    """Return the (weighted) mean loss in nats per token, or mean of what else ``evaluate`` returns
    for each target: in float64."""
    return weighted_mean(token_losses(evaluate, params, validation), validation)


def weighted_mean(found: NDArray[np.float32], validation: ValidationSet) -> float:
    """Return the mean of what was ``found`` for the targets, each times its weight, in float64."""
    return float(np.mean(found, dtype=np.float64)) / validation.mean_weight


def validation_accuracy(compiled: Program, params: Any, validation: ValidationSet) -> float | None:
    """Return the (weighted) share of targets that the model takes for the most probable; None: not
    asked for."""
    return compiled.accuracy and validation_loss(compiled.accuracy, params, validation)


def compile_accuracy(recipe: Recipe, placement: Placement, lanes: int) -> Callable[..., jax.Array]:
    """Return ``accuracy`` of a :class:`Program` whose ``eval_lanes`` are ``lanes``: the logits of a
    lane at a time.

    Raises :class:`BadInput` where these do not fit into a device's memory.
    """
    if without_jit():
        parts, _ = program.eval_parts(recipe, lanes, placement.mesh, recipe.eval_len)
        ctx = program.eval_context(recipe, placement.device)
        return partial(eval_step, recipe, ctx, placement, parts, measure=hits)
    try:
        idle = program.idle_state_bytes(recipe, placement)
        return program.compile_evaluation(recipe, placement, recipe.eval_len, lanes, idle, hits)[1]
    except BadInput as error:
        raise BadInput(f"--accuracy: {error}, or leave --accuracy out") from None
