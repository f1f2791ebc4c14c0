"""The verdicts tested on experiments whose truth is known: how often are they wrong?

Two kinds of setting. `Simulated` draws crossed seeds × documents with log-normal lengths, correlated partners and runs
with normal, heavy-tailed or spiking effects. Plasmode settings draw seeds and documents from a bank of real runs.
`Resampled`: under the null each pair's labels are swapped by a coin, so that the truth is exactly 0 and no run needs to
come twice; planted effects have the document profile of a real effect. `BankContrast`: a real effect, seeds and
documents with replacement; the bank's own Δ is the truth.

`tally` passes every experiment through the functions that make real verdicts and counts errors; `judge` compares the
counts with a simultaneous binomial band: over all M judged rows at once a method that errs at its nominal rate is
called a failure with probability 5 % at most (exact binomial tails, 0.05/M a row, by Bonferroni).

    two-sided   the rate may lie neither above nor below the band: the primary t interval where its assumption, normal
                effects of seeds, holds about, and with more than 4 seeds: up to 4 it is the wider of two
    one-sided   the rate may not lie above the band: everything else, which may err less than it says
    counted     the positive control: found in at least 95 % of the experiments, no band
    shown       measured, printed, not judged: skewed worlds in which no interval from 3 to 12 seeds can be right
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import scipy  # pyright: ignore[reportMissingTypeStubs]

from .decide import decide, holm
from .looks import LOOKS, look_levels
from .paired import (
    FEW_SEEDS,
    Estimate,
    Floats,
    PairTable,
    document_interval,
    equivalence_interval,
    mean_difference,
    seed_interval,
    sign_flip,
    t_quantile,
    two_way_interval,
)

_scipy: Any = scipy  # without types; its parts are imported where they are first used, as that takes a second
_LN2 = math.log(2)

SEEDS = (3, 4, 6, 8, 12)
FAMILY = 3  # contrasts against one baseline, for Holm's error
NOMINAL = 0.05
MARGIN = 8.0  # standard errors at 12 seeds: so wide that only the true difference decides about `equivalent`
PLANNED = 4  # seeds at which the positive control must be found
FLIPS_FROM = 6  # seeds from which the sign-flip test can reach 5 %
RESAMPLES = 999

Law = Literal["normal", "heavy", "spikes", "skewed"]
Rule = Literal["two-sided", "one-sided", "counted", "shown"]
Interval = tuple[float, float]
Key = tuple[str, int]  # what is counted, and at how many seeds

COVERAGE, NULL, EQUIVALENT = "interval misses the truth", "better or worse, truth 0", "equivalent, truth at the margin"
FLIP, HOLM = "sign-flip p ≤ 0.05, truth 0", f"Holm, any of {FAMILY}, truth 0"
LOOKS_NULL, LOOKS_EQUIVALENT = "better or worse at any look, truth 0", "equivalent at any look, truth at the margin"
MISSED = "positive control not found worse"


class Draw(NamedTuple):
    """One experiment of 12 seeds; the first S of them are the experiment of S seeds.

    planted: a table with Δ = ``truth``. margin: None where the setting has this table alone. null: FAMILY tables with
    Δ = 0. same_text: a null table without documents' part, as the sign-flip test asks about the text at hand alone.
    """

    planted: PairTable
    truth: float
    margin: float | None = None
    null: tuple[PairTable, ...] = ()
    same_text: PairTable | None = None


class Setting(Protocol):
    """Where experiments come from."""

    @property
    def name(self) -> str: ...

    @property
    def documents(self) -> int: ...

    @property
    def rule(self) -> Rule: ...

    def draw(self, rng: np.random.Generator) -> Draw: ...


# --- simulated --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Simulated:
    """bpb of a run on a document = 2 + document's difficulty + run's effect + arm's own on this document + rest.

    seed_sd: of a run's effect in bpb, of which ``correlation`` is shared by partners. document_sd: of what an arm does
    to a document beyond its mean effect. rest_sd: of run × document. Lengths are log-normal with σ = 1.
    law of the runs' effects: "normal"; "heavy", t with 3 df, documents' effects too; "spikes", one run of 8 is worse by
    an exponential of 5 seed_sd; "skewed", the treatments' runs alone do that.
    """

    name: str
    documents: int
    rule: Rule
    law: Law = "normal"
    seed_sd: float = 0.003
    document_sd: float = 0.004
    rest_sd: float = 0.005
    correlation: float = 0.5

    def draw(self, rng: np.random.Generator) -> Draw:
        arms, seeds, documents = FAMILY + 1, SEEDS[-1], self.documents
        size = np.exp(rng.normal(7.5, 1.0, documents))
        shared, own = math.sqrt(self.correlation), math.sqrt(1 - self.correlation)
        run = self.seed_sd * (shared * self._effect(rng, (1, seeds, 1)) + own * self._effect(rng, (arms, seeds, 1)))
        if self.law == "skewed":
            run[1:] += self.seed_sd * _spikes(rng, (FAMILY, seeds, 1))
        document = self.document_sd * self._tail(rng, (arms, 1, documents))
        document[0] = rng.normal(0, 0.3, documents)  # how hard a document is, for all arms
        document[1:] += document[0]
        bpb = 2 + run + document + rng.normal(0, self.rest_sd, (arms, seeds, documents))
        nats = bpb * size * _LN2
        names = tuple(f"document {d}" for d in range(documents))
        null = [_table(names, nats[0], nats[arm], size) for arm in range(1, arms)]
        planted = _table(names, nats[0], nats[-1] + self.margin * size * _LN2, size)
        own = (document[1] - document[0]) * size * _LN2
        same_text = _table(names, nats[0], nats[1] - own, size)
        return Draw(planted, self.margin, self.margin, tuple(null), same_text)

    @cached_property
    def margin(self) -> float:
        """MARGIN standard errors at 12 seeds, from the variances of the parts."""
        tail = 3.0 if self.law == "heavy" else 1.0  # the variance of t with 3 df
        spikes = 1 / 8 * 2 * 5**2 - (5 / 8) ** 2  # of an effect that is exponential in one run of 8
        runs = 2 * (1 - self.correlation) * (tail + (spikes if self.law == "spikes" else 0.0))
        runs += spikes if self.law == "skewed" else 0.0
        unequal = math.exp(1.0) / self.documents  # Σ size² / (Σ size)² of log-normal lengths with σ = 1
        text = tail * self.document_sd**2 * unequal
        return MARGIN * math.sqrt(text + (self.seed_sd**2 * runs + 2 * self.rest_sd**2 * unequal) / SEEDS[-1])

    def _tail(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        return rng.standard_t(3, shape) if self.law == "heavy" else rng.standard_normal(shape)

    def _effect(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        effect = self._tail(rng, shape)
        return effect + _spikes(rng, shape) if self.law == "spikes" else effect


def _spikes(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Exponential with mean 5 in one of 8, 0 in the others, less the mean of all."""
    return rng.exponential(5.0, shape) * (rng.random(shape) < 1 / 8) - 5 / 8


