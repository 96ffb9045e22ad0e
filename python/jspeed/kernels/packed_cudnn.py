"""cuDNN's attention of lanes whose longest document is known, in a graph that is as long as that
and not as the lane.

JAX and XLA give cuDNN a batch of all slots for documents, each as long as a lane. Of that size are
the workspace of the backward pass, the softmax statistic and the thread blocks, of which nearly all
find nothing to do: for record 29 29.2 GB and 442,000 blocks a layer. But cuDNN finds a document by
where it starts in memory, whatever the rows of the arrays are. So lanes can be viewed as more and
shorter rows: 1.2 GB and 18,000 blocks.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jspeed.base.jax_versions import cudnn_attention, no_score_mod

ALIGNED = 8  # a row of the softmax statistic, fp32, is then a multiple of 32 bytes


def row_length(tokens: int, longest: int) -> int:
    """Length of the shortest rows, aligned and of at least ``longest`` tokens, into which
    ``tokens`` can be divided."""
    rows = range(tokens // longest, 1, -1)
    return next((tokens // n for n in rows if tokens % (n * ALIGNED) == 0), tokens)


def tables(
    lengths_BM: jax.Array, starts_BO: jax.Array, length: int, row: int
) -> tuple[jax.Array, jax.Array]:
    """Return what cuDNN is told of the documents of all lanes: lengths ``[R, M]`` and starts ``[R,
    M + 1]``, int32.

    Both count tokens and are read in order, whatever their shape: the documents, then slots of no
    length that start where the last lane ends. ``lengths_BM`` and ``starts_BO`` are those of
    :func:`jspeed.kernels.attention_backends.cudnn_slots`, lanes are of ``length`` tokens,
    rows of ``row``. A longer document, which only a lane of NaN has, ends early: kernels read and
    write no further.
    """
    lanes = lengths_BM.shape[0]
    end = lanes * length
    used = lengths_BM >= 0
    before_B1 = length * jnp.arange(lanes, dtype=jnp.int32)[:, None]
    starts = jnp.where(used, starts_BO[:, :-1] + before_B1, end).ravel()
    lengths = jnp.where(used, jnp.minimum(lengths_BM, row), 0).ravel()
    if lanes > 1:
        starts, lengths = jax.lax.sort((starts, lengths), num_keys=1)
    rows = end // row
    slots = max(2, -(-starts.size // rows))  # JAX takes one slot to mean that nothing is packed

    def shaped(x: jax.Array, slots: int, fill: int) -> jax.Array:
        return jnp.pad(x, (0, rows * slots - x.size), constant_values=fill).reshape(rows, slots)

    return shaped(lengths, slots, 0), shaped(starts, slots + 1, end)


def attend(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    lengths_BM: jax.Array,
    starts_BO: jax.Array,
    row: int,
    scale: float,
    window: int | None,
    gradient_window: int | None = None,
) -> jax.Array:
    """Attend causally within documents of at most ``row`` tokens, which must divide the tokens of
    all lanes.

    ``gradient_window``: that of the backward pass, where it is shorter.

    Raises NotImplementedError for what JAX knows that cuDNN does not support.
    """
    lanes, length, heads, width = q_BTHK.shape
    lengths_RM, starts_RO = tables(lengths_BM, starts_BO, length, row)
    qkv = [x.reshape(lanes * length // row, row, heads, width) for x in (q_BTHK, k_BTHK, v_BTHK)]
    # Starts as cuDNN counts them, in elements: the caller has checked that int32 holds them.
    starts_RO *= heads * width
    return _attend(*qkv, lengths_RM, starts_RO, scale, window, gradient_window or window).reshape(
        q_BTHK.shape
    )


def attend_causally(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    scale: float,
    window: int | None,
    gradient_window: int,
) -> jax.Array:
    """Attend causally within whole lanes, with another window in the backward pass. Raises as
    :func:`attend` does."""
    none = jnp.zeros(0, q_BTHK.dtype)
    return _attend(q_BTHK, k_BTHK, v_BTHK, none, none, scale, window, gradient_window)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attend(q, k, v, lengths, starts, scale, window, gradient_window):
    return forward(q, k, v, lengths, starts, scale, window, training=False)[0]


def _attend_forward(q, k, v, lengths, starts, scale, window, gradient_window):
    out, statistic = forward(q, k, v, lengths, starts, scale, window, training=True)
    return out, (q, k, v, lengths, starts, statistic, out)


def _attend_backward(scale, window, gradient_window, kept, g):
    return *backward(*kept, g, scale, gradient_window), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def forward(q, k, v, lengths, starts, scale, window, training) -> Any:
    """Return the output of documents of ``lengths`` from elements ``starts`` on, or of lanes where
    these are empty; in training the statistic too."""
    fused, arguments, settings = _call(q, k, v, lengths, starts, scale, window)
    version = fused.check_cudnn_version()
    fused.check_is_flash_attention(
        q, k, v, settings["layout"], version, False, training, lengths.size > 0
    )
    return fused._dot_product_attention_fwd_p.bind(*arguments, **settings, is_training=training)


def backward(q, k, v, lengths, starts, statistic, out, g, scale, window) -> Any:
    """Return the gradients of ``q``, ``k`` and ``v``."""
    fused, arguments, settings = _call(q, k, v, lengths, starts, scale, window)
    return fused._dot_product_attention_bwd_p.bind(*arguments, statistic, out, g, **settings)


def _call(
    q, k, v, lengths, starts, scale, window
) -> tuple[Any, tuple[jax.Array, ...], dict[str, Any]]:
    """Return JAX's module, and what its inner primitives take; functions around them compute tables
    of lanes."""
    fused = cudnn_attention()
    settings = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias
        "mask_type": fused.MaskType.PADDING_CAUSAL if lengths.size else fused.MaskType.CAUSAL,
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
        **no_score_mod(),
    }
    none = jnp.zeros(0, q.dtype)
    return fused, (q, k, v, none, lengths, lengths, starts, starts, none, none), settings
