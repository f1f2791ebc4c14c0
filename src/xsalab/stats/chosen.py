"""The interval of a difference whose settings were chosen on the other seeds: leave one out.

Each seed's difference is taken where the other S − 1 seeds say that each side is best, so its mean is not flattered by
the choice. But the seeds share the runs that they choose on: a lucky run moves the choice of all the others. Where they
do not all choose alike, the plain interval misses the truth in 8 to 21 % of experiments and not in 5 %; with

    var = s² · (1/S + 1/(S − 1))        in place of s²/S        Nadeau & Bengio (2003, Machine Learning 52:239)

for one seed left out and S − 1 that choose, in 4 to 7 % (docs/statistics.md). Where all choose alike nothing is added.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import scipy  # pyright: ignore[reportMissingTypeStubs]

from .paired import Estimate

_scipy: Any = scipy  # without types; its parts are imported where they are first used, as that takes a second


def widened_for_choice(estimate: Estimate, choosers: int) -> Estimate:
    """The estimate with its interval and standard error √(1 + S/(S − 1)) times as wide about the mean.

    choosers: S, the seeds that chose, of which each left itself out; at least 2, or ValueError. An estimate without an
    interval stays as it is.
    """
    if choosers < 2:
        raise ValueError(f"choosers = {choosers}: a seed's setting is chosen on others, so there are at least 2")
    if estimate.low is None or estimate.high is None or estimate.standard_error is None or estimate.df is None:
        return estimate
    factor = math.sqrt(1 + choosers / (choosers - 1))
    error, p = estimate.standard_error * factor, estimate.p
    if error > 0:
        p = 2.0 * float(_scipy.special.stdtr(estimate.df, -abs(estimate.mean) / error))
    return replace(
        estimate,
        low=estimate.mean - factor * (estimate.mean - estimate.low),
        high=estimate.mean + factor * (estimate.high - estimate.mean),
        standard_error=error,
        p=p,
        method=f"{estimate.method}, widened for the choice",
    )
