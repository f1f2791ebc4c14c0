"""The output head with its soft cap and loss, in blocks of rows: no (tokens × vocabulary) tensor is kept.

The loss makes its gradients in forward, where the probabilities are at hand, for a weight of 1 on every row: three
products instead of the four of a backward that makes the logits again. Backward multiplies them where all rows that
count have one weight, as in training; where they differ it makes them once more, with the weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .head_triton import available, head_nats, head_nats_and_gradients
from .native import AFTER_LOADING, takes

# Bytes of a block's logits in x's dtype: few and large products, and the sums of dW are read and written once a block.
BLOCK_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}
# Bytes of float32 logits that pass through softmax at a time: within a core's cache on CPUs, few launches on GPUs.
CACHE_BYTES = {"cpu": 1 << 20, "cuda": 1 << 28}
LARGEST_CAP = 64  # of csrc/head.cpp, which takes no maximum off the logits: exp(64) times a vocabulary is a float32


def capped_logits(x: Tensor, weight: Tensor, cap: float) -> Tensor:
    """cap · tanh(x Wᵀ / cap) in float32; the plain product where cap is 0."""
    logits = torch.nn.functional.linear(x, weight.to(x.dtype)).float()
    return cap * torch.tanh(logits / cap) if cap else logits


def token_nats(x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int) -> Tensor:
    """−ln softmax(capped logits)[target] in float32, targets' shape; 0 where the target is −1.

    x (..., c); weight (rows ≥ vocabulary, c), the rows beyond the vocabulary are padding and take no part. Rows whose
    target is −1 cost nothing: they are left out before the products.
    """
    rows, targets_of = x.flatten(0, -2).contiguous(), targets.flatten().contiguous()
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        nats = _TokenNats.apply(rows, weight, targets_of, cap, vocabulary)
    else:
        nats = _nats(rows, weight, targets_of, cap, vocabulary)
    return nats.view(targets.shape)


class _TokenNats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int) -> Tensor:  # pyright: ignore
        nats, *ctx.unit = _nats_and_gradients(x, weight, targets, None, cap, vocabulary)
        ctx.save_for_backward(x, weight, targets)
        ctx.cap, ctx.vocabulary = cap, vocabulary
        return nats

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight, targets = ctx.saved_tensors
        unit, ctx.unit = ctx.unit, None  # they become the gradients: a second backward makes its own
        scale = grad[targets >= 0]
        if unit is not None and len(scale) and bool((scale == scale[0]).all()):
            # in float32: a product with bfloat16 would round the factor first, and all gradients alike with it
            grad_x, grad_weight = unit[0].float().mul_(scale[0]).to(x.dtype), unit[1].mul_(scale[0])
        else:
            _, grad_x, grad_weight = _nats_and_gradients(x, weight, targets, grad.contiguous(), ctx.cap, ctx.vocabulary)
        return grad_x, grad_weight, None, None, None


def _native(x: Tensor, weight: Tensor, cap: float) -> bool:
    """Whether csrc/head.cpp does it: bfloat16 on the CPU, float32 weights, a cap, a width of whole tiles."""
    fits = weight.dtype == torch.float32 and weight.is_contiguous() and x.shape[1] % 32 == 0
    return takes(x) and fits and 0 < cap <= LARGEST_CAP


def _nats(x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int) -> Tensor:
    if available(x):
        return head_nats(x, weight, targets, cap, vocabulary)
    if _native(x, weight, cap):
        return torch.ops.xsalab.token_nats(x, weight, targets, cap, vocabulary)
    return _plain(x, weight, targets, None, cap, vocabulary, gradients=False)[0]


def _nats_and_gradients(
    x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None, cap: float, vocabulary: int
) -> tuple[Tensor, ...]:
    """nats (n,) in float32 and the gradients of Σ scale · nats by x and weight, in their dtypes; no scale: 1."""
    if available(x):
        return head_nats_and_gradients(x, weight, targets, scale, cap, vocabulary)
    if _native(x, weight, cap):
        return torch.ops.xsalab.token_nats_and_gradients(x, weight, targets, scale, cap, vocabulary)
    return _plain(x, weight, targets, scale, cap, vocabulary, gradients=True)


def _plain(
    x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None, cap: float, vocabulary: int, gradients: bool
) -> tuple[Tensor, ...]:
    nats = torch.zeros(len(x), dtype=torch.float32, device=x.device)
    grad_x, grad_weight = (torch.zeros_like(x), torch.zeros_like(weight, dtype=torch.float32)) if gradients else (x, x)
    used = weight[:vocabulary].to(x.dtype)
    # left out, not multiplied by 0: a masked position may hold anything, infinity included
    counted = (targets >= 0).nonzero()[:, 0]
    block, step = _rows(BLOCK_BYTES, x, vocabulary * x.element_size()), _rows(CACHE_BYTES, x, vocabulary * 4)
    logits = x.new_empty(min(block, len(counted)), vocabulary)
    product = torch.empty_like(used) if gradients else used
    for part in counted.split(block):
        rows, target = x[part], targets[part]
        weights = torch.ones_like(part, dtype=torch.float32) if scale is None else scale[part]
        slope = torch.mm(rows, used.T, out=logits[: len(part)])  # the logits, and then the gradient by them
        pieces = zip(slope.split(step), target.split(step), weights.split(step), strict=True)
        nats[part] = torch.cat([_softmax(*piece, cap, gradients) for piece in pieces])
        if gradients:
            grad_x[part] = slope @ used
            if x.dtype == torch.float32:
                grad_weight[:vocabulary].addmm_(slope.T, rows)
            else:
                grad_weight[:vocabulary] += torch.mm(slope.T, rows, out=product)
    return (nats, grad_x, grad_weight.to(weight.dtype)) if gradients else (nats,)


def _softmax(logits: Tensor, target: Tensor, scale: Tensor, cap: float, gradients: bool) -> Tensor:
    """Nats of a few rows. With ``gradients`` the logits become the gradient of Σ scale · nats by them.

    tanh costs six times a sigmoid on CPUs: cap · tanh(z / cap) = cap · (1 − 2q) with q = sigmoid(−2z / cap), and its
    slope is 4 (q − q²).
    """
    q = logits.to(torch.float32, copy=True)  # worked on in place
    if cap:
        q.mul_(-2 / cap).sigmoid_()
        bits = q * (-2 * cap / math.log(2))  # the logits but for a constant, in powers of two: exp2 is the fastest
    else:
        bits = q.mul_(1 / math.log(2))
    place = target[:, None]
    bits -= bits.amax(1, keepdim=True)
    chosen = bits.gather(1, place)
    e = bits.exp2_()
    total = e.sum(1, keepdim=True)
    if gradients:
        factor = scale[:, None] * (4 if cap else 1)
        e.mul_(factor / total).scatter_add_(1, place, -factor)
        if cap:
            torch.mul(e, torch.addcmul(q, q, q, value=-1, out=q), out=logits)
        else:
            logits.copy_(e)
    return ((total.log2() - chosen) * math.log(2))[:, 0]


def _rows(limit: dict[str, int], x: Tensor, bytes_a_row: int) -> int:
    return max(16, limit.get(x.device.type, limit["cpu"]) // bytes_a_row // 16 * 16)


def _tell_shapes() -> None:
    """For torch.compile: what the operations of csrc/head.cpp give."""

    @torch.library.register_fake("xsalab::token_nats")
    def _(x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int) -> Tensor:
        return x.new_empty(len(x), dtype=torch.float32)

    @torch.library.register_fake("xsalab::token_nats_and_gradients")
    def _(
        x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None, cap: float, vocabulary: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return x.new_empty(len(x), dtype=torch.float32), torch.empty_like(x), torch.empty_like(weight)


AFTER_LOADING.append(_tell_shapes)
