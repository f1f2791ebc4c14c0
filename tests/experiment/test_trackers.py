"""TensorBoard and W&B get copies; the run's own record needs neither."""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from xsalab.experiment import run as runs
from xsalab.experiment.run import run_cell
from xsalab.experiment.store import RunFolder
from xsalab.train import Hook, StepMetrics, TrainState

Numbers = Callable[[RunFolder], dict[str, Any]]


class FakeRun:
    """As W&B: a step not above the last one that was seen is dropped without a word."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.rows, self.finished = settings, {}, False

    def log(self, values: dict[str, float], step: int) -> None:
        assert not self.finished
        if step > max(self.rows, default=-1):
            self.rows[step] = values

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    opened: list[FakeRun] = []

    def init(**settings: Any) -> FakeRun:
        assert all(run.finished for run in opened), "one run at a time: another init would go on with it"
        opened.append(FakeRun(settings))
        return opened[-1]

    module = types.ModuleType("wandb")
    module.init = init  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return opened


class StopAt(Hook):
    """Ends a run after its step 2."""

    def __init__(self, *_: Any) -> None: ...

    def after_step(self, state: TrainState, metrics: StepMetrics) -> None:
        if metrics.step == 2:
            raise KeyboardInterrupt


def test_the_own_record_is_whole_without_the_tracker(
    lab: Any, wandb: list[FakeRun], monkeypatch: pytest.MonkeyPatch, numbers_of: Numbers
) -> None:
    """F132, F133: stopped at step 2, resumed at 2: the tracker sees the step in a run of its own, our record once."""
    whole = numbers_of(lab("whole").run())
    home = lab()
    monkeypatch.setitem(runs.TRACKERS, "stop", StopAt)
    with pytest.raises(KeyboardInterrupt):
        run_cell(dataclasses.replace(home.task(), trackers=("wandb", "stop")))
    run_cell(dataclasses.replace(home.task(), trackers=("wandb",)))
    assert numbers_of(home.folder()) == whole
    assert [run.settings["name"] for run in wandb] == ["base.standard.s0-from-0", "base.standard.s0-from-2"]
    assert [list(run.rows) for run in wandb] == [[0, 1, 2], [2, 3]]
    assert all(run.finished for run in wandb)
    losses = {row["step"]: row["loss"] for row in home.folder().metrics() if "loss" in row}
    assert {step: row["train/loss"] for run in wandb for step, row in run.rows.items()} == losses


def test_wandb_is_offline_unless_said_otherwise(
    lab: Any, wandb: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = lab()
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run_cell(dataclasses.replace(home.task(), trackers=("wandb",)))
    assert os.environ["WANDB_MODE"] == "disabled"
    monkeypatch.delenv("WANDB_MODE")
    run_cell(dataclasses.replace(home.task("xsa"), trackers=("wandb",)))
    assert os.environ["WANDB_MODE"] == "offline"
    assert [run.settings["group"] for run in wandb] == ["base.standard.s0", "base.xsa.s0"]


def test_a_missing_package_is_named_with_its_extra(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    home = lab()
    for name in ("wandb", "tensorboard"):
        with pytest.raises(ValueError, match=rf"--{name} needs the package {name}: pip install 'xsalab\[{name}\]'"):
            run_cell(dataclasses.replace(home.task(), trackers=(name,)))


def test_tensorboard_holds_every_step(lab: Any) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    home = lab()
    run_cell(dataclasses.replace(home.task(), trackers=("tensorboard",)))
    run = home.folder()
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss", "train/grad_norm", "train/lr_factor"]
    found = {event.step: event.value for event in events.Scalars("train/loss")}
    assert found == pytest.approx({row["step"]: row["loss"] for row in run.metrics() if "loss" in row}, rel=1e-6)
