"""The causal loss of a language model, without ever holding all logits.

[Note: losses in chunks]
The logits of T tokens over a vocabulary V take 4TV bytes and more, several times what a small device budget holds. Here they exist for
`CHUNK` tokens at a time: their loss and its gradient are worked out in the forward pass (as in Liger's fused linear cross entropy,
arXiv:2410.10989). The gradient of the logits is kept in the compute dtype for `GROUP_SHARE` of as many tokens as the model is wide, so that
the weight's gradient is rounded once per group and not once per chunk, and the two together never exceed 1.5 times the weight.
A loss scale for fp16 must be part of `scale`: it then enters while gradients are fp32, before they are narrowed.
All sizes follow from the model's shape alone, so that the bits are the same at every placement.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

CHUNK = 128
GROUP_SHARE = 0.5


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, scale: float, needed: bool) -> torch.Tensor:
        """Mean cross entropy times `scale`, fp32 scalar; hidden [T, H], weight [V, H], targets int64 [T]; `needed`: gradients too."""
        tokens, width = hidden.shape
        group = group_tokens(width)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if needed and ctx.needs_input_grad[0] else None
        d_weight = torch.empty_like(weight) if needed and ctx.needs_input_grad[1] else None
        logits = torch.empty(min(CHUNK, tokens), len(weight), dtype=torch.float32, device=hidden.device)
        d_logits = hidden.new_empty(min(group, tokens), len(weight)) if needed else hidden.new_empty(logits.shape)
        for start in range(0, tokens, group):
            stop = min(start + group, tokens)
            for a in range(start, stop, CHUNK):
                b = min(a + CHUNK, stop)
                narrow = d_logits[a - start : b - start] if needed else d_logits[: b - a]
                total += _chunk(hidden[a:b], weight, targets[a:b], logits[: b - a], narrow, scale / tokens if needed else None)
                if d_hidden is not None:
                    torch.mm(narrow, weight, out=d_hidden[a:b])
            if d_weight is not None:
                grads = d_logits[: stop - start].t()
                if start:
                    d_weight.addmm_(grads, hidden[start:stop])
                else:
                    torch.mm(grads, hidden[start:stop], out=d_weight)
        ctx.grads = (d_hidden, d_weight)
        return total * (scale / tokens)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        """Hands out what forward worked out."""
        if ctx.grads is None:
            raise RuntimeError("the chunked loss frees its gradients in backward: it can run only once")
        (d_hidden, d_weight), ctx.grads = ctx.grads, None
        if float(grad_outputs[0]) != 1.0:
            for gradient in (d_hidden, d_weight):
                if gradient is not None:
                    gradient.mul_(grad_outputs[0])
        return d_hidden, d_weight, None, None, None


def _chunk(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, logits: torch.Tensor, narrow: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Summed loss of a chunk; leaves the scaled gradient of its logits [C, V] in `narrow`. `logits` is fp32 scratch [C, V]."""
    torch.mm(hidden, weight.t(), out=narrow)
    logits.copy_(narrow)
    wanted = logits.gather(1, targets[:, None])
    top = logits.amax(1, keepdim=True)
    logits.sub_(top).exp_()
    sums = logits.sum(1, keepdim=True)
    if scale is not None:
        logits.mul_(scale / sums)
        logits.scatter_add_(1, targets[:, None], torch.full_like(wanted, -scale))
        narrow.copy_(logits)
    return (sums.log() + top - wanted).sum()


def group_tokens(width: int) -> int:
    """Tokens whose logits' gradients are held together, by the model's width."""
    return max(CHUNK, int(width * GROUP_SHARE) // CHUNK * CHUNK)


def planned_tokens(width: int, logit_bytes: int) -> int:
    """Tokens of whole logits, at `logit_bytes` an element, that take as much memory as the chunked loss: what a plan counts."""
    return max(CHUNK, -(-(4 * CHUNK + 4 * group_tokens(width)) // logit_bytes))


def chunked_causal_loss(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Mean loss of predicting each next token, times `scale`: fp32 scalar, differentiable once.

    hidden [B, L, H] and weight [V, H] of one floating dtype, ids int64 [B, L]. Logits are `hidden @ weight.T`, the softmax is fp32.
    """
    flat = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    loss: torch.Tensor = _ChunkedLoss.apply(flat, weight, ids[:, 1:].reshape(-1), scale, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return loss


def full_causal_loss(model: nn.Module, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The model's own loss on `ids` [B, L], times `scale`, all logits at once."""
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss.float() * scale


def plain_head(model: Any) -> nn.Linear | None:
    """The output embedding of a model whose logits might be the head of its base model's last hidden state and nothing else."""
    head = model.get_output_embeddings()
    base = getattr(model, "base_model", model)
    return head if base is not model and isinstance(head, nn.Linear) and head.bias is None else None


def head_is_plain(model: Any) -> bool:
    """Whether a small `model` (plain torch, fp32) has the same loss and gradients in chunks: no scaling, capping or added terms."""
    head = plain_head(model)
    if head is None:
        return False
    ids = torch.arange(24).reshape(2, 12) % int(model.config.vocab_size)
    with torch.no_grad():
        head.weight.mul_(50)  # logits large enough for a cap to show
    try:
        model.zero_grad()
        torch.autograd.backward(full_causal_loss(model, ids))
        expected = [p.grad for p in model.parameters()]
        model.zero_grad()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        torch.autograd.backward(chunked_causal_loss(hidden, head.weight, ids))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False
    pairs = zip(expected, (p.grad for p in model.parameters()), strict=True)
    return all(
        (a is None) == (b is None) and (a is None or b is None or functional.mse_loss(a, b) <= 1e-8 * a.square().mean() + 1e-12) for a, b in pairs
    )
