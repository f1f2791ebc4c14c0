"""Answers to items against scipy, textbook sums for stratified samples, and simulated models whose truth is known."""

# pyright: reportOptionalOperand=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
# pyright: reportArgumentType=false
from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from xsalab.eval import ItemScore, TaskAnswers, centred_mean
from xsalab.stats import (
    Estimate,
    PairTable,
    decide,
    document_interval,
    equivalence_interval,
    mean_difference,
    seed_interval,
)
from xsalab.stats.items import centred_values, mcnemar, noise_sentence, standard_error_of

BASELINES = {"four options": 0.25, "words": 0.0, "yes or no": 0.62}
SIZES = {"four options": 40, "words": 12, "yes or no": 25}


def labels(sizes: dict[str, int] = SIZES) -> list[str]:
    return [task for task, size in sizes.items() for _ in range(size)]


def table(baseline, treatment, sizes=SIZES, baselines=BASELINES, weights=None) -> PairTable:
    """(S, D) right answers of both arms, item by item in the order of ``sizes``."""
    tasks = labels(sizes)
    weights = np.ones(len(tasks)) if weights is None else weights
    (a, scaled), (b, _) = (centred_values(side, weights, tasks, baselines) for side in (baseline, treatment))
    names = tuple(f"item {i}" for i in range(len(tasks)))
    return PairTable(tuple(range(len(a))), names, a, b, scaled, "CORE", 1.0, "items", tuple(tasks))


def some_answers(rng: np.random.Generator, seeds: int = 6, sizes=SIZES, gain: float = 0.0):
    """Both arms' answers, (S, D) 0 or 1: items of their own difficulty, an arm's own on some, and luck."""
    count = sum(sizes.values())
    hard, own = rng.normal(0, 1.5, count), rng.normal(0, 0.7, (2, 1, count))
    level = hard + own + rng.normal(0, 0.2, (2, seeds, 1)) + np.array([0.0, gain])[:, None, None]
    return (rng.random(level.shape) < 1 / (1 + np.exp(-level))).astype(float)


# --- McNemar ----------------------------------------------------------------------------------------------------------


def test_mcnemar_is_the_binomial_test_on_the_items_that_tell_the_two_apart():
    """8 against 1 by hand: 2 · (1 + 9) / 2⁹. And scipy's test for many tables."""
    a = np.array([1] * 5 + [1] * 8 + [0] + [0] * 7)
    b = np.array([1] * 5 + [0] * 8 + [1] + [0] * 7)
    found = mcnemar(a, b)
    assert dataclasses.astuple(found) == pytest.approx((5, 8, 1, 7, 20 / 512))
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b = rng.integers(0, 2, (2, 30))
        found = mcnemar(a, b)
        assert found.p == pytest.approx(stats.binomtest(int((a > b).sum()), int((a != b).sum())).pvalue)
        assert (found.both + found.neither, found.treatment + found.baseline) == ((a == b).sum(), (a != b).sum())
        swapped = mcnemar(b, a)
        assert (swapped.treatment, swapped.baseline, swapped.p) == (found.baseline, found.treatment, found.p)


def test_mcnemar_has_a_p_where_nothing_or_everything_tells_the_two_apart():
    """F164: never NaN, never 0."""
    assert mcnemar([1, 0], [1, 0]).p == 1
    assert 0 < mcnemar(np.ones(9000), np.zeros(9000)).p < 1e-300


def test_an_item_is_one_trial_however_many_seeds_answered_it():
    """Seeds that agree add no evidence: pooling their answers as if they were independent would square the p."""
    a, b = np.array([1, 1, 1, 1, 1, 1, 0, 0]), np.array([0, 0, 0, 0, 0, 1, 0, 1])
    one, five = mcnemar(a, b), mcnemar([a] * 5, [b] * 5)
    assert five.p == one.p
    assert (five.treatment, five.baseline) == (5 * one.treatment, 5 * one.baseline)
    # an item that one seed gives to each arm speaks for neither
    assert mcnemar([[1, 1], [0, 1]], [[0, 0], [1, 0]]).p == 1.0


def test_shares_of_several_samples_count_for_the_better_arm():
    found = mcnemar([0.5, 1.0, 0.0, 0.25], [0.25, 1.0, 0.0, 0.5])
    assert dataclasses.astuple(found) == (1, 1, 1, 1, 1.0)
    # thirds that add up to the same over seeds are equal, rounding or not
    assert mcnemar([[0.1], [0.2]], [[0.3], [0.0]]).p == 1.0


