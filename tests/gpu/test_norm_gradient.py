"""The gradient of a norm beside a residual stream on a real GPU, against plain JAX."""

import jax
import jax.numpy as jnp

from jspeed.kernels.norm_gradient import norm_gradient
from jspeed.model.layers import inverse_rms, rms_norm

from ..model import dense


def test_one_pass():
    out, normed, x = jax.random.normal(jax.random.key(0), (3, 4096, 768), jnp.bfloat16)
    scale = jnp.float32(1.25)
    found = norm_gradient(out, normed, x, inverse_rms(x)[:, 0], scale)
    wide = [a.astype(jnp.float32) for a in (out, normed, x)]
    back = jax.vjp(lambda x, scale: (scale * x, rms_norm(x)), wide[2], scale)[1]
    for one, other in zip(found, back((wide[0], wide[1])), strict=True):
        assert dense.distance(one, other) < 0.005
