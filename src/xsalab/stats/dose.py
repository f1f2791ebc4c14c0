"""Dose and response: how a metric changes with a number that was set to several values, such as α.

Every seed ran at every dose, and every run was scored on the same documents. Per seed and document a parabola with
a level of its own is fitted by least squares over the doses,

    value[s,k,d] ≈ level[s,d] + b1[s,d]·(a[k] − a0) + b2[s,d]·(a[k] − a0)²      Δ(a) = b1·(a − a0) + b2·(a − a0)²

so Δ is 0 at the reference dose a0. The level is free because the reference run is as noisy as the others: which dose
is called the reference moves the curve up or down and does not bend it. Coefficients, the curve at any dose and its
slope are linear combinations of the K values, with weights that add up to 0; so each has the two-way interval
of ``mean_difference``, pairing included. Intervals are pointwise: 95 % for one dose, not for the whole curve.

The lowest dose's set inverts tests, as Fieller (1954) does for a ratio: see ``Minimum``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .paired import LEAST_SEEDS, Estimate, Floats, PairTable, mean_difference

GRID = 51  # doses at which the curve is drawn and the minimum's set is searched
_HALVINGS = 16  # of a step of that grid, for the ends of the set


@dataclass(frozen=True, eq=False)
class DoseTable:
    """One metric of the runs of every seed at every dose.

    ``doses`` (K,): at least 3, all different, in any order. ``values`` (S, K, D) float64: a sum over document d of the
    run of seed s at dose k (bpb: nats); ``weights`` (D,) float64 and ``unit`` as in ``PairTable``.
    ``reference``: the index of the dose that the others are compared with. ``dose_word`` names the dose in sentences.
    Raises ValueError where doses are too few, equal or not finite, and where shapes disagree; the pairs made from it
    check the rest.
    """

    doses: tuple[float, ...]
    seeds: tuple[int, ...]
    items: tuple[str, ...]
    values: Floats
    weights: Floats
    metric: str
    unit: float
    reference: int = 0
    item_word: str = "documents"
    dose_word: str = "α"

    def __post_init__(self) -> None:
        object.__setattr__(self, "doses", tuple(float(dose) for dose in self.doses))
        values = np.array(self.values, dtype=np.float64)  # a copy, which nobody else can change
        values.setflags(write=False)
        object.__setattr__(self, "values", values)
        shown = ", ".join(f"{dose:g}" for dose in self.doses)
        if not all(math.isfinite(dose) for dose in self.doses):
            raise ValueError(f"doses = {shown}: must be finite numbers")
        if len(set(self.doses)) < max(3, len(self.doses)):
            raise ValueError(f"doses = {shown}: a curve needs at least 3 doses, each of them once")
        if not 0 <= self.reference < len(self.doses):
            raise ValueError(f"reference = {self.reference}: the index of a dose, 0 to {len(self.doses) - 1}")
        if values.shape != (shape := (len(self.seeds), len(self.doses), len(self.items))):
            raise ValueError(f"{self.metric}: values has shape {values.shape}; seeds, doses and items ask for {shape}")
        if not np.isfinite(values).all():
            raise ValueError(f"{self.metric}: values are not finite; leave out the seed of a diverged run")

    def combination(self, of_doses: Sequence[float] | Floats) -> PairTable:
        """The pairs whose x is Σ_k of_doses[k] · value[s,k,d] in units of the metric; of_doses (K,) adds up to 0.

        Taken from differences to the reference: equal runs give 0 exactly. The baseline is the reference dose.
        """
        reference = self.values[:, self.reference]
        differences = self.values - reference[:, None]
        combined = np.tensordot(differences, np.asarray(of_doses, dtype=np.float64), axes=(1, 0))
        return PairTable(
            self.seeds, self.items, reference, reference + combined,
            self.weights, self.metric, self.unit, self.item_word,
        )  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """The fitted Δ at a grid of doses, with pointwise intervals; None where one run meets one document."""

    doses: tuple[float, ...]
    delta: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True)
class Minimum:
    """Where the curve is lowest within the range of the doses.

    dose: of the fitted curve. within: the 95 % confidence set, a list of closed intervals (low, high); it always holds
    ``dose``. It is what these tests leave over, each from a 95 % interval of a linear combination:

        the lowest end a   is out where the slope there is below 0
        the highest end    is out where the slope there is above 0
        a dose between     is out where the slope there is not 0
        any dose           is out where the curve at an end of the range is lower than it

    The last rule removes the tops of a curve that bends down, and what a plain fall rules out although the slope
    at one dose is hard to tell. A true minimum is left out with probability 5 %; in simulation up to 8 % where the
    whole curve is nearly flat, where every dose is about as good as any other.
    decidable: False at 2 seeds or fewer and where the seeds are not in use; then ``within`` is the whole range.
    """

    dose: float
    within: tuple[tuple[float, float], ...]
    words: str
    decidable: bool


@dataclass(frozen=True)
class DoseResponse:
    """What the doses do to the metric, in units of the metric.

    points: of each dose in the order given, its measured Δ against the reference. b1, b2: the coefficients, per unit
    of dose and of dose squared. lack_of_fit: how far a cubic part moves the curve at the dose where it moves it
    most; an interval without 0 says that a parabola is not enough. None with 3 doses, which a parabola meets exactly.
    fit: that in words. Of an estimate of a combination only mean, interval, p and spread have a meaning.
    """

    doses: tuple[float, ...]
    reference: float
    points: tuple[Estimate, ...]
    curve: Curve
    b1: Estimate
    b2: Estimate
    lack_of_fit: Estimate | None
    fit: str
    minimum: Minimum
    note: str


def dose_response(table: DoseTable, *, confidence: float = 0.95, grid: int = GRID) -> DoseResponse:
    """Points, parabola and minimum, as the head of this file says; ``grid`` doses of the curve, at least 2.

    Raises ValueError for a confidence outside (0, 1) and for what ``PairTable`` refuses.
    """
    assert grid >= 2, "a curve has two ends"
    fitted = _Parabola(table, confidence)
    count = len(table.doses)
    unit_vectors = np.eye(count)
    points = tuple(fitted.estimate(unit_vectors[k] - unit_vectors[table.reference]) for k in range(count))
    doses = np.linspace(min(table.doses), max(table.doses), grid)
    drawn = [fitted.estimate(fitted.at(dose)) for dose in doses]
    cubic = fitted.cubic()
    lack = None if cubic is None else fitted.estimate(cubic)
    return DoseResponse(
        doses=table.doses,
        reference=table.doses[table.reference],
        points=points,
        curve=Curve(
            tuple(float(dose) for dose in doses),
            tuple(estimate.mean for estimate in drawn),
            tuple(estimate.low for estimate in drawn),
            tuple(estimate.high for estimate in drawn),
        ),
        b1=fitted.estimate(fitted.b1),
        b2=fitted.estimate(fitted.b2),
        lack_of_fit=lack,
        fit=_fit_in_words(lack),
        minimum=_minimum(fitted, doses),
        note=_note(table),
    )


class _Parabola:
    """The (K,) weights of the values that make up coefficients, curve and slope."""

    def __init__(self, table: DoseTable, confidence: float) -> None:
        self.table, self.confidence = table, confidence
        self.origin = table.doses[table.reference]
        self.low, self.high = min(table.doses), max(table.doses)
        self.span = self.high - self.low
        # In units of the range, so that the columns are of one size whatever the doses are.
        self.steps = (np.array(table.doses) - self.origin) / self.span
        solve = np.linalg.pinv(np.vander(self.steps, 3, increasing=True))
        self.b1: Floats = solve[1] / self.span
        self.b2: Floats = solve[2] / self.span**2

    def at(self, dose: float) -> Floats:
        """Of Δ at a dose."""
        step = dose - self.origin
        return self.b1 * step + self.b2 * step**2

    def slope(self, dose: float) -> Floats:
        return self.b1 + 2 * self.b2 * (dose - self.origin)

    def cubic(self) -> Floats | None:
        """Of the cubic orthogonal contrast, in units of the largest shift that the cubic part makes at a dose."""
        if len(self.steps) < 4:
            return None
        powers = np.vander(self.steps, 4, increasing=True)
        orthogonal, _ = np.linalg.qr(powers)
        last = orthogonal[:, 3] * np.sign(orthogonal[int(np.argmax(self.steps)), 3])  # up at the highest dose
        return last * float(np.abs(last).max())

    def estimate(self, of_doses: Floats) -> Estimate:
        return mean_difference(self.table.combination(of_doses), confidence=self.confidence)


def _minimum(fitted: _Parabola, grid: Floats) -> Minimum:
    b1, b2 = fitted.estimate(fitted.b1), fitted.estimate(fitted.b2)
    dose = _lowest(fitted, b1.mean, b2.mean)
    word = fitted.table.dose_word
    note = next((estimate.note for estimate in (b1, b2) if estimate.note and not estimate.decidable), "")
    if not (b1.decidable and b2.decidable):
        why = note or f"{_count(len(fitted.table.seeds))} cannot tell a curve from the spread between seeds"
        return Minimum(dose, ((fitted.low, fitted.high),), f"not decidable: {why}", decidable=False)
    within = _kept(fitted, sorted({*(float(a) for a in grid), dose}))
    return Minimum(dose, within, _where(within, fitted.low, fitted.high, word), decidable=True)


def _lowest(fitted: _Parabola, b1: float, b2: float) -> float:
    """The dose at which the fitted curve is lowest within the range; the lower dose where two are equal."""
    ends = (fitted.low, fitted.high)
    if b2 > 0 and ends[0] < (vertex := fitted.origin - b1 / (2 * b2)) < ends[1]:
        return vertex
    return min(ends, key=lambda dose: b1 * (dose - fitted.origin) + b2 * (dose - fitted.origin) ** 2)


def _stays(fitted: _Parabola, dose: float) -> bool:
    """Whether no test of ``Minimum`` puts this dose out."""
    slope = fitted.estimate(fitted.slope(dose))
    if dose < fitted.high and _below(slope):
        return False
    if dose > fitted.low and _above(slope):
        return False
    ends = (end for end in (fitted.low, fitted.high) if end != dose)
    return not any(_below(fitted.estimate(fitted.at(end) - fitted.at(dose))) for end in ends)


def _below(estimate: Estimate) -> bool:
    return estimate.high is not None and estimate.high < 0


def _above(estimate: Estimate) -> bool:
    return estimate.low is not None and estimate.low > 0


def _kept(fitted: _Parabola, doses: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """The intervals that stay: runs of kept doses of the grid, with their ends found by halving."""
    stays = [_stays(fitted, dose) for dose in doses]
    found: list[tuple[float, float]] = []
    for kept, group in itertools.groupby(range(len(doses)), key=lambda i: stays[i]):
        if kept:
            inside = list(group)
            first, last = inside[0], inside[-1]
            low = doses[first] if first == 0 else _edge(fitted, doses[first], doses[first - 1])
            high = doses[last] if last == len(doses) - 1 else _edge(fitted, doses[last], doses[last + 1])
            found.append((low, high))
    return tuple(found)


def _edge(fitted: _Parabola, kept: float, out: float) -> float:
    for _ in range(_HALVINGS):
        middle = (kept + out) / 2
        kept, out = (middle, out) if _stays(fitted, middle) else (kept, middle)
    return kept


def _where(within: Sequence[tuple[float, float]], low: float, high: float, word: str) -> str:
    """The set in a sentence."""
    if within == ((low, high),):
        return f"cannot be told: anywhere from {word} = {low:g} to {high:g}"
    if within == ((high, high),):
        return f"the curve falls to {word} = {high:g}: no minimum inside"
    if within == ((low, low),):
        return f"the curve rises from {word} = {low:g}: no minimum inside"
    if within == ((low, low), (high, high)):
        return f"at an end, {word} = {low:g} or {high:g}: no minimum inside"
    pieces = [f"at {a:.3g}" if a == b else f"from {a:.3g} to {b:.3g}" for a, b in within]
    return f"{word} anywhere {' or '.join(pieces)}"


def _fit_in_words(lack: Estimate | None) -> str:
    if lack is None:
        return "3 doses: the parabola goes through all points, so its form is not tested"
    if lack.low is None or lack.high is None:
        return "the parabola's form is not tested: one run of each dose, one document"
    if not lack.decidable:
        return "the parabola's form is not tested: too few seeds"
    if lack.low > 0 or lack.high < 0:
        return "a parabola is not enough: the points have a cubic part; read the points, not the curve"
    return "no cubic part is seen: a parabola describes the points"


def _note(table: DoseTable) -> str:
    if len(table.seeds) >= LEAST_SEEDS:
        return ""
    if len(table.seeds) == 1:
        return f"1 seed: intervals are over {table.item_word} alone and say nothing of another seed"
    return f"{_count(len(table.seeds))}: not decidable"


def _count(n: int) -> str:
    return f"{n} seed" + ("" if n == 1 else "s")
