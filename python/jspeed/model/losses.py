"""Cross-entropy through any head, without saving a [tokens, vocabulary] array for the backward
pass."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

LogitsOf: TypeAlias = Callable[[Any, jax.Array], jax.Array]
"""A head's parameters and its input, any ``t`` tokens of each lane, to raw logits ``[B, t, V]``."""


@dataclass(frozen=True)
class Softcap:
    """A smooth elementwise ``function`` of fp32 logits whose values stay below ``bound``.

    Because the bound is known, log-sum-exp needs no pass for the maximum. Values must stay above
    ``bound - 80``, or ``exp`` underflows in fp32.
    """

    function: Callable[[jax.Array], jax.Array]
    bound: float


def sigmoid_cap(cap: float) -> Softcap:
    """``2 cap sigmoid(2 logits / cap)``, within (0, 2 ``cap``); ``cap`` at most 40.

    It is ``cap tanh(logits / cap)`` (Gemma 2) shifted by ``cap``, which leaves the softmax
    unchanged: the form of speedrun record 19.
    """
    return Softcap(lambda logits: 2 * cap * jax.nn.sigmoid(logits * (2 / cap)), 2 * cap)


def root_cap(cap: float) -> Softcap:
    """``cap logits / sqrt(logits^2 + cap^2)``, within +-``cap``; ``cap`` at most 40. The speedrun's
    track 3."""
    return Softcap(lambda logits: cap * logits * jax.lax.rsqrt(jnp.square(logits) + cap**2), cap)


def asymmetric_cap(bound: float, shift: float, width: float) -> Softcap:
    """``bound sigmoid((logits + shift) / width)``, within (0, ``bound``); ``bound`` at most 80.
    Speedrun record 54."""
    return Softcap(lambda logits: bound * jax.nn.sigmoid((logits + shift) / width), bound)


def softcap(logits: jax.Array, cap: Softcap | None) -> jax.Array:
    """Return a head's ``logits`` in fp32, after the softcap if there is one."""
    logits32 = logits.astype(jnp.float32)
    return cap.function(logits32) if cap else logits32


def keep_low_precision(logits_BTV: jax.Array) -> jax.Array:
    """Return ``logits_BTV`` behind an optimization barrier.

    Without it XLA keeps the loss's fp32 logits for the gradient, twice the bytes of the bf16 ones.
    """
    return jax.lax.optimization_barrier(logits_BTV) if logits_BTV.dtype.itemsize < 4 else logits_BTV


