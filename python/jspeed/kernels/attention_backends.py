"""The fused attention backends (cuDNN, our own, splash): wrappers, each with its document format,
and what each is for.

All take what :func:`jspeed.model.attention.attention` takes, bf16 or fp16 ``[B, T, H, K]``, and
``offsets_BO`` or ``ids_BT`` as in ``Documents``. In lanes that overflow ``offsets_BO``, queries are
NaN. Libraries are imported when called: none is needed to run elsewhere.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jspeed.base.jax_versions import cudnn_attention, register_gpus_with_pallas
from jspeed.kernels import packed_cudnn
from jspeed.model.custom_kernels import Attending, Backend, Chip, Refused

TRITON_WIDTHS = (64, 128)  # of heads, that fused_attention.py has blocks for
FUSED = (8, 0)  # Ampere, the first with cuDNN's causal attention and fused_attention.py's
HOPPER = (9, 0)
BLACKWELL_GEFORCE = (12, 0)  # whose cuDNN within documents is not known (RTX 50)


def backends() -> dict[str, Backend]:
    """Return all of them, the fastest first."""

    def on_gpu(chip: Chip) -> bool:
        return chip.capability is not None

    def on_tpu(chip: Chip, attending: Attending | None = None) -> bool:
        return chip.platform == "tpu"

    def fused(chip: Chip) -> bool:
        return chip.capability is not None and chip.capability >= FUSED

    def has_cudnn(chip: Chip, attending: Attending) -> bool:
        known = chip.capability and HOPPER <= chip.capability < BLACKWELL_GEFORCE
        return fused(chip) and (not attending.packed or bool(known))

    def has_cudnn_lanes(chip: Chip, attending: Attending) -> bool:
        return attending.bounded and has_cudnn(chip, attending)

    def has_triton(chip: Chip, attending: Attending) -> bool:
        return fused(chip) and (attending.width is None or attending.width in TRITON_WIDTHS)

    lanes = frozenset(("gradient_window", "doc_tagged"))
    return {
        "cudnn": Backend(cudnn, "offsets_BO", on_gpu, has_cudnn, lanes | {"longest"}),
        "cudnn_lanes": Backend(cudnn_lanes, "offsets_BO", on_gpu, has_cudnn_lanes),
        "triton": Backend(triton, "offsets_BO", on_gpu, has_triton, file="fused_attention"),
        "splash": Backend(splash, "ids_BT", on_tpu, on_tpu, file="splash_attention"),
    }


def cudnn(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    *,
    scale: float,
    offsets_BO: jax.Array | None,
    window: int | None,
    longest: int | None = None,
    gradient_window: int | None = None,
) -> jax.Array:
    """Attend with cuDNN's fused kernel: causal, or packed (Hopper or newer) where ``offsets_BO``
    are given.

    Packed lanes are viewed as rows of about ``longest`` tokens, which no document exceeds
    (:mod:`jspeed.kernels.packed_cudnn`). Without it, or where the lanes do not divide, this
    is the layer under ``jax.nn.dot_product_attention``, which has no offsets yet
    (https://github.com/jax-ml/jax/pull/29731). Each slot for a document then costs as much memory
    as a lane: of the softmax statistic, fp32 ``[B * max_docs, H, T]``, 100 MB a layer for 8 lanes
    of 8,192 tokens, 64 documents, 6 heads; and in the backward pass of workspace, fp32 ``[B *
    max_docs, H, T, K]``. Versions of cuDNN that are known to be wrong:
    :mod:`jspeed.kernels.preflight.known_faults`.

    Raises BadInput for other types, a head width that is no multiple of 8 or above 128 (Hopper and
    newer: 256), arrays of 2**31 elements, no CUDA plugin, and packed lanes on GPUs before Hopper.
    """
    _check("cudnn", q_BTHK, k_BTHK, v_BTHK)
    if offsets_BO is not None and q_BTHK.size >= 2**31:
        raise Refused(
            f"attention backend 'cudnn' counts elements in int32, found {q_BTHK.size:,} in a batch"
            f" of {q_BTHK.shape[0]} lanes; take fewer lanes at a time"
        )
    fused = cudnn_attention()
    try:
        fused.check_cudnn_version()
    except RuntimeError:
        raise Refused(
            "attention backend 'cudnn' finds no cuDNN; install jspeed[cuda12] or choose 'xla'"
        ) from None
    mask, lengths_BM, starts_BO = fused.MaskType.CAUSAL, None, None
    if offsets_BO is not None:
        mask = fused.MaskType.PADDING_CAUSAL
        lengths_BM, starts_BO = cudnn_slots(offsets_BO, q_BTHK.shape[1])
    try:
        if lengths_BM is not None and starts_BO is not None and longest is not None:
            lanes, length = q_BTHK.shape[:2]
            if (row := packed_cudnn.row_length(lanes * length, longest)) < length:
                windows = window, gradient_window
                return packed_cudnn.attend(
                    q_BTHK, k_BTHK, v_BTHK, lengths_BM, starts_BO, row, scale, *windows
                )
        if gradient_window is not None and offsets_BO is None:
            return packed_cudnn.attend_causally(
                q_BTHK, k_BTHK, v_BTHK, scale, window, gradient_window
            )
        return fused.dot_product_attention(
            q_BTHK,
            k_BTHK,
            v_BTHK,
            q_seqlen=lengths_BM,
            kv_seqlen=lengths_BM,
            q_offsets=starts_BO,
            kv_offsets=starts_BO,
            scale=scale,
            mask_type=mask,
            sliding_window_length=window,
        )
    except NotImplementedError as error:
        raise Refused(
            f"attention backend 'cudnn' cannot do this here ({error}); choose another backend"
        ) from error


def cudnn_lanes(q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, **rest: Any) -> jax.Array:
    """:func:`cudnn` that is not told the longest document, for a cuDNN that is wrong about rows."""
    return cudnn(q_BTHK, k_BTHK, v_BTHK, **rest)


def cudnn_slots(offsets_BO: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Return (lengths ``[B, M]``, starts ``[B, M + 1]``) of the documents, int32, -1 in unused
    slots.

    JAX compacts the entries that are not -1 over all lanes, starts and lengths separately, and
    pairs them in order: so a lane must have as many starts as lengths, and no end after its last
    start. M is ``max_docs``, but at least 2, since JAX takes one slot to mean that nothing is
    packed.
    """
    starts_BM, ends_BM = _slots(offsets_BO, length)
    used = ends_BM > starts_BM
    lengths_BM, starts_BM = (jnp.where(used, x, -1) for x in (ends_BM - starts_BM, starts_BM))
    slots = max(starts_BM.shape[1], 2)

    def padded(x_BM: jax.Array, size: int) -> jax.Array:
        return jnp.pad(x_BM, ((0, 0), (0, size - x_BM.shape[1])), constant_values=-1)

    return padded(lengths_BM, slots), padded(starts_BM, slots + 1)


def triton(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    *,
    scale: float,
    offsets_BO: jax.Array | None,
    window: int | None,
    interpret: bool = False,
) -> jax.Array:
    """Attend with our custom kernels (:mod:`jspeed.kernels.fused_attention`).

    They are for GPUs that no maintained library supports with documents
    (docs/reference/device_choices.md).
    Inside ``jax.shard_map`` this needs ``check_vma=False``. ``interpret=True`` runs JAX's
    interpreter of kernels, for tests. Raises BadInput for types other than bf16, head widths other
    than 64 and 128, and a JAX without Pallas on Triton.
    """
    _check("triton", q_BTHK, k_BTHK, v_BTHK, dtypes=(jnp.bfloat16,))
    try:
        from jspeed.kernels import fused_attention
    except ImportError as error:
        raise Refused(
            f"attention backend 'triton' needs Pallas on Triton, which this JAX lacks ({error})"
        ) from error
    if q_BTHK.shape[-1] not in TRITON_WIDTHS:
        widths = " and ".join(map(str, TRITON_WIDTHS))
        raise Refused(
            f"attention backend 'triton' takes head widths {widths}, found {q_BTHK.shape[-1]}"
        )
    register_gpus_with_pallas()
    lanes, length = q_BTHK.shape[:2]
    bounds = jnp.zeros((lanes, length), jnp.int32), jnp.full((lanes, length), length, jnp.int32)
    if offsets_BO is not None:
        bounds = token_bounds(offsets_BO, length)
    ranges = fused_attention.ranges(*bounds, window)
    how = offsets_BO is not None, window
    return fused_attention.attend(q_BTHK, k_BTHK, v_BTHK, *ranges, scale, *how, interpret)


def token_bounds(offsets_BO: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Return (start, end) of the document that each token lies in: int32 ``[B, T]``, the end
    exclusive."""
    starts_BM, ends_BM = _slots(offsets_BO, length)
    t_T = jnp.arange(length, dtype=jnp.int32)
    # as in find_documents
    search = partial(jnp.searchsorted, v=t_T, side="right", method="scan_unrolled")
    slots_BT = jax.vmap(search)(starts_BM) - 1
    return jnp.take_along_axis(starts_BM, slots_BT, axis=1), jnp.take_along_axis(
        ends_BM, slots_BT, axis=1
    )


def splash(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    *,
    scale: float,
    ids_BT: jax.Array | None,
    window: int | None,
    interpret: bool = False,
) -> jax.Array:
    """Attend with JAX's custom kernels for TPUs (:mod:`jspeed.kernels.splash_attention`).

    Documents are passed as segment ids. There is no limit on their number: ``max_docs`` is not
    needed and no lane becomes NaN. Inside ``jax.shard_map`` this needs ``check_vma=False``.
    ``interpret=True`` runs JAX's interpreter of kernels, for tests. Raises BadInput for types other
    than bf16, a head width that is no multiple of 8 or above 256, and a JAX without these kernels.
    """
    _check("splash", q_BTHK, k_BTHK, v_BTHK, dtypes=(jnp.bfloat16,))
    try:
        from jspeed.kernels import splash_attention
    except ImportError as error:
        raise Refused(
            f"attention backend 'splash' needs splash attention, which this JAX lacks ({error})"
        ) from error
    return splash_attention.attend(q_BTHK, k_BTHK, v_BTHK, ids_BT, scale, window, interpret)


def _slots(offsets_BO: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """Return (starts, ends) ``[B, M]``. The last slot ends with the lane, so that every token has a
    slot.

    Kernels do not write outputs of tokens outside of every slot; in a lane that overflows these
    would be uninitialised memory, where NaN is promised.
    """
    end_B1 = jnp.full_like(offsets_BO[:, :1], length)
    return offsets_BO[:, :-1], jnp.concatenate([offsets_BO[:, 1:-1], end_B1], axis=1)


def _check(
    backend: str, *qkv: jax.Array, dtypes: tuple[Any, ...] = (jnp.bfloat16, jnp.float16)
) -> None:
    for name, x in zip("qkv", qkv, strict=True):
        if x.dtype not in dtypes:
            known = " or ".join(jnp.dtype(one).name for one in dtypes)
            raise Refused(f"attention backend '{backend}' takes {known}, found {name} in {x.dtype}")
        if x.shape != qkv[0].shape:
            raise Refused(
                f"attention backend '{backend}' takes q, k, v of one shape, found"
                f" {[x.shape for x in qkv]}"
            )
    width = qkv[0].shape[-1]
    if width % 8 or width > 256:
        raise Refused(
            f"attention backend '{backend}' takes head widths 8, 16, ... 256, found {width}"
        )
