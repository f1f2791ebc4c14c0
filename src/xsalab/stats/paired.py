"""THE STATISTICS: the difference of two arms over paired seeds and shared documents, with its interval.

    x[s,d] = μ + a[s] + b[d] + e[s,d]            Δ = mean of x over all s and d
    var Δ  = σ²_a/S + σ²_b/D + σ²_e/(S·D)

x[s,d] is treatment − baseline of seed s on document d, scaled so that its mean is the difference of the
arms: for bits per byte (nats of the document) · D / (ln 2 · bytes of all documents). Every run sees the same
documents, so seeds and documents are crossed: an interval over documents alone knows nothing of another
seed, one over seeds alone knows nothing of another text. The three parts come from the mean squares of the
two-way table,

    σ²_e = MS_rest     σ²_a = max(0, MS_seeds − MS_rest)/D     σ²_b = max(0, MS_documents − MS_rest)/S

which makes var Δ at least the variance of either one-way mean. Degrees of freedom are Satterthwaite's, never
below S − 1; at 4 seeds or fewer the wider of this and the plain t interval over seeds is taken.

Δ is a ratio, nats over bytes, and documents differ in length. So MS_documents is that of x[s,d] − Δ·D·bytes[d]/bytes:
what a document adds beyond its length's share of Δ. The width of the interval then does not depend on Δ.
Few long or unusual documents can hold most of that: their residuals are the jackknife's and their degrees of freedom
count them as few (``_documents``). Without this the interval misses the truth in 8 % of experiments, not 5 %, where 40
documents of log-normal lengths matter, and on real text (docs/calibration.md).

With ``strata`` the items belong to tasks, which are fixed: no other tasks are drawn. Each mean square is then formed
within the tasks, each residual against its own task's mean, and they are added up with the tasks' weights in Δ. How
tasks differ from each other is no noise. A seed's part is still that of its whole difference (stats/items.py).

No number here is ever NaN: what cannot be computed is None, and ``note`` says why.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import scipy  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray

_scipy: Any = scipy  # without types; its parts are imported where they are first used, as that takes a second
Floats = NDArray[np.float64]

FEW_SEEDS = 4  # up to here the two-way interval alone covers less than it says (0.92 of 0.95 at 3 seeds)
LEAST_SEEDS = 3  # with fewer nothing is decided
EXACT_FLIPS = 16  # seeds up to which all 2^S sign flips are counted
_FLIPS = 99_999  # sign flips drawn beyond that
_ROUNDING = 8 * float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class PairTable:
    """One metric of both arms at one point: row s of both is the pair of seed s, column d is item d.

    ``baseline``, ``treatment`` (S, D) float64: a sum over the item (bpb: its nats; an accuracy: 0 or 1).
    ``weights`` (D,) float64: what the sum is taken over (bpb: its bytes; an accuracy: 1), the same in all runs.
    ``unit``: ln 2 for bpb, 1 otherwise. The metric of a run is sum of values / (unit · sum of weights).
    ``item_word`` names the columns in words: "documents", "items". ``strata`` (D,): the task of each item where the
    items were drawn task by task; empty where they were drawn as one.
    Raises ValueError where shapes disagree, a number is not finite, a weight is not positive, there are no
    items ("no bytes"), or a seed or item comes twice.
    """

    seeds: tuple[int, ...]
    items: tuple[str, ...]
    baseline: Floats
    treatment: Floats
    weights: Floats
    metric: str
    unit: float
    item_word: str = "documents"
    strata: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("seeds", "items", "strata"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("baseline", "treatment", "weights"):
            copy = np.array(getattr(self, name), dtype=np.float64)  # which nobody else can change
            object.__setattr__(self, name, _read_only(copy))
        if not self.seeds:
            raise ValueError(f"{self.metric}: no seeds; a comparison needs at least one pair of runs")
        if not self.items:
            raise ValueError(f"{self.metric}: no bytes: there is no {self.item_word.removesuffix('s')} to score")
        for name in ("seeds", "items"):
            if (twice := _repeated(getattr(self, name))) is not None:
                raise ValueError(f"{self.metric}: {name} has {twice!r} twice; each pair and item counts once")
        if self.strata and len(self.strata) != len(self.items):
            raise ValueError(f"{self.metric}: {len(self.strata)} strata for {len(self.items)} items; name each one's")
        shapes = {"baseline": self._shape, "treatment": self._shape, "weights": self._shape[1:]}
        for name, shape in shapes.items():
            array: Floats = getattr(self, name)
            if array.shape != shape:
                raise ValueError(f"{self.metric}: {name} has shape {array.shape}; seeds and items ask for {shape}")
            if not np.isfinite(array).all():
                raise ValueError(f"{self.metric}: {name} is not finite; leave out the pair of a diverged run")
        if (self.weights <= 0).any():
            item = self.items[int(np.argmin(self.weights))]
            raise ValueError(f"{self.metric}: item {item!r} has no bytes (weight {self.weights.min():g}); leave it out")
        if not (math.isfinite(self.unit) and self.unit > 0):
            raise ValueError(f"{self.metric}: unit = {self.unit}; use ln 2 for bits per byte, else 1")

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.seeds), len(self.items)

    @cached_property
    def _scale(self) -> float:
        """What makes the mean of values over items the metric of a run."""
        return len(self.items) / (self.unit * float(self.weights.sum()))

    @cached_property
    def x(self) -> Floats:
        """(S, D): treatment − baseline in units of the metric; its mean is Δ."""
        return _read_only((self.treatment - self.baseline) * self._scale)

    @cached_property
    def baseline_means(self) -> Floats:
        """(S,): the metric of each baseline run."""
        return _read_only(self.baseline.mean(axis=1) * self._scale)

    @cached_property
    def treatment_means(self) -> Floats:
        """(S,): the metric of each treatment run."""
        return _read_only(self.treatment.mean(axis=1) * self._scale)

    @cached_property
    def differences(self) -> Floats:
        """(S,): the paired difference of each seed. All of them are shown; their mean is Δ."""
        return _read_only(self.x.mean(axis=1))

    @cached_property
    def groups(self) -> tuple[NDArray[np.intp], ...]:
        """The columns of each stratum; of all items where there are none.

        A stratum of one item has no spread to look at: those are taken together, one alone goes to the smallest other.
        """
        members: dict[str, list[int]] = {}
        for column, stratum in enumerate(self.strata or ("",) * len(self.items)):
            members.setdefault(stratum, []).append(column)
        found = sorted(members.values(), key=len)
        alone = sum(len(group) == 1 for group in found)
        joined = 2 if alone == 1 and len(found) > 1 else alone
        together = [column for group in found[:joined] for column in group]
        return tuple(np.array(group) for group in ([together] if together else []) + found[joined:])

    @cached_property
    def rounding(self) -> float:
        """Differences of x below this are float64's rounding of the values, not spread."""
        largest = max(float(np.abs(self.baseline).max()), float(np.abs(self.treatment).max()))
        return _ROUNDING * largest * self._scale

    @property
    def still(self) -> bool:
        """Whether no run of either arm differs from that of another seed."""
        moved = max(float(np.ptp(arm, axis=0).max()) for arm in (self.baseline, self.treatment))
        return len(self.seeds) > 1 and moved * self._scale <= self.rounding


