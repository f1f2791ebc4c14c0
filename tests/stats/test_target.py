"""Time to target and equal time: by hand, with every kind of censoring, and in a world whose truth is known."""

# pyright: reportOptionalOperand=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import stats

from xsalab.stats import Bounds, PairTable, equal_time_by_slope, mean_difference, time_ratio, time_to_target

BUDGETS = (100, 200, 400)


def ready(result) -> str:
    """As JSON, which has neither infinity nor NaN."""
    return json.dumps(dataclasses.asdict(result), allow_nan=False)


# ---- time to target


def test_a_crossing_is_interpolated_between_complete_budgets():
    """From 1.0 at 100 steps to 0.8 at 200: 0.95 is met at 125 steps, 62.5 s at half a second each."""
    result = time_to_target(BUDGETS, np.array([[1.0, 0.8, 0.7]]), 0.95, 0.5)
    assert result.seconds[0] == pytest.approx((62.5, 62.5))
    assert (result.not_reached, result.within) == (0, 0)
    on_a_budget = time_to_target(BUDGETS, np.array([[1.0, 0.8, 0.7]]), 0.8, 0.5)
    assert on_a_budget.seconds[0] == Bounds(100, 100)


def test_crossings_agree_with_numpy_interp():
    rng = np.random.default_rng(0)
    values = np.sort(rng.uniform(0.5, 1, (20, 5)), axis=1)[:, ::-1]
    budgets = (10, 30, 50, 80, 200)
    target = float(values[:, 2].mean())
    result = time_to_target(budgets, values, target, 2.0)
    for row, seconds in zip(values, result.seconds, strict=True):
        if row[-1] < target < row[0]:
            assert seconds.low == pytest.approx(2 * np.interp(-target, -row, budgets))
            assert seconds.known


def test_what_is_not_reached_is_censored_and_never_infinite():
    values = np.array([[1.0, 0.9, 0.8], [1.0, 0.9, 0.75], [0.7, 0.6, 0.5]])
    result = time_to_target(BUDGETS, values, 0.75, 1.0)
    assert result.seconds == (Bounds(400, None), Bounds(400, 400), Bounds(0, 100))
    assert (result.not_reached, result.within) == (1, 1)
    assert [bounds.words("s") for bounds in result.seconds] == ["at least 400 s", "400 s", "at most 100 s"]
    assert result.summary.median == Bounds(400, 400)
    ready(result)


def test_a_censored_median_is_a_bound():
    """Two of three seeds do not reach the target: the median is at least the largest budget's time."""
    result = time_to_target(BUDGETS, np.array([[1, 1, 0.9], [1, 1, 0.9], [1, 0.6, 0.5]]), 0.7, 1.0)
    assert result.summary.median == Bounds(400, None)
    assert result.summary.median.words("s") == "at least 400 s"
    # Between a known 175 s and a censored 400 s it lies above their mean.
    even = time_to_target(BUDGETS, np.array([[1, 1, 0.9], [1, 0.6, 0.5]]), 0.7, 1.0)
    assert even.summary.median == Bounds((175 + 400) / 2, None)


def test_one_budget_says_reached_or_not():
    result = time_to_target((400,), np.array([[0.8], [0.7]]), 0.75, 1.0)
    assert result.seconds == (Bounds(400, None), Bounds(0, 400))
    assert result.summary.low == Bounds(0, 400)
    assert result.summary.high == Bounds(400, None)


def test_a_second_crossing_is_named():
    result = time_to_target(BUDGETS, np.array([[1.0, 0.6, 0.8], [0.6, 0.8, 0.5], [1.0, 0.8, 0.6]]), 0.7, 1.0)
    assert result.crossings == (0, 1)
    assert result.seconds[0].known
    assert "first crossing" in result.note


