"""The small parts: a linear map that casts its weight, RMS norm without gain, rotary embedding, the MLP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import FastLinear, FastMLP, served
from .native import AFTER_LOADING


class Linear(nn.Linear):
    """y = W x without bias; the master weight (outputs, inputs) stays float32 and is cast to x's dtype."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Left to init_weights: no number is drawn from the global stream."""

    def forward(self, x: Tensor) -> Tensor:
        if served(x):
            return FastLinear.apply(x, self.weight)
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Embedding):
    """A table of rows by token, drawn by init_weights."""

    def reset_parameters(self) -> None:
        """Left to init_weights."""


def rms_norm(x: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    """scale · x / √(mean x² + eps) over the last axis, without a learned gain; the mean is taken in float32."""
    if served(x) and scale:
        return _FastNorm.apply(x, eps, scale)
    return _RMSNorm.apply(x, eps, scale)


def add_norm(
    x: Tensor, y: Tensor, eps: float, r: Tensor | None = None, b: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """r x + b y (1 where none; else one number, float32) and its RMS norm, both of x's shape and dtype."""
    if served(x, y):
        y = y.view_as(y) if y is x else y  # torch.compile takes no tensor twice
        return _FastAddNorm.apply(x, y, None if r is None else r.float(), None if b is None else b.float(), eps)
    mixed = (x if r is None else r.to(x.dtype) * x) + (y if b is None else b.to(x.dtype) * y)
    return mixed, rms_norm(mixed, eps)


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


class _FastNorm(torch.autograd.Function):
    """Keeps its result, which the next product keeps anyway, and one factor a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, scale: float) -> Tensor:  # pyright: ignore
        y, factors = torch.ops.xsalab.rms_norm(x, eps, scale)
        ctx.save_for_backward(y, factors)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        return torch.ops.xsalab.rms_norm_backward(grad, None, *ctx.saved_tensors, ctx.scale), None, None


class _FastAddNorm(torch.autograd.Function):
    """Keeps the norm and one factor a row; x and y only where r and b get gradients, which are sums over them."""

    @staticmethod
    def forward(  # pyright: ignore
        ctx: Any, x: Tensor, y: Tensor, r: Tensor | None, b: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        mixed, normed, factors = torch.ops.xsalab.mix_norm(x, y, r, b, eps)
        plain = r is None and b is None
        ctx.save_for_backward(normed, factors, None if r is None else x, None if plain else y, r, b)
        return mixed, normed

    @staticmethod
    def backward(ctx: Any, along: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        normed, factors, x, y, r, b = ctx.saved_tensors
        if y is None:
            both = torch.ops.xsalab.rms_norm_backward(grad, along, normed, factors, 1.0)
            return both, both, None, None, None
        dx, dy, sums = torch.ops.xsalab.mix_norm_backward(along, grad, normed, factors, x, y, r, b)
        dr, db = (None if of is None else total.view(of.shape) for of, total in ((r, sums[0]), (b, sums[1])))
        return dx, dy, dr, db, None


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
        if served(x):
            return FastMLP.apply(x, self.w1.weight, self.w2.weight)
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


class _FastSmear(torch.autograd.Function):
    """Keeps x and one gate a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, strength: Tensor) -> Tensor:  # pyright: ignore
        y, gates = torch.ops.xsalab.smear(x, weight.to(x.dtype), strength)
        ctx.save_for_backward(x, gates, weight, strength)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore
        x, gates, weight, strength = ctx.saved_tensors
        dx, dw, total = torch.ops.xsalab.smear_backward(grad, x, gates, weight.to(x.dtype), strength)
        return dx, dw.view_as(weight), total.view_as(strength)


def smear(x: Tensor, gate: Linear, strength: Tensor) -> Tensor:
    """x_t + λ σ(W x_t[:k]) x_{t−1} with x (b, t, c) before smearing; position 0 has nothing before it.

    gate is W (1, k), strength λ (1,).
    """
    if served(x):
        return _FastSmear.apply(x, gate.weight, strength.float())
    return smear_from(x[:, :1], x[:, 1:], x[:, :-1], gate, strength)


def smear_from(kept: Tensor, x: Tensor, before: Tensor, gate: Linear, strength: Tensor) -> Tensor:
    """``kept`` as it is, then x smeared with the tokens ``before`` each."""
    share = strength.to(x.dtype) * torch.sigmoid(gate(x[..., : gate.in_features]))
    return torch.cat((kept, x + share * before), dim=1)


def _shapes() -> None:
    """What the operations give, without doing it: for torch.compile."""

    def factors(x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)

    @torch.library.register_fake("xsalab::rms_norm")
    def _(x, eps, scale):
        return torch.empty_like(x, memory_format=torch.contiguous_format), factors(x)

    @torch.library.register_fake("xsalab::rms_norm_backward")
    def _(grad, added, y, factors, scale):
        return torch.empty_like(y)

    @torch.library.register_fake("xsalab::mix_norm")
    def _(x, y, r, b, eps):
        like = torch.empty_like(x, memory_format=torch.contiguous_format)
        return like, torch.empty_like(like), factors(x)

    @torch.library.register_fake("xsalab::mix_norm_backward")
    def _(added, grad, normed, factors, x, y, r, b):
        return torch.empty_like(normed), torch.empty_like(normed), factors.new_empty(2)

    @torch.library.register_fake("xsalab::smear")
    def _(x, weight, strength):
        return torch.empty_like(x, memory_format=torch.contiguous_format), factors(x).flatten()

    @torch.library.register_fake("xsalab::smear_backward")
    def _(grad, x, gates, weight, strength):
        like = torch.empty_like(x, memory_format=torch.contiguous_format)
        return like, gates.new_empty(weight.numel()), gates.new_empty(1)


AFTER_LOADING.append(_shapes)