@pytest.mark.parametrize(("a", "b"), [([1, 0], [1]), ([], []), ([2.0], [0.0]), ([math.nan], [0.0]), ([0.0], [-1.0])])
def test_mcnemar_refuses_what_are_no_answers(a, b):
    with pytest.raises(ValueError, match=r"answer"):
        mcnemar(a, b)


# --- the figure -------------------------------------------------------------------------------------------------------


def test_the_figure_is_the_mean_of_centred_accuracies():
    """Against the benchmark's own definition, with several samples to some items."""
    rng = np.random.default_rng(1)
    tasks = labels()
    weights = rng.integers(1, 4, len(tasks)).astype(float)
    right = np.floor(rng.random((3, len(tasks))) * (weights + 1))
    values, scaled = centred_values(right, weights, tasks, BASELINES)
    for row, given in zip(values, right, strict=True):
        answers = [
            TaskAnswers(task, BASELINES[task], 0.0, tuple(
                ItemScore(task, str(i), given[i], weights[i]) for i, name in enumerate(tasks) if name == task
            ))
            for task in SIZES
        ]  # fmt: skip
        assert row.sum() / scaled.sum() == pytest.approx(centred_mean(answers), rel=1e-12)
    plain, ones = centred_values(right.clip(0, 1), np.ones(len(tasks)), tasks, BASELINES)
    assert ones == pytest.approx(1, rel=1e-12)
    assert plain.shape == right.shape


@pytest.mark.parametrize(
    ("value", "weight", "baseline"), [(2.0, 1.0, 0.0), (-1.0, 1.0, 0.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)]
)
def test_answers_and_baselines_out_of_range_are_refused(value, weight, baseline):
    with pytest.raises(ValueError, match=r"item|baseline"):
        centred_values(np.array([value]), np.array([weight]), ["t"], {"t": baseline})


def test_over_items_alone_the_error_is_that_of_a_stratified_sample():
    """One seed: √(Σ w² s²/n) of the textbook (Cochran, Sampling Techniques, 5.1), task by task."""
    a, b = some_answers(np.random.default_rng(2), seeds=1)
    e = mean_difference(table(a, b))
    variance, mean, start = 0.0, 0.0, 0
    for task, n in SIZES.items():
        x = (b - a)[0, start : start + n]
        weight = 1 / (3 * (1 - BASELINES[task]))
        mean, variance, start = mean + weight * x.mean(), variance + weight**2 * x.var(ddof=1) / n, start + n
    assert e.mean == pytest.approx(mean, rel=1e-12)
    assert e.standard_error == pytest.approx(math.sqrt(variance), rel=1e-12)
    assert (e.method, e.decidable) == ("t over items within tasks only (1 seed)", False)


