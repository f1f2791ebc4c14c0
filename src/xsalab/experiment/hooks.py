"""What watches our own loop, in pretraining and fine-tuning alike: checkpoints, validation, metrics, progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..eval import ItemScore
from ..eval.bits_per_byte import total_bpb
from ..model import GPT
from ..train import Hook, StepMetrics, TrainState
from ..train.checkpoint import save_checkpoint
from .store import MetricsLog


class Checkpoints(Hook):
    """Saves every ``every`` steps and at the end, before anything else happens at that step."""

    def __init__(self, folder: Path, log: MetricsLog, every: int, steps: int, saved_at: int) -> None:
        self.folder, self.log, self.every, self.steps, self.saved_at = folder, log, every, steps, saved_at

    def before_step(self, state: TrainState) -> None:
        due = state.step == self.steps or (state.step and state.step % self.every == 0)
        if due and state.step != self.saved_at:
            self.log.sync()
            save_checkpoint(self.folder, state, {})
            self.saved_at = state.step


class Validation(Hook):
    """val_bpb[s] with the weights after s updates; at the end the rows that are kept.

    ``every`` steps from the first on; 0: at the end alone, and with ``first`` before the first step.
    """

    def __init__(
        self, log: MetricsLog, evaluate: Callable[[GPT], list[ItemScore]], every: int, steps: int, first: bool = False
    ) -> None:
        self.log, self.evaluate, self.every, self.steps, self.first = log, evaluate, every, steps, first
        self.scores: list[ItemScore] = []
        self.seconds = 0.0

    def before_step(self, state: TrainState) -> None:
        due = state.step % self.every == 0 if self.every else self.first and state.step == 0
        if due or state.step == self.steps:
            begin = time.perf_counter()
            self.scores = self.evaluate(state.model)
            self.seconds = time.perf_counter() - begin
            self.log.write({"step": state.step, "val_bpb": total_bpb(self.scores), "eval_seconds": self.seconds})


class Metrics(Hook):
    """One row a step, with what the variants log."""

    def __init__(self, log: MetricsLog) -> None:
        self.log = log

    def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
        row: dict[str, Any] = dict(vars(metrics))
        for layer, variant in enumerate(state.model.variants()):
            row |= {f"layer{layer}.{name}": value for name, value in variant.logged().items()}
        self.log.write(row)


class Report(Hook):
    """Tells the caller how far the run is, at most a few times a second."""

    def __init__(self, steps: int, event: Callable[[dict[str, Any]], None]) -> None:
        self.steps, self.event, self.last = steps, event, 0.0

    def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
        now = time.perf_counter()
        if now - self.last > 0.3 or state.step == self.steps:
            self.last = now
            self.event({"kind": "step", "step": state.step, "steps": self.steps, "loss": metrics.loss})
