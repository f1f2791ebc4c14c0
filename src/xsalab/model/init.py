"""First weights: every tensor is a pure function of (seed, its name), whatever else the model holds.

Drawn on the CPU in float32, then cast: an arm that adds a parameter shifts no other, and the start is
the same on every device and at every world size. Distributions: docs/model.md, "Start".
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from .gpt import GPT


def stream(seed: int, name: str) -> torch.Generator:
    """The random stream of one parameter."""
    number = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
    return torch.Generator().manual_seed(number % 2**63)


@torch.no_grad()
def init_weights(model: GPT, seed: int) -> None:
    """Fills every parameter in place, but for a variant's own, which its constructor has filled.

    Raises ValueError for a parameter that no rule claims.
    """
    config = model.config
    bound = config.matrix_bound * math.sqrt(3 / config.width)

    def uniform(name: str, shape: torch.Size, low: float, high: float) -> Tensor:
        return torch.empty(shape).uniform_(low, high, generator=stream(seed, name))

    def normal(name: str, shape: torch.Size, std: float) -> Tensor:
        return torch.empty(shape).normal_(0, std, generator=stream(seed, name)) if std else torch.zeros(shape)

    along = torch.arange(config.depth) / max(config.depth - 1, 1)
    for name, parameter in model.named_parameters():
        last, shape = name.removesuffix(".weight").rsplit(".", 1)[-1], parameter.shape
        if ".variant." in name:
            continue
        if name == "embedding.weight":
            value = normal(name, shape, config.embedding_std)
        elif name == "head.weight":
            value = normal(name, shape, config.head_std)
        elif name.startswith("value_embeddings.") or last in ("w_q", "w_k", "w_v"):
            value = uniform(name, shape, -bound, bound)
        elif last == "w1":
            value = uniform(name, shape, -bound * config.mlp_bound, bound * config.mlp_bound)
        elif last in ("w_o", "w2", "smear"):
            value = torch.zeros(shape)
        elif last in ("value_gate", "smear_gate"):
            value = uniform(name, shape, 0.0, config.gate_bound)
        elif name == "residual":
            value = config.residual_start - config.residual_fall * along
        elif name == "x0":
            value = config.x0_start - config.x0_fall * along
        elif name == "backout":
            value = torch.full(shape, config.backout_start)
        else:
            raise ValueError(f"no rule gives parameter {name} {tuple(shape)} its first value")
        parameter.copy_(value)
