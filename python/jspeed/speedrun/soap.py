"""SOAP-Muon: momentum whitened in the eigenbases of its gradients, made orthogonal, on a sphere
whose radius moves slowly; and steps that look ahead."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jspeed.optim.muon import NEWTON_SCHULZ_12, frobenius, orthogonalise

SMALLEST = 1e-8  # below it a norm is not divided by


class SoapState(NamedTuple):
    """Number of updates so far (int32 scalar), and of each bank ``[n, r, c]`` in fp32: momentum,
    and mean squares in the eigenbases.

    ``rows`` and ``columns`` are running means of G G^T ``[n, r, r]`` and G^T G ``[n, c, c]``. Bases
    are their eigenvectors, in columns by falling eigenvalue.
    """

    step: jax.Array
    momentum: Any
    square: Any
    rows: Any
    columns: Any
    row_basis: Any
    column_basis: Any


class Floor(NamedTuple):
    """What keeps weights in place.

    Each output's update has at least ``ratio`` of the norm of its weights. Of an update away from 0
    the part ``outward`` is kept. Weights that the update shrinks lose the share ``decay`` x rate of
    themselves.
    """

    ratio: float
    outward: float
    decay: float


def soap_muon(
    learning_rate: optax.Schedule,
    momentum: optax.Schedule,
    *,
    beta: float,
    floor: Floor,
    scale: ArrayLike,
    outputs_last: ArrayLike,
    trust: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], ArrayLike] | None = None,
    dtype: Any = jnp.bfloat16,
) -> optax.GradientTransformation:
    """Update banks ``[n, r, c]`` (modded-nanogpt, track 3, entries 44 and 46).

    Nesterov momentum by ``momentum(past updates)`` is whitened with means of decay ``beta``
    (Vyas et al. 2024, SOAP), orthogonalised in ``dtype`` and multiplied by ``scale`` (broadcast
    against the bank). ``outputs_last`` says, broadcast likewise, of which matrices an output is a
    column, not a row. ``trust(raw, whitened, gradient, step)`` returns how much of the whitening
    to believe, by default all. Eigenbases take one QR iteration a step, after it.
    """

    def init(params: Any) -> SoapState:
        def square(axis: int) -> Any:
            side = lambda p: jnp.zeros((*p.shape[:-2], p.shape[axis], p.shape[axis]), jnp.float32)
            return jax.tree.map(side, params)

        like = partial(jax.tree.map, lambda p: jnp.zeros_like(p, jnp.float32), params)
        return SoapState(
            jnp.zeros([], jnp.int32), like(), like(), square(-2), square(-1), square(-2), square(-1)
        )

    def update(grads: Any, state: SoapState, params: Any = None) -> tuple[Any, SoapState]:
        rate, mu = (
            jnp.asarray(schedule(state.step), jnp.float32) for schedule in (learning_rate, momentum)
        )

        def one(g: jax.Array, p: jax.Array, *kept: jax.Array) -> tuple[jax.Array, ...]:
            m, square, rows, columns, row_basis, column_basis = kept
            m = m + (1 - mu) * (g - m)
            ahead = g + mu * (m - g)
            white, square = whiten(ahead, square, row_basis, column_basis, beta)
            # There is no basis before the first step.
            white = jnp.where(state.step == 0, ahead, white)
            if trust:
                believed = trust(ahead, white, g, state.step)
                white = of_size(ahead + (white - ahead) * believed, ahead)
            whole = orthogonalise(white, polynomial=NEWTON_SCHULZ_12, norm=schatten4, dtype=dtype)
            change = on_sphere(whole.astype(jnp.float32) * scale, p, rate, floor, outputs_last)
            rows += (1 - beta) * (g @ g.mT - rows)
            columns += (1 - beta) * (g.mT @ g - columns)
            return change, m, square, rows, columns, row_basis, column_basis

        def bases(square: jax.Array, *kept: jax.Array) -> tuple[jax.Array, ...]:
            rows, columns, row_basis, column_basis = kept
            row_basis, order = turned(rows, row_basis)
            square = jnp.take_along_axis(square, order[..., :, None], axis=-2)
            column_basis, order = turned(columns, column_basis)
            square = jnp.take_along_axis(square, order[..., None, :], axis=-1)
            return square, row_basis, column_basis

        def first(square: jax.Array, *kept: jax.Array) -> tuple[jax.Array, ...]:
            rows, columns, *_ = kept
            return square, eigenvectors(rows), eigenvectors(columns)

        with jax.default_matmul_precision("float32"):
            change, m, square, *means = _each(one, grads, params, *state[1:])
            turn = partial(jax.lax.cond, state.step == 0, first, bases)
            square, *new = _each(turn, square, *means)
        return change, SoapState(state.step + 1, m, square, *means[:2], *new)

    return optax.GradientTransformation(init, update)


def schatten4(x: jax.Array) -> jax.Array:
    """Return the fourth root of the sum of the singular values to the power of four, fp32 ``[...,
    1, 1]``: an upper bound of the largest that is nearer to it than the Frobenius norm."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    gram = x.mT @ x if x.shape[-2] > x.shape[-1] else x @ x.mT
    return jnp.sqrt(frobenius(gram))