class Parts(NamedTuple):
    """Shares of the variance of Δ, which add up to 1; all 0 where there is no spread."""

    seeds: float
    documents: float
    rest: float


@dataclass(frozen=True)
class Estimate:
    """Δ with its interval, in units of the metric.

    low, high, standard_error, df: None only where one seed meets one item: then there is no spread to look at.
    parts: shares of the two-way variance. document_error: the standard error from the choice of documents alone, which
    no number of seeds lowers; 0 where it cannot be told from the rest.
    p: two-sided, of Δ = 0; where two intervals are compared for width, the larger p of the two, so that p < 0.05
    exactly when the 95 % interval excludes 0. Without spread p is 1 where both arms are equal, None ("not testable")
    where they are not.
    sd: standard deviation of the seeds' differences; None at one seed.
    relative: Δ / |mean of the baseline|, so that it has the sign of Δ; None where that mean is 0.
    decidable: False at 2 seeds or fewer, over documents alone, where no run of either arm differs from another seed's,
    and where all seeds gave one and the same difference other than 0: then the seeds are not in use.
    """

    mean: float
    low: float | None
    high: float | None
    standard_error: float | None
    df: float | None
    p: float | None
    n: int
    items: int
    confidence: float
    method: str
    parts: Parts
    document_error: float
    sd: float | None
    relative: float | None
    baseline_mean: float
    treatment_mean: float
    metric: str
    item_word: str
    decidable: bool
    note: str = ""

    @property
    def half_width(self) -> float | None:
        """What stands behind ±: half the width of the interval."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2


class _Spread(NamedTuple):
    """One way to see the uncertainty of Δ: the three parts of its variance, df, and the words for it."""

    variance: Parts
    df: float
    method: str

    @property
    def standard_error(self) -> float:
        return math.sqrt(sum(self.variance))

    def half_width(self, confidence: float) -> float:
        return t_quantile((1 + confidence) / 2, self.df) * self.standard_error

    def p(self, mean: float) -> float | None:
        if self.standard_error == 0:
            return 1.0 if mean == 0 else None
        return 2.0 * float(_scipy.special.stdtr(self.df, -abs(mean) / self.standard_error))


def mean_difference(pairs: PairTable, *, confidence: float = 0.95) -> Estimate:
    """Δ with the primary interval: two-way over seeds × documents, as the head of this file says.

    One document: plain t over seeds. One seed: over documents only, and not decidable. One of both: no interval.
    Raises ValueError for a confidence outside (0, 1).
    """
    seeds, documents = pairs.baseline.shape
    if seeds == 1 and documents == 1:
        return _estimate(pairs, [], confidence, decidable=False, note="not testable (n=1)")
    if seeds == 1:
        return document_interval(pairs, confidence=confidence)
    if documents == 1:
        return seed_interval(pairs, confidence=confidence)
    candidates = [_two_way(pairs)]
    if seeds <= FEW_SEEDS:
        candidates.append(_over_seeds(pairs)._replace(method="t over seeds (wider)"))
    return _estimate(pairs, candidates, confidence, decidable=seeds >= LEAST_SEEDS)


def seed_interval(pairs: PairTable, *, confidence: float = 0.95) -> Estimate:
    """Δ with the plain t interval over seeds: says nothing of another text. At least 2 seeds, or ValueError."""
    if len(pairs.seeds) < 2:
        raise ValueError(f"{pairs.metric}: an interval over seeds needs 2 of them, got {len(pairs.seeds)}")
    return _estimate(pairs, [_over_seeds(pairs)], confidence, decidable=len(pairs.seeds) >= LEAST_SEEDS)


def document_interval(pairs: PairTable, *, confidence: float = 0.95) -> Estimate:
    """Δ with the t interval over documents: says nothing of another seed, so it is never decidable.

    At least 2 documents, or ValueError.
    """
    if len(pairs.items) < 2:
        raise ValueError(f"{pairs.metric}: an interval over {pairs.item_word} needs 2 of them, got {len(pairs.items)}")
    return _estimate(pairs, [_over_documents(pairs)], confidence, decidable=False)


def two_way_interval(pairs: PairTable, *, confidence: float = 0.95) -> Estimate:
    """Δ with the two-way interval at any number of seeds: up to 4 of them it covers less than it says.

    At least 2 seeds and 2 documents, or ValueError.
    """
    if min(pairs.baseline.shape) < 2:
        raise ValueError(f"{pairs.metric}: a two-way interval needs 2 seeds and 2 {pairs.item_word}")
    return _estimate(pairs, [_two_way(pairs)], confidence, decidable=len(pairs.seeds) >= LEAST_SEEDS)


def equivalence_interval(pairs: PairTable, *, level: float = 0.05) -> Estimate:
    """Δ with the interval of two one-sided tests at ``level`` each: never narrower than `mean_difference` has it.

    A few documents with most of an effect make Δ skewed. Where few of them were drawn, Δ and its standard error both
    come out small. A two-sided interval makes up on one side for what it misses on the other; a one-sided test does
    not. So the end on the longer side moves outwards by

        se · ((1 + 2z²)/6 · g + (1 + z²) · h)       g = Σ_d q_d³ / D³ / se³
                                                    h = Σ_sd a_s q_d z_sd / (S(S − 1) · D(D − 1)) / se³

    with the two-way se, the normal quantile z of ``level``, and of Δ's deviations q_d those of documents
    (``_residuals``), a_s of seeds, z_sd of cells. The first term is the modified t of Johnson (1978, JASA 73:536). The
    second is the same Cornish–Fisher step for the third moment that seeds and documents have together, E[a b e] with e
    the rest: seeds that differ most on the documents that the change hurts most. Divided by S·D it comes 6 times in
    the third moment of Δ and 4 times in the covariance of Δ and se²; the documents' own comes once in each. A skewness
    of the seeds themselves cannot be seen in a few of them and is left alone.
    Raises ValueError unless 0 < level < 0.5.
    """
    if not 0 < level < 0.5:
        raise ValueError(f"level = {level}: must lie between 0 and 0.5, for instance 0.05")
    plain = mean_difference(pairs, confidence=1 - 2 * level)
    if not plain.standard_error or min(pairs.baseline.shape) < 2:
        return plain
    s, d = pairs.baseline.shape
    se, quantile = _two_way(pairs).standard_error, float(_scipy.special.ndtri(1 - level))
    z, q = _beyond_length(pairs) / se, _residuals(pairs) / se
    own = float((q**3).sum()) / d**3
    mixed = float(z.mean(axis=1) @ z @ (q - q.mean())) / (s * (s - 1) * d * (d - 1))
    shift = se * ((1 + 2 * quantile**2) / 6 * own + (1 + quantile**2) * mixed)
    assert plain.low is not None, "two seeds and two documents give an interval"
    assert plain.high is not None, "two seeds and two documents give an interval"
    low, high = min(plain.low, plain.low + shift), max(plain.high, plain.high + shift)
    return replace(plain, low=low, high=high, method=f"{plain.method}, widened for skewness")


@lru_cache(maxsize=4)  # one table is asked for at several confidences
def _beyond_length(pairs: PairTable) -> Floats:
    """(S, D) x without each document's share, by length, of Δ; in each stratum the mean over all is 0. Read-only."""
    z = np.empty_like(pairs.x)
    for group in pairs.groups:
        x, weights = pairs.x[:, group], pairs.weights[group]
        z[:, group] = x - x.mean() * weights / weights.mean()
    return _read_only(z)


