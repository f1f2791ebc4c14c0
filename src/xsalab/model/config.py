"""ModelConfig: every number that shapes the network. Read with the formulas of docs/model.md."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

FLOAT32_EPS = 1.1920928955078125e-07


@dataclass(frozen=True)
class ModelConfig:
    """The shape and the constants of a GPT; the defaults are nanochat's (karpathy/nanochat 92d63d4).

    A zero in ``head_dim`` or ``kv_heads`` means "derive it": the properties ``head_size`` and
    ``groups`` give the number in use. Raises ValueError naming the field, the value and legal values.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    depth: int = 4
    width: int = 256
    heads: int = 4
    kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: width / heads
    context: int = 512
    vocab_size: int = 4096
    vocab_multiple: int = 64  # rows of embedding and head; the logits of the padding are cut

    window: str = "SSSL"  # one letter a layer, tiled: S short, L full; the last layer is always full
    window_share: int = 4  # S reaches back context / window_share, rounded up to a multiple of
    window_block: int = 128  # this many positions

    rotary_base: float = 100_000.0
    qk_norm: bool = True
    qk_scale: float = 1.2  # q and k are multiplied by it after their norm
    norm_eps: float = FLOAT32_EPS
    mlp_ratio: int = 4
    soft_cap: float = 15.0  # logits = cap · tanh(logits / cap); 0: no cap

    value_embeddings: bool = True
    value_gate_channels: int = 12
    value_gate_range: float = 3.0
    smear: bool = True
    smear_channels: int = 24
    backout: bool = True
    backout_start: float = 0.2
    residual_scalars: bool = True
    residual_start: float = 1.15  # r of the first layer,
    residual_fall: float = 0.10  # less this at the last layer, linear between
    x0_start: float = 0.20  # b of the first layer,
    x0_fall: float = 0.15  # less this at the last layer

    embedding_std: float = 0.8
    head_std: float = 0.001
    matrix_bound: float = 1.0  # W_q, W_k, W_v, VE: uniform within ± this · √3 / √width
    mlp_bound: float = 0.4  # W_1: the same with this factor
    gate_bound: float = 0.02  # gates: uniform in [0, this]

    def __post_init__(self) -> None:
        for name in ("depth", "width", "heads", "context", "vocab_size", "vocab_multiple", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in ("window_share", "window_block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.context < 2:
            raise ValueError(f"context = {self.context}: must be at least 2")
        for name in ("embedding_std", "head_std", "matrix_bound", "mlp_bound", "gate_bound"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be a finite number of at least 0")
        for name in ("rotary_base", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be a finite number above 0")
        for name in ("kv_heads", "head_dim"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be 0 (derived) or more")
        if self.head_dim == 0 and self.width % self.heads:
            down, up = self.width // self.heads * self.heads, -(-self.width // self.heads) * self.heads
            near = " or ".join(str(w) for w in (down, up) if w)
            raise ValueError(
                f"width = {self.width} is not divisible by heads = {self.heads}: "
                f"use width {near}, another number of heads, or state head_dim"
            )
        if self.head_size % 2:
            raise ValueError(
                f"head_dim = {self.head_size} is odd: rotary embeddings turn pairs of channels; "
                f"use {self.head_size + 1}"
            )
        if self.heads % self.groups:
            legal = [g for g in range(1, self.heads + 1) if self.heads % g == 0]
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}: use one of {legal}")
        if not self.window or set(self.window) - set("SL"):
            raise ValueError(f"window = {self.window!r}: one letter a layer, S (short) or L (full), such as 'SSSL'")
        if not 0 <= self.soft_cap < math.inf:
            raise ValueError(f"soft_cap = {self.soft_cap}: must be positive, or 0 for no cap")
        for switch, name in ((self.value_embeddings, "value_gate_channels"), (self.smear, "smear_channels")):
            if switch and not 1 <= getattr(self, name) <= self.width:
                raise ValueError(f"{name} = {getattr(self, name)}: must be from 1 to width = {self.width}")

    @property
    def head_size(self) -> int:
        """Channels of a head, D."""
        return self.head_dim or self.width // self.heads

    @property
    def groups(self) -> int:
        """Key/value heads; each serves heads / groups query heads."""
        return self.kv_heads or self.heads

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and the head: vocab_size padded up to vocab_multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def has_value_embedding(self, layer: int) -> bool:
        """Every second layer, the last one included."""
        return self.value_embeddings and layer % 2 == (self.depth - 1) % 2

    def is_full_window(self, layer: int) -> bool:
        """Whether the layer's window reaches over the whole context; the last layer's always does."""
        return layer == self.depth - 1 or self.window[layer % len(self.window)] == "L"

    def window_of(self, layer: int) -> int:
        """Earlier keys that a query of this layer sees besides itself (a full window: the context)."""
        if self.is_full_window(layer):
            return self.context
        return -(-self.context // (self.window_share * self.window_block)) * self.window_block
