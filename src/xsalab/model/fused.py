"""Attention in one C++ kernel (csrc/attention.cpp), with the exclusion of XSA inside where it is asked for.

Saved for backward: q, k, v, the output, and two float32 numbers a head and position (the softmax's total, and the
ratio c of the exclusion). The output is what the output projection keeps anyway, so XSA keeps c alone in addition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .native import AFTER_LOADING, takes, with_rows


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes these: bfloat16 on a CPU that has it, heads of a multiple of 32, and not a few new
    tokens behind a long cache, whose keys it would pack anew each time.
    """
    long_enough = q.shape[1] >= 16 or q.shape[1] == k.shape[1]
    return takes(q, k, v) and q.shape[-1] % 32 == 0 and long_enough


def attention(q: Tensor, k: Tensor, v: Tensor, window: int, alpha: float | Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / √D) v within the window, q (b, t, h, d), k and v (b, s, g, d) -> (b, t, h, d).

    With ``alpha``, a number or a tensor () or (h,): exclude_self of it against v of the same tokens, in float32 until
    it is rounded once.
    """
    if alpha is not None:
        strengths = torch.as_tensor(alpha, dtype=torch.float32).expand(q.shape[2]).contiguous()
        return _Attention.apply(with_rows(q), with_rows(k), with_rows(v), window, strengths)
    return _Attention.apply(with_rows(q), with_rows(k), with_rows(v), window, None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, alpha: Tensor | None) -> Tensor:  # pyright: ignore
        out, log_total, ratio = torch.ops.xsalab.attention(q, k, v, window, alpha)
        ctx.save_for_backward(q, k, v, out, log_total, ratio, alpha)
        ctx.window = window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        *saved, alpha = ctx.saved_tensors
        gq, gk, gv, galpha = torch.ops.xsalab.attention_backward(with_rows(grad), *saved, ctx.window, alpha)
        return gq, gk, gv, None, None if alpha is None else galpha


def _tell_shapes() -> None:
    @torch.library.register_fake("xsalab::attention")
    def _(q: Tensor, k: Tensor, v: Tensor, window: int, alpha: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        b, t, h, _ = q.shape
        totals = q.new_empty((b, h, t), dtype=torch.float32)
        return q.new_empty(q.shape), totals, q.new_empty((b if alpha is not None else 0, h, t), dtype=torch.float32)

    @torch.library.register_fake("xsalab::attention_backward")
    def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
        return (
            q.new_empty(q.shape),
            k.new_empty(k.shape),
            v.new_empty(v.shape),
            q.new_empty(q.shape[2], dtype=torch.float32),
        )


AFTER_LOADING.append(_tell_shapes)
