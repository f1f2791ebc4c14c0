"""A training state of two small layers, and batches that are a function of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from xsalab.data import Batch
from xsalab.model import GPT, ModelConfig, VariantChoice, init_weights
from xsalab.optim import Hybrid, OptimConfig
from xsalab.optim.hybrid import GROUPS, Rates
from xsalab.train import TrainState

CONFIG = ModelConfig(
    depth=2, width=32, heads=2, context=16, vocab_size=50, vocab_multiple=16, window_block=4,
    value_gate_channels=4, smear_channels=8,
)  # fmt: skip


def make_state(
    options: Mapping[str, Any] | None = None, dtype: torch.dtype = torch.float32, rate: float = 0.01
) -> TrainState:
    model = GPT(CONFIG, VariantChoice("xsa", options=options or {}), dtype=dtype)
    init_weights(model, 0)
    return TrainState(model, Hybrid(model, OptimConfig(), Rates(dict.fromkeys(GROUPS, rate), 0.0), dtype))


def make_batch(step: int, rows: int = 4) -> Batch:
    tokens = torch.randint(50, (rows, 17), generator=torch.Generator().manual_seed(step))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].clone(), torch.arange(rows))


@pytest.fixture
def state() -> TrainState:
    return make_state()


@pytest.fixture
def fresh() -> Callable[..., TrainState]:
    return make_state


@pytest.fixture
def batch_of() -> Callable[..., Batch]:
    return make_batch
