"""Welch's interval against its formula and in a simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from xsalab.stats.welch import welch

A = (2.51, 2.48, 2.50, 2.47, 2.52)
B = (2.56, 2.55, 2.53, 2.57)


def test_welchs_interval_is_the_formula_by_hand() -> None:
    a, b = np.array(A), np.array(B)
    va, vb = a.var(ddof=1) / 5, b.var(ddof=1) / 4
    df = (va + vb) ** 2 / (va**2 / 4 + vb**2 / 3)
    half = stats.t.ppf(0.975, df) * math.sqrt(va + vb)
    estimate = welch(a.tolist(), b.tolist(), metric="m")
    assert estimate.mean == pytest.approx(a.mean() - b.mean())
    assert estimate.low == pytest.approx(estimate.mean - half)
    assert estimate.high == pytest.approx(estimate.mean + half)
    assert estimate.df == pytest.approx(df)
    assert estimate.p == pytest.approx(2 * stats.t.sf(abs(estimate.mean) / math.sqrt(va + vb), df))
    assert (estimate.n, estimate.method) == (4, "Welch t over seeds, not paired")
    assert estimate.sd == pytest.approx(math.sqrt(va + vb) * 2)


def test_welch_never_gives_a_number_that_is_none() -> None:
    """F164: one run a side, equal runs, and p too small for a float."""
    single = welch([1.0], [2.0, 3.0], metric="m")
    assert (single.low, single.p, single.decidable, single.note) == (None, None, False, "not testable (n=1)")
    same = welch([1.0] * 4, [1.0] * 4, metric="m")
    assert (same.mean, same.low, same.high, same.p, same.decidable) == (0, 0, 0, 1.0, True)
    apart = welch([1.0] * 4, [2.0] * 4, metric="m")
    assert (apart.low, apart.high, apart.p, apart.decidable) == (-1, -1, None, False)
    assert "no spread" in apart.note
    draw = np.random.default_rng(0)
    far = welch((1e6 + draw.normal(0, 1e-6, 60)).tolist(), draw.normal(0, 1e-6, 60).tolist(), metric="m")
    assert far.p is not None
    assert far.p > 0
    with pytest.raises(ValueError, match="finite"):
        welch([math.nan], [1.0], metric="m")


def test_welchs_interval_covers_what_it_says() -> None:
    """4 and 7 runs of unequal spread: 95 % to within four standard errors of the simulation."""
    draw, hits, n = np.random.default_rng(0), 0, 400
    for _ in range(n):
        estimate = welch(draw.normal(0, 3, 4).tolist(), draw.normal(0, 1, 7).tolist(), metric="m")
        assert estimate.low is not None
        assert estimate.high is not None
        hits += estimate.low < 0 < estimate.high
    assert abs(hits / n - 0.95) < 4 * math.sqrt(0.95 * 0.05 / n)
