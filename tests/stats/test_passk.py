from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from xsalab.stats.passk import mean_pass_at_k, pass_at_k


@pytest.mark.parametrize("samples", range(1, 8))
def test_it_is_the_share_of_subsets_that_hold_a_right_answer(samples: int) -> None:
    """Against enumeration of all k-subsets."""
    for correct in range(samples + 1):
        answers = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            hits = [any(chosen) for chosen in itertools.combinations(answers, k)]
            assert pass_at_k(samples, correct, k) == float(Fraction(sum(hits), len(hits)))


def test_it_is_unbiased() -> None:
    """The mean over all outcomes of n samples that are right with chance p is 1 − (1 − p)^k."""
    p, samples = Fraction(3, 10), 6
    for k in (1, 2, 5):
        mean = 0.0
        for outcome in itertools.product((0, 1), repeat=samples):
            correct = sum(outcome)
            estimate = pass_at_k(samples, correct, k)
            assert estimate is not None
            mean += float(p**correct * (1 - p) ** (samples - correct)) * estimate
        assert mean == pytest.approx(float(1 - (1 - p) ** k), abs=1e-12)


def test_large_numbers_keep_their_digits() -> None:
    """One right of a million: pass@k is k / n exactly, where a product of floats or 1 − (1 − tiny) loses digits."""
    assert pass_at_k(1_000_000, 1, 3) == 3 / 1_000_000
    assert pass_at_k(10_000, 10_000, 5_000) == 1.0
    assert pass_at_k(10_000, 0, 5_000) == 0.0


def test_more_than_the_samples_is_reported_as_not_available() -> None:
    """F152: ten problems with one sample each, k = 1 and 10: a number and "not available", and neither is dropped."""
    counts = [(1, int(problem < 3)) for problem in range(10)]
    assert mean_pass_at_k(counts, (1, 10)) == {1: pytest.approx(0.3), 10: None}


def test_a_subset_of_problems_and_unequal_samples_work() -> None:
    """F152: the mean is over the problems given; one problem with fewer samples makes a k unavailable, not wrong."""
    assert mean_pass_at_k([(4, 2)], (1, 2)) == {1: 0.5, 2: pytest.approx(5 / 6)}
    assert mean_pass_at_k([(4, 2), (1, 1)], (1, 2)) == {1: 0.75, 2: None}


@pytest.mark.parametrize(("samples", "correct", "k"), [(0, 0, 1), (2, 3, 1), (2, -1, 1), (2, 1, 0)])
def test_numbers_that_do_not_fit_are_refused(samples: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        pass_at_k(samples, correct, k)


def test_no_problem_is_refused() -> None:
    with pytest.raises(ValueError, match="no problem"):
        mean_pass_at_k([], (1,))
