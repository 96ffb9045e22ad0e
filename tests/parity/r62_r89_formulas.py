"""What the GPU kernels of records 62 and 89 compute, as plain differentiable PyTorch."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from . import r62_r89_fp8
from .cpu_stand_ins import flash_attn_varlen_func


def kernels(found: list[np.ndarray], past_end: bool, fp8: list[Any] | None) -> dict[str, Any]:
    """Return the modules that the scripts import, with formulas for kernels.

    The loss of each token's own target goes into ``found``, an array for each call. ``past_end``:
    whether the gradient of several targets also has those past the end of a lane, as record 89's
    kernel has it and record 62's has not. ``fp8``: those of record 89 cast to 8 bits and leave
    their operands here.
    """

    def cross_entropy(
        logits: Any, targets: Any, weights: Any, prefixes: Any = None, prefix_weight: Any = 0.0
    ) -> Any:
        z = 23.0 * torch.sigmoid((logits + 5.0) / 7.5)
        lse, rows = torch.logsumexp(z, dim=-1), torch.arange(len(z))
        losses = torch.zeros(len(z))
        for ahead, weight in enumerate(weights):
            exists = rows + ahead < len(z)
            target = targets[torch.clamp(rows + ahead, max=len(z) - 1)]
            loss = lse - z[rows, target]
            if ahead == 0:
                found.append(loss.detach().numpy().copy())
            losses = losses + weight * torch.where(exists, loss, 0.0)
            if past_end:
                losses = losses + weight * torch.where(exists, 0.0, lse - lse.detach())
        if prefixes is not None:
            loss = lse - z[rows, torch.clamp(prefixes, min=0)]
            losses = losses + prefix_weight * torch.where(prefixes >= 0, loss, 0.0)
        return losses

    def fused_head(
        x: Any,
        targets: Any,
        weights: Any,
        prefixes: Any,
        prefix_weight: Any,
        head: Any,
        *_: Any,
        **__: Any,
    ) -> Any:
        return cross_entropy(x @ head, targets, weights, prefixes, prefix_weight)

    def either_entropy(*args: Any) -> Any:
        return cross_entropy(*args) if len(args) == 3 else fused_head(*args)

    triton = SimpleNamespace(
        XXT=lambda x, out: torch.matmul(x, x.mT, out=out),
        XTX=lambda x, out: torch.matmul(x.mT, x, out=out),
        ba_plus_cAA=lambda a, alpha, beta, out: out.copy_(beta * a + alpha * (a @ a)),
        FusedLinearReLUSquareFunction=SimpleNamespace(apply=relu_squared_mlp),
        FusedSoftcappedCrossEntropy=SimpleNamespace(apply=either_entropy),
        transpose_copy=lambda source, to: to.copy_(source.T),
        transpose_add=lambda source, to: to.add_(source.T),
        # Only FP8 reads what these prepare.
        quantize_transpose_mlp_down_weights=lambda *_, **__: None,
        reduce_mlp_activation_scales=lambda *_, **__: None,
    )
    if fp8 is not None:
        vars(triton).update(r62_r89_fp8.modules(cross_entropy, fp8))
    flash = SimpleNamespace(flash_attn_interface=SimpleNamespace(flash_attn_varlen_func=attention))
    return {
        "kernels": SimpleNamespace(get_kernel=lambda *_, **__: flash),
        "triton_kernels": triton,
        "dc_triton_kernels": SimpleNamespace(
            dc_attention_postonly_nodd_correction_add_base_triton=composed
        ),
    }


def relu_squared_mlp(x: Any, up: Any, down: Any) -> Any:
    """``relu(x up^T)^2 down``."""
    return torch.relu(x @ up.T).square() @ down


def seen(length: int, starts: Any, window: int) -> Any:
    """Which keys a query sees: bool ``[T, T]``, its document's, itself and ``window`` before it."""
    t = torch.arange(length)
    document = torch.searchsorted(starts.long().unique(), t, right=True)
    back = t[:, None] - t[None]
    return (back >= 0) & (back <= window) & (document[:, None] == document[None])


def attention(*args: Any, **kwargs: Any) -> Any:
    """Softmax attention ``[T, H, K]`` within documents."""
    return flash_attn_varlen_func(*args, **kwargs).contiguous()


def composed(
    base: Any,
    q: Any,
    k: Any,
    v: Any,
    weights: Any,
    _: Any,
    *,
    scaling: float,
    window: int,
    seq_lens: Any,
) -> Any:
    """Add to ``base`` what probabilities that are mixed over heads make of values, ``window``
    tokens with the query."""
    take, give = (w[0] for w in weights)
    scores = torch.einsum("thk,shk->hts", q[0], k[0]) * scaling
    p = torch.softmax(
        scores.masked_fill(~seen(q.shape[1], seq_lens, window - 1), -torch.inf), dim=-1
    )
    mixed = torch.einsum("th,hts->ts", take, p)
    return base + give[..., None] * torch.einsum("ts,shk->thk", mixed, v[0]).view(base.shape)
