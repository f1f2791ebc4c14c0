"""What the benchmarks train: models and steps as `xsalab run` makes them, on tokens drawn at random.

Text and its order do not change what a step costs. Sizes: ``SMALL`` and ``LARGE`` are the two models of the targets.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from xsalab.data import Batch, DataConfig
from xsalab.eval.validation import EvalConfig
from xsalab.experiment.building import build_state
from xsalab.experiment.design import RunConfig
from xsalab.model import ModelConfig, VariantChoice
from xsalab.optim import OptimConfig, Schedule
from xsalab.train import TrainConfig, TrainState, train_step

HEAD, VOCABULARY, CONTEXT, ROWS = 64, 8_192, 512, 16
SMALL, LARGE = (4, 256), (6, 384)  # depth, width
STATUS = Path("/proc/self/status")
STEPS = 1_000_000  # of the schedule: no benchmark reaches its end


def config_of(
    depth: int, width: int, *, variant: str = "standard", context: int = CONTEXT, rows: int = ROWS,
    vocabulary: int = VOCABULARY,
) -> RunConfig:  # fmt: skip
    """A run's configuration with full windows, everything else as it comes: dtype, attention kernel, compiling."""
    return RunConfig(
        seed=0,
        data=DataConfig(),
        model=ModelConfig(
            depth=depth, width=width, heads=width // HEAD, context=context, vocab_size=vocabulary, window="L"
        ),
        optim=OptimConfig(),
        train=TrainConfig(batch_tokens=rows * context, tokens=rows * context * STEPS, threads=torch.get_num_threads()),
        eval=EvalConfig(),
        variant=VariantChoice(variant),
    )


def random_tokens(rows: int, context: int, vocabulary: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 (rows, context); the same for the same step."""
    drawn = torch.randint(vocabulary, (rows, context + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def batch_of(config: RunConfig, step: int) -> Batch:
    """A run's batch, drawn."""
    rows = config.train.batch_rows(config.model.context)
    return Batch(*random_tokens(rows, config.model.context, config.model.vocab_size, step), torch.arange(rows))


def stepper(config: RunConfig) -> tuple[TrainState, Callable[[], float]]:
    """A new state, and one training step on it, which returns the loss. Raises ArithmeticError where that breaks."""
    state = build_state(config)
    schedule: Schedule = config.optim.schedule_over(STEPS)

    def step() -> float:
        metrics = train_step(state, batch_of(config, state.step), schedule)
        if not metrics.finite:
            raise ArithmeticError(f"step {metrics.step}: loss {metrics.loss}, gradient norm {metrics.grad_norm}")
        return metrics.loss

    return state, step


def peak_memory() -> int | None:
    """The most bytes that this process ever held; None where the system does not tell."""
    return _status("VmHWM")


def resident_memory() -> int | None:
    """The bytes that this process holds now; None where the system does not tell."""
    return _status("VmRSS")


def _status(name: str) -> int | None:
    # Not getrusage: its peak starts with that of the process that started this one.
    if not STATUS.is_file():
        return None
    found = [line.split() for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines()]
    return next((int(words[1]) * 1024 for words in found if words and words[0] == f"{name}:"), None)
