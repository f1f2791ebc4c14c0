"""The small parts: a linear map that casts its weight, RMS norm without gain, rotary embedding, the MLP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """y = W x without bias; the master weight (outputs, inputs) stays float32 and is cast to x's dtype."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Left to init_weights: no number is drawn from the global stream."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Embedding):
    """A table of rows by token, drawn by init_weights."""

    def reset_parameters(self) -> None:
        """Left to init_weights."""


def rms_norm(x: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    """scale · x / √(mean x² + eps) over the last axis, without a learned gain; the mean is taken in float32."""
    return _RMSNorm.apply(x, eps, scale)


class _RMSNorm(torch.autograd.Function):
    """On CPUs torch takes its own rms_norm apart into seven passes over memory and twice that in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, scale: float) -> Tensor:  # pyright: ignore
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        factor = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, factor)
        ctx.scale = scale
        return (wide * (scale * factor)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        x, factor = ctx.saved_tensors
        wide, g = x.to(factor.dtype), grad.to(factor.dtype)
        # with n = x · factor: ∂L/∂x = scale · factor · (g − n · mean(g n))
        along = (g * wide).mean(-1, keepdim=True) * factor.square()
        return torch.addcmul(g, wide, along, value=-1).mul_(ctx.scale * factor).to(x.dtype), None, None


def rotary_tables(length: int, head_size: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position · base^(−2i/D), each (1, length, 1, D/2) in float32."""
    frequencies = base ** (-torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)[None, :, None, :]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the halves (x1, x2) of each head, x (b, t, h, d), by −angle: (x1 cos + x2 sin, −x1 sin + x2 cos)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


class MLP(nn.Module):
    """W_2 relu(W_1 x)²."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = Linear(width, hidden)
        self.w2 = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """x (b, t, c) -> (b, t, c)."""
        return self.w2(_ReluSquared.apply(self.w1(x)))


class _ReluSquared(torch.autograd.Function):
    """relu(x)², keeping relu(x) alone for a backward of two passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        (positive,) = ctx.saved_tensors
        return (grad * positive).mul_(2)
