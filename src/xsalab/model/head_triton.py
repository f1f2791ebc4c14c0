"""The output head's loss on CUDA: what lies between its matrix products, as one Triton kernel over a block of logits.

A block of logits is made by a product in x's dtype. The kernel reads each row for its loss; where gradients are asked
for it goes through the row once more and turns it in place into the loss's gradient, for two further products. They are
made in the forward, as head.py wants them. The products do nearly all of the arithmetic; written in PyTorch's
operations the part in between is some twenty passes over a float32 copy of the logits. Its bound is the memory's
bandwidth: a block is read and written once, as the second pass finds its row (64 KB of 32,768 logits) in the cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .exclude_triton import available as available  # the same dtypes, devices and reasons
from .exclude_triton import jit

BLOCK_BYTES = 1 << 29  # of logits in x's dtype
COLUMNS = 4096  # of a row at a time: 16 a thread in 8 warps

# pyright: reportInvalidTypeForm=false
tl: Any = None  # triton.language from the first launch on, which annotations name


def head_nats(x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int) -> Tensor:
    """−ln softmax(logits)[target] of each row, float32 (n,): x (n, c), weight (rows ≥ vocabulary, c), targets int64.

    logits = cap · tanh(x Wᵀ / cap), or x Wᵀ where cap is 0. A row whose target is −1 has 0 nats, whatever it holds.
    Raises RuntimeError for a target beyond the vocabulary.
    """
    return _nats(x, weight, targets, float(cap), vocabulary)


def head_nats_and_gradients(
    x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None, cap: float, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor]:
    """nats as above, and the gradients of Σ scale · nats by x and weight, in their dtypes.

    scale (n,) float32, None: 1 for every row. A row whose target is −1 has no gradient and adds to none.
    """
    return _nats_and_gradients(x, weight, targets, scale, float(cap), vocabulary)


# --- operations: opaque to torch.compile


@torch.library.custom_op(
    "xsalab::head_triton",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor targets, float cap, int vocabulary) -> Tensor",
)
def _nats(x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int) -> Tensor:
    used = weight[:vocabulary].to(x.dtype)
    nats = torch.zeros(len(x), dtype=torch.float32, device=x.device)
    blocks, room = _blocks(x, targets, vocabulary)
    for part in blocks:
        logits = torch.mm(x[part], used.T, out=room[: len(part)])
        nats[part] = _launch(logits, targets[part], None, cap)
    return nats


@_nats.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, cap: float, vocabulary: int) -> Tensor:
    return x.new_empty(len(x), dtype=torch.float32)


@torch.library.custom_op(
    "xsalab::head_triton_gradients",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor targets, Tensor? scale, float cap, int vocabulary) "
    "-> (Tensor, Tensor, Tensor)",
)
def _nats_and_gradients(
    x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None, cap: float, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor]:
    used = weight[:vocabulary].to(x.dtype)
    nats = torch.zeros(len(x), dtype=torch.float32, device=x.device)
    scale = torch.ones_like(nats) if scale is None else scale
    grad_x = x.new_zeros(x.shape)
    grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    blocks, room = _blocks(x, targets, vocabulary)
    for part in blocks:
        rows = x[part]
        slopes = torch.mm(rows, used.T, out=room[: len(part)])  # the logits, and then the gradient by them
        nats[part] = _launch(slopes, targets[part], scale[part], cap)
        grad_x[part] = slopes @ used
        if x.dtype == torch.float32:
            grad_weight[:vocabulary].addmm_(slopes.T, rows)
        else:
            grad_weight[:vocabulary] += slopes.T @ rows
    return nats, grad_x, grad_weight.to(weight.dtype)


@_nats_and_gradients.register_fake
def _(
    x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None, cap: float, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(len(x), dtype=torch.float32), x.new_empty(x.shape), weight.new_empty(weight.shape)


def _blocks(x: Tensor, targets: Tensor, vocabulary: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """The rows that count, by blocks, and room for the logits of one."""
    # left out, not multiplied by 0: a masked row may hold anything, infinity included
    counted = (targets >= 0).nonzero()[:, 0]
    if not len(counted):
        return (), x.new_empty(0)
    if (largest := int(targets.max())) >= vocabulary:
        raise RuntimeError(f"target {largest} is beyond the vocabulary of {vocabulary}")
    size = max(1, BLOCK_BYTES // (x.element_size() * vocabulary))
    return counted.split(size), x.new_empty(min(size, len(counted)), vocabulary)


def _launch(logits: Tensor, targets: Tensor, scale: Tensor | None, cap: float) -> Tensor:
    """Nats of the rows, a program a row. With ``scale`` the logits become the gradient of Σ scale · nats by them."""
    rows, columns = logits.shape
    nats = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(COLUMNS, 1 << (columns - 1).bit_length())
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _jitted()[(rows,)](logits, targets, scale, nats, cap, columns, CAPPED=cap != 0, BLOCK=block, num_warps=8)
    return nats


@cache
def _jitted() -> Any:
    return jit(_kernel)


# --- the kernel: a row of logits (rows, columns), contiguous, by blocks of columns; float32 within.
# tanh |u| = (1 − e) / (1 + e) with e = exp(−2 |u|): right to 1e-7 absolutely, which is what a logit needs.


def _kernel(logits, targets, scale, nats, cap, columns, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
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
    log_total = top + tl.log(total)
    tl.store(nats + row, log_total - chosen)
    if scale is not None:
        factor = tl.load(scale + row)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            at = logits + row * columns + column
            x = tl.load(at, mask=column < columns, other=0.0).to(tl.float32)
            slope = factor
            if CAPPED:
                e = tl.exp(tl.abs(x) * rate)
                inverse = 1 / (1 + e)
                x = tl.where(x < 0, -cap, cap) * ((1 - e) * inverse)
                slope = factor * (4 * e * inverse * inverse)  # 1 − tanh², without its cancellation
            p = tl.exp(x - log_total) - tl.where(column == target, 1.0, 0.0)
            tl.store(at, (p * slope).to(logits.dtype.element_ty), mask=column < columns)
