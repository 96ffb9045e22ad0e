"""The score: every token's loss from what a recipe gives, by the trainer's own code.

A recipe gives logits of the inputs alone. Targets, log-softmax, weights and mean are not its to
compute, so whatever it gives sums to one over the vocabulary. Its ``loss`` is for training.

``forward`` gives the logits of whole lanes. With a large vocabulary a recipe gives ``hidden(params,
tokens_BT, ctx)``, a tree of arrays ``[B, T, ...]``. Of that ``logits(params, hidden_Bt, ctx)`` are
the logits ``[B, t, V]`` of any ``t`` of its tokens. Where tokens may be copied it gives
``pointer(params, hidden, tokens_BT, ctx)``: the id that stands for copying and the arguments of
:func:`jspeed.model.pointer.copies` but for the targets.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jspeed.errors import BadInput
from jspeed.model import pointer
from jspeed.model.losses import over_chunks
from jspeed.recipe import Context, ParamSpec, Recipe

LOGITS = 2**26
"""Logits that exist at once on a device: 268 MB in fp32."""

UNLIKELY = 83.0
"""How far, in nats, an impossible id is below the highest logit: record 91's -60 under its cap of
23."""

Measure = Callable[[Recipe, Any, jax.Array, jax.Array, Context], jax.Array]


def losses(
    recipe: Recipe, params: Any, tokens_BT: jax.Array, targets_BT: jax.Array, ctx: Context
) -> jax.Array:
    """Return the loss of every target: fp32 ``[B, T]``, nats.

    With ``hidden`` and ``logits`` a lane's logits exist for a few tokens at a time; with
    ``forward`` alone for whole lanes, a few at a time. Raises :class:`BadInput` for logits of
    another shape.
    """
    params = without_padding(recipe, params)
    if recipe.hidden is None or recipe.logits is None:
        return by_lanes(recipe, params, tokens_BT, targets_BT, ctx, whole_lanes)
    logits = recipe.logits
    state = recipe.hidden(params, tokens_BT, ctx)
    leaves, structure = jax.tree.flatten(state)
    copied: tuple[Any, ...] = ()
    copy_id: Any = None
    if recipe.pointer is not None:
        copy_id, where = recipe.pointer(params, state, tokens_BT, ctx)
        copied = pointer.copies(targets_BT=targets_BT, **where)

    def of_chunk(
        _: None, targets_Bt: jax.Array, tokens_Bt: jax.Array, *rest: jax.Array
    ) -> tuple[None, jax.Array]:
        of_state, of_copies = rest[: len(leaves)], rest[len(leaves) :]
        z_BtV = checked(
            recipe, logits(params, jax.tree.unflatten(structure, of_state), ctx), targets_Bt
        )
        loss_Bt = cross_entropy(z_BtV, targets_Bt, tokens_Bt, ctx.tokenizer_mask)
        if of_copies:
            copy_Bt = cross_entropy(
                z_BtV, jnp.full_like(targets_Bt, copy_id), tokens_Bt, ctx.tokenizer_mask
            )
            loss_Bt = pointer.mixed_loss(loss_Bt, copy_Bt, *of_copies)
        return None, loss_Bt

    lanes = targets_BT.shape[0]
    chunk = max(1, LOGITS // (lanes * recipe.data.vocab_size))
    arrays = (targets_BT, tokens_BT, *leaves, *copied)
    return over_chunks(of_chunk, None, arrays, chunk)[1]


def without_padding(recipe: Recipe, params: Any) -> Any:
    """Return ``params`` with zeros for padding: what is not counted as parameters is none.

    ``params`` has entries of ``recipe.parameters`` whole, at least those with padding.
    """

    def zeroed(spec: ParamSpec, array: Any) -> Any:
        return array.at[spec.shape[0] - spec.padding :].set(0) if spec.padding else array

    return jax.tree.map(
        zeroed, recipe.parameters, params, is_leaf=lambda leaf: isinstance(leaf, ParamSpec)
    )


def hits(
    recipe: Recipe, params: Any, tokens_BT: jax.Array, targets_BT: jax.Array, ctx: Context
) -> jax.Array:
    """Return 1 for every target that the model takes for the most probable, else 0: ``[B, T]``."""

    def of_lanes(recipe: Recipe, params: Any, tokens_BT: Any, targets_BT: Any, ctx: Context) -> Any:
        logits_BTV = recipe.forward(params, tokens_BT, ctx)[..., : recipe.vocab_size]
        return (jnp.argmax(logits_BTV, axis=-1) == targets_BT).astype(jnp.float32)

    return by_lanes(recipe, params, tokens_BT, targets_BT, ctx, of_lanes)


def by_lanes(
    recipe: Recipe,
    params: Any,
    tokens_BT: jax.Array,
    targets_BT: jax.Array,
    ctx: Context,
    measure: Measure,
) -> jax.Array:
    """Return what ``measure`` makes of so many lanes at a time that their logits have room."""
    lanes, length = tokens_BT.shape
    most = max(1, LOGITS // (length * recipe.data.vocab_size))
    at_once = max(n for n in range(1, lanes + 1) if lanes % n == 0 and n <= most)

    def of_part(part: tuple[jax.Array, jax.Array, Any]) -> jax.Array:
        tokens, targets, beside = part
        return measure(recipe, params, tokens, targets, replace(ctx, beside=beside))

    parts: tuple[jax.Array, jax.Array, Any] = tokens_BT, targets_BT, ctx.beside
    if at_once == lanes:
        return of_part(parts)
    cut = jax.tree.map(lambda a: a.reshape(lanes // at_once, at_once, *a.shape[1:]), parts)
    return jax.lax.map(of_part, cut).reshape(lanes, length)


def whole_lanes(
    recipe: Recipe, params: Any, tokens_BT: jax.Array, targets_BT: jax.Array, ctx: Context
) -> jax.Array:
    """Return the losses of lanes from ``forward``'s logits, all at once."""
    logits_BTV = checked(recipe, recipe.forward(params, tokens_BT, ctx), targets_BT)
    return cross_entropy(logits_BTV, targets_BT, tokens_BT, ctx.tokenizer_mask)


