"""What cuDNN computes of packed documents, in plain JAX: it finds each by its start in memory and
its length alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

from jspeed.kernels import attention_backends, packed_cudnn


def put_in_place(patch: pytest.MonkeyPatch) -> None:
    """Let jspeed call the fake where it would call cuDNN, in any float type, so that no rounding
    hides a difference; what cuDNN would leave unwritten is NaN."""
    patch.setattr(attention_backends, "_check", lambda *_, **__: None)
    patch.setattr(fused, "check_cudnn_version", lambda: 92800)
    patch.setattr(fused, "dot_product_attention", attend_lanes)
    patch.setattr(packed_cudnn, "forward", forward)
    patch.setattr(packed_cudnn, "backward", backward)


def attend_lanes(
    q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type, sliding_window_length
):
    """The same through JAX's own tables, of lanes."""
    assert mask_type == fused.MaskType.PADDING_CAUSAL
    sizes, _, starts, _ = fused._fix_seqlen_offsets(
        q_seqlen, kv_seqlen, q_offsets, kv_offsets, q, k
    )
    return packed_cudnn._attend(
        q, k, v, sizes, starts, scale, sliding_window_length, sliding_window_length
    )


def masks(lengths, starts, shape, window):
    """Return (what sees what, what lies in a document) of all tokens in memory, bool ``[N, N]`` and
    ``[N]``."""
    rows, row, heads, width = shape
    if not lengths.size:  # lanes without documents, which the callers above do not have
        lengths = jnp.repeat(jnp.array([row, 0]), rows).reshape(rows, 2)
        starts = row * heads * width * jnp.minimum(jnp.arange(3 * rows), rows).reshape(rows, 3)
    assert lengths.shape[0] == starts.shape[0] == rows
    assert starts.shape[1] == lengths.shape[1] + 1 > 2
    sizes_S1 = lengths.reshape(-1, 1)
    starts_S1 = starts.reshape(-1, 1)[: len(sizes_S1)] // (heads * width)
    n_N = jnp.arange(rows * row)[None]
    # A document longer than the graph's sequence would be read and written up to there.
    inside_SN = (n_N >= starts_S1) & (n_N < starts_S1 + jnp.minimum(sizes_S1, row))
    distance_NN = n_N.T - n_N
    seen_NN = (distance_NN >= 0) & (distance_NN < (window or rows * row))
    return seen_NN & (
        inside_SN.T.astype(jnp.int32) @ inside_SN.astype(jnp.int32) > 0
    ), inside_SN.any(axis=0)


def of_all(*arrays):
    """All tokens of the arrays in one row, in fp32 at least."""
    wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in arrays]
    return [x.reshape(-1, *x.shape[2:]) for x in wide]


def scores_of(q, k, scale):
    return scale * jnp.einsum("thk,shk->hts", *of_all(q, k), precision="highest")


def unwritten(x, written):
    return jnp.where(written.reshape(*x.shape[:2], 1, 1), x, jnp.nan)


def forward(q, k, v, lengths, starts, scale, window, training):
    """The statistic, of which only the size is cuDNN's, begins with log-sum-exp of all tokens."""
    seen, written = masks(lengths, starts, q.shape, window)
    scores = jnp.where(seen | ~written[:, None], scores_of(q, k, scale), -jnp.inf)
    weights, sums = jax.nn.softmax(scores, axis=-1), jax.nn.logsumexp(scores, axis=-1)
    out = (
        jnp.einsum("hts,shk->thk", weights, *of_all(v), precision="highest")
        .reshape(q.shape)
        .astype(q.dtype)
    )
    shape = lengths.size or len(q), q.shape[2], q.shape[1]
    statistic = jnp.zeros(np.prod(shape)).at[: sums.size].set(sums.ravel()).reshape(shape)
    out = unwritten(out, written)
    return (out, statistic) if training else (out,)


def backward(q, k, v, lengths, starts, statistic, out, g, scale, window):
    """Weights from the statistic, whatever the window was in the forward pass."""
    seen, written = masks(lengths, starts, q.shape, window)
    assert statistic.shape == (lengths.size or len(q), q.shape[2], q.shape[1])
    einsum = partial(jnp.einsum, precision="highest")
    flat_q, flat_k, flat_v, flat_out, flat_g = of_all(q, k, v, out, g)
    flat_out, flat_g = (jnp.where(written[:, None, None], x, 0) for x in (flat_out, flat_g))
    scores = scores_of(q, k, scale)
    sums = statistic.ravel()[: scores.shape[0] * scores.shape[1]].reshape(scores.shape[:2])
    weights = jnp.where(seen, jnp.exp(scores - sums[..., None]), 0)
    mean = jnp.sum(flat_out * flat_g, axis=-1).T[..., None]
    dscores = scale * weights * (einsum("thk,shk->hts", flat_g, flat_v) - mean)
    gradients = einsum("hts,shk->thk", dscores, flat_k), einsum("hts,thk->shk", dscores, flat_q)
    gradients = *gradients, einsum("hts,thk->shk", weights, flat_g)
    return tuple(unwritten(x.reshape(q.shape).astype(q.dtype), written) for x in gradients)
