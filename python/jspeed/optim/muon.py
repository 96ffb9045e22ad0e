"""Muon: momentum, then the nearest orthogonal matrix, on banks of matrices of one shape."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jspeed.recipe import SMALL


class Polynomial(NamedTuple):
    """Iterations that push singular values towards 1, and what a matrix is divided by before them:
    ``safety`` x its norm + ``epsilon``."""

    maps: tuple[tuple[float, float, float], ...]
    """(a, b, c) of each iteration: X <- a X + (b A + c A A) X with A = X X^T."""
    safety: float = 1.0
    epsilon: float = 1e-7


# Keller Jordan's quintic (kellerjordan.github.io/posts/muon): five iterations take singular values
# from 0.0032 to 1 into 0.68 to 1.21.
NEWTON_SCHULZ_5 = Polynomial(((3.4445, -4.7750, 2.0315),) * 5)
# Twelve iterations of the Newton-Schulz polynomial that converges to 1 (modded-nanogpt, track 3
# baseline).
NEWTON_SCHULZ_12 = Polynomial(((2.0, -1.5, 0.5),) * 12)
# Polar Express (Amsel et al. 2025) for five iterations, safety factor 2e-2, cushion 2.
POLAR_EXPRESS = Polynomial(
    safety=1.02,
    epsilon=1e-6,
    maps=(
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
)


# Six maps that take singular values from 0.003 to 1 / 1.05 into 0.995 to 1.0005 (modded-nanogpt,
# record 92).
ANVIL_MAPS = Polynomial(
    safety=1.05,
    epsilon=1e-6,
    maps=(
        (3.923798038567, -6.095026865488, 3.905234618423),
        (3.278126713798, -3.328923386476, 0.989127286973),
        (3.505298394150, -5.137358782410, 1.968325560615),
        (2.815058591845, -3.685181239622, 1.417196497642),
        (2.245503932403, -2.443826979899, 0.963091710461),
        (2.256537145403, -2.166840097229, 0.929501253245),
    ),
)


class MuonState(NamedTuple):
    """Number of updates so far (int32 scalar) and the momentum buffers (fp32, shaped like the
    parameters)."""

    step: jax.Array
    momentum: Any


def on_whole_matrices(function: Callable[[jax.Array], jax.Array], bank: jax.Array) -> jax.Array:
    """Return ``function(bank)``, computed on whole matrices of ``bank`` ``[n, in, out]``, however
    it is sharded.

    The bank is resharded between matrices, over as many mesh axes as divide n, and back. Small
    banks are not, nor any where no mesh is set: ``run/compute/step.py`` sets it when a layout
    shards matrices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    names = tuple(name for name, size in mesh.shape.items() if size > 1)
    while names and bank.shape[0] % math.prod(mesh.shape[name] for name in names):
        names = names[:-1]
    if bank.ndim < 3 or bank.size < SMALL or not names:
        return function(bank)
    # One axis at a time: for two at once XLA gathers the whole bank.
    hops = [PartitionSpec(names[: n + 1], None, *names[n + 1 :]) for n in range(len(names))]
    for hop in hops:
        bank = jax.lax.with_sharding_constraint(bank, hop)
    bank = function(bank)
    for hop in reversed(hops):
        bank = jax.lax.with_sharding_constraint(bank, hop)
    return bank


def frobenius(x: jax.Array) -> jax.Array:
    """Return the norm of every matrix, fp32 ``[..., 1, 1]``."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)


def orthogonalise(
    x: jax.Array,
    *,
    polynomial: Polynomial = NEWTON_SCHULZ_5,
    norm: Callable[[jax.Array], jax.Array] = frobenius,
    dtype: Any = jnp.bfloat16,
) -> jax.Array:
    """Push the singular values of every matrix in ``x`` (``[..., rows, cols]``) towards 1;
    ``dtype`` out.

    They are first divided by ``norm(x)``, at least the largest. The iterations of ``polynomial``
    are on the wide orientation, so that the Gram matrix is the small one. A zero matrix stays zero.
    A device needs whole matrices: :func:`on_whole_matrices` reshards banks whose matrices are
    sharded.
    """
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = (x / (polynomial.safety * norm(x) + polynomial.epsilon)).astype(dtype)
    for a, b, c in polynomial.maps:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def scale_by_muon(
    momentum: Callable[[jax.Array], Any],
    *,
    polynomial: Polynomial = NEWTON_SCHULZ_5,
    scale: ArrayLike | None = None,
    dtype: Any = jnp.bfloat16,
) -> optax.GradientTransformation:
    """Replace each gradient bank (``[..., in, out]``) by its orthogonalised Nesterov momentum.

    ``momentum`` maps the number of past updates to beta: M <- beta M + (1 - beta) G, and beta M +
    (1 - beta) G is orthogonalised in ``dtype``. The update is scaled by sqrt(max(1, out / in)) so
    that its effect on activations does not depend on the shape (modded-nanogpt, records 3-40). For
    a bank that stores some matrices transposed ``scale``, broadcast against the bank, replaces that
    factor.
    """

    def init(params: Any) -> MuonState:
        return MuonState(
            jnp.zeros([], jnp.int32), jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
        )

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        beta = jnp.asarray(momentum(state.step), jnp.float32)
        buffers = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.momentum, grads)

        def direction(m: jax.Array, g: jax.Array) -> jax.Array:
            rows, cols = g.shape[-2:]
            whole = partial(orthogonalise, polynomial=polynomial, dtype=dtype)
            update = on_whole_matrices(whole, beta * m + (1 - beta) * g)
            return update.astype(jnp.float32) * (
                max(1.0, cols / rows) ** 0.5 if scale is None else scale
            )

        return jax.tree.map(direction, buffers, grads), MuonState(state.step + 1, buffers)

    return optax.GradientTransformation(init, update)


def muon(
    learning_rate: optax.ScalarOrSchedule,
    momentum: Callable[[jax.Array], Any],
    *,
    polynomial: Polynomial = NEWTON_SCHULZ_5,
    scale: ArrayLike | None = None,
    weight_decay: float = 0.0,
    dtype: Any = jnp.bfloat16,
) -> optax.GradientTransformation:
    """Muon with a learning-rate schedule, a momentum schedule and decoupled weight decay (rate x
    decay a step)."""
    return optax.chain(
        scale_by_muon(momentum, polynomial=polynomial, scale=scale, dtype=dtype),
        optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity(),
        optax.scale_by_learning_rate(learning_rate),
    )
