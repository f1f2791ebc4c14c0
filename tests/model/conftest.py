"""A small model with every part at work: windows, grouped heads, value embeddings, weights away from zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from xsalab.model import GPT, ModelConfig, VariantChoice

SMALL = {
    "depth": 4, "width": 32, "heads": 4, "kv_heads": 2, "context": 16, "vocab_size": 50, "vocab_multiple": 16,
    "window_block": 4, "value_gate_channels": 4, "smear_channels": 8,
}  # fmt: skip


def build(
    name: str = "standard",
    options: dict | None = None,
    *,
    layers: str = "all",
    dtype: torch.dtype = torch.float32,
    kernel: str = "sdpa",
    **changes,
) -> GPT:
    """Every parameter gets numbers of its own, so that nothing hides behind a zero or a one."""
    config = ModelConfig(**{**SMALL, **changes})
    model = GPT(config, VariantChoice(name, layers, options or {}), dtype=dtype, kernel=kernel)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".strength.raw"):
                continue  # a learned α keeps the start that was asked for
            random = torch.Generator().manual_seed(sum(name.encode()))
            parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.3, generator=random))
    return model


@pytest.fixture
def tiny() -> Callable[..., GPT]:
    return build


@pytest.fixture
def tokens() -> torch.Tensor:
    """Two rows of 13 tokens: longer than the short window, no multiple of it."""
    return torch.randint(0, 50, (2, 13), generator=torch.Generator().manual_seed(0))
