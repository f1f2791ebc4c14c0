"""The output head's loss on CUDA: what lies between its matrix products, as two Triton kernels over a block of logits.

A block of logits is made by a product in x's dtype. ``_statistics`` reads it once, for the loss of each row;
``_slopes`` turns it in place into the loss's gradient, for the two products of the backward. The products do nearly all
of the arithmetic; written in PyTorch's operations the part in between is some twenty passes over a float32 copy of the
logits. The bound is the memory's bandwidth: each kernel reads the block once, the second writes it.

``head_forward`` and ``head_backward`` make the logits twice, as head.py does. ``mean_nats`` is for training, where the
gradient of the sum is known beforehand to be the same for every token: it makes them once, gradients in the forward.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .exclude_triton import available as available  # the same dtypes, devices and reasons

BLOCK_BYTES = 1 << 29  # of logits in x's dtype
COLUMNS = 4096  # of a row at a time: 16 a thread in 8 warps

if TYPE_CHECKING:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
else:
    triton = tl = None  # until the first launch; the kernels look for them here


def head_forward(x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int) -> tuple[Tensor, Tensor]:
    """(nats, log Σ exp) of each row, float32 (n,): x (n, c), weight (rows ≥ vocabulary, c), targets int64 (n,).

    logits = cap · tanh(x Wᵀ / cap), or x Wᵀ where cap is 0. A target of −1 has 0 nats.
    """
    return _forward(x, weight, targets, float(cap), vocabulary)


def head_backward(
    grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, log_total: Tensor, cap: float, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """(∂L/∂x, ∂L/∂weight) in their dtypes, from grad (n,) = ∂L/∂nats and what ``head_forward`` gave."""
    return _backward(grad, x, weight, targets, log_total, float(cap), vocabulary)


def mean_nats(x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int, scale: float) -> Tensor:
    """scale · Σ nats, () in float32; both gradients are made in the forward, while the logits are there."""
    return _MeanNats.apply(x, weight, targets, float(cap), vocabulary, scale)  # pyright: ignore


class _MeanNats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int, scale: float
    ) -> Tensor:  # pyright: ignore
        if not any(ctx.needs_input_grad[:2]):
            return scale * _forward(x, weight, targets, cap, vocabulary)[0].sum()
        nats, grad_x, grad_weight = _both(x, weight, targets, cap, vocabulary, scale)
        ctx.save_for_backward(grad_x, grad_weight)
        return scale * nats.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        grad_x, grad_weight = ctx.saved_tensors
        # where the loss is this mean, grad is 1 and nothing is rounded again
        return grad_x * grad.to(grad_x.dtype), grad_weight * grad.to(grad_weight.dtype), None, None, None, None


# --- operations: opaque to torch.compile


@torch.library.custom_op(
    "xsalab::head_triton",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor targets, float cap, int vocabulary) -> (Tensor, Tensor)",
)
def _forward(x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int) -> tuple[Tensor, Tensor]:
    used, targets = weight[:vocabulary].to(x.dtype), targets.contiguous()
    nats, log_total = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    for rows in _blocks(x, vocabulary):
        _launch("statistics", x[rows] @ used.T, targets[rows], cap, nats[rows], log_total[rows])
    return nats, log_total


@_forward.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), dtype=torch.float32), x.new_empty(len(x), dtype=torch.float32)


@torch.library.custom_op(
    "xsalab::head_triton_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, Tensor targets, Tensor log_total, float cap, int vocabulary) "
    "-> (Tensor, Tensor)",
)
def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, log_total: Tensor, cap: float, vocabulary: int
) -> tuple[Tensor, Tensor]:
    used, targets, grad = weight[:vocabulary].to(x.dtype), targets.contiguous(), grad.float().contiguous()
    grad_x, grad_weight = _room(x, weight)
    for rows in _blocks(x, vocabulary):
        logits = x[rows] @ used.T
        _launch("slopes", logits, targets[rows], cap, grad[rows], log_total[rows])
        _products(logits, x[rows], used, grad_x[rows], grad_weight[:vocabulary])
    return grad_x, grad_weight.to(weight.dtype)


@_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, log_total: Tensor, cap: float, vocabulary: int
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@torch.library.custom_op(
    "xsalab::head_triton_both",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor targets, float cap, int vocabulary, float scale) "
    "-> (Tensor, Tensor, Tensor)",
)
def _both(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    used, targets = weight[:vocabulary].to(x.dtype), targets.contiguous()
    grad_x, grad_weight = _room(x, weight)
    nats, log_total = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    grad = torch.full_like(nats, scale)
    for rows in _blocks(x, vocabulary):
        logits = x[rows] @ used.T
        _launch("statistics", logits, targets[rows], cap, nats[rows], log_total[rows])
        _launch("slopes", logits, targets[rows], cap, grad[rows], log_total[rows])
        _products(logits, x[rows], used, grad_x[rows], grad_weight[:vocabulary])
    return nats, grad_x, grad_weight.to(weight.dtype)


@_both.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(len(x), dtype=torch.float32), x.new_empty(x.shape), weight.new_empty(weight.shape)


def _room(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)


def _products(slopes: Tensor, x: Tensor, used: Tensor, grad_x: Tensor, grad_weight: Tensor) -> None:
    torch.mm(slopes, used, out=grad_x)
    if x.dtype == torch.float32:
        grad_weight.addmm_(slopes.T, x)
    else:
        grad_weight += slopes.T @ x


def _blocks(x: Tensor, vocabulary: int) -> list[slice]:
    rows, size = len(x), max(1, BLOCK_BYTES // (x.element_size() * vocabulary))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _launch(name: str, logits: Tensor, targets: Tensor, cap: float, *of_rows: Tensor) -> None:
    """A program a row. ``of_rows``: nats and log_total for "statistics", grad and log_total for "slopes"."""
    n, columns = logits.shape
    block = min(COLUMNS, 1 << (columns - 1).bit_length())
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _kernel(name)[(n,)](logits, targets, *of_rows, cap, columns, CAPPED=cap != 0, BLOCK=block, num_warps=8)


@cache
def _kernel(name: str) -> Any:
    global triton, tl
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    return triton.jit({"statistics": _statistics, "slopes": _slopes}[name])


# --- kernels: a row of logits (n, columns), contiguous, by blocks of columns; float32 within.
# tanh |u| = (1 − e) / (1 + e) with e = exp(−2 |u|): right to 1e-7 absolutely, which is what a logit needs.


def _statistics(logits, targets, nats, log_total, cap, columns, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    top = -float("inf")
    total = 0.0
    chosen = 0.0
    rate = -2 / cap if CAPPED else 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
        if CAPPED:
            e = tl.exp(tl.abs(x) * rate)
            x = tl.where(x < 0, -cap, cap) * ((1 - e) / (1 + e))
        x = tl.where(column < columns, x, -float("inf"))
        higher = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), axis=0)
        chosen += tl.sum(tl.where(column == target, x, 0.0), axis=0)
        top = higher
    log_sum = top + tl.log(total)
    tl.store(log_total + row, log_sum)
    tl.store(nats + row, tl.where(target >= 0, log_sum - chosen, 0.0))


def _slopes(logits, targets, grad, log_total, cap, columns, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    log_sum = tl.load(log_total + row)
    # selected, not multiplied: the gradient at a masked position may be anything
    scale = tl.where(target >= 0, tl.load(grad + row), 0.0)
    rate = -2 / cap if CAPPED else 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        at = logits + row * columns + column
        x = tl.load(at, mask=column < columns, other=0.0).to(tl.float32)
        slope = scale
        if CAPPED:
            e = tl.exp(tl.abs(x) * rate)
            inverse = 1 / (1 + e)
            x = tl.where(x < 0, -cap, cap) * ((1 - e) * inverse)
            slope = scale * (4 * e * inverse * inverse)  # 1 − tanh², without its cancellation
        p = tl.exp(x - log_sum) - tl.where(column == target, 1.0, 0.0)
        tl.store(at, (p * slope).to(logits.dtype.element_ty), mask=column < columns)
