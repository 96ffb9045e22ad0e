"""Coefficients that each token computes for itself, and sums weighted with them (Xiao et al. 2025, MUDD)."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp


def coefficients(
    x_BTD: jax.Array, up_DK: jax.Array, down_KN: jax.Array, bias_N: jax.Array, scale: jax.Array | float
) -> jax.Array:
    """Return ``scale`` x (``gelu(x up) down + bias``): ``[B, T, N]`` in the dtype of ``x_BTD``; gelu by erf.

    With ``down`` zero they are the same for all tokens, ``scale`` x ``bias`` (modded-nanogpt, records 81 and 85).
    """
    hidden_BTK = jax.nn.gelu(x_BTD @ up_DK, approximate=False)
    return ((hidden_BTK @ down_KN + bias_N[None, None]) * scale).astype(x_BTD.dtype)


def named(c_BTN: jax.Array, sizes: Mapping[Any, int]) -> dict[Any, jax.Array]:
    """Cut coefficients into ``[B, T, size]`` for each name in order; ``[B, T]`` where the size is 1."""
    parts = zip(sizes, jnp.split(c_BTN, list(accumulate(sizes.values())), axis=-1), strict=False)
    return {name: part if sizes[name] > 1 else part[..., 0] for name, part in parts}


def blend(*terms: tuple[jax.Array | float, jax.Array]) -> jax.Array:
    """Return the sum of coefficient x array over the terms, in the dtype of the first array.

    A coefficient is a number, a scalar or ``[B, T]``, the arrays are ``[B, T, D]``; sums are fp32.
    """
    total = sum(
        jnp.asarray(c, jnp.float32)[..., *[None] * (jnp.ndim(c) > 0)] * x_BTD.astype(jnp.float32) for c, x_BTD in terms
    )
    return jnp.asarray(total, terms[0][1].dtype)