def test_the_median_interval_covers_what_it_says():
    """Eight seeds: from the least to the greatest but none; coverage by the binomial, and in a simulation."""
    rng = np.random.default_rng(1)
    budgets, truth, held = (1, 10_000), 5_000.0, 0
    for _ in range(1000):
        times = truth * np.exp(rng.standard_t(2, 8) / 10)
        values = np.stack([np.ones(8), 1 - 0.5 * 9_999 / (times - 1)], axis=1)  # crosses 0.5 at exactly ``times``
        summary = time_to_target(budgets, values, 0.5, 1.0).summary
        held += summary.low.low <= truth <= summary.high.low
    expected = 1 - 2 * stats.binom.cdf(0, 8, 0.5)
    assert summary.coverage == pytest.approx(expected)
    assert held / 1000 == pytest.approx(expected, abs=3.5 * math.sqrt(expected * (1 - expected) / 1000))


@pytest.mark.parametrize(("seeds", "coverage"), [(1, 0.0), (2, 0.5)])
def test_one_or_two_seeds_are_not_decidable(seeds, coverage):
    result = time_to_target(BUDGETS, np.array([[1.0, 0.8, 0.7], [1.0, 0.9, 0.7]])[:seeds], 0.75, 1.0)
    assert not result.summary.decidable
    assert result.summary.coverage == pytest.approx(coverage)
    assert "too few" in result.summary.note
    ready(result)


# ---- the ratio of two arms' times


def test_ratios_are_of_partners_and_bounds_where_a_time_is_censored():
    treatment = time_to_target(BUDGETS, np.array([[1, 0.6, 0.5], [1, 1, 0.9], [0.6, 0.5, 0.4], [1, 1, 0.9]]), 0.7, 1.02)
    baseline = time_to_target(BUDGETS, np.array([[1, 0.4, 0.3], [1, 0.9, 0.7], [1, 0.4, 0.3], [1, 1, 0.9]]), 0.7, 1.0)
    result = time_ratio(treatment, baseline)
    assert result.ratios[0] == pytest.approx((1.02 * 175 / 150, 1.02 * 175 / 150))
    assert result.ratios[1] == (pytest.approx(1.02), None)
    assert result.ratios[2] == (0, pytest.approx(102 / 150))
    assert result.ratios[3] == (0, None)  # neither reached: nothing is known
    assert [ratio.words() for ratio in result.ratios] == ["1.19", "at least 1.02", "at most 0.68", "cannot be told"]
    assert result.censored == 3
    assert "3 of 4 are bounds" in result.words
    ready(result)


def test_ends_that_print_alike_are_one_number():
    """Never "from 1.1 to 1.1"."""
    assert Bounds(1.101, 1.102).words("s") == "1.1 s"
    assert Bounds(1.1, 1.2).words() == "from 1.1 to 1.2"


def test_a_baseline_that_meets_the_target_at_once_leaves_only_a_lower_bound():
    treatment = time_to_target(BUDGETS, np.array([[1, 0.6, 0.5]]), 0.7, 1.0)
    baseline = time_to_target(BUDGETS, np.array([[0.6, 0.5, 0.4]]), 0.7, 1.0)
    assert time_ratio(treatment, baseline).ratios == (Bounds(1.75, None),)


@pytest.mark.parametrize("seed", range(20))
def test_bounds_of_a_median_hold_it_whatever_the_censored_values_are(seed):
    """Whatever stands behind a bound, the median of the true values lies in the median's bounds."""
    rng = np.random.default_rng(seed)
    values = np.sort(rng.uniform(0.4, 1, (rng.integers(3, 8), 3)), axis=1)[:, ::-1]
    summary = (result := time_to_target(BUDGETS, values, 0.7, 1.0)).summary
    for _ in range(50):
        truth = np.median(
            [rng.uniform(b.low, b.high) if b.high is not None else rng.uniform(b.low, 5000) for b in result.seconds]
        )
        assert summary.median.low - 1e-9 <= truth
        assert summary.median.high is None or truth <= summary.median.high + 1e-9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((200, 100), [[1, 1]], 0.7, 1.0), "budgets"),
        (((0, 100), [[1, 1]], 0.7, 1.0), "budgets"),
        (((), [[]], 0.7, 1.0), "budgets"),
        (((100, 200), [[1, 1, 1]], 0.7, 1.0), "shape"),
        (((100, 200), [[1, math.nan]], 0.7, 1.0), "diverged"),
        (((100, 200), [[1, 1]], math.inf, 1.0), "target"),
        (((100, 200), [[1, 1]], 0.7, 0.0), "seconds_per_step"),
    ],
)
def test_mistakes_of_times_are_named(arguments, message):
    budgets, values, target, seconds = arguments
    with pytest.raises(ValueError, match=message):
        time_to_target(budgets, np.array(values), target, seconds)