class _Documents(NamedTuple):
    """What the documents say: their mean square, its degrees of freedom, and those that lengths leave in each stratum.

    mean_square: of (mean over seeds, as if the document were left out), Σ over documents / (D − 1).
    """

    mean_square: float
    df: float
    df_of_lengths: list[float]


def _residuals(pairs: PairTable) -> Floats:
    """(D,): of each document's mean over seeds, as the jackknife has them.

    A long document pulls Δ towards itself, so its plain residual is too small.
    """
    found = _beyond_length(pairs).mean(axis=0)
    for group in pairs.groups:
        share = pairs.weights[group] / pairs.weights[group].sum()
        found[group] *= (1 - 1 / len(share)) / np.maximum(1 - share, _ROUNDING)
    return found


def _documents(pairs: PairTable) -> _Documents:
    """The mean square and its degrees of freedom.

    Degrees of freedom, never more than Kish's effective number of documents less one, (Σ bytes)² / Σ bytes² − 1, which
    is D − 1 where lengths are equal: Satterthwaite's, with the variance of each square estimated by the square itself,
    3 (Σ q)² / Σ q² − 2. Few documents with most of the variance count as few. In each of several strata of n
    documents a square counts n/(n − 1) times, and one degree of freedom is lost.
    """
    squares, by_length = _residuals(pairs) ** 2, list[float]()
    for group in pairs.groups:
        share = pairs.weights[group] / pairs.weights[group].sum()
        squares[group] *= len(group) / max(1, len(group) - 1)
        by_length.append(max(1.0, 1 / float((share**2).sum()) - 1))
    total, fourth = float(squares.sum()), float((squares**2).sum())
    df = 3 * total**2 / fourth - 2 if fourth > 0 else sum(by_length)
    return _Documents(total / len(squares), min(max(df, 1.0), sum(by_length)), by_length)