def _table(items: tuple[str, ...], baseline: Floats, treatment: Floats, size: Floats) -> PairTable:
    return PairTable(tuple(range(len(baseline))), items, baseline, treatment, size, "bpb", _LN2)


_WORLDS: tuple[tuple[str, Rule, Law, float, float], ...] = (
    ("normal", "two-sided", "normal", 0.004, 0.5),
    ("documents matter", "two-sided", "normal", 0.02, 0.8),
    ("t with 3 df", "one-sided", "heavy", 0.004, 0.5),
    ("spikes in both arms", "one-sided", "spikes", 0.004, 0.2),
    ("spikes in one arm", "shown", "skewed", 0.004, 0.5),
)
SIMULATED = tuple(
    Simulated(f"simulated, {name}", documents, rule, law, document_sd=document_sd, correlation=correlation)
    for name, rule, law, document_sd, correlation in _WORLDS
    for documents in (40, 240)
)


# --- plasmode ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Resampled:
    """Experiments from one point of a bank: (S, D) nats of its finished runs, S ≥ 12.

    Seeds are drawn without, documents with replacement. null: baseline against its null control, labels swapped by a
    coin for each pair, for each contrast of a family anew. planted: the same with
    ``profile``, (D,) nats, added to the treatment, scaled to MARGIN standard errors of the null at 12 seeds.
    """

    name: str
    rule: Rule
    baseline: Floats
    null: Floats
    profile: Floats
    size: Floats

    @property
    def documents(self) -> int:
        return len(self.size)

    @cached_property
    def margin(self) -> float:
        """In bpb: MARGIN · the root mean square of the null's differences / √12."""
        differences = (self.null - self.baseline).sum(axis=1) / (_LN2 * self.size.sum())
        return MARGIN * math.sqrt(float((differences**2).mean()) / SEEDS[-1])

    @cached_property
    def effect(self) -> Floats:
        """(D,) nats with the profile's shape over documents, whose Δ on the whole bank is the margin."""
        return self.profile * (self.margin * _LN2 * self.size.sum() / self.profile.sum())

    def draw(self, rng: np.random.Generator) -> Draw:
        documents = rng.integers(len(self.size), size=len(self.size))
        size = self.size[documents]
        names = tuple(f"document {d}" for d in range(len(size)))
        null: list[PairTable] = []
        for _ in range(FAMILY):
            seeds = rng.permutation(len(self.baseline))[: SEEDS[-1]]
            swap = rng.random((SEEDS[-1], 1)) < 0.5
            a, b = self.baseline[np.ix_(seeds, documents)], self.null[np.ix_(seeds, documents)]
            null.append(_table(names, np.where(swap, b, a), np.where(swap, a, b), size))
        last = null[-1]
        planted = _table(names, last.baseline, last.treatment + self.effect[documents], size)
        return Draw(planted, self.margin, self.margin, tuple(null), null[0])