def as_made(logits_BTV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return logits for the loss and for its gradient: in memory as they are."""
    return logits_BTV, keep_low_precision(logits_BTV)


def unmixed(loss_BTN: jax.Array) -> tuple[jax.Array, Callable[..., Any]]:
    """Return losses of targets as they are, and how shares of them become shares of those given."""
    return loss_BTN, lambda share_BTN: (share_BTN, ())


@dataclass(frozen=True)
class Head:
    """What gives logits, and how a loss in training treats them."""

    logits: LogitsOf
    # Tokens of each lane whose logits exist at a time; None: all.
    chunk: int | None = None
    # Raw logits to what loss and gradient read: what lies in memory between them.
    keep: Callable[[jax.Array], tuple[jax.Array, jax.Array]] = as_made
    # Losses ``[B, T, N]`` of N targets, and other arrays ``[B, T]``, to losses and a function. That
    # turns weights of these into (weights of those given, gradients of the arrays).
    mix: Callable[..., tuple[jax.Array, Callable[..., Any]]] = unmixed
    cap: Softcap | None = None


def cross_entropy(
    head: Head | LogitsOf,
    head_params: Any,
    x_BTD: jax.Array,
    *arrays_BT: jax.Array,
    **of_head: Any,
) -> tuple[jax.Array, jax.Array]:
    """Return (sum of weights x loss: fp32 scalar, loss: fp32 ``[B, T]`` in nats, without a
    gradient).

    ``head`` is differentiated with respect to ``head_params`` and ``x_BTD``, so arrays that need a
    gradient must not be closed over. ``arrays_BT`` are targets, integer ids below V; their weights,
    which are constants; and what ``head.mix`` takes. ``of_head`` replace attributes of the
    :class:`Head`; recipes on the board give ``cap`` and ``chunk`` so.

    A token may have several targets, each with its weight: ``[N, B, T]`` both. All weigh into the
    sum; the loss is that of the first.

    Under differentiation the gradients with respect to ``head_params`` and ``x_BTD`` are formed in
    the forward pass, while a chunk's logits exist. The backward pass only scales them: no matmul of
    the head is repeated. Over chunks the gradient of ``head_params`` accumulates in fp32.

    The gradient that reaches ``head`` is that of the unweighted loss: weights are first divided by
    the largest, which the backward pass multiplies in. With equal weights, however small, a logit's
    gradient is a probability or less, as FP8 scales fixed in advance need it.
    """
    targets_BT, weights_BT, *beside_BT = arrays_BT
    how = replace(head if isinstance(head, Head) else Head(head), **of_head)
    ids_and_weights = targets_last(targets_BT, weights_BT)
    return _cross_entropy(how, head_params, x_BTD, tuple(beside_BT), *ids_and_weights)


def multi_token_targets(
    targets_BT: jax.Array, weights_BT: jax.Array, shares_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the next N tokens of every position as its targets, ``[N, B, T]``, and their weights.

    The n-th weighs ``weights_BT`` x ``shares_N[n]``, or nothing where the lane ends before it:
    multi-token prediction with one head (modded-nanogpt, record 53).
    """
    late, length = range(len(shares_N)), targets_BT.shape[1]
    targets_NBT = jnp.stack([jnp.pad(targets_BT[:, n:], ((0, 0), (0, n))) for n in late])
    exists_NT = jnp.stack([jnp.arange(length) < length - n for n in late])
    return targets_NBT, shares_N[:, None, None] * weights_BT[None] * exists_NT[:, None]


def with_prefix(
    targets_NBT: jax.Array, weights_NBT: jax.Array, prefixes_V: jax.Array, share: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Add a target: the prefix of the first one, if it has one, at ``share`` of its weight.

    ``prefixes_V`` as :func:`jspeed.model.prefixes.gpt2_prefixes` returns it (modded-nanogpt, record
    88).
    """
    prefix_BT = prefixes_V[targets_NBT[0]]
    targets = jnp.maximum(prefix_BT, 0)[None]
    weights = (share * weights_NBT[0] * (prefix_BT >= 0))[None]
    return jnp.concatenate([targets_NBT, targets]), jnp.concatenate([weights_NBT, weights])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(head, head_params, x_BTD, beside, targets_BTN, weights_BTN):
    def of_chunk(_, x_BtD, targets_BtN, *beside_Bt):
        loss_BtN = _loss(head.logits(head_params, x_BtD), targets_BtN, head.cap)[0]
        return None, head.mix(loss_BtN, *beside_Bt)[0]

    loss_BTN = over_chunks(of_chunk, None, (x_BTD, targets_BTN, *beside), head.chunk)[1]
    return total(loss_BTN, weights_BTN), loss_BTN[..., 0]


def _forward(head, head_params, x_BTD, beside, targets_BTN, weights_BTN):
    largest, share_BTN = shares(weights_BTN)

    def of_chunk(dhead, x_BtD, targets_BtN, share_BtN, *beside_Bt):
        made_BtV, pull = jax.vjp(head.logits, head_params, x_BtD)
        logits_BtV, again_BtV = head.keep(made_BtV)
        loss_BtN, shift_Bt, sum_Bt = _loss(logits_BtV, targets_BtN, head.cap)
        loss_BtN, pull_mix = head.mix(loss_BtN, *beside_Bt)
        share_BtN, dbeside = pull_mix(share_BtN)
        scale_Bt = jnp.sum(share_BtN, axis=-1) / sum_Bt
        hits_BtV = _hits(targets_BtN, share_BtN, logits_BtV.shape)
        new, dx_BtD = pull(dlogits(again_BtV, hits_BtV, scale_Bt, shift_Bt, head.cap))
        dhead = jax.tree.map(lambda total, part: total + part.astype(jnp.float32), dhead, new)
        return dhead, (loss_BtN, (dx_BtD, *dbeside))

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), head_params)
    arrays = (x_BTD, targets_BTN, share_BTN, *beside)
    dhead, (loss_BTN, (dx_BTD, *dbeside)) = over_chunks(of_chunk, zeros, arrays, head.chunk)
    dhead = jax.tree.map(lambda d, p: d.astype(p.dtype), dhead, head_params)
    grads = dhead, dx_BTD, tuple(dbeside)
    return (total(loss_BTN, weights_BTN), loss_BTN[..., 0]), (grads, largest)


def _backward(head, saved, cotangents):
    return *rescale_gradients(saved, cotangents), None, None


_cross_entropy.defvjp(_forward, _backward)


def _loss(logits_BTV: jax.Array, targets_BTN: jax.Array, cap: Softcap | None):
    """Return (loss of each target, shift, sum); log-sum-exp is shift + log(sum)."""
    shift_BT, sum_BT = partition_sum(cap, (logits_BTV, None))
    target_BTN = jnp.take_along_axis(logits_BTV, targets_BTN, axis=-1)
    return loss_of(target_BTN, shift_BT, sum_BT, cap), shift_BT, sum_BT


def _hits(targets_BTN: jax.Array, share_BTN: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return an array [B, T, V] with each target's share at its id, 0 elsewhere."""
    ids_BTV = jax.lax.broadcasted_iota(targets_BTN.dtype, shape, 2)
    hits_BTV = jnp.zeros(shape, jnp.float32)
    for n in range(targets_BTN.shape[-1]):
        hits_BTV += jnp.where(targets_BTN[..., n, None] == ids_BTV, share_BTN[..., n, None], 0.0)
    return hits_BTV


# Parts that the cross-entropy over the whole vocabulary and the one over a sample of it
# (model/sampled.py) share.


def targets_last(targets_BT: jax.Array, weights_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return targets and weights as ``[B, T, N]``, from ``[B, T]`` or ``[N, B, T]``."""
    targets_BTN, weights_BTN = (
        jnp.moveaxis(a[None] if a.ndim == 2 else a, 0, 2) for a in (targets_BT, weights_BT)
    )
    return targets_BTN, weights_BTN


def shares(weights_BTN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the largest weight, and all as shares of it."""
    largest = jnp.max(jnp.abs(weights_BTN))
    return largest, weights_BTN / jnp.where(largest > 0, largest, 1)


def partition_sum(
    cap: Softcap | None, *parts: tuple[jax.Array, jax.Array | None]
) -> tuple[jax.Array, jax.Array]:
    """Return (shift, sum), fp32 ``[B, T]``: the partition function is exp(shift) x sum.

    A part is raw logits ``[B, T, n]`` and how often each counts, fp32 ``[B, T, n]``, or None where
    all count once.
    """
    z_parts = [(softcap(logits_BTn, cap), counts_BTn) for logits_BTn, counts_BTn in parts]
    if cap:
        shift_BT = jnp.full(parts[0][0].shape[:2], cap.bound, jnp.float32)
    else:
        shift_BT = reduce(jnp.maximum, [jnp.max(z_BTn, axis=-1) for z_BTn, _ in z_parts])
    terms = [(jnp.exp(z_BTn - shift_BT[..., None]), counts_BTn) for z_BTn, counts_BTn in z_parts]
    sums = [
        jnp.sum(e_BTn if counts_BTn is None else counts_BTn * e_BTn, axis=-1)
        for e_BTn, counts_BTn in terms
    ]
    return shift_BT, reduce(jnp.add, sums)


def loss_of(
    target_BTN: jax.Array, shift_BT: jax.Array, sum_BT: jax.Array, cap: Softcap | None
) -> jax.Array:
    """Return the loss of every target from its raw logit and :func:`partition_sum`."""
    return (shift_BT + jnp.log(sum_BT))[..., None] - softcap(target_BTN, cap)


def dlogits(
    logits_BTn: jax.Array,
    hits_BTn: jax.Array | None,
    scale_BT: jax.Array,
    shift_BT: jax.Array,
    cap: Softcap | None,
    counts_BTn: jax.Array | None = None,
) -> jax.Array:
    """Return the loss's gradient with respect to a part's raw logits, in their dtype.

    ``scale_BT`` is the sum of all targets' shares over the sum of :func:`partition_sum`;
    ``hits_BTn`` holds each target's share at its logit, None where no logit is a target's.
    """
    logits32_BTn = logits_BTn.astype(jnp.float32)
    slope_BTn = jnp.ones_like(logits32_BTn)
    z_BTn, slope_BTn = (
        jax.jvp(cap.function, (logits32_BTn,), (slope_BTn,)) if cap else (logits32_BTn, slope_BTn)
    )
    p_BTn = jnp.exp(z_BTn - shift_BT[..., None]) * scale_BT[..., None]
    p_BTn = p_BTn if counts_BTn is None else counts_BTn * p_BTn
    return ((p_BTn if hits_BTn is None else p_BTn - hits_BTn) * slope_BTn).astype(logits_BTn.dtype)


def rescale_gradients(saved: tuple[Any, jax.Array], cotangents: tuple[jax.Array, Any]) -> Any:
    """Scale the saved gradients by the largest weight and the total's cotangent."""
    grads, largest = saved
    scale = largest * cotangents[0]
    return jax.tree.map(lambda g: (g.astype(jnp.float32) * scale).astype(g.dtype), grads)


def total(loss_BTN: jax.Array, weights_BTN: jax.Array) -> jax.Array:
    """Return the weighted sum of all losses: fp32 scalar."""
    # Lane by lane first: a flat fp32 sum over all tokens depends on how lanes are sharded over
    # devices.
    return jnp.sum(jnp.sum(loss_BTN * weights_BTN, axis=(1, 2)))


def over_chunks(of_chunk, carry, arrays_BT: tuple[jax.Array, ...], chunk: int | None):
    """Fold ``of_chunk(carry, *slices) -> (carry, outputs)`` over slices of T; outputs are joined
    along T."""
    length = arrays_BT[0].shape[1]
    size = min(chunk or length, length)
    # A loop, because unrolled chunks do not depend on each other: the GPU scheduler then starts
    # all their matmuls at once (26 GB instead of 2 for an evaluation lane of 16 chunks).
    looped = length // size if length > size else 0
    parts = []
    if looped:

        def step(carry, start):
            return of_chunk(
                carry, *(jax.lax.dynamic_slice_in_dim(a, start, size, axis=1) for a in arrays_BT)
            )

        carry, stacked = jax.lax.scan(step, carry, size * jnp.arange(looped))
        parts = [
            jax.tree.map(
                lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1, *a.shape[3:]), stacked
            )
        ]
    if looped * size < length:
        carry, rest = of_chunk(carry, *(a[:, looped * size :] for a in arrays_BT))
        parts.append(rest)
    return carry, jax.tree.map(lambda *p: jnp.concatenate(p, axis=1), *parts)
