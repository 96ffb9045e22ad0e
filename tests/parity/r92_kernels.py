"""What record 92's GPU kernels compute, as plain differentiable PyTorch, beside the Python of its
kernel modules."""

import ast
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from . import r62_r89_formulas as formulas
from .cpu_stand_ins import Anything, Over

# Of each module the statements that are executed as they are; everything else launches kernels.
AS_THEY_ARE = {
    "bigram_kernels.py": (
        "BGX_TRI_CH2 H_B1 HIST_ROWS _want_unique bgpull_want_build bgcache_land bgfuse_send_cast "
        "bgadam_hist_alloc bgadam_hist_push"
    ),
    "fuse_tiny_kernels.py": "FT_BLOCK _SC_COLS afe_flatten afe_run_fused",
    "triton_kernels.py": "_SNS_BUFS",
}


def modules(texts: dict[str, str], found: list[np.ndarray], size: Any) -> dict[str, Any]:
    """Return the modules that the script imports: what :data:`AS_THEY_ARE` names of their
    ``texts``, and formulas.

    The loss of each token's own target goes into ``found``, an array for each call of a loss in
    training.
    """
    made = formulas.kernels(found, past_end=False, fp8=None)
    triton = made["triton_kernels"]
    entropy = triton.FusedSoftcappedCrossEntropy.apply
    vars(triton).update(_executed("triton_kernels.py", texts), _SNS_IDX={}, _PTP_W_RUNTIME=0.0)
    # The script looks for these in the kernel's CUDA.
    triton.CE_KERNEL_SOURCE = "cuda_fp16.h"

    def all_columns(x: Any, targets: Any, weights: Any, head: Any, *rest: Any) -> Any:
        prefixes = rest[5]
        return entropy(x, targets, weights, prefixes, triton._PTP_W_RUNTIME, head)

    def some_columns(x: Any, targets: Any, weights: Any, head: Any, *rest: Any) -> Any:
        chosen, places, prefixes = (triton._SNS_IDX[name] for name in ("C", "TPOS", "PPOS"))
        of_tokens = places[: len(x)], weights, prefixes[: len(x)], triton._PTP_W_RUNTIME
        return entropy(x, *of_tokens, head[:, chosen[: rest[-1]]])

    def sns_init(_: Any, counts: Any, vocab: int, rows: int, model_dim: int) -> None:
        for name, kind in triton._SNS_BUFS:
            triton._SNS_IDX[name] = torch.full(
                ({"P": max(counts), "T": rows}[kind],), -1, dtype=torch.int64
            )

    triton.FusedSoftcappedCrossEntropy = SimpleNamespace(apply=all_columns)
    triton.SampledSoftcappedCrossEntropy = SimpleNamespace(apply=some_columns)
    triton.sns_init = sns_init
    # Only FP8 reads what these prepare.
    for name in "quantize_mlp_weights_dual quantize_weights_dual_ntiles prime_stage_cache \
sns_gather".split():
        setattr(triton, name, lambda *_, **__: None)

    def planes(table: Any, tokens: Any) -> Any:
        return tuple(table.view(4, size.vocab, -1)[:, tokens])

    class Into(torch.autograd.Function):
        """Rows of the value tables, whose gradient is added to a buffer beside them."""

        @staticmethod
        def forward(ctx: Any, table: Any, tokens: Any, sums: Any) -> Any:
            ctx.save_for_backward(tokens, sums)
            return tuple(plane.clone() for plane in planes(table, tokens))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            tokens, sums = ctx.saved_tensors
            for plane, grad in zip(sums.view(4, size.vocab, -1), grads, strict=True):
                plane.index_add_(0, tokens, grad)
            return None, None, None

    tables = SimpleNamespace(
        value_embedding_planes_selected_load=planes,
        value_embedding_planes_selected_load_into=Into.apply,
    )
    attention = SimpleNamespace(
        PackedFP8QKVPre=None,
        QKNormRoPEPad=queries_and_keys,
        quantize_dual_layout_packed_batched=None,
    )
    tiny = SimpleNamespace(**_executed("fuse_tiny_kernels.py", texts), _sns_copy_evt=None)
    tiny.sns_war_record = lambda: None
    tiny.sns_upload_async = lambda pairs: [to.copy_(source) for to, source in pairs]
    rows = SimpleNamespace(**_executed("bigram_kernels.py", texts))
    rows.bgx_x0_bigram, rows.bgadam_rows_launch = signed_rows, adam_of_rows
    rows.bgfuse_scatter_add = lambda source, to_rows, to: to.index_add_(0, to_rows.long(), source)
    rows.bgfuse_scatter_copy = lambda source, to_rows, to: to.index_copy_(0, to_rows.long(), source)
    return made | {
        "triton_kernels": triton,
        "value_embed_op": tables,
        "anvil_attn_kernels": attention,
        "fuse_tiny_kernels": tiny,
        "bigram_kernels": rows,
    }