@lru_cache(maxsize=4)
def _two_way(pairs: PairTable) -> _Spread:
    z = _beyond_length(pairs)
    s, d = z.shape
    documents = _documents(pairs)
    ms_seeds = d * float((z.mean(axis=1) ** 2).sum()) / (s - 1)
    ms_documents = s * documents.mean_square
    rests: list[tuple[float, float]] = []  # each stratum's share of the rest, and its degrees of freedom
    for group, by_length in zip(pairs.groups, documents.df_of_lengths, strict=True):
        x = z[:, group]
        rest = x - x.mean(axis=1, keepdims=True) - x.mean(axis=0, keepdims=True)
        squares = float((rest**2).sum()) / (s - 1)
        rests.append((squares * len(group) / max(1, len(group) - 1) / d, (s - 1) * by_length))
    ms_rest = sum(part for part, _ in rests)
    parts = Parts(max(0.0, ms_seeds - ms_rest), max(0.0, ms_documents - ms_rest), ms_rest)
    variance = Parts(*(part / (s * d) for part in parts))
    # The sum is a combination of the mean squares that are not truncated away: 1 each for the two outer ones,
    # and −1, 0 or +1 for the rest. Satterthwaite: (sum)² / Σ (term² / its df).
    kept = [(ms_seeds, s - 1.0)] * (parts.seeds > 0) + [(ms_documents, documents.df)] * (parts.documents > 0)
    if len(kept) != 1:
        kept += rests
    total, below = sum(parts), sum(ms**2 / df for ms, df in kept)
    df = max(total**2 / below, s - 1.0) if below > 0 else s - 1.0
    return _Spread(variance, df, f"two-way t, seeds × {pairs.item_word}{_within(pairs)}")


