"""Equal time and time-to-target, from complete runs only.

A curve read before its end still has a high learning rate: where it crosses a level says nothing of a run that
was planned to end there. So a point of these curves is a whole run: the final metric at a budget of steps.

    time to target   per seed, between the two budgets whose final metrics bracket the target, by a straight line
    equal time       the slower arm gets fewer steps. Trained again with that many, the pair is a plain PairTable;
                     else ``equal_time_by_slope`` takes them off by the baseline's slope between N and 0.9·N

A time is known exactly, or only to be below or above something: then it is censored. ``Bounds`` carries that through
medians and ratios without a guess, and nothing here is ever infinite or NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import scipy  # pyright: ignore[reportMissingTypeStubs]

from .paired import LEAST_SEEDS, Estimate, Floats, PairTable, mean_difference

_scipy: Any = scipy  # without types; its parts are imported where they are first used, as that takes a second


class Bounds(NamedTuple):
    """What is known of a positive number: low ≤ it ≤ high; high is None where nothing bounds it from above.

    low = high: known. low = 0: no lower bound.
    """

    low: float
    high: float | None

    @property
    def known(self) -> bool:
        return self.low == self.high

    def words(self, unit: str = "") -> str:
        """ "312 s", "at least 1.02", "at most 200 s", "from 1.1 to 1.4", "cannot be told"."""
        after = f" {unit}" if unit else ""
        if self.high is None:
            return f"at least {_short(self.low)}{after}" if self.low > 0 else "cannot be told"
        if self.known:
            return f"{_short(self.low)}{after}"
        if self.low == 0:
            return f"at most {_short(self.high)}{after}"
        low, high = _short(self.low), _short(self.high)
        return f"{low}{after}" if low == high else f"from {low} to {high}{after}"


@dataclass(frozen=True)
class MedianBounds:
    """Median over n seeds, and the interval between two order statistics of it: ``low``.low to ``high``.high.

    It covers with probability ``coverage`` whatever the distribution. ``note`` says so where n is too small for
    the confidence asked for. decidable: False at 2 seeds or fewer.
    """

    median: Bounds
    low: Bounds
    high: Bounds
    n: int
    coverage: float
    decidable: bool
    note: str = ""


@dataclass(frozen=True)
class TargetTime:
    """Seconds until a complete run of one arm reaches the target.

    seconds: of each seed, in the order of ``seeds``. Not reached within the largest budget: at least its time.
    Reached at the smallest budget already: at most its time. not_reached, within: how many there are of either.
    crossings: seeds that reach the target at one budget and miss it at a larger one; the first crossing counts.
    """

    target: float
    seeds: tuple[int, ...]
    budgets: tuple[float, ...]
    seconds_per_step: float
    seconds: tuple[Bounds, ...]
    summary: MedianBounds
    not_reached: int
    within: int
    crossings: tuple[int, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class TimeRatio:
    """How many times as long the treatment takes to the target as the baseline, by seed: the pairs of one seed.

    ratios: of each seed. A censored time makes its ratio a bound. censored: how many are not known exactly.
    """

    target: float
    seeds: tuple[int, ...]
    ratios: tuple[Bounds, ...]
    summary: MedianBounds
    censored: int
    words: str


def time_to_target(
    budgets: Sequence[float],
    values: Floats,
    target: float,
    seconds_per_step: float,
    *,
    seeds: Sequence[int] = (),
    confidence: float = 0.95,
) -> TargetTime:
    """When does a run that was planned for it reach ``target``, a metric of which less is better?

    budgets (B,): steps of the complete runs, rising, B ≥ 1. values (S, B): the final metric of each seed at each
    budget. seconds_per_step: of this arm, taken as known; its own uncertainty is not in the interval.
    seeds: numbers of the rows, by default 0 to S − 1.
    Raises ValueError for budgets that do not rise from above 0, shapes that disagree, and numbers that are not finite.
    """
    steps, table = np.asarray(budgets, dtype=np.float64), np.asarray(values, dtype=np.float64)
    rows = tuple(seeds) if seeds else tuple(range(len(table)))
    if steps.ndim != 1 or not len(steps) or not np.isfinite(steps).all() or (np.diff(steps, prepend=0.0) <= 0).any():
        raise ValueError(f"budgets = {list(budgets)}: numbers of steps of complete runs, each above the one before")
    if table.ndim != 2 or not len(table) or table.shape != (len(rows), len(steps)):
        raise ValueError(f"values has shape {table.shape}; seeds and budgets ask for {(len(rows), len(steps))}")
    if len(set(rows)) < len(rows):
        raise ValueError(f"seeds = {list(rows)}: each seed counts once")
    if not np.isfinite(table).all():
        raise ValueError("values are not finite; leave out the seed of a diverged run")
    if not math.isfinite(target):
        raise ValueError(f"target = {target}: must be a finite value of the metric")
    if not (math.isfinite(seconds_per_step) and seconds_per_step > 0):
        raise ValueError(f"seconds_per_step = {seconds_per_step}: must be positive and finite")
    seconds = tuple(_scaled(_crossing(steps, row, target), seconds_per_step) for row in table)
    crossings = tuple(  # reached at one budget and not at a larger one
        seed for seed, row in zip(rows, table <= target, strict=True) if (row[:-1] & ~row[1:]).any()
    )
    note = ""
    if crossings:
        shown = ", ".join(str(seed) for seed in crossings)
        note = f"seeds {shown}: above the target again at a larger budget; the first crossing counts"
    return TargetTime(
        target=float(target),
        seeds=rows,
        budgets=tuple(float(step) for step in steps),
        seconds_per_step=float(seconds_per_step),
        seconds=seconds,
        summary=_median(seconds, confidence),
        not_reached=sum(bounds.high is None for bounds in seconds),
        within=sum(bounds.low == 0 for bounds in seconds),
        crossings=crossings,
        note=note,
    )


def _crossing(steps: Floats, row: Floats, target: float) -> Bounds:
    """Steps to the first crossing of the line through the (budget, metric) points of one seed."""
    reached = np.flatnonzero(row <= target)
    if not len(reached):
        return Bounds(float(steps[-1]), None)
    after = int(reached[0])
    if after == 0:
        return Bounds(0.0, float(steps[0]))
    before = after - 1
    share = (row[before] - target) / (row[before] - row[after])
    step = float(steps[before] + share * (steps[after] - steps[before]))
    return Bounds(step, step)


def _scaled(bounds: Bounds, by: float) -> Bounds:
    return Bounds(bounds.low * by, None if bounds.high is None else bounds.high * by)


def time_ratio(treatment: TargetTime, baseline: TargetTime, *, confidence: float = 0.95) -> TimeRatio:
    """treatment's time / baseline's time, seed by seed, with what censoring leaves of it.

    A treatment that does not reach the target gives "at least", a baseline that does not gives "at most"; both: nothing
    is known of that seed. Raises ValueError unless both have the same target and seeds.
    """
    if treatment.target != baseline.target:
        raise ValueError(f"targets differ: {treatment.target:g} and {baseline.target:g}; compare at one target")
    if treatment.seeds != baseline.seeds:
        raise ValueError(f"seeds differ: {list(treatment.seeds)} and {list(baseline.seeds)}; keep those of both arms")
    ratios = tuple(_quotient(t, b) for t, b in zip(treatment.seconds, baseline.seconds, strict=True))
    summary = _median(ratios, confidence)
    censored = sum(not ratio.known for ratio in ratios)
    words = f"median ratio over {_count(len(ratios))}: {summary.median.words()}"
    if censored:
        words += f"; {censored} of {len(ratios)} are bounds, as a run did not reach the target or did so at once"
    return TimeRatio(treatment.target, treatment.seeds, ratios, summary, censored, words)


def _quotient(a: Bounds, b: Bounds) -> Bounds:
    low = 0.0 if b.high is None else a.low / b.high
    return Bounds(low, None if a.high is None or b.low == 0 else a.high / b.low)


def _median(values: Sequence[Bounds], confidence: float) -> MedianBounds:
    """Order statistics only rise with each value: those of the lower and of the upper bounds bound them."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence}: must lie between 0 and 1, for instance 0.95")
    n = len(values)
    lows = np.sort([bounds.low for bounds in values])
    highs = np.sort([math.inf if bounds.high is None else bounds.high for bounds in values])

    def between(low: float, high: float) -> Bounds:
        return Bounds(float(low), float(high) if math.isfinite(high) else None)

    # Ranks k and n + 1 − k leave out the median with probability 2·P(Binomial(n, ½) < k).
    rank = max(1, int(_scipy.stats.binom.ppf((1 - confidence) / 2, n, 0.5)))
    coverage = max(0.0, 1 - 2 * float(_scipy.special.bdtr(rank - 1, n, 0.5)))
    note = ""
    if coverage < confidence:
        note = f"{_count(n)}: too few for {confidence:.0%}; from least to greatest covers {coverage:.1%}"
    return MedianBounds(
        median=between(float(np.median(lows)), float(np.median(highs))),
        low=between(lows[rank - 1], highs[rank - 1]),
        high=between(lows[n - rank], highs[n - rank]),
        n=n,
        coverage=coverage,
        decidable=n >= LEAST_SEEDS,
        note=note,
    )


