"""Schedules at named points, by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from xsalab.optim import OptimConfig, Schedule

LONG = Schedule("nanochat", 2000)  # warm-up 40; warm-down the last 1300: steps 700 to 1999


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 1 / 40),
        (19, 0.5),
        (39, 1.0),
        (40, 1.0),
        (700, 1.0),
        (701, 0.05 + 0.95 * 1299 / 1300),
        (1350, 0.05 + 0.95 * 0.5),
        (1999, 0.05 + 0.95 / 1300),
        (2000, 0.05),
    ],
)
def test_nanochats_rate(step: int, factor: float) -> None:
    assert LONG.lr(step) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("step", "momentum"),
    [(0, 0.85), (200, 0.91), (400, 0.97), (700, 0.97), (1350, 0.935), (2000, 0.90)],
)
def test_nanochats_momentum(step: int, momentum: float) -> None:
    assert LONG.momentum(step) == pytest.approx(momentum, rel=1e-12)


def test_the_climb_of_the_momentum_wins_over_the_warm_down() -> None:
    short = Schedule("nanochat", 300)  # the warm-down begins at step 105, the climb ends after the run
    assert short.momentum(200) == pytest.approx(0.91)
    assert short.lr(200) == pytest.approx(0.05 + 0.95 * 100 / 195)


@pytest.mark.parametrize(("step", "factor"), [(0, 1.0), (500, 0.5 + 0.5**1.5), (1000, 0.5), (2000, 0.0)])
def test_decay_is_half_a_cosine(step: int, factor: float) -> None:
    assert LONG.weight_decay(step) == pytest.approx(factor, abs=1e-12)


@pytest.mark.parametrize(
    ("step", "factor"),
    [(0, 0.1), (9, 1.0), (10, 1.0), (60, 0.55), (35, 0.1 + 0.9 * (0.5 + 0.5**1.5)), (110, 0.1)],
)
def test_cosine_rate(step: int, factor: float) -> None:
    assert Schedule("cosine", 110, warmup=10, final=0.1).lr(step) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("kind", ["nanochat", "cosine"])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 60, 1000])
@pytest.mark.parametrize("warmup", [0, 1, 10, 40])
@pytest.mark.parametrize("warmdown", [0.01, 0.65, 1.0])
def test_no_factor_leaves_its_range(kind: str, steps: int, warmup: int, warmdown: float) -> None:
    """F120: never below the floor, never above 1, whatever the length; past the end it stays at the floor."""
    schedule = Schedule(kind, steps, warmup, warmdown, final=0.05)
    for step in range(2 * steps + 50):
        floor = 0.05 if step >= warmup else 1 / warmup
        assert min(floor, 1.0) - 1e-12 <= schedule.lr(step) <= 1 + 1e-12
        assert 0.85 - 1e-12 <= schedule.momentum(step) <= 0.97 + 1e-12
        assert -1e-12 <= schedule.weight_decay(step) <= 1
    if steps > warmup:
        assert schedule.lr(steps) == pytest.approx(0.05)


@pytest.mark.parametrize("kind", ["nanochat", "cosine"])
def test_the_rate_falls_steadily_to_the_last_step(kind: str) -> None:
    """F120: it ends exactly at the last step, not before."""
    rates = [Schedule(kind, 100, warmup=5).lr(step) for step in range(5, 101)]
    assert all(later <= earlier for earlier, later in pairwise(rates))
    assert rates[-2] > rates[-1] == pytest.approx(0.05)


def test_the_schedule_comes_from_the_configuration() -> None:
    """F043: every number of it is a field."""
    config = OptimConfig(
        schedule="cosine", warmup_steps=7, warmdown=0.5, final_lr=0.2, momentum_start=0.1, momentum_peak=0.2,
        momentum_end=0.15, momentum_steps=9,
    )  # fmt: skip
    assert config.schedule_over(123) == Schedule("cosine", 123, 7, 0.5, 0.2, 0.1, 0.2, 0.15, 9)