def _within(pairs: PairTable) -> str:
    return " within tasks" if pairs.strata else ""


def _over_seeds(pairs: PairTable) -> _Spread:
    s = len(pairs.seeds)
    method = "t over seeds" + (f" (one {pairs.item_word.removesuffix('s')})" if len(pairs.items) == 1 else "")
    return _Spread(Parts(float(pairs.differences.var(ddof=1)) / s, 0.0, 0.0), s - 1.0, method)


def _over_documents(pairs: PairTable) -> _Spread:
    s, d = pairs.baseline.shape
    documents = _documents(pairs)
    method = f"t over {pairs.item_word}{_within(pairs)} only ({_count(s, 'seed')})"
    return _Spread(Parts(0.0, documents.mean_square / d, 0.0), documents.df, method)


def _estimate(
    pairs: PairTable, spreads: Sequence[_Spread], confidence: float, *, decidable: bool, note: str = ""
) -> Estimate:
    """The estimate by the widest of ``spreads``; the parts of the variance are those of the first."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence}: must lie between 0 and 1, for instance 0.95")
    x = pairs.x
    mean, baseline = float(x.mean()), float(pairs.baseline_means.mean())
    sd = float(pairs.differences.std(ddof=1)) if len(x) > 1 else None
    if len(x) > 1 and float(np.ptp(x, axis=0).max()) <= pairs.rounding:
        sd, note = 0.0, "no spread: every seed gave the same difference"
        decidable = decidable and float(np.abs(x).max()) <= pairs.rounding  # equal arms are equal
        if pairs.still:  # so are runs that are one run
            note, decidable = "no spread: every seed gave the same result; are the seeds in use?", False
    if spreads and float(np.abs(_beyond_length(pairs)).max()) <= pairs.rounding:
        note = note or "no spread: all differences are equal"
        spreads = [spread._replace(variance=Parts(0.0, 0.0, 0.0)) for spread in spreads]
        mean = 0.0 if abs(mean) <= pairs.rounding else mean
    widest = max(spreads, key=lambda spread: spread.half_width(confidence), default=None)
    half = widest.half_width(confidence) if widest else None
    variance = spreads[0].variance if spreads else Parts(0.0, 0.0, 0.0)
    total = sum(variance)
    every_p = [spread.p(mean) for spread in spreads]
    return Estimate(
        mean=mean,
        low=None if half is None else mean - half,
        high=None if half is None else mean + half,
        standard_error=widest.standard_error if widest else None,
        df=widest.df if widest else None,
        p=max((p for p in every_p if p is not None), default=None),
        n=len(pairs.seeds),
        items=len(pairs.items),
        confidence=confidence,
        method=widest.method if widest else "no interval",
        parts=Parts(*(part / total for part in variance)) if total else variance,
        document_error=math.sqrt(variance.documents),
        sd=sd,
        relative=mean / abs(baseline) if baseline else None,
        baseline_mean=baseline,
        treatment_mean=float(pairs.treatment_means.mean()),
        metric=pairs.metric,
        item_word=pairs.item_word,
        decidable=decidable,
        note=note,
    )


@dataclass(frozen=True)
class SignFlip:
    """p of the sign-flip test over seeds, two-sided, and the smallest p that this number of seeds can reach."""

    p: float
    smallest: float


def sign_flip(pairs: PairTable) -> SignFlip:
    """Would the mean be as large if each pair's arms had been swapped by a coin? Exact up to 16 seeds.

    It is printed beside the interval and decides nothing: at 4 seeds its smallest p is 0.125.
    """
    differences = pairs.differences
    seeds = len(differences)
    if seeds > EXACT_FLIPS:
        drawn = _scipy.stats.permutation_test(
            (differences,),
            np.mean,
            permutation_type="samples",
            vectorized=True,
            n_resamples=_FLIPS,
            batch=1000,
            random_state=np.random.default_rng(0),
        )
        return SignFlip(float(drawn.pvalue), 2 / (_FLIPS + 1))
    sums = np.abs(_all_signs(seeds) @ differences)
    rounding = 1e-12 * float(np.abs(differences).sum())  # sums that are equal in exact arithmetic count as equal
    return SignFlip(float((sums >= abs(differences.sum()) - rounding).mean()), min(1.0, 2 / 2**seeds))


@lru_cache(maxsize=4)
def _all_signs(seeds: int) -> Floats:
    """(2^S, S): every way to swap the arms of S pairs. Read-only."""
    return _read_only(np.array(list(itertools.product((-1.0, 1.0), repeat=seeds))))


@dataclass(frozen=True)
class Correlation:
    """How far partners moved together over seeds, and the share of the difference's variance that pairing saved."""

    r: float
    low: float
    high: float
    saved: float
    saved_low: float
    saved_high: float
    n: int


