"""PyTorch emulation of record 89's FP8 kernels, with the same casts."""

from typing import Any

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def as_e4m3(x: Any) -> Any:
    """Clip to what e4m3 holds and round to it."""
    return x.clamp(-448.0, 448.0).to(E4M3)


def modules(cross_entropy: Any, calls: list[Any]) -> dict[str, Any]:
    """What to put in place of formulas without 8 bits; ``cross_entropy(logits, ...)`` is the loss
    of a head's logits.

    ``calls`` get (what it is, operands, result) of every product forward, and of backward (...,
    gradient, gradients).
    """

    class Mlp(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any,
            x: Any,
            up: Any,
            down: Any,
            up_f8: Any = None,
            dequant: Any = None,
            x_f8: Any = None,
            down_f8: Any = None,
            down_scale: Any = None,
            activation_scale: Any = None,
            partial_amax: Any = None,
        ) -> Any:
            x = x.view(-1, x.shape[-1])
            if up_f8 is None:
                post = torch.relu(x @ up.T).square()
                y = post @ down
            else:
                post = torch.relu(x_f8.view(x.shape).float() @ up_f8.float().T * dequant).square()
                partial_amax.fill_(post.max())
                y = (
                    as_e4m3(post / activation_scale).float()
                    @ down_f8.float()
                    * activation_scale
                    * down_scale
                )
            ctx.save_for_backward(x, up, down, post)
            calls.append(("mlp", (x, up, down, post.max()), y))
            return y[None]

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, up, down, post = ctx.saved_tensors
            grad = grad.view(-1, grad.shape[-1])
            pre = 2 * (grad @ down.T) * post.sqrt()
            grads = pre @ up, pre.T @ x, post.T @ grad
            calls.append(("mlp back", (x, up, down, post.max()), grad, grads))
            return grads[0][None], *grads[1:], *(None,) * 7

    class Head(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, head: Any, x_s: float, w_s: float, grad_s: float) -> Any:
            x_f8, w_f8 = x.div(x_s).to(E4M3), head.div(w_s).to(E4M3)
            ctx.kept = x_f8.float(), w_f8.float(), x_s, w_s, grad_s
            ctx.operands, logits = (x, head), x_f8.float() @ w_f8.float() * (x_s * w_s)
            calls.append(("head", ctx.operands, logits))
            return logits

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, w, x_s, w_s, grad_s = ctx.kept
            rounded = grad.div(grad_s).clamp(-57344.0, 57344.0).to(E5M2).float()
            grads = rounded @ w.T * (grad_s * w_s), x.T @ rounded * (x_s * grad_s)
            calls.append(("head back", ctx.operands, grad, grads))
            return *grads, None, None, None

    def head_and_loss(
        x: Any,
        targets: Any,
        weights: Any,
        prefixes: Any,
        share: Any,
        head: Any,
        x_s: float,
        w_s: float,
        *rest: float,
    ) -> Any:
        # The scale of gradients is meant for those of a lane that weighs as in the record; here it
        # weighs 1.
        grad_s, weight = rest
        logits = Head.apply(x, head, x_s, w_s, grad_s / weight)
        return cross_entropy(logits, targets, weights, prefixes, share)

    def quantise_down(
        weights: Any, storage: Any, next_scales: Any, used_scales: Any, _: Any
    ) -> None:
        storage.copy_(as_e4m3(weights / next_scales[:, None, None]).mT)
        used_scales.copy_(next_scales)
        next_scales.copy_(weights.abs().amax((1, 2)).clamp(min=1e-12) * (1.12 / 448))

    def new_scales(amax: Any, scales: Any, headroom: float) -> None:
        scales.copy_(amax.amax(1).clamp(min=1e-12) * (headroom / 448))

    return {
        "FusedLinearReLUSquareFunction": Mlp,
        "FusedSoftcappedCrossEntropy": type("Fused", (), {"apply": staticmethod(head_and_loss)}),
        "quantize_transpose_mlp_down_weights": quantise_down,
        "reduce_mlp_activation_scales": new_scales,
    }