def checked(recipe: Recipe, logits: Any, targets_BT: jax.Array) -> jax.Array:
    """Return ``logits`` in fp32; raises :class:`BadInput` where they are not real numbers, one for
    each id."""
    shape, known = getattr(logits, "shape", None), recipe.vocab_size
    if (
        shape is None
        or shape[:-1] != targets_BT.shape
        or shape[-1] < known
        or not jnp.issubdtype(logits.dtype, jnp.floating)
    ):
        raise BadInput(
            f"recipe {recipe.name}: for {math.prod(targets_BT.shape)} tokens an evaluation got"
            f" logits {getattr(logits, 'dtype', type(logits).__name__)}{list(shape or ())};"
            f" expected real numbers {[*targets_BT.shape, known]}, or more in the last axis"
        )
    return logits.astype(jnp.float32)


def cross_entropy(
    z_BTV: jax.Array,
    targets_BT: jax.Array,
    tokens_BT: jax.Array,
    tokenizer_mask_VW: jax.Array | None,
) -> jax.Array:
    """Return minus the log-softmax of fp32 logits at the targets: ``[B, T]``.

    Ids that the tokenizer never writes after a token of ``tokens_BT`` have no share of the softmax
    (bits of ``Context.tokenizer_mask``); as a target, which no canonical text has, one would be
    ``UNLIKELY`` below the highest logit.
    """
    own_BT = jnp.take_along_axis(z_BTV, targets_BT[..., None], axis=-1)[..., 0]
    if tokenizer_mask_VW is None:
        return jax.nn.logsumexp(z_BTV, axis=-1) - own_BT
    bits_BTW = tokenizer_mask_VW[tokens_BT]
    size = z_BTV.shape[-1]
    bits_BTV = jnp.unpackbits(bits_BTW, axis=-1, count=size, bitorder="little")
    possible_BTV = jnp.where(bits_BTV == 1, -jnp.inf, z_BTV)
    total_BT = jax.nn.logsumexp(possible_BTV, axis=-1)
    byte_BT = jnp.take_along_axis(bits_BTW, targets_BT[..., None] // 8, axis=-1)[..., 0]
    never_BT = byte_BT >> (targets_BT % 8).astype(jnp.uint8) & 1
    floor_BT = jnp.max(possible_BTV, axis=-1) - UNLIKELY
    return total_BT - jnp.where(never_BT == 1, floor_BT, own_BT)