def _executed(name: str, texts: dict[str, str]) -> dict[str, Any]:
    """Execute those statements of a module that are named in :data:`AS_THEY_ARE`, and return what
    they define."""
    wanted = set(AS_THEY_ARE[name].split())

    def defined(statement: ast.stmt) -> set[str]:
        if isinstance(statement, ast.FunctionDef):
            return {statement.name}
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        return {
            node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)
        }

    body = [statement for statement in ast.parse(texts[name]).body if defined(statement) & wanted]
    kernel = SimpleNamespace(cdiv=lambda n, by: -(-n // by)), Launched()
    space = {"torch": Over(torch, cuda=Anything()), "np": np, "_build_kernel": lambda: kernel}
    kept = set(space)
    exec(compile(ast.Module(body, []), name, "exec"), space)
    missing = wanted - set(space)
    assert not missing, f"{name} of the record has no {missing}"
    return {key: value for key, value in space.items() if key not in kept | {"__builtins__"}}


class Launched:
    """The record's kernel for Adam on all small parameters at once, over their segments."""

    def __getitem__(self, _: Any) -> Any:
        return self.run

    @staticmethod
    def run(
        p: Any, g: Any, m: Any, v: Any, segments: Any, table: Any, count: int, **_: Any
    ) -> None:
        beta1, fresh1, beta2, fresh2, eps, step, decay, active = table[segments.long()].T
        new_m, new_v = m * beta1 + fresh1 * g, v * beta2 + fresh2 * g * g
        change = new_m / (new_v.sqrt() + eps) * step
        change = change + decay * p * (change * p > 0)
        for old, new in ((m, new_m), (v, new_v), (p, p - change)):
            old.copy_(torch.where(active != 0, new, old))


def queries_and_keys(
    x: Any, cosines: Any, sines: Any, heads: int, _: int, paired: bool, from_before: bool
) -> Any:
    """Normalise and turn queries and keys ``[T, 2 H, K]``; channels in pairs of neighbours."""
    tokens, _, width = x.shape
    x = torch.nn.functional.rms_norm(x, (width,))
    swapped = x.view(tokens, 2 * heads, -1, 2).flip(-1).view(x.shape)
    if paired:  # a row has the factors of two positions, for even heads and for odd ones
        cosines, sines = (
            f.view(tokens, 1, 2, width).expand(-1, heads, -1, -1).reshape(x.shape)
            for f in (cosines, sines)
        )
    else:
        cosines, sines = cosines[:, None], sines[:, None]
    y = cosines * x + sines * swapped
    q, k = y[:, :heads], y[:, heads:]
    if from_before:
        before = torch.cat([k[:1, :, width // 2 :], x[:-1, heads:, width // 2 :]])
        k = torch.cat([k[..., : width // 2], before], dim=-1)
    if paired:
        q, k = (a.reshape(2 * tokens, heads // 2, width) for a in (q, k))
    return q, k


def signed_rows(table: Any, rows: Any, signs: Any, tokens: Any, sink: Any) -> Any:
    """The sum of each token's bigram and trigram, with their signs; gradients go to ``sink``, one
    after the other."""
    found = table[rows].detach()
    found = found if sink is None else found + sink
    before, more = (torch.cat([tokens.new_zeros(n), tokens[:-n]]) for n in (1, 2))
    of_two = (30011 * before) ^ (48271 * tokens)
    of_three = (26801 * more) ^ (39779 * before) ^ (58699 * tokens)
    of_two[:1], of_three[:2] = 0, 0
    last = len(signs) - 1
    return (
        found[: len(tokens)] * signs[of_two & last] + found[len(tokens) :] * signs[of_three & last]
    )


def adam_of_rows(
    _m: Any, v: Any, p: Any, g: Any, rows: Any, last: Any, history: Any, now: int, beta1: float,
    beta2: float,
    eps: float, rate: float, decay: float, fresh1: float, fresh2: float, out: Any = None,
) -> Any:  # fmt: skip
    """Adam with one second moment a row, for ``rows``, after the decay owed since ``last``."""
    assert beta1 == 0
    if out is not None:
        return out.copy_(p[rows.long()])
    rows = torch.unique(rows).long()
    for event in range(int(last[rows].min()) + 1, now + 1):
        v[rows] *= torch.where(last[rows] < event, history[1, event], 1.0)[:, None]
    last[rows] = now
    if g is not None:
        last[rows] += 1
        v[rows] = v[rows] * beta2 + g[rows].square().mean(dim=1, keepdim=True) * fresh2
        change = g[rows] * fresh1 / (v[rows].sqrt() + eps) * rate
        p[rows] -= change + torch.where(change * p[rows] > 0, p[rows] * decay, 0.0)
    return out
