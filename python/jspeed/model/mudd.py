"""Coefficients that each token computes for itself, and sums weighted with them (Xiao et al. 2025, MUDD)."""

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


def blend(*terms: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return the sum of coefficient x array over the terms, in the dtype of the first array.

    A coefficient is a scalar or ``[B, T]``, the arrays are ``[B, T, D]``; sums are fp32.
    """
    total = sum((c[..., None] if c.ndim else c).astype(jnp.float32) * x_BTD.astype(jnp.float32) for c, x_BTD in terms)
    return jnp.asarray(total, terms[0][1].dtype)
