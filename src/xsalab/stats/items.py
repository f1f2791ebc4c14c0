"""Answers to items, right or wrong, in tasks: one task by McNemar's test, a benchmark's figure by the two-way scheme.

A benchmark's figure is the mean over its T tasks of the centred accuracy, (accuracy − b_t) / (1 − b_t), with b_t what
its convention takes as guessing in task t. So the difference of two arms is a weighted sum over tasks,

    Δ = Σ_t 1/(T (1 − b_t)) · mean over the task's items of (treatment − baseline)

and an item of a small task weighs more than one of a large task. The tasks are those of the benchmark, no other ones
are drawn: how they differ from each other is no noise. Items are drawn within their tasks, and every run answers the
same ones, so seeds and items are crossed: paired.py with ``strata``. `centred_values` brings answers into that form.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import ArrayLike

from .paired import LEAST_SEEDS, Estimate, Floats

_scipy: Any = scipy  # without types; its parts are imported where they are first used, as that takes a second
_ROUNDING = 1e-9  # of shares of several samples, added up over seeds


@dataclass(frozen=True)
class McNemar:
    """Two models on the same items: how many both, one alone and none answered right, and the exact two-sided p.

    treatment, baseline: items that this one answered better; of right and wrong, right where the other was wrong.
    both, neither: of the others those with some credit, and those without. p: of as uneven a split of the items that
    tell the two apart, if each went either way by a fair coin; 1 where there is no such item, never 0.
    """

    both: int
    treatment: int
    baseline: int
    neither: int
    p: float


def mcnemar(treatment: ArrayLike, baseline: ArrayLike) -> McNemar:
    """McNemar's exact test (1947) of one model against another.

    treatment, baseline: (n,) what each item was given, 0 to 1; of (S, n) row s is the pair of seed s. Then the counts
    are of all S · n answers, but an item is still one trial: it goes to the arm that did better on it over all seeds,
    as answers of several seeds to one item are not independent. p is about these trained models and other items of the
    kind. It says nothing about other seeds.
    Raises ValueError for shapes that differ, no items, and values outside [0, 1].
    """
    a: Floats = np.array(treatment, dtype=np.float64, ndmin=2)
    b: Floats = np.array(baseline, dtype=np.float64, ndmin=2)
    if a.shape != b.shape or not a.size:
        raise ValueError(f"{a.shape} answers against {b.shape}: give both arms' of the same items")
    if not ((np.minimum(a, b) >= 0) & (np.maximum(a, b) <= 1)).all():
        raise ValueError("an answer has a value from 0 (wrong) to 1 (right)")
    towards: Floats = (a - b).sum(axis=0)
    wins, losses = int((towards > _ROUNDING).sum()), int((towards < -_ROUNDING).sum())
    p = float(_scipy.stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    p = max(p, sys.float_info.min)  # 2^−n of more than a thousand items is no longer a float
    counts = (int(mask.sum()) for mask in ((a == b) & (a > 0), a > b, a < b, (a == b) & (a == 0)))
    return McNemar(*counts, p=p)


def centred_values(
    values: Floats, weights: Floats, tasks: Sequence[str], baselines: Mapping[str, float]
) -> tuple[Floats, Floats]:
    """(…, D) values and (D,) weights such that Σ value / Σ weight of all items is the benchmark's figure.

    values: right answers to each item, 0 to ``weights`` (D,), which is the number of answers, mostly 1. tasks (D,): of
    each item. baselines: of each task, a share below 1. With ``strata=tasks`` a `PairTable` of them, unit 1, has Δ as
    at the head of this file. Raises ValueError for a baseline outside [0, 1), a weight that is not positive and a
    value outside 0 to its weight.
    """
    if not (weights > 0).all() or not ((values >= 0) & (values <= weights)).all():
        raise ValueError("an item has a positive weight and a value from 0 to that weight")
    names, task = np.unique(np.asarray(tasks), return_inverse=True)
    guess = np.array([baselines[name] for name in names], dtype=np.float64)
    if not ((guess >= 0) & (guess < 1)).all():
        raise ValueError(f"a task's baseline is a share from 0, below 1; got {dict(baselines)}")
    share = 1 / np.bincount(task, weights)[task]
    full = len(weights) / len(names) / (1 - guess[task])
    return (values - guess[task] * weights) * share * full, weights * share * np.bincount(task)[task]


def standard_error_of(accuracies: Sequence[float], counts: Sequence[int], baselines: Sequence[float]) -> float:
    """The standard error of one run's benchmark figure from the choice of items alone, under stated accuracies.

    √(Σ_t a_t (1 − a_t) / n_t / (1 − b_t)²) / T, an entry a task in each argument. Two runs with independent answers
    differ by √2 of it; answers to the same items agree in part, which makes it less, and seeds make it more.
    Raises ValueError where lengths differ or an entry is out of range.
    """
    a, n, b = (np.asarray(given, dtype=np.float64) for given in (accuracies, counts, baselines))
    if not (a.ndim == 1 and len(a) and a.shape == n.shape == b.shape):
        raise ValueError(f"{len(a)} accuracies, {len(n)} counts, {len(b)} baselines: give one of each a task")
    if not (((a >= 0) & (a <= 1) & (n >= 1)).all() and ((b >= 0) & (b < 1)).all()):
        raise ValueError("accuracies lie in [0, 1], counts are at least 1, baselines lie in [0, 1)")
    return math.sqrt(float((a * (1 - a) / n / (1 - b) ** 2).sum())) / len(a)


def noise_sentence(estimate: Estimate, *, per: str = "", adjusted_p: float | None = None) -> str:
    """ "a CORE difference of +0.0123 is beyond noise (95 % interval +0.0041 to +0.0205; 6 seeds, 9,133 items)"

    adjusted_p: Holm's, where the contrast is one of several. per: what the difference is for each of, "" for none.
    With one or two seeds the sentence says what cannot be told.
    """
    low, high, n = estimate.low, estimate.high, estimate.n
    word = estimate.item_word if estimate.items != 1 else estimate.item_word.removesuffix("s")
    size = f"{n} seed{'' if n == 1 else 's'}, {estimate.items:,} {word}"
    what = f"a {estimate.metric} difference{f' for each {per}' if per else ''} of"
    if low is None or high is None:
        return f"{what} {_signed(estimate.mean, 4)} is no evidence ({size})"
    places = 4 if high == low else max(2, 1 - int(f"{(high - low) / 2:.1e}".partition("e")[2]))
    start = f"{what} {_signed(estimate.mean, places)}"
    interval = f"{100 * estimate.confidence:.3g} % interval {_signed(low, places)} to {_signed(high, places)}; {size}"
    excludes = low > 0 or high < 0
    if n == 1:
        return (
            f"{start} is {'' if excludes else 'not '}beyond the noise of the {estimate.item_word} alone ({interval}); "
            "one run an arm cannot tell it from the luck of a seed"
        )
    if n < LEAST_SEEDS or not estimate.decidable:
        why = estimate.note if n >= LEAST_SEEDS else f"{n} seeds are too few to know their spread"
        return f"{start} cannot be told from noise ({interval}): {why}"
    if excludes and adjusted_p is not None and adjusted_p >= round(1 - estimate.confidence, 12):
        return f"{start} is not beyond noise after Holm's adjustment, p = {adjusted_p:.2g} ({interval})"
    return f"{start} is {'' if excludes else 'not '}beyond noise ({interval})"


def _signed(value: float, places: int) -> str:
    return f"{round(value, places) + 0.0:+.{places}f}".replace("-", "−")  # never "−0.00"