@dataclass(frozen=True, eq=False)
class BankContrast:
    """A real contrast of the bank: seeds and documents with replacement, the truth is the bank's own Δ."""

    name: str
    rule: Rule
    baseline: Floats
    treatment: Floats
    size: Floats

    @property
    def documents(self) -> int:
        return len(self.size)

    @cached_property
    def truth(self) -> float:
        """Δ of the bank in bpb."""
        return float((self.treatment - self.baseline).sum() / (len(self.baseline) * _LN2 * self.size.sum()))

    def draw(self, rng: np.random.Generator) -> Draw:
        seeds = rng.integers(len(self.baseline), size=SEEDS[-1])
        documents = rng.integers(len(self.size), size=len(self.size))
        rows = np.ix_(seeds, documents)
        names = tuple(f"document {d}" for d in range(len(documents)))
        table = _table(names, self.baseline[rows], self.treatment[rows], self.size[documents])
        return Draw(table, self.truth)


# --- counting ---------------------------------------------------------------------------------------------------------


def first_seeds(pairs: PairTable, seeds: int) -> PairTable:
    """The table of the first ``seeds`` pairs: what the experiment looked like then."""
    if seeds == len(pairs.seeds):
        return pairs
    return replace(pairs, seeds=pairs.seeds[:seeds], baseline=pairs.baseline[:seeds], treatment=pairs.treatment[:seeds])


def tally(setting: Setting, experiments: int, rng: np.random.Generator) -> Counter[Key]:
    """How many of ``experiments`` went wrong, for each thing that is counted and number of seeds."""
    errors: Counter[Key] = Counter()
    for _ in range(experiments):
        errors.update(key for key, wrong in _errors(setting.draw(rng)).items() if wrong)
    return errors


def _errors(draw: Draw) -> dict[Key, bool]:
    """What went wrong in one experiment, after each number of seeds and over all looks."""
    found: dict[Key, bool] = {}
    for seeds in SEEDS:
        planted = first_seeds(draw.planted, seeds)
        low, high = _limits(mean_difference(planted))
        found[COVERAGE, seeds] = not low <= draw.truth <= high
        if draw.margin is not None and draw.same_text is not None:
            null = [first_seeds(table, seeds) for table in draw.null]
            _planted_errors(found, planted, seeds, draw.margin)
            _null_errors(found, null, seeds, draw.margin)
            if seeds >= FLIPS_FROM:
                found[FLIP, seeds] = sign_flip(first_seeds(draw.same_text, seeds)).p <= NOMINAL
    return found


def _planted_errors(found: dict[Key, bool], pairs: PairTable, seeds: int, margin: float) -> None:
    """`equivalent`, alone or as "below the margin", where the truth is the margin."""

    def inside(level: float = NOMINAL, equivalence_level: float = NOMINAL) -> bool:
        wide, narrow = (
            mean_difference(pairs, confidence=1 - level),
            equivalence_interval(pairs, level=equivalence_level),
        )
        verdict = decide(wide, margin=margin, estimate90=narrow, level=level, equivalence_level=equivalence_level)
        return verdict.word == "equivalent" or verdict.below_margin

    found[EQUIVALENT, seeds] = inside()
    if seeds in LOOKS:
        looks = look_levels(LOOKS)
        before = found.get((LOOKS_EQUIVALENT, LOOKS[-1]), False)
        found[LOOKS_EQUIVALENT, LOOKS[-1]] = before or inside(looks.two_sided, looks.one_sided)


