"""Copies of the metrics to TensorBoard or Weights & Biases, when asked for. The run's own record needs neither."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..train import Hook, StepMetrics, TrainState
from .design import Cell


class TensorBoard(Hook):
    """Event files in RUN/tensorboard; what lies after the step of a resume is purged by the viewer."""

    def __init__(self, folder: Path, cell: Cell, config: Mapping[str, Any], step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("--tensorboard needs the package tensorboard: pip install 'xsalab[tensorboard]'") from None
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step or None)

    def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
        for name in ("loss", "grad_norm", "lr_factor"):
            self.writer.add_scalar(f"train/{name}", getattr(metrics, name), metrics.step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB(Hook):
    """One W&B run for each of ours, offline unless WANDB_MODE says otherwise.

    A resumed run opens a new W&B run of the same group, as W&B drops steps that it has seen.
    """

    def __init__(self, folder: Path, cell: Cell, config: Mapping[str, Any], step: int) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ValueError("--wandb needs the package wandb: pip install 'xsalab[wandb]'") from None
        os.environ.setdefault("WANDB_MODE", "offline")
        self.run = wandb.init(
            project="xsalab", group=cell.name, name=f"{cell.name}-from-{step}", dir=str(folder), config=dict(config)
        )

    def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
        values = {f"train/{name}": getattr(metrics, name) for name in ("loss", "grad_norm", "lr_factor")}
        self.run.log(values, step=metrics.step)

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB}