def test_seeds_and_items_are_two_ways_within_the_tasks():
    """Mean squares by hand: of seeds over whole differences, of items and rest task by task."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(5, 77)) + rng.normal(size=77) + rng.normal(size=(5, 1))
    tasks = labels()
    pairs = PairTable(tuple(range(5)), tuple(map(str, range(77))), 0 * x, x, np.ones(77), "CORE", 1.0, "items",
                      tuple(tasks))  # fmt: skip
    e = mean_difference(pairs)
    seeds, items, rest, start, by_task = x.mean(axis=1).var(ddof=1) / 5, 0.0, 0.0, 0, []
    for n in SIZES.values():
        y, share = x[:, start : start + n], n / 77
        left = y - y.mean(axis=0) - y.mean(axis=1, keepdims=True) + y.mean()
        by_task.append(share**2 * (left**2).sum() / (4 * (n - 1)) / (5 * n))
        items, rest, start = items + share**2 * y.mean(axis=0).var(ddof=1) / n, rest + by_task[-1], start + n
    assert min(seeds, items) > rest, "no part is cut off here"
    assert e.standard_error == pytest.approx(math.sqrt(seeds + items - rest), rel=1e-12)
    total = seeds + items - rest
    assert e.parts == pytest.approx(((seeds - rest) / total, (items - rest) / total, rest / total), rel=1e-9)
    # df: Satterthwaite; the items' by their squares, as for documents
    q = np.concatenate([
        math.sqrt(n / (n - 1)) * (x[:, i : i + n].mean(axis=0) - x[:, i : i + n].mean())
        for i, n in ((0, 40), (40, 12), (52, 25))
    ]) ** 2  # fmt: skip
    df_items = min(3 * q.sum() ** 2 / (q**2).sum() - 2, 77 - 3)
    below = seeds**2 / 4 + items**2 / df_items
    below += sum(part**2 / (4 * (n - 1)) for part, n in zip(by_task, SIZES.values(), strict=True))
    assert e.df == pytest.approx(total**2 / below, rel=1e-9)


def test_one_stratum_is_none():
    a, b = some_answers(np.random.default_rng(4), sizes={"words": 30})
    one = table(a, b, {"words": 30})
    none = dataclasses.replace(one, strata=())
    for make in (mean_difference, document_interval, seed_interval, equivalence_interval):
        left, right = (dataclasses.asdict(make(pairs)) for pairs in (one, none))
        assert left.pop("method").replace(" within tasks", "") == right.pop("method")
        assert left == right


def test_how_tasks_differ_is_no_noise():
    """A difference that is larger in one task by a constant moves Δ and not its error; without strata it would."""
    a, b = some_answers(np.random.default_rng(5))
    pairs = table(a, b)
    shift = np.array([0.5 if task == "words" else 0.0 for task in labels()])
    moved = dataclasses.replace(pairs, treatment=pairs.treatment + shift)
    e, other = mean_difference(pairs), mean_difference(moved)
    assert other.mean - e.mean == pytest.approx(0.5 * 12 / 77)
    assert (other.standard_error, other.df) == pytest.approx((e.standard_error, e.df), rel=1e-9)
    blind = [mean_difference(dataclasses.replace(p, strata=())).standard_error for p in (pairs, moved)]
    assert blind[1] > 1.01 * blind[0]


def test_the_order_of_items_does_not_matter():
    pairs = table(*some_answers(np.random.default_rng(6)))
    order = np.random.default_rng(0).permutation(77)
    mixed = PairTable(
        pairs.seeds, tuple(pairs.items[i] for i in order), pairs.baseline[:, order], pairs.treatment[:, order],
        pairs.weights[order], "CORE", 1.0, "items", tuple(pairs.strata[i] for i in order),
    )  # fmt: skip
    for make in (mean_difference, equivalence_interval):
        e, other = make(pairs), make(mixed)
        assert (other.low, other.high, other.df) == pytest.approx((e.low, e.high, e.df), rel=1e-9)


@pytest.mark.parametrize("sizes", [{"a": 1, "b": 1, "c": 5}, {"a": 1, "b": 4, "c": 9}, {"a": 1, "b": 1}, {"a": 1}])
@pytest.mark.parametrize("seeds", [1, 3, 6])
def test_a_task_of_one_item_has_no_spread_of_its_own_and_joins_others(sizes, seeds):
    """Those are taken as one task, one alone with the smallest other: wider, if anything, and never NaN."""
    a, b = some_answers(np.random.default_rng(7), seeds, sizes)
    e = mean_difference(table(a, b, sizes, dict.fromkeys(sizes, 0.0)))
    numbers = [n for n in dataclasses.astuple(e) if isinstance(n, float)]
    assert all(math.isfinite(n) for n in numbers)
    groups = [len(group) for group in table(a, b, sizes, dict.fromkeys(sizes, 0.0)).groups]
    assert sum(groups) == sum(sizes.values())
    assert min(groups) > 1 or sizes == {"a": 1}


def test_strata_name_every_item():
    with pytest.raises(ValueError, match="CORE: 1 strata for 2 items"):
        PairTable((0,), ("a", "b"), np.ones((1, 2)), np.ones((1, 2)), np.ones(2), "CORE", 1.0, "items", ("t",))


def test_equal_arms_are_equivalent_and_never_nan():
    a, _ = some_answers(np.random.default_rng(8))
    pairs = table(a, a)
    e = mean_difference(pairs)
    assert (e.mean, e.low, e.high, e.p) == (0, 0, 0, 1)
    verdict = decide(e, margin=0.01, estimate90=equivalence_interval(pairs), lower_is_better=False)
    assert verdict.word == "equivalent"


def logistic_normal(mean: np.ndarray, variance: float) -> np.ndarray:
    """E of 1 / (1 + exp(−x)) for normal x, by Gauss–Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(31)
    x = mean[..., None] + math.sqrt(variance) * nodes
    return (1 / (1 + np.exp(-x)) * weights / weights.sum()).sum(axis=-1)