def test_only_equal_targets_and_seeds_are_compared():
    values = np.array([[1.0, 0.8, 0.7]])
    with pytest.raises(ValueError, match="targets differ"):
        time_ratio(time_to_target(BUDGETS, values, 0.75, 1.0), time_to_target(BUDGETS, values, 0.76, 1.0))
    with pytest.raises(ValueError, match="seeds differ"):
        time_ratio(time_to_target(BUDGETS, values, 0.75, 1.0), time_to_target(BUDGETS, values, 0.75, 1.0, seeds=[4]))


# ---- equal time by the baseline's slope


def pairs_of(treatment, baseline, weights=None, unit=1.0) -> PairTable:
    s, d = np.shape(baseline)
    weights = np.ones(d) if weights is None else weights
    items = tuple(f"d{i}" for i in range(d))
    return PairTable(tuple(range(s)), items, np.array(baseline), np.array(treatment), weights, "val_bpb", unit)


def test_equal_time_by_hand():
    """r = 1.25 leaves 80 % of the steps: two tenths of N less, each worth 0.01 by the baseline's last tenth."""
    pairs = pairs_of([[0.97], [0.98], [0.96]], [[1.0], [1.0], [1.0]])
    result = equal_time_by_slope(pairs, np.array([[1.01], [1.01], [1.01]]), ratio=1.25)
    assert result.factors[0] == pytest.approx(2.0)
    assert result.mean == pytest.approx(-0.03 + 0.02)
    assert result.slope.mean == pytest.approx(0.01)
    assert result.shortened == "treatment"
    assert result.steps_share == pytest.approx(0.8)
    assert "approximation" in result.words
    assert "80 % of the steps" in result.words
    assert "prolonged" in result.words
    half = stats.t.ppf(0.975, 2) * 0.01 / math.sqrt(3)
    assert (result.low, result.high) == pytest.approx((-0.01 - half, -0.01 + half))
    ready(result)


def test_a_faster_treatment_shortens_the_baseline():
    """r = 0.95: the baseline has 95 % of its steps in the treatment's time, half a tenth of N less."""
    pairs = pairs_of([[0.97], [0.98], [0.96]], [[1.0], [1.0], [1.0]])
    result = equal_time_by_slope(pairs, np.array([[1.01], [1.01], [1.01]]), ratio=0.95)
    assert result.factors[0] == pytest.approx(-0.5)
    assert result.mean == pytest.approx(-0.03 - 0.005)
    assert result.shortened == "baseline"
    assert "prolonged" not in result.words


def test_swapping_the_arms_of_one_curve_turns_the_sign():
    """Where both arms have the same losses, r and 1/r are the same question asked the other way round."""
    rng = np.random.default_rng(0)
    full = rng.normal(1, 0.01, (5, 4))
    shorter = full + 0.01
    there = equal_time_by_slope(pairs_of(full, full), shorter, ratio=1.08)
    back = equal_time_by_slope(pairs_of(full, full), shorter, ratio=1 / 1.08)
    assert there.mean == pytest.approx(-back.mean)


