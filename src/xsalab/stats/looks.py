"""Looking at the result while seeds are added: one nominal level for every look, the error over all looks alpha.

Seeds come in steps, 4, 6, 8, 12 by default, and after each the verdict is asked for again. Asked four times at 5 %
a t test is wrong in 13 % of experiments. So each look uses a smaller level, the same at every look (Pocock
1977), chosen such that under the null any of them crosses with probability alpha. With 4 to 12 seeds the statistic is
Student's t of a growing sample, and boundaries from normal theory are not valid; the level is found by simulation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import scipy  # pyright: ignore[reportMissingTypeStubs]

from .paired import LEAST_SEEDS, Floats

_scipy: Any = scipy  # without types; its parts are imported where they are first used, as that takes a second

LOOKS = (4, 6, 8, 12)
PATHS = 1_000_000  # experiments simulated for a schedule


@dataclass(frozen=True)
class Looks:
    """The seeds at each look, and the nominal level there.

    two_sided: of the t test for better and worse; its interval has confidence 1 − two_sided.
    one_sided: of each of the two one-sided tests for equivalence; their interval has confidence 1 − 2·one_sided.
    """

    seeds: tuple[int, ...]
    two_sided: float
    one_sided: float


def looks_up_to(cap: int) -> tuple[int, ...]:
    """The looks of an experiment that ends at ``cap`` seeds at the latest; the cap itself is the last.

    4, 6, 8, 12, and beyond these 16, 24, 32, 48, … (2ⁿ and 3·2ⁿ): a look adds a third to a half of the seeds, since
    looks that are closer cost level and tell little. Raises ValueError for a cap below 4.
    """
    if cap < LOOKS[0]:
        raise ValueError(f"cap = {cap} seeds: the first look is at {LOOKS[0]}; allow at least that many")
    found, look, after = list[int](), LOOKS[0], LOOKS[1]
    while look < cap:
        found.append(look)
        look, after = after, 2 * look
    return (*found, cap)


def look_levels(seeds: Sequence[int], *, alpha: float = 0.05) -> Looks:
    """The nominal level at each look at which, under the null, any of them crosses with probability ``alpha``.

    For normal seed effects, by 1,000,000 simulated experiments with a fixed seed: the error over all looks that the
    levels give is alpha ± 0.0003 (one standard error is 0.0002), and a level has about four times less. One look gives
    alpha itself. The error of `equivalent` is at its largest where the truth lies at the margin; there one of its two
    tests alone matters.
    Raises ValueError unless ``seeds`` rise, from at least 3, and 0 < alpha < 0.5.
    """
    given = tuple(seeds)
    if not given or given[0] < LEAST_SEEDS or any(b <= a for a, b in itertools.pairwise(given)):
        raise ValueError(f"looks at {list(given)} seeds: give rising numbers, the first at least {LEAST_SEEDS}")
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha = {alpha}: must lie between 0 and 0.5, for instance 0.05")
    return _levels(given, alpha)


@lru_cache(maxsize=64)
def _levels(seeds: tuple[int, ...], alpha: float) -> Looks:
    if len(seeds) == 1:
        return Looks(seeds, alpha, alpha)
    lowest, highest = _extremes(seeds)
    # Every path is two: itself and its mirror image, whose lower tail is this one's upper.
    one_sided = float(np.quantile(np.concatenate((lowest, 1 - highest)), alpha))
    two_sided = float(np.quantile(2 * np.minimum(lowest, 1 - highest), alpha))
    return Looks(seeds, two_sided, one_sided)


def _extremes(seeds: tuple[int, ...]) -> tuple[Floats, Floats]:
    """(PATHS,) each: the least and the greatest probability P(T ≤ t) of a path over its looks."""
    rng = np.random.default_rng(20_240_229)
    lowest, highest = np.ones(PATHS), np.zeros(PATHS)
    mean, squares, before = np.zeros(PATHS), np.zeros(PATHS), 0
    for look in seeds:
        # The k new seeds by their mean and sum of squares, joined to those before.
        k = look - before
        shift = rng.standard_normal(PATHS) / np.sqrt(k) - mean
        squares += shift**2 * (before * k / look)
        if k > 1:
            squares += rng.chisquare(k - 1, PATHS)
        mean += shift * (k / look)
        below = _scipy.special.stdtr(look - 1, mean / np.sqrt(squares / (look - 1) / look))
        np.minimum(lowest, below, out=lowest)
        np.maximum(highest, below, out=highest)
        before = look
    return lowest, highest