@pytest.mark.parametrize("seeds", [1, 6])
def test_the_95_percent_interval_covers_95_percent(seeds):
    """300 simulated experiments on 22 tasks of 24 to 100 items, with a true effect, seeds, and items that an arm likes.

    One run an arm: the truth is that of these two models over all items of the kind. Six: that of the arms. Beyond one
    seed the interval may cover more; in longer simulations it covers 95 to 98 % (docs/statistics.md).
    """
    rng = np.random.default_rng(9)
    sizes = {f"t{t:02d}": (24, 50, 100)[t % 3] for t in range(22)}
    baselines = {task: (0.0, 0.25)[i % 2] for i, task in enumerate(sizes)}
    tasks = np.array([int(task[1:]) for task in labels(sizes)])
    level, weight = np.linspace(-3, 2, 22), np.array([1 / (22 * (1 - b)) for b in baselines.values()])
    misses = 0
    for _ in range(300):
        run = rng.normal(0, 0.1, (2, seeds, 1)) + rng.normal(0, 0.2, (2, seeds, 22))
        run[1] += 0.3
        logits = (level + run)[:, :, tasks] + rng.normal(0, 1.5, len(tasks)) + rng.normal(0, 0.7, (2, 1, len(tasks)))
        a, b = (rng.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(float)
        if seeds == 1:
            p = logistic_normal(level + run[:, 0], 1.5**2 + 0.7**2)
        else:
            p = logistic_normal(np.array([level, level + 0.3]), 1.5**2 + 0.7**2 + 0.1**2 + 0.2**2)
        e = mean_difference(table(a, b, sizes, baselines))
        misses += not e.low <= float((weight * (p[1] - p[0])).sum()) <= e.high
    least, most = stats.binom.interval(0.999, 300, 0.05)
    assert misses <= most
    assert misses >= (least if seeds == 1 else 1)


# --- one run ----------------------------------------------------------------------------------------------------------


def test_the_standard_error_of_one_figure_is_that_of_drawn_answers():
    accuracies, counts, baselines = [0.4, 0.1, 0.7], [40, 12, 25], [0.25, 0.0, 0.62]
    rng = np.random.default_rng(10)
    right = rng.binomial(counts, accuracies, (20_000, 3)) / counts
    figures = ((right - baselines) / (1 - np.array(baselines))).mean(axis=1)
    assert standard_error_of(accuracies, counts, baselines) == pytest.approx(figures.std(), rel=0.02)
    assert standard_error_of([0.5], [100], [0.5]) == pytest.approx(0.1)


@pytest.mark.parametrize("bad", [([], [], []), ([0.5], [0], [0.0]), ([1.5], [9], [0.0]), ([0.5], [9], [1.0]),
                                 ([0.5, 0.5], [9], [0.0])])  # fmt: skip
def test_counts_and_accuracies_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=r"accuracies"):
        standard_error_of(*bad)


# --- the sentence -----------------------------------------------------------------------------------------------------


def estimate(**change) -> Estimate:
    pairs = table(*some_answers(np.random.default_rng(11), gain=0.8))
    return dataclasses.replace(mean_difference(pairs), **change)


def test_the_sentence_says_whether_a_difference_is_beyond_noise():
    beyond = estimate(mean=0.0123, low=0.0041, high=0.0205, items=9133)
    assert noise_sentence(beyond) == (
        "a CORE difference of +0.0123 is beyond noise (95 % interval +0.0041 to +0.0205; 6 seeds, 9,133 items)"
    )
    within = estimate(mean=-0.0023, low=-0.0105, high=0.0059)
    assert noise_sentence(within).startswith("a CORE difference of −0.0023 is not beyond noise (95 % interval −0.0105")
    assert "is not beyond noise after Holm's adjustment, p = 0.08" in noise_sentence(beyond, adjusted_p=0.08)
    assert "is beyond noise (" in noise_sentence(beyond, adjusted_p=0.049)
    assert noise_sentence(beyond, per="doubling").startswith("a CORE difference for each doubling of +0.0123")
    assert "difference of 0.00 " not in noise_sentence(estimate(mean=-1e-9, low=-0.02, high=0.02))
    assert "+0.000" in noise_sentence(estimate(mean=-1e-9, low=-0.02, high=0.02))


def test_one_run_an_arm_says_what_it_cannot_tell():
    """Beyond the items' noise or not, a seed's luck is not in the interval."""
    a, b = some_answers(np.random.default_rng(12), seeds=1)
    for low, word in ((0.001, "is beyond"), (-0.02, "is not beyond")):
        text = noise_sentence(dataclasses.replace(mean_difference(table(a, b)), mean=0.02, low=low, high=0.06))
        assert f"{word} the noise of the items alone" in text
        assert "one run an arm cannot tell it from the luck of a seed" in text
    two = noise_sentence(dataclasses.replace(estimate(), n=2, decidable=False, low=0.1, high=0.2))
    assert "cannot be told from noise" in two
    assert "2 seeds are too few" in two
    lone = mean_difference(PairTable((0,), ("a",), np.zeros((1, 1)), np.ones((1, 1)), np.ones(1), "CORE", 1.0, "items"))
    assert noise_sentence(lone) == "a CORE difference of +1.0000 is no evidence (1 seed, 1 item)"
