"""The small parts: a linear map that casts its weight, RMS norm without gain, rotary embedding, the MLP."""

from __future__ import annotations

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


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """x / √(mean x² + eps) over the last axis, without a learned gain."""
    return F.rms_norm(x, (x.shape[-1],), eps=eps)


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
        return self.w2(self.w1(x).relu().square())
