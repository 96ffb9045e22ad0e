"""MUDD (dynamic dense connections, Xiao et al. 2025): per-token coefficients, and sums weighted by
them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jspeed.model.custom_kernels import Kernel
from jspeed.model.layers import inverse_rms, rms_norm

Term = tuple[jax.Array | float, jax.Array]
"""A coefficient, and the array that it weighs."""

Terms = Callable[[jax.Array, jax.Array], list[Term]]
"""What is added to a residual stream, by the normalised stream and its first channels."""


def coefficients(
    x_BTD: jax.Array,
    params: Mapping[str, jax.Array],
    name: str,
    number: int,
    scale: jax.Array | float,
) -> jax.Array:
    """Return ``scale`` x (``gelu(x up) down + bias``): ``[B, T, N]`` in the dtype of ``x_BTD``;
    gelu by erf.

    ``up [D, K]``, ``down [K, N]`` and ``bias [N]`` are entry ``number`` of the parameters
    ``name_up``, ``name_down`` and ``name_bias``. With ``down`` zero all tokens have the same,
    ``scale`` x ``bias`` (records 81 and 85).
    """
    up_DK, down_KN, bias_N = (params[f"{name}_{part}"][number] for part in ("up", "down", "bias"))
    hidden_BTK = jax.nn.gelu(x_BTD @ up_DK, approximate=False)
    return ((hidden_BTK @ down_KN + bias_N[None, None]) * scale).astype(x_BTD.dtype)


def grouped_coefficients(
    x_BTD: jax.Array,
    params: Mapping[str, jax.Array],
    name: str,
    number: int,
    scale: jax.Array | float,
) -> jax.Array:
    """:func:`coefficients` that differ between groups of channels: ``[B, T, N, G]``.

    The parameter ``name_groups [K, N, G]`` adds to ``down`` for each group; with zeros all groups
    have the same (record 92). Its N says how many of ``down``'s outputs are used.
    """
    up_DK, down_KN, bias_N = (params[f"{name}_{part}"][number] for part in ("up", "down", "bias"))
    groups_KNG = params[f"{name}_groups"]
    count = groups_KNG.shape[1]
    hidden_BTK = jax.nn.gelu(x_BTD @ up_DK, approximate=False)
    same_BTN = hidden_BTK @ down_KN[:, :count] + bias_N[None, None, :count]
    own_BTNG = jnp.einsum("btk,kng->btng", hidden_BTK, groups_KNG)
    return ((same_BTN[..., None] + own_BTNG) * scale).astype(x_BTD.dtype)


def padded(*rows: Sequence[float]) -> NDArray[np.float64]:
    """Return rows of one length, the shorter ones followed by zeros."""
    return np.array(list(zip_longest(*rows, fillvalue=0.0))).T


def slots(
    kinds: Mapping[str, tuple[Sequence[int], int, float]], sets: Sequence[range]
) -> tuple[list[dict[tuple[str, int], int]], NDArray[np.float64]]:
    """Assign coefficients to output slots: (``{(kind, layer): size}`` for each set, initial values
    ``[sets, slots]``).

    ``kinds`` gives the layers, the size and the initial value of each kind of coefficient; ``sets``
    the layers of each set of coefficients.
    """
    sizes = [
        {
            (kind, layer): size
            for kind, (layers, size, _) in kinds.items()
            for layer in layers
            if layer in one
        }
        for one in sets
    ]
    return sizes, padded(
        *([kinds[kind][2] for (kind, _), n in one.items() for _ in range(n)] for one in sizes)
    )


def named(c_BTN: jax.Array, sizes: Mapping[Any, int]) -> dict[Any, jax.Array]:
    """Split coefficients by name, in order: each ``[B, T, size]``, or ``[B, T]`` where the size is
    1."""
    parts = zip(sizes, jnp.split(c_BTN, list(accumulate(sizes.values())), axis=-1), strict=False)
    return {name: part if sizes[name] > 1 else part[..., 0] for name, part in parts}


def weighed(term: Term) -> jax.Array:
    """Return coefficient x array of a term: fp32 ``[B, T, D]``.

    A coefficient is a number, a scalar, ``[B, T]`` or ``[B, T, G]``, one for each of G groups of
    channels; the array is ``[B, T, D]``.
    """
    c, x_BTD = jnp.asarray(term[0], jnp.float32), term[1]
    if isinstance(term[0], jax.Array) and c.ndim == 0:
        c = _of_tokens(c, x_BTD.shape[:-1])
    if c.ndim == x_BTD.ndim:
        c = jnp.repeat(c, x_BTD.shape[-1] // c.shape[-1], axis=-1)
    else:
        c = c[..., *[None] * (c.ndim > 0)]
    return c * x_BTD.astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _of_tokens(c: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A scalar of all tokens as one of each. Its gradient is that of each token, which a pass has
    that sums over channels anyway, and then their sum; one sum over all is a pass of its own."""
    return jnp.broadcast_to(c, shape)


