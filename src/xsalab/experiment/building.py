"""From a run's configuration to what trains: model, optimizer with its rates, corpus, batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..data import Batch, Corpus, DataConfig, Rows, batch_at, prepare
from ..model import GPT, ModelConfig, count_parameters, cuda, init_weights
from ..model.variant import check_choice
from ..optim import Hybrid, effective_rates
from ..optim.hybrid import Rates
from ..train import TrainState
from ..train.distributed import Alone, DataParallel, FullySharded
from ..train.loop import DTYPES, fast_bfloat16
from ..train.ranks import ALONE, Ranks
from .design import RunConfig


def compute_dtype(config: RunConfig) -> str:
    """ "float32" or "bfloat16": as configured, or what this processor has fast units for."""
    train = config.train
    if train.dtype != "auto":
        return train.dtype
    return "bfloat16" if fast_bfloat16(train.device) else "float32"


def rates_of(config: RunConfig) -> Rates:
    """The optimizer's rates for this model and batch."""
    return effective_rates(
        config.optim,
        width=config.model.width,
        batch_tokens=config.train.batch_tokens,
        scaling_parameters=scaling_parameters(config.model),
        reference_parameters=scaling_parameters(reference_model(config.model)),
    )


def reference_model(model: ModelConfig) -> ModelConfig:
    """Depth 12 at the same width per layer and the same head size: where nanochat's hyperparameters were tuned."""
    heads = max(1, round(12 * model.width / model.depth / model.head_size))
    return dataclasses.replace(
        model, depth=12, heads=heads, kv_heads=0, head_dim=model.head_size, width=heads * model.head_size
    )


@lru_cache(maxsize=64)
def scaling_parameters(model: ModelConfig) -> int:
    """Matrices of the blocks and the head. The model is never filled, so its memory is not touched."""
    return count_parameters(GPT(model)).scaling


def build_state(config: RunConfig, ranks: Ranks = ALONE) -> TrainState:
    """A model with the first weights of its seed, on its device, and its optimizer; divided among ``ranks``."""
    if config.train.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("train.device = 'cuda': torch finds no CUDA device here; use 'cpu'")
    dtype = DTYPES[compute_dtype(config)]
    model = GPT(config.model, config.variant, dtype=dtype, kernel=config.train.attention)
    init_weights(model, config.seed)
    if config.train.shard and ranks.world > 1:
        if config.train.compile:
            raise ValueError("train.compile with train.shard: slices are not compiled; use one of the two")
        division = FullySharded(model, config.optim.kind, ranks, config.train.device)
    else:
        model.to(config.train.device)
        division = DataParallel(model, config.optim.kind, ranks) if ranks.world > 1 else Alone(model)
    if config.train.device == "cuda":
        cuda.activate_fa3()  # where it cannot be, torch's own flash attention serves; the fingerprint tells which
    rates = rates_of(config)
    optimizer = division.optimizer(lambda parameters: Hybrid(parameters, config.optim, rates, dtype))
    state = TrainState(model, optimizer, division=division)
    if config.train.compile and not cannot_compile():
        windows = {config.model.window_of(layer) for layer in range(config.model.depth)}
        if config.train.device == "cuda":
            cuda.prepare(windows, config.model.context, config.train.device)
        state.token_nats = compiled_nats(model)
    return state


def compiled_nats(model: GPT) -> Callable[..., torch.Tensor]:
    """model.token_nats with its trunk compiled for fixed shapes; the head works in blocks of its own."""
    hidden = torch.compile(model.hidden, dynamic=False, fullgraph=True)
    return lambda tokens, targets: model.nats_of_hidden(hidden(tokens), targets)


@lru_cache(maxsize=1)
def cannot_compile() -> str:
    """Empty where torch.compile can work on this machine, else why not, in one line."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # torch raises kinds of its own for "no compiler"
        return f"no C++ compiler is installed ({type(error).__name__}): training runs uncompiled"
    return ""


@lru_cache(maxsize=4)
def open_corpus(data: DataConfig, vocab_size: int, home: Path) -> Corpus:
    """The prepared corpus, prepared now where it is not there yet."""
    return prepare(data, vocab_size, home)


def batches(config: RunConfig, rows: Rows, ranks: Ranks = ALONE) -> Callable[[int], Batch]:
    """The run's batch of a step, or this process's share of it: a pure function of its seed and the step."""
    batch_rows, permute = config.train.batch_rows(config.model.context), config.train.permute_rows
    return lambda step: batch_at(
        rows, seed=config.seed, step=step, batch_rows=batch_rows, permute=permute, rank=ranks.rank, world=ranks.world
    )


def derived(config: RunConfig) -> dict[str, Any]:
    """Numbers that follow from the configuration, stored beside it."""
    model = GPT(config.model, config.variant)  # never filled: its memory is not touched
    counts = count_parameters(model)
    extra = sum(variant.extra_flops() for variant in model.variants())
    rates, context = rates_of(config), config.model.context
    seen = sum(min(config.model.window_of(layer), context) + 1 for layer in range(config.model.depth))
    attention = 4 * config.model.heads * config.model.head_size * seen
    return {
        "steps": config.train.steps,
        "parameters": dict(counts._asdict(), total=counts.total, scaling=counts.scaling),
        "flops_per_token": 3 * (2 * counts.scaling + attention + extra),
        "lr": dict(rates.lr),
        "matrix_weight_decay": rates.matrix_weight_decay,
        "dtype": compute_dtype(config),
        "head_size": config.model.head_size,
        "kv_heads": config.model.groups,
        "layers": list(check_choice(config.variant, config.model)),
    }
