"""Projections, value embedding, rotary, QK norm; then the variant; then the output projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attend import Attend
from .config import ModelConfig
from .layers import Linear, rms_norm, rotate
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
