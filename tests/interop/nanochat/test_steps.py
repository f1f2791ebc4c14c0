"""The log of nanochat's steps: its file. What is written into it, test_main.py asks of whole runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from xsalab.interop.nanochat import StepLog, watch_steps


@pytest.fixture
def log(tmp_path: Path) -> StepLog:
    return StepLog(tmp_path / "metrics.jsonl")


def rows(log: StepLog) -> list[dict[str, float]]:
    return [json.loads(line) for line in log.path.read_text(encoding="utf-8").splitlines()]


def step(log: StepLog, *losses: float) -> None:
    log.losses += [torch.tensor(loss) for loss in losses]
    log.updated()


def test_a_step_s_loss_is_the_sum_of_what_was_given_to_backward(log: StepLog) -> None:
    """F131: each micro-batch's loss was divided by their number. Row s is of the weights before update s."""
    log.write({"val_bpb": 2.0})
    step(log, 1.0, 0.5)
    step(log, 1.25)
    log.write({"val_bpb": 1.5})
    assert rows(log) == [
        {"step": 0, "val_bpb": 2.0}, {"step": 0, "loss": 1.5}, {"step": 1, "loss": 1.25}, {"step": 2, "val_bpb": 1.5},
    ]  # fmt: skip


def test_ranks_are_averaged_and_the_first_writes(log: StepLog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """F131: another rank with a loss of 4 beside ours of 2."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda loss: loss.add_(4.0))
    step(log, 2.0)
    assert rows(log) == [{"step": 0, "loss": 3.0}]
    monkeypatch.setenv("RANK", "1")
    other = StepLog(tmp_path / "other.jsonl")
    step(other, 2.0)
    assert not other.path.exists()


def test_a_run_that_goes_on_cuts_the_log_back_to_its_step(log: StepLog, tmp_path: Path) -> None:
    """F132: also where the last line was cut off in the middle; a run from the start leaves nothing of an older one."""
    log.path.write_text(
        '{"step": 0, "loss": 5}\n{"step": 1, "loss": 4}\n{"step": 2, "loss": 3}\n{"st', encoding="utf-8"
    )
    log.begin(2)
    step(log, 3.5)
    assert rows(log) == [{"step": 0, "loss": 5}, {"step": 1, "loss": 4}, {"step": 2, "loss": 3.5}]
    again = StepLog(log.path)
    step(again, 6.0)
    assert rows(again) == [{"step": 0, "loss": 6.0}]


def test_a_diverged_loss_is_written_as_it_is(log: StepLog) -> None:
    """The experiment must see that the run diverged, and not a step that is missing."""
    step(log, float("nan"))
    assert rows(log)[0]["loss"] != rows(log)[0]["loss"]


def test_an_update_without_a_loss_is_no_step_in_silence(log: StepLog) -> None:
    with pytest.raises(ValueError, match="this checkout's loop is not understood"):
        log.updated()


def test_float16_is_refused(checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NANOCHAT_DTYPE", "float16")
    with pytest.raises(ValueError, match="--log does not know which updates its scaler skips"):
        watch_steps(tmp_path / "log.jsonl")


def test_a_nanochat_that_is_built_in_another_way_is_refused(checkout: Path, tmp_path: Path) -> None:
    file = checkout / "scripts" / "base_eval.py"
    file.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"scripts\.base_eval has no evaluate_core"):
        watch_steps(tmp_path / "log.jsonl")
