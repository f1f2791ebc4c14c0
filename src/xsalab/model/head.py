"""The output head with its soft cap and loss, in blocks of rows: no (tokens × vocabulary) tensor is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Bytes of float32 logits a block: within a core's cache on CPUs, few launches on GPUs.
BLOCK_BYTES = {"cpu": 1 << 20, "cuda": 1 << 28}


def capped_logits(x: Tensor, weight: Tensor, cap: float) -> Tensor:
    """cap · tanh(x Wᵀ / cap) in float32; the plain product where cap is 0."""
    logits = torch.nn.functional.linear(x, weight.to(x.dtype)).float()
    return cap * torch.tanh(logits / cap) if cap else logits


def token_nats(x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int) -> Tensor:
    """−ln softmax(capped logits)[target] in float32, targets' shape; 0 where the target is −1.

    x (..., c); weight (rows ≥ vocabulary, c), the rows beyond the vocabulary are padding and take no part.
    """
    nats = _TokenNats.apply(x.flatten(0, -2), weight, targets.flatten(), cap, vocabulary)
    return nats.view(targets.shape)


class _TokenNats(torch.autograd.Function):
    """Makes the logits of a block twice, in forward and in backward, and keeps none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int) -> Tensor:  # pyright: ignore
        used = weight[:vocabulary].to(x.dtype)
        nats = torch.empty(len(x), dtype=torch.float32, device=x.device)
        log_total = torch.empty_like(nats)
        for rows in _blocks(x, vocabulary):
            logits = (x[rows] @ used.T).float()
            if cap:
                logits.div_(cap).tanh_().mul_(cap)
            target = targets[rows]
            log_total[rows] = logits.logsumexp(-1)
            chosen = logits.gather(1, target.clamp_min(0)[:, None])[:, 0]
            # selected, not multiplied: a masked position may hold anything, infinity included
            nats[rows] = torch.where(target >= 0, log_total[rows] - chosen, 0.0)
        ctx.save_for_backward(x, weight, targets, log_total)
        ctx.cap, ctx.vocabulary = cap, vocabulary
        return nats

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight, targets, log_total = ctx.saved_tensors
        cap, vocabulary = ctx.cap, ctx.vocabulary
        used = weight[:vocabulary].to(x.dtype)
        scale = torch.where(targets >= 0, grad, 0.0)
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for rows in _blocks(x, vocabulary):
            logits = (x[rows] @ used.T).float()
            slope = None
            if cap:
                logits.div_(cap).tanh_()
                slope = 1 - logits.square()
                logits.mul_(cap)
            p = logits.sub_(log_total[rows, None]).exp_()
            p.scatter_add_(1, targets[rows].clamp_min(0)[:, None], p.new_full((len(p), 1), -1.0))
            p.mul_(scale[rows, None])
            if slope is not None:
                p.mul_(slope)
            low = p.to(x.dtype)
            torch.mm(low, used, out=grad_x[rows])
            if x.dtype == torch.float32:
                grad_weight[:vocabulary].addmm_(low.T, x[rows])
            else:
                grad_weight[:vocabulary] += low.T @ x[rows]
        return grad_x, grad_weight.to(weight.dtype), None, None, None


def _blocks(x: Tensor, vocabulary: int) -> list[slice]:
    rows, size = len(x), max(64, BLOCK_BYTES.get(x.device.type, 1 << 20) // (4 * vocabulary))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