def of_size(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return ``x`` with the :func:`schatten4` of ``like``."""
    size, now = (jnp.maximum(schatten4(part), SMALLEST) for part in (like, x))
    return x * (size / now)


def whiten(
    x: jax.Array, square: jax.Array, row_basis: jax.Array, column_basis: jax.Array, beta: float
) -> tuple[jax.Array, jax.Array]:
    """Return ``x`` ``[..., r, c]`` divided by its root mean squares in both bases, of the size
    that it had, and the new mean squares."""
    inside = row_basis.mT @ x @ column_basis
    square = square + (1 - beta) * (jnp.square(inside) - square)
    inside = inside / jnp.sqrt(jnp.maximum(square, SMALLEST**2))
    return of_size(row_basis @ inside @ column_basis.mT, x), square


def eigenvectors(gram: jax.Array) -> jax.Array:
    """Return the eigenvectors of symmetric matrices, in columns by falling eigenvalue."""
    vectors = lambda gram: jnp.linalg.eigh(gram)[1]
    return jnp.flip(_one_by_one(vectors, gram), -1)


def turned(gram: jax.Array, basis: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return ``basis``, sorted and turned towards the eigenvectors of ``gram`` by one QR iteration,
    and the order (``[..., columns]``) of its old columns."""
    order = jnp.argsort(-jnp.sum(basis * (gram @ basis), axis=-2), axis=-1)
    basis = jnp.take_along_axis(basis, order[..., None, :], axis=-1)
    return _one_by_one(lambda x: jnp.linalg.qr(x)[0], gram @ basis), order


def on_sphere(
    update: jax.Array, p: jax.Array, rate: jax.Array, floor: Floor, outputs_last: ArrayLike
) -> jax.Array:
    """Return a change of ``p``: ``rate`` x ``update`` is subtracted, the norm corrected, and the
    result decays. The norm is what the part of ``update`` along ``p`` alone would give."""
    along = _sum(update * p) / jnp.maximum(_sum(p * p), 1e-12)
    update -= jnp.where(along < 0, (1 - floor.outward) * along, 0) * p

    def by_output(x: jax.Array) -> jax.Array:
        columns, rows = (jnp.sum(x * x, axis=axis, keepdims=True) for axis in (-2, -1))
        return jnp.maximum(jnp.sqrt(jnp.where(outputs_last, columns, rows)), SMALLEST)

    update *= jnp.maximum(floor.ratio * by_output(p) / by_output(update), 1)
    before = jnp.maximum(frobenius(p), SMALLEST)
    radius = jnp.maximum(before - rate * _sum(update * p) / before, SMALLEST)
    moved = p - rate * update
    moved *= radius / jnp.maximum(frobenius(moved), SMALLEST)
    return moved * (1 - rate * floor.decay * (update * p > 0)) - p


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the cosine of the angle between matrices, ``[..., 1, 1]``."""
    return _sum(a * b) / jnp.maximum(frobenius(a) * frobenius(b), SMALLEST)


def agreement(raw: jax.Array, white: jax.Array, gradient: jax.Array, least: float) -> jax.Array:
    """Return 0 to 1, ``[..., 1, 1]``: how far the cosine of ``white`` and ``raw`` is from ``least``
    to 1, times a share. It is what whitening leaves of the cosine of ``raw`` and ``gradient``."""
    agrees = jnp.clip((cosine(white, raw) - least) / (1 - least), 0, 1)
    kept = cosine(white, gradient) / jnp.maximum(cosine(raw, gradient), SMALLEST)
    return agrees * jnp.clip(kept, 0, 1)


class UncorrectedState(NamedTuple):
    """Running means of gradients and of their squares, fp32."""

    mean: Any
    square: Any


def uncorrected_adam(
    learning_rate: optax.Schedule, beta1: float, beta2: ArrayLike, *, eps: float
) -> optax.GradientTransformation:
    """Adam whose means start at 0 and are not corrected for it; ``beta2`` is broadcast against each
    parameter (modded-nanogpt, track 3, entry 44)."""

    def init(params: Any) -> UncorrectedState:
        like = partial(jax.tree.map, lambda p: jnp.zeros_like(p, jnp.float32), params)
        return UncorrectedState(like(), like())

    def update(
        grads: Any, state: UncorrectedState, params: Any = None
    ) -> tuple[Any, UncorrectedState]:
        mean = jax.tree.map(lambda m, g: m + (1 - beta1) * (g - m), state.mean, grads)
        square = jax.tree.map(lambda v, g: v + (1 - beta2) * (g * g - v), state.square, grads)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mean, square)
        return updates, UncorrectedState(mean, square)

    return optax.chain(
        optax.GradientTransformation(init, update), optax.scale_by_learning_rate(learning_rate)
    )


class AheadState(NamedTuple):
    """Number of updates so far (int32 scalar) and the running mean of the parameters' movement,
    fp32."""

    step: jax.Array
    movement: Any


def look_ahead(distance: optax.Schedule, *, decay: float) -> optax.GradientTransformation:
    """Move parameters on along the mean of their last movements, before the next gradient.

    EMA-Nesterov (arXiv:2605.25395). M <- decay M + (1 - decay) x (this step's whole movement), and
    ``distance(n)`` x M is added before step n. Comes last in a chain: it adds to each update what
    comes before the next step, so parameters between two steps are those that look ahead.
    """

    def init(params: Any) -> AheadState:
        like = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
        return AheadState(jnp.zeros([], jnp.int32), like)

    def update(updates: Any, state: AheadState, params: Any = None) -> tuple[Any, AheadState]:
        now, then = (jnp.float32(distance(state.step + n)) for n in (0, 1))
        movement = jax.tree.map(
            lambda m, u: m + (1 - decay) * (u + now * m - m), state.movement, updates
        )
        updates = jax.tree.map(lambda u, m: u + then * m, updates, movement)
        return updates, AheadState(state.step + 1, movement)

    return optax.GradientTransformation(init, update)


def _one_by_one(function: Callable[[jax.Array], jax.Array], bank: jax.Array) -> jax.Array:
    """Apply a function of LAPACK to every matrix; on a CPU one after the other. There two of
    jaxlib's batched calls at once hold both threads of a pool of two, and wait for a third."""
    return jax.lax.platform_dependent(bank, cpu=partial(jax.lax.map, function), default=function)


def _each(function: Callable[..., Any], *trees: Any) -> list[Any]:
    """Apply a function of leaves that returns several; return a tree of each."""
    results = [function(*part) for part in zip(*map(jax.tree.leaves, trees), strict=True)]
    shape = jax.tree.structure(trees[0])
    return [jax.tree.unflatten(shape, part) for part in zip(*results, strict=True)]


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=(-2, -1), keepdims=True)
