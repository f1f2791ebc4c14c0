"""Running the cells of a tiny experiment in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from xsalab.experiment.design import Cell, Experiment
from xsalab.experiment.fleet import begin_experiment, tasks
from xsalab.experiment.reading import load_experiment
from xsalab.experiment.run import RunTask, run_cell
from xsalab.experiment.store import RunFolder, RunStore


def numbers(run: RunFolder) -> dict[str, Any]:
    """What a run found, time fields aside: weights, every metric, every document's score."""
    rows = [{key: value for key, value in row.items() if not key.endswith("seconds")} for row in run.metrics()]
    return {"weights": run.status["weights"], "rows": rows, "scores": run.scores()}


@dataclass
class Lab:
    """A loaded experiment, its store and its cells' tasks."""

    experiment: Experiment
    store: RunStore
    out: Path

    def task(self, arm: str = "standard", seed: int = 0, point: str = "base") -> RunTask:
        found = next(task for task in tasks(self.experiment, self.out) if task.cell == Cell(point, arm, seed))
        assert isinstance(found, RunTask), "the lab is of our own engine"
        return found

    def folder(self, arm: str = "standard", seed: int = 0, point: str = "base") -> RunFolder:
        return self.store.run(Cell(point, arm, seed))

    def run(self, arm: str = "standard", seed: int = 0, point: str = "base") -> RunFolder:
        run_cell(self.task(arm, seed, point))
        return self.folder(arm, seed, point)

    def run_all(self) -> None:
        for task in tasks(self.experiment, self.out):
            run_cell(task)


@pytest.fixture
def lab(write_experiment: Callable[..., Path], tmp_path: Path) -> Callable[..., Lab]:
    """Prepares a tiny experiment under ``tmp_path / out``; keyword arguments as for write_experiment."""

    def make(stem: str = "tiny", out: str = "out", **changes: Any) -> Lab:
        experiment = load_experiment(write_experiment(stem, **changes))
        store, _ = begin_experiment(experiment, tmp_path / out)
        return Lab(experiment, store, tmp_path / out)

    return make


@pytest.fixture
def numbers_of() -> Callable[[RunFolder], Mapping[str, Any]]:
    return numbers
