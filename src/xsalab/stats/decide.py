"""From an interval to a word: verdicts, several contrasts at once, what an experiment can find, and the sentence.

    better, worse   the 95 % interval excludes 0 (several contrasts: and Holm's adjusted p is below 0.05)
    equivalent      the 90 % interval lies inside ± margin: two one-sided tests at 5 % (``equivalence_interval``)
    both            better or worse, "below the margin"
    neither         inconclusive, with what would help

Where looks are taken while seeds are added, both intervals have the higher confidence of each look (looks.py).
An arm with a diverged run is `diverged`, whatever its finished pairs say; 2 seeds or fewer are `not decidable`.
The advice for the inconclusive aims at a 95 % interval no wider than the margin: wherever such an interval lies, it
excludes 0 or lies inside ± margin. It never looks at the observed Δ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy  # pyright: ignore[reportMissingTypeStubs]

from .paired import LEAST_SEEDS, Estimate, Floats, clopper_pearson, t_quantile

_scipy: Any = scipy  # without types; its parts are imported where they are first used, as that takes a second

Word = Literal["better", "worse", "equivalent", "inconclusive", "not decidable", "diverged"]
MANY_SEEDS = 1000  # beyond this a number of seeds is no advice


@dataclass(frozen=True)
class Verdict:
    """word: one of six. reason: why, one clause. advice: what would help, empty where nothing is needed.

    below_margin: better or worse, but by less than the margin. diverged: runs of the treatment arm that diverged, and
    runs in all; diverged_interval: the exact 95 % interval of that probability, None where nothing diverged.
    """

    word: Word
    reason: str
    advice: str = ""
    below_margin: bool = False
    diverged: tuple[int, int] = (0, 0)
    diverged_interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"{self.word}, below the margin" if self.below_margin else self.word


def decide(
    estimate: Estimate | None,
    *,
    margin: float,
    estimate90: Estimate | None,
    lower_is_better: bool = True,
    adjusted_p: float | None = None,
    diverged: tuple[int, int] = (0, 0),
    level: float = 0.05,
    equivalence_level: float = 0.05,
) -> Verdict:
    """The rule at the head of this file.

    estimate: with the 95 % interval; None where all pairs are lost to diverged runs. estimate90: of the same pairs
    the ``equivalence_interval``, 90 %; None leaves equivalence untested. margin: absolute, in units of the metric.
    adjusted_p: Holm's, over the declared family. diverged: (runs of the treatment arm that diverged, its runs).
    level, equivalence_level: where looks are taken while seeds are added, the nominal levels of each look
    (``look_levels``). Then ``estimate`` has confidence 1 − level, ``estimate90`` 1 − 2·equivalence_level, and Holm's p
    is compared with level.
    Raises ValueError for a margin that is not positive, for intervals of another confidence, for levels outside
    (0, 0.5), and for no estimate without a diverged run.
    """
    if not (math.isfinite(margin) and margin > 0):
        raise ValueError(f"margin = {margin}: must be a positive difference in units of the metric")
    for name, value in (("level", level), ("equivalence_level", equivalence_level)):
        if not 0 < value < 0.5:
            raise ValueError(f"{name} = {value}: must lie between 0 and 0.5, for instance 0.05")
    for given, confidence in ((estimate, 1 - level), (estimate90, 1 - 2 * equivalence_level)):
        if given is not None and not math.isclose(given.confidence, confidence):
            raise ValueError(
                f"the interval has confidence {given.confidence}; the rule is written for {confidence:.6g}"
            )
    lost, runs = diverged
    if lost:
        low, high = clopper_pearson(lost, runs)
        reason = f"{lost} of {runs} runs diverged (95 % interval {_percent(low)} to {_percent(high)})"
        advice = "lower the learning rate or lengthen the warm-up, for both arms"
        return Verdict("diverged", reason, advice, diverged=diverged, diverged_interval=(low, high))
    if estimate is None:
        raise ValueError("no estimate and no diverged run: there is nothing to decide on")
    if not estimate.decidable:
        return _not_decidable(estimate)
    low, high = _interval(estimate)
    inside = False
    if estimate90 is not None:
        low90, high90 = _interval(estimate90)
        inside = -margin < low90 and high90 < margin
    excludes = low > 0 or high < 0
    interval, interval90 = f"the {_confidence(level)} interval", f"the {_confidence(2 * equivalence_level)} interval"
    each_look = "" if level == equivalence_level == 0.05 else " (nominal level of each look)"
    if excludes and (adjusted_p is None or adjusted_p < level):
        word: Word = "better" if (estimate.mean < 0) == lower_is_better else "worse"
        reason = f"{interval} excludes 0" + ("" if adjusted_p is None else f" (Holm's p = {adjusted_p:.2g})")
        reason += each_look
        return Verdict(word, reason, below_margin=inside)
    if inside:
        return Verdict("equivalent", f"{interval90} lies inside ± {_plain(margin)}{each_look}")
    reason = f"{interval} holds 0"
    if excludes and adjusted_p is not None:
        reason = f"{interval} excludes 0, but not after Holm's adjustment (p = {adjusted_p:.2g})"
    if estimate90 is not None:
        reason += f" and {interval90} reaches beyond ± {_plain(margin)}"
    advice = _what_would_help(estimate, margin, level)
    if excludes and adjusted_p is not None:
        alone = "new runs of a smaller declared family, as the interval alone excludes 0"
        advice = f"{alone}; to see a difference as small as the margin: {advice}" if advice else alone
    return Verdict("inconclusive", reason + each_look, advice)


def _interval(estimate: Estimate) -> tuple[float, float]:
    assert estimate.low is not None, "a decidable estimate has an interval"
    assert estimate.high is not None, "a decidable estimate has an interval"
    return estimate.low, estimate.high


def _not_decidable(estimate: Estimate) -> Verdict:
    if estimate.n < LEAST_SEEDS:
        return Verdict(
            "not decidable",
            f"{_count(estimate.n)} cannot tell a difference from the spread between seeds",
            f"at least {LEAST_SEEDS} seeds; 6 or more to see a small difference",
        )
    if estimate.note:
        return Verdict("not decidable", estimate.note, "check that the runs use their seeds")
    return Verdict("not decidable", f"{estimate.method}: says nothing about seeds", "the interval over seeds as well")


def _what_would_help(estimate: Estimate, margin: float, level: float) -> str:
    """Seeds as a range, or more text: from the spread and the margin, never from the observed Δ."""
    beyond = 1 - level / 2
    text = estimate.document_error**2  # the variance that no seed lowers
    width_of_text = 2 * float(_scipy.special.ndtri(beyond)) * math.sqrt(text)
    if width_of_text >= margin:
        times = (width_of_text / margin) ** 2
        return (
            f"more validation text, over {_two_digits(times)} times as much: with this text no number of seeds makes "
            "the interval narrower than the margin"
        )
    advice = ""
    if estimate.parts.documents > 0.5:
        advice = f"more validation text, as {_percent(estimate.parts.documents)} of the variance is from it; or "
    low, high = sd_interval(estimate.sd or 0.0, estimate.n)

    def narrow(sd: float) -> Callable[[int], bool]:
        return lambda n: 2 * t_quantile(beyond, n - 1) * math.sqrt(sd**2 / n + text) <= margin

    fewest, most = (_first(narrow(sd), estimate.n + 1, MANY_SEEDS) for sd in (low, high))
    if fewest is None:
        return advice + f"more seeds, over {MANY_SEEDS:,} in all: a wider margin or a calmer recipe is cheaper"
    if fewest == most:
        return advice + f"more seeds, {fewest} in all"
    return advice + f"more seeds, {fewest} to {f'over {MANY_SEEDS:,}' if most is None else most} in all"


def sd_interval(sd: float, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """The chi-square interval of a standard deviation ``sd`` that was estimated from n values. n ≥ 2, or ValueError."""
    if n < 2:
        raise ValueError(f"n = {n}: a standard deviation needs 2 values")
    tail, df = (1 - confidence) / 2, n - 1
    return tuple(sd * math.sqrt(df / float(_scipy.special.chdtri(df, p))) for p in (tail, 1 - tail))  # pyright: ignore


def holm(p: Sequence[float]) -> Floats:
    """(m,) p values adjusted for the declared family of m contrasts (Holm 1979), in the order given.

    The smallest is multiplied by m, the next by m − 1, and so on; none is below one before it, none above 1.
    Raises ValueError for a p outside [0, 1].
    """
    values = np.asarray(p, dtype=np.float64)
    if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"p = {list(p)}: give a list of numbers from 0 to 1")
    order = np.argsort(values, kind="stable")
    stepped = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def minimum_detectable(sd: float, n: int, *, alpha: float = 0.05, power: float = 0.8) -> float:
    """The smallest true difference that n pairs find with this power (two-sided t test over seeds, noncentral t).

    sd: of the seeds' differences; ``estimate.standard_error · √n`` counts the validation text in.
    Raises ValueError for n < 2, a negative sd, or alpha and power that do not satisfy 0 < alpha < power < 1.
    """
    if n < 2:
        raise ValueError(f"n = {n}: a t test needs 2 pairs")
    if not (math.isfinite(sd) and sd >= 0):
        raise ValueError(f"sd = {sd}: must be a finite number of at least 0")
    if not 0 < alpha < power < 1:
        raise ValueError(f"alpha = {alpha}, power = {power}: 0 < alpha < power < 1 must hold")
    critical = t_quantile(1 - alpha / 2, n - 1)

    def lacking(shift: float) -> float:
        # The lower tail is the upper one of −shift: scipy's cdf of it is NaN for large shifts.
        return float(sum(_scipy.stats.nct.sf(critical, n - 1, nc) for nc in (shift, -shift))) - power

    most = 1.0
    while lacking(most) < 0:
        most *= 2
    return sd / math.sqrt(n) * float(_scipy.optimize.brentq(lacking, 1e-6, most, xtol=1e-10))


def seeds_needed(
    sd: float, effect: float, *, alpha: float = 0.05, power: float = 0.8, most: int = MANY_SEEDS
) -> int | None:
    """The smallest number of seeds, at least 3, that finds a true difference ``effect`` with this power.

    None where it is above ``most``. The effect is the one worth finding, not the one observed. ValueError unless > 0.
    """
    if not (math.isfinite(effect) and effect > 0):
        raise ValueError(f"effect = {effect}: must be a positive difference in units of the metric")
    return _first(lambda n: minimum_detectable(sd, n, alpha=alpha, power=power) <= effect, LEAST_SEEDS, most)


def sentence(treatment: str, baseline: str, estimate: Estimate | None, verdict: Verdict, *, metric: str = "") -> str:
    """ "XSA (α = 1, all layers) against standard: Δ bpb −0.0031 ± 0.0012 over 6 seeds, better"

    ± is half the 95 % interval, shown with two digits; the sign of Δ is always shown. metric: its name in the sentence,
    by default the table's.
    """
    start = f"{treatment} against {baseline}: "
    if verdict.word == "diverged":
        conditional = "no pair finished"
        if estimate is not None:
            delta = _delta(estimate, metric)
            conditional = f"{delta} over {_count(estimate.n)}, on condition that both runs finish"
        return f"{start}{verdict.reason}; {conditional}"
    assert estimate is not None, "only a diverged arm has no estimate"
    alone = f" ({estimate.item_word} only)" if estimate.n == 1 and estimate.low is not None else ""
    return f"{start}{_delta(estimate, metric)}{alone} over {_count(estimate.n)}, {verdict}"


def _delta(estimate: Estimate, metric: str) -> str:
    """Δ bpb −0.0031 ± 0.0012"""
    mean, half = estimate.mean, estimate.half_width
    name = f"Δ {metric or estimate.metric}"
    if not half:  # no interval, or no spread
        digits = f"{mean:+.4g}" if mean else "0"
        return f"{name} {_minus(digits)}" + ("" if half is None else " ± 0")
    places = max(0, 1 - _exponent(half))
    return f"{name} {_minus(f'{mean:+.{places}f}')} ± {half:.{places}f}"


def _exponent(value: float) -> int:
    """The power of ten of the first digit after rounding to two digits: −3 for 0.0012, −2 for 0.00999."""
    return int(f"{value:.1e}".partition("e")[2])


def _two_digits(value: float) -> str:
    return f"{value:.{max(0, 1 - _exponent(value))}f}"


def _plain(value: float) -> str:
    return _minus(f"{value:.3g}")


def _minus(text: str) -> str:
    return text.replace("-", "−")


def _confidence(outside: float) -> str:
    """ "95 %" for 0.05, "97.9 %" for 0.0213."""
    return f"{100 * (1 - outside):.3g} %"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _count(n: int) -> str:
    return f"{n} seed" + ("" if n == 1 else "s")


def _first(holds: Callable[[int], bool], least: int, most: int) -> int | None:
    """The smallest n from least to most for which ``holds``, which stays true once it is; None where it never is."""
    if least > most or not holds(most):
        return None
    low, high = least, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
