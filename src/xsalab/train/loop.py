"""The only training loop. Steps run from 0 to N − 1; the weights after s updates belong to step s.

A hook is an object with any of the methods of ``Hook``; validation, logging and checkpoints are hooks that
the caller hands in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..config import config
from ..data import Batch
from ..model import GPT
from ..optim import Hybrid, Schedule
from .distributed import Alone
from .ranks import Ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@config
class TrainConfig:
    """How long, in which batches and in which arithmetic. ``tokens`` is rounded up to whole steps."""

    tokens: int = 524_288
    batch_tokens: int = 8_192
    micro_rows: int = 0  # rows a forward pass of a process; 0: its whole share of the batch at once
    dtype: str = "auto"  # "float32", "bfloat16"; auto: bfloat16 where the processor has units for it
    device: str = "cpu"  # "cpu" or "cuda"
    threads: int = 1  # a run; runs are carried out side by side
    compile: bool = False  # torch.compile; in small runs on CPUs it costs more than it saves
    attention: str = "auto"  # kernel: "auto", "sdpa", "blocked" (short windows in long contexts), "explicit"
    permute_rows: bool = False  # another order of the rows inside every batch: the null control
    checkpoint_steps: int = 50
    processes: int = 1  # that share each batch, each with a device (or ``threads``) of its own
    shard: bool = False  # FSDP2: each process keeps a slice of the model instead of the whole

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_tokens", "threads", "checkpoint_steps", "processes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        legal = {
            "dtype": ("auto", *DTYPES),
            "device": ("cpu", "cuda"),
            "attention": ("auto", "sdpa", "blocked", "explicit"),
        }
        for name, values in legal.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} = {getattr(self, name)!r}: use one of {', '.join(values)}")
        if self.micro_rows < 0:
            raise ValueError(f"micro_rows = {self.micro_rows}: must be 0 (the whole batch) or more")

    @property
    def steps(self) -> int:
        """Optimizer steps of the run, N."""
        return -(-self.tokens // self.batch_tokens)

    def batch_rows(self, context: int) -> int:
        """Rows of a global batch. ValueError with the nearest legal values where it does not divide."""
        if self.batch_tokens % context:
            down = self.batch_tokens // context * context
            near = " or ".join(str(n) for n in (down, down + context) if n)
            raise ValueError(
                f"train.batch_tokens = {self.batch_tokens} is not a multiple of context = {context}: use {near}"
            )
        rows = self.batch_tokens // context
        if self.micro_rows and rows % self.micro_rows:
            legal = [n for n in range(1, rows + 1) if rows % n == 0]
            raise ValueError(
                f"train.micro_rows = {self.micro_rows} does not divide the {rows} rows of a batch: use one of {legal}"
            )
        if rows % self.processes:
            fewer = max(n for n in range(1, self.processes) if rows % n == 0)
            more = min((n for n in range(self.processes + 1, rows + 1) if rows % n == 0), default=0)
            up = -(-rows // self.processes) * self.processes * context
            raise ValueError(
                f"{self.processes} processes do not divide the {rows} rows of a batch: use {fewer}"
                f"{f' or {more}' if more else ''} processes, or train.batch_tokens = {up}"
            )
        return rows


def fast_bfloat16(device: str) -> bool:
    """Whether the processor multiplies bfloat16 matrices in units of its own (AMX, AVX512-BF16, tensor cores)."""
    if device == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


@dataclass
class TrainState:
    """All that a run carries from step to step; batches and schedules are functions of ``step``."""

    model: GPT
    optimizer: Hybrid
    step: int = 0
    token_nats: Callable[..., torch.Tensor] | None = None  # compiled form of model.token_nats
    schedules_ended: bool = False  # fine-tuning: a variant's own schedule stays at its end
    division: Alone = None  # pyright: ignore  # of a step among processes; none: this one does it all

    def __post_init__(self) -> None:
        self.division = self.division or Alone(self.model)

    @property
    def ranks(self) -> Ranks:
        """The processes that train this model together."""
        return self.division.ranks

    def tell_variants(self, steps: int) -> None:
        """Tells the variants how much of a run of ``steps`` is done, for their schedules."""
        self.model.set_progress(1.0 if self.schedules_ended else self.step / steps)


@dataclass(frozen=True)
class StepMetrics:
    """``loss``: mean nats over all counted tokens of global batch ``step``, with the weights before its update."""

    step: int
    loss: float
    grad_norm: float
    lr_factor: float
    tokens: int
    seconds: float
    data_seconds: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Hook:
    """Receives the state before each step (and after the last) and the metrics of each finished step."""

    def before_step(self, state: TrainState) -> None:
        """``state.step`` updates have been made."""

    def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
        """The step that ``metrics`` describes is done."""

    def close(self) -> None:
        """Training has ended, well or not."""


def micro_batches(
    inputs: torch.Tensor, targets: torch.Tensor, rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(inputs, targets) in pieces of ``rows`` rows; 0: all at once."""
    rows = rows or len(inputs)
    for start in range(0, len(inputs), rows):
        yield inputs[start : start + rows], targets[start : start + rows]