def _null_errors(found: dict[Key, bool], family: Sequence[PairTable], seeds: int, margin: float) -> None:
    """`better` or `worse` where the truth is 0: of one contrast, of any in a family after Holm, at any look."""

    def claims(estimate: Estimate, adjusted_p: float | None = None, level: float = NOMINAL) -> bool:
        verdict = decide(estimate, margin=margin, estimate90=None, adjusted_p=adjusted_p, level=level)
        return verdict.word in ("better", "worse")

    estimates = [mean_difference(pairs) for pairs in family]
    adjusted = holm([1.0 if estimate.p is None else estimate.p for estimate in estimates])
    found[NULL, seeds] = claims(estimates[0])
    found[HOLM, seeds] = any(claims(e, float(p)) for e, p in zip(estimates, adjusted, strict=True))
    if seeds in LOOKS:
        level = look_levels(LOOKS).two_sided
        before = found.get((LOOKS_NULL, LOOKS[-1]), False)
        found[LOOKS_NULL, LOOKS[-1]] = before or claims(mean_difference(family[0], confidence=1 - level), level=level)


def _limits(estimate: Estimate) -> Interval:
    assert estimate.low is not None, "seeds and documents give an interval"
    assert estimate.high is not None, "seeds and documents give an interval"
    return estimate.low, estimate.high


def tally_control(setting: Setting, experiments: int, rng: np.random.Generator) -> Counter[Key]:
    """In how many experiments of PLANNED seeds a change known to hurt is not found `worse`."""
    missed: Counter[Key] = Counter()
    for _ in range(experiments):
        estimate = mean_difference(first_seeds(setting.draw(rng).planted, PLANNED))
        missed[MISSED, PLANNED] += decide(estimate, margin=1.0, estimate90=None).word != "worse"
    return missed


