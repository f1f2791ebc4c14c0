"""GPT of the nanochat family: smeared embedding, blocks with residual scalars, backout, capped logits.

Formulas and constants: docs/model.md; each constant is a field of ModelConfig.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .attend import KVCache, LayerAttend
from .attention import Attention
from .config import ModelConfig
from .head import capped_logits, token_nats
from .layers import MLP, Embedding, Linear, add_norm, rms_norm, rotary_tables, smear, smear_from
from .native import load as load_native
from .variant import VariantChoice, build_variant


class Block(nn.Module):
    """x ← x + Attn(norm x);  x ← x + MLP(norm x)."""

    def __init__(self, config: ModelConfig, layer: int, choice: VariantChoice) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.attention = Attention(config, layer, build_variant(choice, config, layer))
        self.mlp = MLP(config.width, config.mlp_ratio * config.width)

    def forward(
        self, x: Tensor, normed: Tensor, value_embedding: Tensor | None, cos: Tensor, sin: Tensor, attend: LayerAttend
    ) -> Tensor:
        """x (b, t, c) and its norm, which whoever made x has at hand."""
        x, normed = add_norm(x, self.attention(normed, value_embedding, cos, sin, attend), self.eps)
        return x + self.mlp(normed)


class GPT(nn.Module):
    """Tokens (b, t) to logits (b, t, vocabulary).

    ``dtype`` is that of matrix products and activations; matrices keep float32 masters, in bfloat16 the
    tables E and VE are stored in it. ``kernel`` names the attention kernel (attend.KERNELS).
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        choice: VariantChoice | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        self.config, self.choice, self.dtype, self.kernel = config, choice or VariantChoice(), dtype, kernel
        if dtype == torch.bfloat16:
            load_native()
        rows, kv_width = config.vocab_rows, config.groups * config.head_size
        self.embedding = Embedding(rows, config.width, dtype=dtype)
        self.blocks = nn.ModuleList(Block(config, layer, self.choice) for layer in range(config.depth))
        self.head = Linear(config.width, rows)
        self.value_embeddings = nn.ModuleDict(
            {
                str(layer): Embedding(rows, kv_width, dtype=dtype)
                for layer in range(config.depth)
                if config.has_value_embedding(layer)
            }
        )
        if config.residual_scalars:
            self.residual = nn.Parameter(torch.empty(config.depth))  # r
            self.x0 = nn.Parameter(torch.empty(config.depth))  # b
        if config.smear:
            self.smear_gate = Linear(config.smear_channels, 1)
            self.smear = nn.Parameter(torch.empty(1))  # λ_s
        if config.backout:
            self.backout = nn.Parameter(torch.empty(1))  # λ_b
        self._tabulate(config.context)

    def _tabulate(self, length: int) -> None:
        cos, sin = rotary_tables(length, self.config.head_size, self.config.rotary_base)
        self.register_buffer("cos", cos.to(self.head.weight.device), persistent=False)
        self.register_buffer("sin", sin.to(self.head.weight.device), persistent=False)

    def set_progress(self, fraction: float) -> None:
        """Tells every variant how much of the run is done (0 to 1), for schedules."""
        for variant in self.variants():
            variant.set_progress(fraction)

    def variants(self) -> list:
        """The variants in use, by layer."""
        return [block.attention.variant for block in self.blocks]  # pyright: ignore

    def hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """The last layer's output after its norm, (b, t, c): what the head multiplies."""
        config, eps, t = self.config, self.config.norm_eps, tokens.shape[1]
        start, places = 0, None
        if cache is not None:
            cache.check_rows(tokens.shape[0])
            start, places = cache.length, cache.places(t)
        if start + t > self.cos.shape[1]:
            self._tabulate(2 * (start + t))  # prompts longer than the context: the table grows
        if places is None:
            cos, sin = (table[:, start : start + t] for table in (self.cos, self.sin))
        else:
            cos, sin = (table[0, places.query] for table in (self.cos, self.sin))

        x = embedded = rms_norm(self.embedding(tokens).to(self.dtype), eps)
        if config.smear:
            x = self._smear(x, cache)
        x0, middle = x, None
        for layer, block in enumerate(self.blocks):
            if config.residual_scalars:  # x ← r x + b x⁰
                x, normed = add_norm(x, x0, eps, self.residual[layer], self.x0[layer])
            else:
                normed = rms_norm(x, eps)
            rows = self.value_embeddings[str(layer)](tokens) if str(layer) in self.value_embeddings else None
            attend = LayerAttend(config.window_of(layer), self.kernel, cache, layer, places)
            x = block(x, normed, rows, cos, sin, attend)
            if layer == config.depth // 2:
                middle = x
        if cache is not None:
            cache.advance(embedded if config.smear else embedded[..., :0])
        if config.backout and middle is not None:
            return add_norm(x, middle, eps, b=-self.backout)[1]
        return rms_norm(x, eps)

    def _smear(self, x: Tensor, cache: KVCache | None) -> Tensor:
        """x_t += λ_s σ(W_s x_t[:k]) x_{t−1}, with x before smearing; position 0 has nothing before it."""
        if cache is None or cache.last_embedding is None:
            return smear(x, self.smear_gate, self.smear)
        before = torch.cat((cache.last_embedding, x[:, :-1]), dim=1)
        return smear_from(x[:, :0], x, before, self.smear_gate, self.smear)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits (b, t, vocab_size) in float32."""
        logits = capped_logits(self.hidden(tokens, cache), self.head.weight, self.config.soft_cap)
        return logits[..., : self.config.vocab_size]

    def token_nats(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """−ln p(target) at every position, (b, t) in float32; 0 where the target is −1."""
        return self.nats_of_hidden(self.hidden(tokens), targets)

    def nats_of_hidden(self, x: Tensor, targets: Tensor) -> Tensor:
        """``token_nats`` from what ``hidden`` gave."""
        return token_nats(x, self.head.weight, targets, self.config.soft_cap, self.config.vocab_size)


class Counts(NamedTuple):
    """Parameters by role, as nanochat counts them."""

    embedding: int
    value_embeddings: int
    head: int
    matrices: int
    other: int

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def scaling(self) -> int:
        """The count that token budgets are a multiple of: matrices of the blocks, gates included, and the head."""
        return self.matrices + self.head


def count_parameters(model: GPT) -> Counts:
    """Parameters by role; every parameter is counted once."""
    counts = dict.fromkeys(Counts._fields, 0)
    for name, parameter in model.named_parameters():
        role = name.split(".")[0]
        if role == "blocks":
            role = "other" if ".variant." in name else "matrices"
        counts[role if role in counts else "other"] += parameter.numel()
    return Counts(**counts)