def train_step(
    state: TrainState, batch: Batch, schedule: Schedule, *, micro_rows: int = 0, clip: float = 0.0
) -> StepMetrics:
    """Forward, backward and one update on a global batch, or on this process's share of it.

    The loss of every micro-batch is its sum of nats over the count of targets in the whole batch, so that
    accumulation gives the gradient of the mean over all tokens however they are split. Where the loss or
    the gradient is not finite the weights stay as they were.
    """
    begin = time.perf_counter()
    model, optimizer, division = state.model, state.optimizer, state.division
    device = model.head.weight.device
    state.tell_variants(schedule.steps)
    optimizer.set_step(schedule, state.step)
    model.zero_grad(set_to_none=True)
    counted = division.counted(batch.targets)
    token_nats = state.token_nats or model.token_nats
    total = torch.zeros((), dtype=torch.float64, device=device)
    inputs, targets = (_sent(tokens, device) for tokens in (batch.inputs, batch.targets))
    pieces = list(micro_batches(inputs, targets, micro_rows))
    for number, (some_inputs, some_targets) in enumerate(pieces, 1):
        nats = token_nats(some_inputs, some_targets).sum()
        division.backward(nats / counted, last=number == len(pieces))
        total += nats.detach()
    loss, norm = division.reduce(total / counted)
    if clip and norm > clip and math.isfinite(norm):
        division.scale(clip / norm)
    tokens = batch.inputs.numel() * state.ranks.world
    metrics = StepMetrics(state.step, loss, norm, schedule.lr(state.step), tokens, 0.0, 0.0)
    if metrics.finite:
        division.step(optimizer)
        state.step += 1
    seconds = time.perf_counter() - begin
    return replace(metrics, seconds=seconds)


def _sent(tokens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A batch on the device; to a GPU without waiting for the copy."""
    return tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens.to(device)


class Diverged(ArithmeticError):
    """The loss or the gradient is not finite; ``metrics`` holds the step where it happened."""

    def __init__(self, metrics: StepMetrics) -> None:
        super().__init__(
            f"step {metrics.step}: loss {metrics.loss}, gradient norm {metrics.grad_norm}: not finite, stopped"
        )
        self.metrics = metrics


def train(
    state: TrainState,
    batch_of: Callable[[int], Batch],
    schedule: Schedule,
    *,
    micro_rows: int = 0,
    clip: float = 0.0,
    hooks: Sequence[Hook] = (),
) -> TrainState:
    """Trains from ``state.step`` to the schedule's end; ``batch_of(step)`` gives a step's batch.

    Raises Diverged, with the weights before the step that failed.
    """
    try:
        while True:
            state.tell_variants(schedule.steps)  # a validation sees this step's schedule as well
            for hook in hooks:
                hook.before_step(state)
            if state.step >= schedule.steps:
                return state
            begin = time.perf_counter()
            batch = batch_of(state.step)
            waited = time.perf_counter() - begin
            metrics = train_step(state, batch, schedule, micro_rows=micro_rows, clip=clip)
            metrics = replace(metrics, data_seconds=waited)
            if not metrics.finite:
                raise Diverged(metrics)
            for hook in hooks:
                hook.after_step(state, metrics)
    finally:
        for hook in hooks:
            hook.close()