def correlation(pairs: PairTable, *, confidence: float = 0.95) -> Correlation | None:
    """Correlation of partners' metrics over seeds with Fisher's interval.

    None below 6 seeds, and where an arm has no spread.

    saved = 1 − var(difference) / (var(baseline) + var(treatment)), negative where pairing made it worse; its
    interval is that of r with the spreads of the arms taken as measured.
    """
    a, b = pairs.baseline_means, pairs.treatment_means
    n = len(a)
    sd_a, sd_b = float(a.std(ddof=1)) if n > 1 else 0.0, float(b.std(ddof=1)) if n > 1 else 0.0
    if n < 6 or min(sd_a, sd_b) <= pairs.rounding:
        return None
    r = float(((a - a.mean()) * (b - b.mean())).sum()) / ((n - 1) * sd_a * sd_b)
    z = math.atanh(min(max(r, -1 + 1e-15), 1 - 1e-15))
    half = float(_scipy.special.ndtri((1 + confidence) / 2)) / math.sqrt(n - 3)
    low, high = math.tanh(z - half), math.tanh(z + half)
    share = 2 * sd_a * sd_b / (sd_a**2 + sd_b**2)
    return Correlation(r, low, high, share * r, share * low, share * high, n)


@dataclass(frozen=True)
class RatioEstimate:
    """Median ratio over n quartets, with an interval between two order statistics.

    It covers with probability ``coverage`` whatever the distribution; ``note`` says so where n is too small for the
    confidence asked for.
    """

    median: float
    low: float
    high: float
    n: int
    coverage: float
    note: str = ""


