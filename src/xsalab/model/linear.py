"""y = x Wᵀ and its two gradients for bfloat16 on CPUs: csrc/linear.cpp where there are many rows, else torch's mm.

Each casts the float32 master itself. The weight's gradient is made in the master's dtype: no rounding to bfloat16
between. Called inside autograd functions, where ``native.takes(x)``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .native import AFTER_LOADING, takes

MANY = 256  # rows from which packing the weight is paid for; the widths are multiples of 32


def _by_kernel(x: Tensor, weight: Tensor) -> bool:
    return x.numel() >= MANY * x.shape[-1] and not weight.shape[0] % 32 and not weight.shape[1] % 32


def linear(x: Tensor, weight: Tensor, squared: bool = False) -> Tensor:
    """x (…, k) · Wᵀ, W (m, k) -> (…, m), and relu(·)² of it where ``squared``."""
    low = weight.to(x.dtype)
    if _by_kernel(x, weight):
        return torch.ops.xsalab.linear(x.flatten(0, -2), low, squared).view(*x.shape[:-1], -1)
    y = F.linear(x, low)
    return y.relu_().square_() if squared else y


def input_gradient(grad: Tensor, weight: Tensor, hidden: Tensor | None = None) -> Tensor:
    """grad (…, m) · W -> (…, k); times relu's share, 2 √hidden, where hidden = relu(x)² (…, k) is given."""
    low = weight.to(grad.dtype)
    if _by_kernel(grad, weight):
        kept = None if hidden is None else hidden.flatten(0, -2)
        return torch.ops.xsalab.linear_input_gradient(grad.flatten(0, -2), low, kept).view(*grad.shape[:-1], -1)
    inner = grad @ low
    return inner if hidden is None else inner.mul_(hidden.sqrt()).mul_(2)


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """gradᵀ x over all rows, (m, k) in the weight's dtype."""
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    made = torch.ops.xsalab.linear_weight_gradient(grad, x) if _by_kernel(grad, weight) else grad.T @ x
    return made.to(weight.dtype)


class FastLinear(torch.autograd.Function):
    """x Wᵀ, keeping x and the master: the cast weight goes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(x, weight)
        return linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # pyright: ignore
        x, weight = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad
        return (
            input_gradient(grad, weight) if for_x else None,
            weight_gradient(grad, x, weight) if for_weight else None,
        )


class FastMLP(torch.autograd.Function):
    """W_2 relu(W_1 x)². Of the hidden width it keeps relu(·)² alone: W_2's gradient needs it, relu(·) is its root."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:  # pyright: ignore
        hidden = linear(x, w1, squared=True)
        ctx.save_for_backward(x, hidden, w1, w2)
        return linear(hidden, w2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore
        x, hidden, w1, w2 = ctx.saved_tensors
        inner = input_gradient(grad, w2, hidden)
        return input_gradient(inner, w1), weight_gradient(inner, x, w1), weight_gradient(grad, hidden, w2)


def served(*tensors: Tensor) -> bool:
    """Whether the kernels of csrc/elementwise.cpp, heads.cpp and linear.cpp take these: widths are multiples of 32."""
    return takes(*tensors) and all(x.shape[-1] % 32 == 0 for x in tensors)


def _shapes() -> None:
    """What the operations give, without doing it: for torch.compile."""

    @torch.library.register_fake("xsalab::linear")
    def _(x, weight, squared):
        return x.new_empty((x.shape[0], weight.shape[0]))

    @torch.library.register_fake("xsalab::linear_input_gradient")
    def _(grad, weight, hidden):
        return grad.new_empty((grad.shape[0], weight.shape[1]))

    @torch.library.register_fake("xsalab::linear_weight_gradient")
    def _(grad, x):
        return grad.new_empty((grad.shape[1], x.shape[1]), dtype=torch.float32)


AFTER_LOADING.append(_shapes)