@dataclass(frozen=True)
class EqualTime:
    """Δ at equal time by the baseline's slope: an approximation, and ``words`` says so.

    mean: at the step-time ratio itself. low, high: from the least to the greatest end of the three intervals in
    ``parts``, at the ratio and both ends of its interval; None where one seed meets one item. For equal degrees of
    freedom no ratio between those ends has an interval that reaches further: a standard error is convex in the
    factor. The union covers with at least 90 % where both intervals have 95 % (Bonferroni), mostly with more.
    factors: what the slope is multiplied with, at each of the three. slope: the baseline's Δ(0.9·N − N), what the last
    tenth of its steps is worth. steps_share: of N that the slower arm, ``shortened``, gets in the other's time.
    """

    mean: float
    low: float | None
    high: float | None
    ratio: tuple[float, float, float]
    factors: tuple[float, float, float]
    parts: tuple[Estimate, Estimate, Estimate]
    slope: Estimate
    share: float
    shortened: str
    steps_share: float
    decidable: bool
    words: str


def equal_time_by_slope(
    pairs: PairTable,
    shorter: Floats,
    *,
    ratio: float,
    ratio_low: float | None = None,
    ratio_high: float | None = None,
    share: float = 0.9,
    confidence: float = 0.95,
) -> EqualTime:
    """Converts the step-time ratio r = treatment's / baseline's seconds a step to units of the metric.

    pairs: both arms at N steps. shorter (S, D) float64: the values of the baseline's complete runs of ``share`` · N
    steps, same seeds and items. The slower arm has fewer steps in the faster one's time, N/r of N where r > 1 and r·N
    where r < 1, and what a step is worth is read off the baseline:

        r ≥ 1   Δ_time = Δ + c·(baseline@0.9N − baseline@N)     c = (1 − 1/r)/(1 − share), treatment shortened
        r < 1   the same                                       c = −(1 − r)/(1 − share),  baseline shortened

    Both agree at r = 1 in value and slope. Approximated is, for r > 1, that the treatment loses with its steps what
    the baseline loses; in both, that the loss is straight in the steps. Between N and share·N that is off by at most
    max|f″| · (N − n)·(n − share·N)/2 for a curve f and n steps; beyond share·N it is a prolongation, which ``words``
    then says.
    ratio_low, ratio_high: the interval of r, by default r itself.
    Raises ValueError for a share outside (0, 1), a ratio outside its interval or not positive, and another shape.
    """
    low, high = ratio if ratio_low is None else ratio_low, ratio if ratio_high is None else ratio_high
    if not (0 < low <= ratio <= high and math.isfinite(high)):
        raise ValueError(f"ratio = {ratio} in {low} to {high}: must be positive and lie inside its interval")
    if not 0 < share < 1:
        raise ValueError(f"share = {share}: of the steps, above 0 and below 1, for instance 0.9")
    less = np.asarray(shorter, dtype=np.float64)
    if less.shape != pairs.baseline.shape:
        raise ValueError(
            f"{pairs.metric}: the runs of {share:g}·N have shape {less.shape}; the pairs have {pairs.baseline.shape}"
        )

    def moved(slope_times: float, treatment: Floats) -> Estimate:
        table = PairTable(
            pairs.seeds, pairs.items, pairs.baseline, treatment + slope_times * (less - pairs.baseline),
            pairs.weights, pairs.metric, pairs.unit, pairs.item_word,
        )  # fmt: skip
        return mean_difference(table, confidence=confidence)

    ratios = (ratio, low, high)
    factors = tuple(_factor(r, share) for r in ratios)
    parts = tuple(moved(factor, pairs.treatment) for factor in factors)
    lows = [part.low for part in parts if part.low is not None]
    highs = [part.high for part in parts if part.high is not None]
    shortened = "neither" if ratio == 1 else "treatment" if ratio > 1 else "baseline"
    return EqualTime(
        mean=parts[0].mean,
        low=min(lows, default=None),
        high=max(highs, default=None),
        ratio=ratios,
        factors=(factors[0], factors[1], factors[2]),
        parts=(parts[0], parts[1], parts[2]),
        slope=moved(1.0, pairs.baseline),
        share=share,
        shortened=shortened,
        steps_share=min(ratio, 1 / ratio),
        decidable=all(part.decidable for part in parts),
        words=_in_words(shortened, min(ratio, 1 / ratio), min(low, 1 / high), share, low < high),
    )


def _factor(ratio: float, share: float) -> float:
    """How many stretches of (1 − share)·N steps the slower arm lacks; negative where that is the baseline."""
    return (1 - 1 / ratio if ratio >= 1 else ratio - 1) / (1 - share)


def _in_words(shortened: str, steps: float, fewest: float, share: float, spread: bool) -> str:
    text = "equal time is an approximation by the baseline's slope between two complete budgets"
    if shortened != "neither":
        text += f": the {shortened} is the slower and would have {_short(100 * steps)} % of the steps"
    if spread:
        text += "; the interval spans those at the step-time ratio and at both ends of its own interval"
    if fewest < share:
        text += f"; {_short(100 * fewest)} % is fewer than the {_short(100 * share)} % measured: the slope is prolonged"
    return text


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _count(n: int) -> str:
    return f"{n} seed" + ("" if n == 1 else "s")