def test_no_overhead_changes_nothing():
    rng = np.random.default_rng(0)
    pairs = pairs_of(rng.normal(1, 0.01, (5, 4)), rng.normal(1, 0.01, (5, 4)))
    result, plain = equal_time_by_slope(pairs, rng.normal(1, 0.01, (5, 4)), ratio=1.0), mean_difference(pairs)
    assert (result.mean, result.low, result.high) == pytest.approx((plain.mean, plain.low, plain.high))
    assert result.shortened == "neither"


def test_the_interval_is_that_of_the_combination_over_seeds_and_spans_the_ratios():
    rng = np.random.default_rng(0)
    t, b, less = (rng.normal(1, 0.01, (6, 1)) for _ in range(3))
    result = equal_time_by_slope(pairs_of(t, b), less, ratio=1.05, ratio_low=1.02, ratio_high=1.09)
    ends = []
    for r in np.linspace(1.02, 1.09, 15):
        x = (t - b + (1 - 1 / r) / 0.1 * (less - b))[:, 0]
        half = stats.t.ppf(0.975, 5) * x.std(ddof=1) / math.sqrt(6)
        ends.append((x.mean() - half, x.mean() + half))
    assert result.low == pytest.approx(min(low for low, _ in ends))
    assert result.high == pytest.approx(max(high for _, high in ends))
    assert "spans" in result.words


@pytest.mark.parametrize("ratio", [0.92, 0.97, 1.02, 1.05, 1.10, 1.20])
@pytest.mark.parametrize("alike", [1.0, 0.97])
def test_in_a_world_of_power_laws_the_error_is_within_its_bound(ratio, alike):
    """Losses A + K·n^−p, where the exact difference at equal time is known.

    The straight line between share·N and N is off by at most max|f″|·|N − n|·|n − share·N|/2 (Lagrange), and what
    the treatment loses differs from what the baseline loses by the two curves' own difference.
    """
    steps, power, share = 1000.0, 0.3, 0.9

    def baseline(n):
        return 0.8 + 2 * n**-power

    def treatment(n):
        return 0.79 + 2 * alike * n**-power

    n = steps / ratio if ratio > 1 else steps * ratio
    exact = treatment(n) - baseline(steps) if ratio > 1 else treatment(steps) - baseline(n)
    ones = np.ones((3, 2))
    result = equal_time_by_slope(
        pairs_of(treatment(steps) * ones, baseline(steps) * ones), baseline(share * steps) * ones, ratio=ratio
    )
    bend = 2 * power * (power + 1) * min(n, share * steps) ** (-power - 2)
    bound = bend * abs(steps - n) * abs(n - share * steps) / 2
    if ratio > 1:
        bound += abs((treatment(n) - treatment(steps)) - (baseline(n) - baseline(steps)))
    assert abs(result.mean - exact) <= bound + 1e-12
    assert abs(result.mean - exact) < 0.1 * abs(exact - (treatment(steps) - baseline(steps)))


@pytest.mark.parametrize(("seeds", "items"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_two_seeds_or_fewer_decide_no_equal_time(seeds, items):
    rng = np.random.default_rng(0)
    t, b, less = (rng.normal(1, 0.01, (seeds, items)) for _ in range(3))
    result = equal_time_by_slope(pairs_of(t, b), less, ratio=1.05, ratio_low=1.0, ratio_high=1.1)
    assert not result.decidable
    assert (result.low is None) == (seeds == items == 1)
    ready(result)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.0}, "ratio"),
        ({"ratio": 1.1, "ratio_low": 1.2, "ratio_high": 1.3}, "inside its interval"),
        ({"ratio": math.inf}, "ratio"),
        ({"ratio": 1.1, "share": 1.0}, "share"),
    ],
)
def test_mistakes_of_equal_time_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        equal_time_by_slope(pairs_of(np.ones((3, 2)), np.ones((3, 2))), np.ones((3, 2)), **options)


def test_runs_of_other_seeds_are_refused():
    with pytest.raises(ValueError, match="shape"):
        equal_time_by_slope(pairs_of(np.ones((3, 2)), np.ones((3, 2))), np.ones((2, 2)), ratio=1.1)
