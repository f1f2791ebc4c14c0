"""Diagnostics of an experiment's runs: measured while they train where ``[diagnose]`` asks for it, or afterwards.

mechanism/step-N.parquet   one row a layer, head and range of positions (eval/diagnostics.py), with the weights after N
                           updates
geometry/step-N.parquet    one row a matrix: what update N did to it (optim/geometry.py), and a sketch of the update

Both lie in the run's folder and are written whole; a resumed run writes the same ones again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import config
from ..data import Corpus
from ..eval.diagnostics import Mechanism, diagnose, validation_rows
from ..files import make_folder
from ..model import GPT
from ..optim import assign_groups
from ..optim.geometry import matrix_geometry, sketch
from ..train import Hook, StepMetrics, TrainState
from .design import RunConfig
from .store import read_parquet, write_rows


@config
class DiagnoseConfig:
    """``rows`` validation rows are diagnosed every ``every`` steps from the first on, and at the end."""

    every: int = 0  # steps; 0: at the end alone
    rows: int = 8

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"every = {self.every}: steps, or 0 for the end alone")
        if self.rows < 1:
            raise ValueError(f"rows = {self.rows}: at least 1")


class Diagnosis(Hook):
    """Measures a run while it trains, and changes nothing of it."""

    def __init__(self, folder: Path, wanted: DiagnoseConfig, corpus: Corpus, run: RunConfig) -> None:
        self.folder, self.wanted, self.steps = folder, wanted, run.train.steps
        self.inputs, self.targets = validation_rows(corpus, run.eval, run.model.context, wanted.rows)
        self.before: dict[str, Tensor] = {}
        self.tried = False
        self.seconds = 0.0

    def before_step(self, state: TrainState) -> None:
        due = self.wanted.every and state.step % self.wanted.every == 0
        begin = time.perf_counter()
        if not self.tried:  # a variant that cannot be measured is told before it trains, not at its end
            diagnose(state.model, self.inputs[:1], self.targets[:1])
            self.tried = True
            self.seconds += time.perf_counter() - begin
        if not due and state.step != self.steps:
            return
        begin = time.perf_counter()
        write_mechanism(self.folder, state.step, diagnose(state.model, self.inputs, self.targets))
        if state.step < self.steps:
            self.before = {name: matrix.detach().clone() for name, matrix in _matrices(state.model).items()}
        self.seconds += time.perf_counter() - begin

    def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
        if not self.before:
            return
        begin = time.perf_counter()
        rows: list[dict[str, Any]] = []
        for name, matrix in _matrices(state.model).items():
            update = matrix.detach() - self.before[name]
            geometry = matrix_geometry(self.before[name], update)
            rows.append(
                {"step": metrics.step, "matrix": name, **geometry, "sketch": sketch(name, update).tolist()}
            )  # fmt: skip
        self.before = {}
        _write(self.folder / "geometry", metrics.step, rows)
        self.seconds += time.perf_counter() - begin


def _matrices(model: GPT) -> dict[str, torch.nn.Parameter]:
    """The matrices that Muon trains where there is Muon, by name."""
    groups = assign_groups(model)
    return {name: parameter for name, parameter in model.named_parameters() if groups[name] == "matrix"}


def write_mechanism(folder: Path, step: int, found: Mechanism) -> Path:
    """Stores a diagnosis in the run's folder."""
    loss = found.loss if math.isfinite(found.loss) else None  # of a run that is about to break down
    common = {"step": step, "loss": loss, "tokens": found.tokens}
    return _write(folder / "mechanism", step, [{**common, **row} for row in found.rows])


def _write(folder: Path, step: int, rows: list[dict[str, Any]]) -> Path:
    make_folder(folder)
    path = folder / f"step-{step:09d}.parquet"
    write_rows(path, rows)
    return path


def stored(folder: Path, kind: str, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The rows of a run's "mechanism" or "geometry", by step; [] where nothing was measured. None: all columns."""
    paths = sorted((folder / kind).glob("step-*.parquet"))
    return [row for path in paths for row in read_parquet(path, columns).to_pylist()]