def ratio_estimate(blocks_a: Sequence[float], blocks_b: Sequence[float], *, confidence: float = 0.95) -> RatioEstimate:
    """How many times as long b takes as a, from blocks timed in turns A B B A, A B B A, …

    blocks_a, blocks_b: seconds of the timed blocks of each, in the order of the clock: two of each a quartet, whose
    ratio (b + b) / (a + a) is free of a steady drift. Raises ValueError for unequal or odd numbers of blocks and for
    times that are not positive and finite.
    """
    a, b = np.asarray(blocks_a, dtype=np.float64), np.asarray(blocks_b, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape or not len(a) or len(a) % 2:
        raise ValueError(f"blocks come as A B B A, two of each a quartet; got {a.shape} and {b.shape} of them")
    if not (np.isfinite(a).all() and np.isfinite(b).all() and (a > 0).all() and (b > 0).all()):
        raise ValueError("a block's time must be positive and finite")
    ratios = np.sort(b.reshape(-1, 2).sum(axis=1) / a.reshape(-1, 2).sum(axis=1))
    n = len(ratios)
    # Ranks k and n + 1 − k leave out the median with probability 2·P(Binomial(n, ½) < k).
    rank = max(1, int(_scipy.stats.binom.ppf((1 - confidence) / 2, n, 0.5)))
    coverage = max(0.0, 1 - 2 * float(_scipy.special.bdtr(rank - 1, n, 0.5)))
    note = ""
    if coverage < confidence:
        note = f"{_count(n, 'quartet')}: too few for {confidence:.0%}; from least to greatest covers {coverage:.1%}"
    return RatioEstimate(float(np.median(ratios)), float(ratios[rank - 1]), float(ratios[n - rank]), n, coverage, note)


def clopper_pearson(k: int, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval of a probability after k events in n trials. Raises ValueError unless 0 ≤ k ≤ n and n ≥ 1."""
    if not (0 <= k <= n and n >= 1):
        raise ValueError(f"{k} of {n} runs: the count must lie between 0 and a number of runs of at least 1")
    interval = _scipy.stats.binomtest(k, n).proportion_ci(confidence, method="exact")
    return float(interval.low), float(interval.high)


def t_quantile(probability: float, df: float) -> float:
    """Student's t below which ``probability`` lies."""
    return float(_scipy.special.stdtrit(df, probability))


def _read_only(array: Floats) -> Floats:
    """The array itself, from now on."""
    array.setflags(write=False)
    return array


def _repeated(values: Sequence[Any]) -> Any:
    if len(set(values)) == len(values):
        return None
    seen: set[Any] = set()
    return next((value for value in values if value in seen or seen.add(value)), None)


def _count(n: int, word: str) -> str:
    return f"{n} {word}" + ("" if n == 1 else "s")
