"""The level of each look against published constants, scipy's t test on drawn samples, and the one-look case."""

# scipy is typed for scalars
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from xsalab.stats import LOOKS, look_levels, looks_up_to


@pytest.mark.parametrize("alpha", [0.05, 0.01, 0.2])
def test_one_look_has_the_whole_error(alpha: float) -> None:
    looks = look_levels([6], alpha=alpha)
    assert (looks.seeds, looks.two_sided, looks.one_sided) == ((6,), alpha, alpha)


@pytest.mark.parametrize(
    ("count", "constant"), [(2, 2.178), (3, 2.289), (4, 2.361)], ids=["2 looks", "3 looks", "4 looks"]
)
def test_with_many_seeds_the_levels_are_those_of_pocock(count: int, constant: float) -> None:
    """Equally spaced looks with known variance: Pocock (1977), two-sided 5 %. At 4,000 seeds t is normal."""
    looks = look_levels([4000 * look for look in range(1, count + 1)])
    assert looks.two_sided == pytest.approx(2 * stats.norm.sf(constant), abs=0.0004)


def test_over_all_looks_a_t_test_errs_at_alpha() -> None:
    """scipy's one-sample t test on samples of another generator: 4 standard errors of 100,000 experiments."""
    looks = look_levels(LOOKS)
    samples = np.random.default_rng(1).normal(size=(100_000, LOOKS[-1]))
    two_sided, one_sided, single = np.zeros((3, len(samples)), dtype=bool)
    for seeds in LOOKS:
        _, p = stats.ttest_1samp(samples[:, :seeds], 0, axis=1)
        two_sided |= p < looks.two_sided
        one_sided |= (p / 2 < looks.one_sided) & (samples[:, :seeds].mean(axis=1) < 0)
        single |= p < 0.05
    error = 4 * np.sqrt(0.05 * 0.95 / len(samples))
    assert two_sided.mean() == pytest.approx(0.05, abs=error)
    assert one_sided.mean() == pytest.approx(0.05, abs=error)
    assert single.mean() > 0.1, "what looking four times at 5 % costs"


def test_more_looks_cost_level_and_the_same_schedule_has_the_same_levels() -> None:
    two, four = look_levels((4, 6)), look_levels(list(LOOKS))
    assert 0.025 < two.two_sided < 0.05, "between a half and the whole of the error"
    assert 0.0125 < four.two_sided < two.two_sided
    assert four.two_sided < four.one_sided < 0.05
    assert look_levels(LOOKS) is four


@pytest.mark.parametrize(
    ("cap", "looks"),
    [
        (4, (4,)),
        (5, (4, 5)),
        (6, (4, 6)),
        (8, (4, 6, 8)),
        (10, (4, 6, 8, 10)),
        (12, LOOKS),
        (20, (*LOOKS, 16, 20)),
        (48, (*LOOKS, 16, 24, 32, 48)),
    ],
)
def test_the_cap_is_the_last_look(cap: int, looks: tuple[int, ...]) -> None:
    assert looks_up_to(cap) == looks


@pytest.mark.parametrize("cap", [3, 0, -4])
def test_a_cap_below_the_first_look_is_refused(cap: int) -> None:
    with pytest.raises(ValueError, match=f"cap = {cap} seeds: the first look is at 4"):
        looks_up_to(cap)


@pytest.mark.parametrize(
    ("seeds", "alpha", "message"),
    [
        ([], 0.05, "looks at"),
        ([2, 4], 0.05, "at least 3"),
        ([4, 4], 0.05, "rising"),
        ([6, 4], 0.05, "rising"),
        ([4, 6], 0.0, "alpha = 0.0"),
        ([4, 6], 0.5, "alpha = 0.5"),
    ],
)
def test_impossible_schedules_are_refused(seeds: list[int], alpha: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        look_levels(seeds, alpha=alpha)
