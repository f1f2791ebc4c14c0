"""Step times in turns: what is measured, in which order, and that a drift of the machine cancels."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from xsalab.data import Batch
from xsalab.eval import throughput
from xsalab.eval.throughput import busy_share, interleaved_step_times, median_of, saved_bytes
from xsalab.model import GPT, ModelConfig, VariantChoice, init_weights
from xsalab.optim import Hybrid, OptimConfig
from xsalab.optim.hybrid import GROUPS, Rates
from xsalab.stats import ratio_estimate
from xsalab.train import TrainState

CONFIG = ModelConfig(depth=2, width=32, heads=2, context=32, vocab_size=50, vocab_multiple=16, window_block=8)


def make_state(name: str = "standard", **options: Any) -> TrainState:
    model = GPT(CONFIG, VariantChoice(name, options=options))
    init_weights(model, 0)
    return TrainState(model, Hybrid(model, OptimConfig(), Rates(dict.fromkeys(GROUPS, 0.01), 0.0)))


def batch_of(step: int) -> Batch:
    tokens = torch.randint(50, (4, 33), generator=torch.Generator().manual_seed(step))
    return Batch(tokens[:, :-1], tokens[:, 1:], torch.arange(4))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str, int], float]], list[tuple[str, int]]]:
    """Replaces the timed step by ``seconds(name, n)`` for the n-th step of all; returns what was asked, in order."""

    def install(seconds: Callable[[str, int], float]) -> list[tuple[str, int]]:
        asked: list[tuple[str, int]] = []

        def timed(state: Any, batch: int, schedule: Any, micro_rows: int) -> float:
            asked.append((state, batch))
            return seconds(state, len(asked) - 1)

        monkeypatch.setattr(throughput, "_timed", timed)
        return asked

    return install


def test_the_order_goes_there_and_back(clock: Any) -> None:
    """A B C C B A, round after round, all on the same batch of a leg."""
    asked = clock(lambda name, n: 1.0)
    times = interleaved_step_times({name: name for name in "ABC"}, lambda step: step, rounds=2, warmup=0)  # pyright: ignore
    assert "".join(name for name, _ in asked) == "ABCCBAABCCBA"
    assert [batch for _, batch in asked] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert {name: len(values) for name, values in times.items()} == {"A": 4, "B": 4, "C": 4}


def test_the_warm_up_is_not_in_the_result(clock: Any) -> None:
    """F130: first steps a hundred times slower leave no trace; the median of the rest is told."""
    clock(lambda name, n: 100.0 if n < 4 else 1.0)
    times = interleaved_step_times({"A": "A", "B": "B"}, lambda step: step, rounds=5, warmup=2)  # pyright: ignore
    assert times == {"A": [1.0] * 10, "B": [1.0] * 10}
    assert median_of(times["A"]) == 1.0


def test_a_steady_drift_cancels(clock: Any) -> None:
    """A machine that slows down by 1 % a step: B costs 1.1 A, and the ratio says so; blocks A…A B…B would not."""
    clock(lambda name, n: (1.1 if name == "B" else 1.0) * 1.01**n)
    times = interleaved_step_times({"A": "A", "B": "B"}, lambda step: step, rounds=8, warmup=1)  # pyright: ignore
    assert ratio_estimate(times["A"], times["B"]).median == pytest.approx(1.1, rel=0.01)


def test_real_steps_are_timed_and_counted() -> None:
    told = []
    states = {"standard": make_state(), "xsa": make_state("xsa")}
    times = interleaved_step_times(states, batch_of, rounds=2, warmup=1, tick=lambda *done: told.append(done))
    assert told == [(1, 2), (2, 2)]
    assert all(0 < seconds < 10 for values in times.values() for seconds in values)
    assert {state.step for state in states.values()} == {5}


def test_saved_bytes_count_each_storage_once_and_no_parameter() -> None:
    """x → x·x·x of n float32 keeps x and x² (n · 4 bytes each), however often a view of them is saved."""

    class Cube(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1000))
            self.head = torch.nn.Linear(1, 1)

        def token_nats(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.weight * inputs.float()  # keeps the inputs as floats; the parameter is not counted
            return x * x[:] * x.view(-1)

    model = Cube()
    state = TrainState(model, None)  # pyright: ignore
    batch = Batch(torch.ones(1, 1000, dtype=torch.int64), torch.zeros(1, 1000, dtype=torch.int64), torch.arange(1))
    assert saved_bytes(state, batch) == 3 * 4 * 1000


def test_saved_bytes_are_those_of_one_micro_batch() -> None:
    state = make_state()
    whole, half = saved_bytes(state, batch_of(0)), saved_bytes(state, batch_of(0), micro_rows=2)
    assert half == pytest.approx(whole / 2, rel=0.1)
    assert saved_bytes(state, batch_of(0)) == whole, "measuring leaves nothing behind"


def test_the_median() -> None:
    for values in ([3.0], [1.0, 4.0], [5.0, 1.0, 3.0], [4.0, 1.0, 2.0, 3.0]):
        assert median_of(values) == statistics.median(values)


def test_the_share_of_others_comes_from_the_system_s_ticks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """100 ticks pass, 70 of them idle and 5 waiting for a disk: others hold a quarter. No such file: unknown."""
    stat = tmp_path / "stat"
    lines = ["cpu  100 0 50 1000 10 0 0 0 0 0\n", "cpu  115 0 60 1070 15 0 0 0 0 0\n"]
    stat.write_text(lines[0], encoding="ascii")
    monkeypatch.setattr(throughput, "STAT", stat)
    monkeypatch.setattr(throughput.time, "sleep", lambda seconds: stat.write_text(lines[1], encoding="ascii"))
    assert busy_share() == pytest.approx(0.25)
    monkeypatch.setattr(throughput, "STAT", tmp_path / "none")
    assert busy_share() is None