_of_tokens.defvjp(
    lambda c, shape: (_of_tokens(c, shape), None),
    lambda shape, _, g_BT: (jnp.sum(jax.lax.optimization_barrier(g_BT)),),
)


def blend(*terms: Term) -> jax.Array:
    """Return the sum of the terms as :func:`weighed` has them, in the dtype of the first array;
    sums are fp32."""
    return jnp.asarray(sum(map(weighed, terms)), terms[0][1].dtype)


def normed_twice(x_BTD: jax.Array, channels: int) -> tuple[jax.Array, jax.Array]:
    """Return ``rms_norm(x)``, and its first channels: normalised on their own, so that their
    gradient is no term of the sum that matmuls add up."""
    return rms_norm(x_BTD), rms_norm(x_BTD)[..., :channels]


def add_normed(
    terms: Terms,
    x_BTD: jax.Array,
    scale: jax.Array,
    kernel: Kernel | None = None,
    channels: int = 0,
) -> jax.Array:
    """Return ``scale`` x + ``terms(rms_norm(x), its first channels)`` as :func:`blend` does;
    ``scale`` is a scalar.

    ``channels`` says how many are first. With ``kernel`` ("gradient of a norm") the gradients of x
    meet in one kernel and are rounded once, not each; on Hopper, for whole blocks of tokens and
    channels. ``terms`` may use arrays around it.
    """
    if not kernel or not kernel.accepts(x_BTD.size // x_BTD.shape[-1], x_BTD.shape[-1]):
        return blend((scale, x_BTD), *terms(*normed_twice(x_BTD, channels)))
    first_BTC = x_BTD[..., :channels]
    added, around = jax.closure_convert(
        lambda *normed: [weighed(term) for term in terms(*normed)], x_BTD, first_BTC
    )
    return _add_normed(added, kernel, channels, x_BTD, scale, around)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _add_normed(added, kernel, channels, x_BTD, scale, around):
    return _add_normed_forward(added, kernel, channels, x_BTD, scale, around)[0]


def _add_normed_forward(added, kernel, channels, x_BTD, scale, around):
    normed_BTD = rms_norm(x_BTD)
    found, back = jax.vjp(added, normed_BTD, normed_BTD[..., :channels], *around)
    sum_BTD = blend((scale, x_BTD), *((1, y_BTD) for y_BTD in found))
    return sum_BTD, (x_BTD, inverse_rms(x_BTD), scale, [y_BTD[:0] for y_BTD in found], back)


def _add_normed_backward(added, kernel, channels, saved, g_BTD):
    x_BTD, inverse_BT1, scale, found, back = saved
    of_normed_BTD, of_first_BTC, *of_around = back([g_BTD.astype(jnp.float32) for _ in found])
    if channels:  # in place
        of_first_BTC += of_normed_BTD[..., :channels]
        of_normed_BTD = jax.lax.dynamic_update_slice(of_normed_BTD, of_first_BTC, (0, 0, 0))
    out_ND, normed_ND, x_ND = (
        a_BTD.reshape(-1, a_BTD.shape[-1]) for a_BTD in (g_BTD, of_normed_BTD, x_BTD)
    )
    dx_ND, dscale = kernel.run(out_ND, normed_ND, x_ND, inverse_BT1.reshape(-1), scale)
    return dx_ND.reshape(x_BTD.shape), dscale.astype(scale.dtype), of_around


_add_normed.defvjp(_add_normed_forward, _add_normed_backward)