# --- the rule ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """errors of experiments, of which a share ``nominal`` is allowed.

    least, most: the numbers of errors that pass; None where there is no such end.
    """

    setting: str
    documents: int
    seeds: int
    what: str
    errors: int
    experiments: int
    nominal: float
    rule: Rule
    least: int | None = None
    most: int | None = None

    @property
    def rate(self) -> float:
        return self.errors / self.experiments

    @property
    def passed(self) -> bool:
        """Within the band; a row that is only shown has none."""
        return (self.least is None or self.errors >= self.least) and (self.most is None or self.errors <= self.most)


def rows(setting: Setting, errors: Mapping[Key, int], experiments: int) -> list[Row]:
    """What `tally` counted in a setting, with the rule that each is judged by; `judge` adds the bands."""
    found: list[Row] = []
    for what, seeds in _errors(setting.draw(np.random.default_rng(0))):
        rule = setting.rule
        if rule == "two-sided" and (what not in (COVERAGE, NULL) or seeds <= FEW_SEEDS):
            rule = "one-sided"
        found.append(
            Row(setting.name, setting.documents, seeds, what, errors.get((what, seeds), 0), experiments, NOMINAL, rule)
        )
    return found


def control_row(setting: Setting, missed: Mapping[Key, int], experiments: int) -> Row:
    """The positive control must be found in 95 % of the experiments, as counted: no band is granted."""
    most = int(NOMINAL * experiments)
    errors = missed.get((MISSED, PLANNED), 0)
    return Row(setting.name, setting.documents, PLANNED, MISSED, errors, experiments, NOMINAL, "counted", most=most)


def judge(rows: Sequence[Row]) -> list[Row]:
    """The rows with the simultaneous band: exact binomial tails of 0.05/M a row, shared by both ends if two-sided."""
    judged = sum(row.rule in ("two-sided", "one-sided") for row in rows)
    found: list[Row] = []
    for row in rows:
        if row.rule not in ("two-sided", "one-sided"):
            found.append(row)
            continue
        tail = 0.05 / judged / (2 if row.rule == "two-sided" else 1)
        least = int(_scipy.stats.binom.ppf(tail, row.experiments, row.nominal)) if row.rule == "two-sided" else None
        found.append(replace(row, least=least, most=int(_scipy.stats.binom.isf(tail, row.experiments, row.nominal))))
    return found


# --- methods that are not used ----------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _resamples(n: int) -> Floats:
    """(RESAMPLES, n): how often each of n things is drawn, n times with replacement. The same for all experiments."""
    return np.random.default_rng(n).multinomial(n, np.full(n, 1 / n), RESAMPLES).astype(np.float64)


def percentile_bootstrap(pairs: PairTable) -> Interval:
    """Seeds resampled: the middle 95 % of the means."""
    return _quantiles(_bootstrap_means(pairs), 0.025, 0.975)


def bca_bootstrap(pairs: PairTable) -> Interval:
    """Seeds resampled: percentiles corrected for bias and acceleration (Efron 1987)."""
    differences, means = pairs.differences, _bootstrap_means(pairs)
    if float(np.ptp(differences)) <= pairs.rounding:
        return _quantiles(means, 0.025, 0.975)
    mean = float(differences.mean())
    below = (float((means < mean).mean()) + float((means <= mean).mean())) / 2
    bias = float(_scipy.special.ndtri(below))
    pull = differences - mean  # the jackknife's, up to a factor that cancels
    acceleration = float((pull**3).sum()) / (6 * float((pull**2).sum()) ** 1.5)
    ends = (float(_scipy.special.ndtri(tail)) + bias for tail in (0.025, 0.975))
    low, high = (float(_scipy.special.ndtr(bias + end / (1 - acceleration * end))) for end in ends)
    return _quantiles(means, low, high)


def pigeonhole_bootstrap(pairs: PairTable) -> Interval:
    """Seeds and documents resampled apart, Δ formed anew each time (Owen 2007): the middle 95 %."""
    s, d = pairs.baseline.shape
    by_document = _resamples(d)
    nats = ((_resamples(s) @ (pairs.treatment - pairs.baseline)) * by_document).sum(axis=1)
    return _quantiles(nats / (s * pairs.unit * (by_document @ pairs.weights)), 0.025, 0.975)


def _bootstrap_means(pairs: PairTable) -> Floats:
    return _resamples(len(pairs.seeds)) @ pairs.differences / len(pairs.seeds)


def _quantiles(values: Floats, low: float, high: float) -> Interval:
    ends = np.quantile(values, (low, high))
    return float(ends[0]), float(ends[1])


def normal_interval(pairs: PairTable) -> Interval:
    """The two-way standard error times 1.96."""
    found = mean_difference(pairs)
    half = float(_scipy.special.ndtri(0.975)) * (found.standard_error or 0.0)
    return found.mean - half, found.mean + half


def welch_interval(pairs: PairTable) -> Interval:
    """Two independent samples of runs (Welch 1947): as if partners shared nothing."""
    a, b, n = pairs.baseline_means, pairs.treatment_means, len(pairs.seeds)
    parts = [float(arm.var(ddof=1)) / n for arm in (a, b)]
    squares = sum(part**2 for part in parts)  # 0 where one seed was drawn each time
    df = (n - 1) * sum(parts) ** 2 / squares if squares else n - 1.0
    half = t_quantile(0.975, df) * math.sqrt(sum(parts))
    mean = float(b.mean() - a.mean())
    return mean - half, mean + half


METHODS: dict[str, Callable[[PairTable], Interval]] = {
    "two-way t (used)": lambda pairs: _limits(mean_difference(pairs)),
    f"two-way t, also up to {FEW_SEEDS} seeds": lambda pairs: _limits(two_way_interval(pairs)),
    "t over seeds alone": lambda pairs: _limits(seed_interval(pairs)),
    "documents alone": lambda pairs: _limits(document_interval(pairs)),
    "two-way, normal (z)": normal_interval,
    "percentile bootstrap over seeds": percentile_bootstrap,
    "BCa bootstrap over seeds": bca_bootstrap,
    "pigeonhole bootstrap": pigeonhole_bootstrap,
    "Welch, unpaired": welch_interval,
}


def tally_methods(setting: Setting, experiments: int, rng: np.random.Generator) -> Counter[Key]:
    """How many 95 % intervals of each method hold the truth of the planted tables, by number of seeds."""
    hits: Counter[Key] = Counter()
    for _ in range(experiments):
        draw = setting.draw(rng)
        for seeds in SEEDS:
            pairs = first_seeds(draw.planted, seeds)
            for name, method in METHODS.items():
                low, high = method(pairs)
                hits[name, seeds] += low <= draw.truth <= high
    return hits


# --- in processes -----------------------------------------------------------------------------------------------------

Tally = Callable[[Setting, int, np.random.Generator], Counter[Key]]
Task = tuple[Tally, Setting, int, tuple[int, int]]  # what is counted, where, in how many experiments, seed of draws


def do(task: Task) -> Counter[Key]:
    """One chunk of experiments, in a process of its own."""
    count, setting, experiments, seed = task
    return count(setting, experiments, np.random.default_rng(seed))
