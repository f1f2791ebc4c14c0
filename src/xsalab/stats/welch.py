"""Welch's interval: the difference of two sets of runs that are no pairs (Welch 1947), by scipy."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import scipy  # pyright: ignore[reportMissingTypeStubs]

from .paired import LEAST_SEEDS, Estimate, Parts

_scipy: Any = scipy  # without types; its parts are imported where they are first used, as that takes a second
_ROUNDING = 8 * float(np.finfo(np.float64).eps)


def welch(treatment: Sequence[float], baseline: Sequence[float], *, metric: str, confidence: float = 0.95) -> Estimate:
    """Difference of the means of runs that are no pairs, with Welch's t interval (scipy's).

    n is the smaller number of runs; with one run on a side there is no interval, with fewer than 3 nothing is decided.
    sd: what the differences of n pairs would need for the same standard error, as the advice on seeds wants it.
    Raises ValueError for no runs and for values that are not finite.
    """
    a, b = (np.asarray(side, dtype=np.float64) for side in (treatment, baseline))
    if not len(a) or not len(b) or not np.isfinite(a).all() or not np.isfinite(b).all():
        raise ValueError(f"{metric}: Welch's interval needs finite values on both sides, got {len(a)} and {len(b)}")
    n, mean, base = min(len(a), len(b)), float(a.mean() - b.mean()), float(b.mean())
    estimate = Estimate(
        mean=mean, low=None, high=None, standard_error=None, df=None, p=None, n=n, items=1, confidence=confidence,
        method="Welch t over seeds, not paired", parts=Parts(0.0, 0.0, 0.0), document_error=0.0, sd=None,
        relative=mean / abs(base) if base else None, baseline_mean=base, treatment_mean=float(a.mean()), metric=metric,
        item_word="runs", decidable=n >= LEAST_SEEDS,
    )  # fmt: skip
    if n < 2:
        return replace(estimate, method="no interval, one run a side", note="not testable (n=1)")
    rounding = _ROUNDING * float(max(np.abs(a).max(), np.abs(b).max()))
    if max(np.ptp(a), np.ptp(b)) <= rounding:
        equal = abs(mean) <= rounding
        estimate = replace(estimate, standard_error=0.0, sd=0.0, p=1.0 if equal else None, mean=0.0 if equal else mean)
        estimate = replace(estimate, low=estimate.mean, high=estimate.mean, decidable=equal and estimate.decidable)
        return replace(estimate, note="no spread: the runs of a side are equal")
    test = _scipy.stats.ttest_ind(a, b, equal_var=False)
    interval = test.confidence_interval(confidence)
    error = math.sqrt(float(a.var(ddof=1)) / len(a) + float(b.var(ddof=1)) / len(b))
    return replace(
        estimate, low=float(interval.low), high=float(interval.high), standard_error=error, df=float(test.df),
        p=max(float(test.pvalue), sys.float_info.min), sd=error * math.sqrt(n), parts=Parts(1.0, 0.0, 0.0),
    )  # fmt: skip
