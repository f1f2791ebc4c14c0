"""Projections, value embedding, rotary, QK norm; then the variant; then the output projection."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attend import Attend
from .config import ModelConfig
from .layers import Linear, rms_norm, rotate
from .linear import input_gradient, linear, served, weight_gradient
from .native import AFTER_LOADING
from .variant import QKV, Variant


class Attention(nn.Module):
    """W_o of the variant's heads. Knows nothing of any variant."""

    def __init__(self, config: ModelConfig, layer: int, variant: Variant) -> None:
        super().__init__()
        heads, groups, size = config.heads, config.groups, config.head_size
        self.config, self.variant = config, variant
        self.w_q = Linear(config.width, heads * size)
        self.w_k = Linear(config.width, groups * size)
        self.w_v = Linear(config.width, groups * size)
        self.w_o = Linear(heads * size, config.width)
        self.value_gate = Linear(config.value_gate_channels, groups) if config.has_value_embedding(layer) else None

    def forward(self, x: Tensor, value_embedding: Tensor | None, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x (b, t, c) is the normalised input, value_embedding (b, t, g·d) this layer's rows for the tokens."""
        config, size = self.config, self.config.head_size
        heads, groups = config.heads, config.groups
        if served(x) and size % 32 == 0 and config.qk_scale:
            return self.variant.project(self._fast(x, value_embedding, cos, sin), attend, self.w_o)
        # One product for all three, and one pass of rotary and norm for q and k together: the weights stay
        # apart (each is a matrix of its own for Muon), only the work is joined.
        weight = torch.cat((self.w_q.weight, self.w_k.weight, self.w_v.weight)).to(x.dtype)
        qk, v_projected = F.linear(x, weight).unflatten(-1, (-1, size)).split((heads + groups, groups), dim=2)
        v = v_projected
        if self.value_gate is not None and value_embedding is not None:
            gate = config.value_gate_range * torch.sigmoid(self.value_gate(x[..., : config.value_gate_channels]))
            v = v + gate.unsqueeze(-1) * value_embedding.to(x.dtype).unflatten(-1, (-1, size))
        qk = rotate(qk, cos, sin)
        if config.qk_norm:
            qk = rms_norm(qk, config.norm_eps, config.qk_scale)
        q, k = qk.split((heads, groups), dim=2)
        return self.variant.project(QKV(q, k, v, v_projected, x), attend, self.w_o)

    def _fast(self, x: Tensor, value_embedding: Tensor | None, cos: Tensor, sin: Tensor) -> QKV:
        """The same by csrc/heads.cpp."""
        gate = None if self.value_gate is None or value_embedding is None else self.value_gate.weight
        rows = None if gate is None else value_embedding
        weights = self.w_q.weight, self.w_k.weight, self.w_v.weight
        q, k, v, v_projected = _FastQKV.apply(x, *weights, gate, rows, cos.float(), sin.float(), self.config)
        return QKV(q, k, v, v if gate is None else v_projected, x)


class _FastQKV(torch.autograd.Function):
    """The joined product, then one pass; its backward is one pass to the gradient of the joined product.

    q, k and v are views of one (b, t, h + 2g, d) tensor. Of it backward needs q and k, which attention keeps anyway,
    and one factor a head: the product itself goes.
    """

    @staticmethod
    def forward(  # pyright: ignore
        ctx: Any,
        x: Tensor,
        w_q: Tensor,
        w_k: Tensor,
        w_v: Tensor,
        gate: Tensor | None,
        rows: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        config: ModelConfig,
    ) -> tuple[Tensor, ...]:
        heads, groups, size = config.heads, config.groups, config.head_size
        product = linear(x, torch.cat((w_q, w_k, w_v)))
        logits = None if gate is None else linear(x[..., : gate.shape[1]], gate)
        if rows is not None:
            rows = rows.to(x.dtype)
        made, factors = torch.ops.xsalab.qkv(
            product, cos, sin, logits, rows, heads, groups,
            config.value_gate_range, config.qk_scale, config.norm_eps, config.qk_norm,
        )  # fmt: skip
        q, k, v = made.split((heads, groups, groups), dim=2)
        v_projected = product.unflatten(-1, (-1, size))[:, :, heads + groups :]
        normed = (q, k, factors) if config.qk_norm else (None, None, None)
        ctx.save_for_backward(x, w_q, w_k, w_v, gate, rows, logits, cos, sin, *normed)
        ctx.set_materialize_grads(False)  # v_projected gets one from few variants
        ctx.config = config
        return q, k, v, v_projected

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, projected: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, w_q, w_k, w_v, gate, rows, logits, cos, sin, q, k, factors = ctx.saved_tensors
        config: ModelConfig = ctx.config
        dq, dk, dv = (
            x.new_zeros((*x.shape[:2], count, config.head_size)) if grad is None else grad
            for grad, count in ((dq, config.heads), (dk, config.groups), (dv, config.groups))
        )
        grad, grad_logits, grad_rows = torch.ops.xsalab.qkv_backward(
            dq, dk, dv, projected, q, k, factors, cos, sin, logits, rows,
            config.value_gate_range, config.qk_scale if config.qk_norm else 1.0,
        )  # fmt: skip
        weight = torch.cat((w_q, w_k, w_v))
        grad_x, grad_gate = input_gradient(grad, weight), None
        if gate is not None:
            channels = gate.shape[1]
            grad_x[..., :channels] += input_gradient(grad_logits, gate)
            grad_gate = weight_gradient(grad_logits, x[..., :channels], gate)
        by_weight = weight_gradient(grad, x, weight).split((len(w_q), len(w_k), len(w_v)))
        return grad_x, *by_weight, grad_gate, None if rows is None else grad_rows, None, None, None


def _shapes() -> None:
    """What the operations give, without doing it: for torch.compile."""

    @torch.library.register_fake("xsalab::qkv")
    def _(product, cos, sin, logits, rows, heads, groups, range, scale, eps, norm):
        b, t, width = product.shape
        factors = product.new_empty((b, t, heads + groups if norm else 0), dtype=torch.float32)
        return product.new_empty((b, t, heads + 2 * groups, width // (heads + 2 * groups))), factors

    @torch.library.register_fake("xsalab::qkv_backward")
    def _(dq, dk, dv, projected, q, k, factors, cos, sin, logits, rows, range, scale):
        (b, t, heads, size), groups = dq.shape, dk.shape[2]
        gated = groups if logits is not None else 0
        whole = dq.new_empty((b, t, (heads + 2 * groups) * size))
        return whole, dq.new_empty((b, t, gated)), dq.new_empty((b, t, gated * size))


AFTER_LOADING.append(_shapes)
