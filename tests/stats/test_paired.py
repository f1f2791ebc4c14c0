"""The estimate against textbook sums, scipy and simulated experiments whose truth is known."""

# An estimate's interval is None at one number alone; a test that meets None there fails, which is enough.
# pyright: reportOptionalOperand=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats

import xsalab.stats as xs
from xsalab.stats import PairTable, mean_difference

LN2 = math.log(2)
MOVING = np.arange(1.0, 5)[:, None] * np.ones(5)  # values of 4 seeds and 5 documents


def table(x, *, weights=None, baseline=None, unit=1.0, metric="bpb", seeds=None) -> PairTable:
    """A table whose treatment is baseline + x · unit · weights / mean weight: its Δ is the mean of x."""
    x = np.asarray(x, dtype=float)
    s, d = x.shape
    weights = np.ones(d) if weights is None else np.asarray(weights, dtype=float)
    baseline = np.broadcast_to(weights * unit, (s, d)) if baseline is None else baseline
    treatment = baseline + x * unit * weights.mean()
    names = tuple(f"doc{k}" for k in range(d))
    return PairTable(seeds or tuple(range(s)), names, baseline, treatment, weights, metric, unit)


def numbers(value) -> list[float]:
    """All floats in a result, nested ones too."""
    flat = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [n for v in flat for n in (v if isinstance(v, tuple) else [v]) if isinstance(n, float)]


# --- the table -------------------------------------------------------------------------------------------------------


def test_bpb_is_total_nats_over_ln2_times_total_bytes():
    nats, fewer, size = np.array([[30.0, 700.0, 5.0]] * 3), np.array([[29.0, 650.0, 5.5]] * 3), [50.0, 1000.0, 10.0]
    pairs = PairTable((3, 1, 2), ("a", "b", "c"), nats, fewer, np.array(size), "bpb", LN2)
    assert pairs.baseline_means == pytest.approx([735 / (LN2 * 1060)] * 3, rel=1e-14)
    assert pairs.treatment_means == pytest.approx([684.5 / (LN2 * 1060)] * 3, rel=1e-14)
    assert pairs.differences == pytest.approx([(684.5 - 735) / (LN2 * 1060)] * 3, rel=1e-13)
    e = mean_difference(pairs)
    assert (e.mean, e.baseline_mean, e.treatment_mean) == pytest.approx(
        (-50.5 / (LN2 * 1060), 735 / (LN2 * 1060), 684.5 / (LN2 * 1060)), rel=1e-13
    )
    assert e.relative == pytest.approx(-50.5 / 735, rel=1e-13)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"items": (), "baseline": np.ones((2, 0)), "treatment": np.ones((2, 0)), "weights": np.ones(0)}, "no bytes"),
        ({"weights": np.array([3.0, 0.0])}, "item 'b' has no bytes"),
        ({"weights": np.array([3.0, -1.0])}, "item 'b' has no bytes"),
        ({"weights": np.array([3.0, math.inf])}, "weights is not finite"),
        ({"weights": np.ones((1, 2))}, "weights has shape"),
        ({"seeds": ()}, "no seeds"),
        ({"seeds": (4, 4)}, "seeds has 4 twice"),
        ({"items": ("a", "a")}, "items has 'a' twice"),
        ({"baseline": np.ones((2, 3))}, "baseline has shape"),
        ({"treatment": np.ones(2)}, "treatment has shape"),
        ({"treatment": np.array([[1, 2], [math.nan, 2]])}, "treatment is not finite"),
        ({"baseline": np.array([[1, 2], [math.inf, 2]])}, "baseline is not finite"),
        ({"unit": 0.0}, "unit = 0.0"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_a_bad_table_is_refused(change, message):
    """F075: "no bytes" is an error, never 0 or infinity in a table."""
    good = {
        "seeds": (0, 1),
        "items": ("a", "b"),
        "baseline": np.ones((2, 2)),
        "treatment": np.ones((2, 2)),
        "weights": np.ones(2),
        "metric": "bpb",
        "unit": LN2,
    }
    PairTable(**good)
    with pytest.raises(ValueError, match=f"^bpb: {message}"):
        PairTable(**(good | change))


def test_a_table_keeps_its_own_numbers():
    values = np.ones((2, 2))
    pairs = table([[1, 2], [3, 4]], baseline=values)
    values[:] = 7
    assert (pairs.baseline == 1).all()
    with pytest.raises(ValueError, match="read-only"):
        pairs.baseline[0, 0] = 7


def test_float32_values_are_summed_in_float64():
    nats = np.full((3, 40_000), 0.1, dtype=np.float32)
    pairs = table(np.zeros((3, 40_000)), baseline=nats)
    assert pairs.baseline.dtype == np.float64
    assert pairs.baseline_means == pytest.approx(float(np.float32(0.1)), rel=1e-13)


# --- the interval ----------------------------------------------------------------------------------------------------


def test_two_way_agrees_with_an_analysis_of_variance_by_hand():
    """Row means 2, 4, 6 and column means 2, 4, 5, 5 of a table with mean 4; total sum of squares 54.

    Rows: 4·(4 + 0 + 4) = 32, 2 df, MS 16. Columns: 3·(4 + 0 + 1 + 1) = 18, 3 df, MS 6. Rest: 4, 6 df, MS 2/3.
    """
    pairs = table([[1, 2, 3, 2], [2, 4, 5, 5], [3, 6, 7, 8]])
    e = mean_difference(pairs, confidence=0.95)
    total = 16 + 6 - 2 / 3
    assert e.parts == pytest.approx(((16 - 2 / 3) / total, (6 - 2 / 3) / total, (2 / 3) / total), rel=1e-12)
    assert e.document_error == pytest.approx(math.sqrt((6 - 2 / 3) / 12), rel=1e-12)
    # three seeds: plain t over them, with se² = 16/12 and 2 df, is wider than two-way with 12 se² = total and 3.2 df
    df = total**2 / (16**2 / 2 + 6**2 / 3 + (2 / 3) ** 2 / 6)
    two_way, seeds = stats.t.ppf(0.975, df) * math.sqrt(total / 12), stats.t.ppf(0.975, 2) * math.sqrt(16 / 12)
    assert seeds > two_way
    assert (e.method, e.df) == ("t over seeds (wider)", 2)
    assert (e.low, e.high) == pytest.approx((4 - seeds, 4 + seeds), rel=1e-10)
    # the same with columns as seeds: now two-way is wider
    turned = mean_difference(table(pairs.x.T))
    assert turned.method == "two-way t, seeds × documents"
    assert turned.df == pytest.approx(df, rel=1e-12)
    assert turned.standard_error == pytest.approx(math.sqrt(total / 12), rel=1e-12)
    assert turned.half_width == pytest.approx(two_way, rel=1e-10)
    assert turned.p == pytest.approx(2 * stats.t.sf(4 / math.sqrt(total / 12), df), rel=1e-10)


@pytest.mark.parametrize(
    ("seed_size", "document_size", "df", "one_way"),
    [(3, 0, 4, "seeds"), (0, 3, 5, "documents"), (0, 0, 20, "rest")],
    ids=["documents-truncated", "seeds-truncated", "both-truncated"],
)
def test_a_negative_component_leaves_the_one_way_interval(seed_size, document_size, df, one_way):
    """Where a part's mean square is below that of the rest, variance and df are those of the other part alone."""
    rest = np.random.default_rng(12).normal(size=(5, 6))
    rest -= rest.mean(0) + rest.mean(1, keepdims=True) - rest.mean()
    x = 0.2 + rest + seed_size * np.linspace(-1, 1, 5)[:, None] + document_size * np.linspace(-1, 1, 6)
    e = mean_difference(table(x))
    oracle = {
        "seeds": x.mean(1).std(ddof=1) / math.sqrt(5),
        "documents": x.mean(0).std(ddof=1) / math.sqrt(6),
        "rest": math.sqrt((rest**2).sum() / 20 / 30),
    }
    assert e.df == pytest.approx(df, rel=1e-9)
    assert e.standard_error == pytest.approx(oracle[one_way], rel=1e-9)


@pytest.mark.parametrize("confidence", [0.8, 0.9, 0.95, 0.99])
def test_over_seeds_it_is_the_paired_t_test(confidence):
    rng = np.random.default_rng(1)
    a, b = rng.normal(1, 0.1, (2, 7, 1))
    pairs = PairTable(tuple(range(7)), ("all",), a, b, np.ones(1), "bpb", 1.0)
    oracle = stats.ttest_rel(b[:, 0], a[:, 0])
    interval = oracle.confidence_interval(confidence)
    for e in (mean_difference(pairs, confidence=confidence), xs.seed_interval(pairs, confidence=confidence)):
        assert (e.low, e.high, e.p) == pytest.approx((interval.low, interval.high, oracle.pvalue), rel=1e-9)
        assert (e.df, e.n, e.items) == (6, 7, 1)
        assert e.sd == pytest.approx((b - a).std(ddof=1), rel=1e-12)


def test_one_document_is_a_t_interval_over_seeds_and_says_so():
    e = mean_difference(table([[0.1], [0.3], [0.2]]))
    assert e.method == "t over seeds (one document)"
    assert e.decidable
    assert e.parts == (1, 0, 0)
    assert e.document_error == 0


def test_one_seed_is_an_interval_over_documents_only_and_decides_nothing():
    x = [[0.1, 0.3, 0.2, 0.5]]
    e = mean_difference(table(x))
    oracle = stats.ttest_1samp(x[0], 0)
    assert (e.method, e.decidable, e.sd) == ("t over documents only (1 seed)", False, None)
    assert (e.low, e.high, e.p) == pytest.approx((*oracle.confidence_interval(0.95), oracle.pvalue), rel=1e-9)


def test_two_seeds_decide_nothing_and_show_the_wide_interval():
    e = mean_difference(table([[0.1, 0.12, 0.11], [0.2, 0.21, 0.22]]))
    assert (e.method, e.df, e.decidable) == ("t over seeds (wider)", 1, False)
    assert e.half_width == pytest.approx(stats.t.ppf(0.975, 1) * 0.05, rel=1e-9)


@pytest.mark.parametrize("seeds", [2, 3, 4, 6])
def test_never_narrower_in_variance_than_either_one_way_interval(seeds):
    rng = np.random.default_rng(seeds)
    for _ in range(100):
        x = rng.normal(size=(seeds, 5)) + rng.choice([0, 1]) * rng.normal(size=5)
        pairs = table(x, weights=rng.uniform(1, 9, 5))
        e = mean_difference(pairs)
        by_seed, by_document = xs.seed_interval(pairs), xs.document_interval(pairs)
        assert sum(e.parts) == pytest.approx(1)
        assert min(e.parts) >= 0
        assert e.standard_error >= by_seed.standard_error * (1 - 1e-12)
        if e.method.startswith("two-way"):
            assert e.standard_error >= by_document.standard_error * (1 - 1e-12)
        assert e.df >= seeds - 1
        if seeds <= xs.paired.FEW_SEEDS:
            assert e.half_width >= by_seed.half_width * (1 - 1e-12)
            assert e.p >= by_seed.p * (1 - 1e-12)


def test_p_is_below_one_in_twenty_exactly_when_the_interval_excludes_zero():
    rng = np.random.default_rng(5)
    sides = set()
    for _ in range(300):
        e = mean_difference(table(rng.normal(0.4, 1, (int(rng.integers(2, 8)), 6)) + rng.normal(0, 0.3, 6)))
        excludes = e.low > 0 or e.high < 0
        assert excludes == (e.p < 0.05)
        sides.add(excludes)
    assert sides == {True, False}


def covered(rng, experiments, seeds, documents, seed_sd, document_sd, rest_sd, truth, *, lengths=0.0) -> int:
    """How many 95 % intervals hold the truth, over crossed random effects per byte and log-normal lengths."""
    hits = 0
    for _ in range(experiments):
        weights = np.exp(rng.normal(0, lengths, documents))
        per_byte = (
            truth
            + seed_sd * rng.normal(size=(seeds, 1))
            + document_sd * rng.normal(size=(1, documents))
            + rest_sd * rng.normal(size=(seeds, documents))
        )
        e = mean_difference(table(per_byte * weights / weights.mean(), weights=weights))
        hits += e.low <= truth <= e.high
    return hits


@pytest.mark.parametrize(
    ("seeds", "seed_sd", "document_sd", "rest_sd", "truth", "lengths"),
    [
        (3, 1, 0, 1, 0, 0),
        (3, 0.3, 2, 1, 0, 0),
        (4, 0.5, 3, 1, 0, 0),
        (6, 1, 0, 1, 0, 0),
        (6, 0.2, 2, 0.5, 0, 0),
        (8, 0.5, 2, 1, 0, 0),
        (12, 0, 1, 0.3, 0, 0),
        (6, 0.2, 1, 0.5, 5, 0.7),
        (6, 0.2, 2, 0.5, 0, 1.0),
    ],
    ids=lambda value: f"{value:g}",
)
def test_the_95_percent_interval_covers_95_percent(seeds, seed_sd, document_sd, rest_sd, truth, lengths):
    """2,000 experiments each; the band is the central 99.9 % of Binomial(2,000, 0.95): about 0.933 to 0.965.

    The last but one has a large true effect and unequal lengths: without the share by length taken out of
    MS_documents it covers nearly all of them. The last has few long documents that hold most of the bytes: with the
    plain residuals and as many degrees of freedom as documents it covers 92 %.
    """
    rng = np.random.default_rng(7)
    hits = covered(rng, 2000, seeds, 40, seed_sd, document_sd, rest_sd, truth, lengths=lengths)
    low, high = stats.binom.interval(0.999, 2000, 0.95)
    assert low <= hits <= high


# --- invariances -----------------------------------------------------------------------------------------------------


def any_table(rng, seeds=6, documents=9) -> PairTable:
    weights = rng.uniform(1, 20, documents)
    baseline = weights * rng.uniform(0.5, 0.7, (seeds, documents))
    treatment = baseline + weights * (
        0.01 * rng.normal(size=(seeds, 1)) + 0.02 * rng.normal(size=documents) + 0.01 * rng.normal(size=baseline.shape)
    )
    names = tuple(f"doc{k}" for k in range(documents))
    return PairTable(tuple(range(seeds)), names, baseline, treatment, weights, "bpb", LN2)


def test_the_documents_part_is_the_jackknife_over_documents():
    """Against leaving out each document in turn and forming the ratio of sums anew."""
    pairs = any_table(np.random.default_rng(2))
    nats, size, d = (pairs.treatment - pairs.baseline).sum(axis=0), pairs.weights, len(pairs.items)
    ratio = nats.sum() / size.sum()
    without = np.array([np.delete(nats, k).sum() / np.delete(size, k).sum() for k in range(d)])
    jackknife = (d - 1) / d * ((without - ratio) ** 2).sum() / (len(pairs.seeds) * LN2) ** 2
    e = xs.document_interval(pairs)
    assert e.standard_error == pytest.approx(math.sqrt(jackknife), rel=1e-12)
    q = (without - ratio) ** 2
    assert e.df == pytest.approx(3 * q.sum() ** 2 / (q**2).sum() - 2, rel=1e-12)
    assert e.df < size.sum() ** 2 / (size**2).sum() - 1, "Kish's effective number less one is its largest value"


def test_documents_that_say_the_same_count_in_full_and_a_dominant_one_counts_alone():
    """Degrees of freedom of the documents: D − 1 for equal squares, little for one document with all the variance."""
    even = xs.document_interval(table([[1.0, -1.0] * 20]))
    alone = xs.document_interval(table([[100.0, *[1.0, -1.0] * 20]]))
    lengths = xs.document_interval(table([[1.0, -1.0] * 20], weights=[1.0, 1.0] * 19 + [50.0, 50.0]))
    assert even.df == pytest.approx(39)
    assert 1 <= alone.df < 2
    assert 1 <= lengths.df < 138**2 / (2 * 50**2 + 38)


def test_one_document_with_nearly_all_bytes_leaves_an_interval():
    weights = np.array([1e9, 1.0, 1.0])
    x = np.random.default_rng(0).normal(size=(4, 3))
    for e in (mean_difference(table(x, weights=weights)), xs.document_interval(table(x, weights=weights))):
        assert e.df >= 1
        assert all(math.isfinite(n) for n in numbers(e))


@pytest.mark.parametrize("seeds", [1, 2, 3, 6])
def test_swapping_the_arms_swaps_the_sign_and_nothing_else(seeds):
    pairs = any_table(np.random.default_rng(2), seeds)
    e, back = (
        mean_difference(p)
        for p in (pairs, dataclasses.replace(pairs, baseline=pairs.treatment, treatment=pairs.baseline))
    )
    assert (back.mean, back.low, back.high) == pytest.approx((-e.mean, -e.high, -e.low), rel=1e-9)
    assert (back.p, back.df, *back.parts) == pytest.approx((e.p, e.df, *e.parts), rel=1e-9)
    assert (back.baseline_mean, back.treatment_mean) == (e.treatment_mean, e.baseline_mean)


def test_order_of_seeds_and_documents_does_not_matter():
    pairs = any_table(np.random.default_rng(3))
    rng = np.random.default_rng(0)
    s, d = rng.permutation(6), rng.permutation(9)
    mixed = PairTable(
        tuple(np.array(pairs.seeds)[s].tolist()),
        tuple(np.array(pairs.items)[d].tolist()),
        pairs.baseline[np.ix_(s, d)],
        pairs.treatment[np.ix_(s, d)],
        pairs.weights[d],
        "bpb",
        LN2,
    )
    assert numbers(mean_difference(mixed)) == pytest.approx(numbers(mean_difference(pairs)), rel=1e-9)
    assert xs.sign_flip(mixed) == xs.sign_flip(pairs)
    assert numbers(xs.correlation(mixed)) == pytest.approx(numbers(xs.correlation(pairs)), rel=1e-9)


def test_values_and_weights_in_other_units_change_nothing():
    pairs = any_table(np.random.default_rng(4))
    scaled = dataclasses.replace(
        pairs, baseline=pairs.baseline * 8, treatment=pairs.treatment * 8, weights=pairs.weights * 8
    )
    assert numbers(mean_difference(scaled)) == pytest.approx(numbers(mean_difference(pairs)), rel=1e-9)


def test_weights_alone_rescaled_rescale_the_metric():
    """Bytes counted twice halve every bpb: Δ, its interval and spread, but neither p nor the shares."""
    pairs = any_table(np.random.default_rng(4))
    e, half = mean_difference(pairs), mean_difference(dataclasses.replace(pairs, weights=pairs.weights * 2))
    assert (2 * half.mean, 2 * half.low, 2 * half.high, 2 * half.sd) == pytest.approx(
        (e.mean, e.low, e.high, e.sd), rel=1e-9
    )
    assert (half.p, half.df, half.relative, *half.parts) == pytest.approx((e.p, e.df, e.relative, *e.parts), rel=1e-9)


@pytest.mark.parametrize("seeds", [1, 3, 6])
def test_the_width_does_not_depend_on_the_size_of_the_effect(seeds):
    """So many bits more for every byte of every document move the interval and leave its width."""
    pairs = any_table(np.random.default_rng(6), seeds)
    shifted = dataclasses.replace(pairs, treatment=pairs.treatment + 0.4 * LN2 * pairs.weights)
    e, moved = mean_difference(pairs), mean_difference(shifted)
    assert (moved.mean, moved.low, moved.high) == pytest.approx((e.mean + 0.4, e.low + 0.4, e.high + 0.4), rel=1e-9)


# --- equivalence -----------------------------------------------------------------------------------------------------


def by_hand(pairs: PairTable, level: float) -> float:
    """How far an end moves, from the parts of x = μ + a + b + e: Johnson's term and that of E[a b e]. Equal weights."""
    x, (s, d) = pairs.x, pairs.x.shape
    a, b = x.mean(axis=1) - x.mean(), x.mean(axis=0) - x.mean()
    e = x - a[:, None] - b - x.mean()
    rest = (e**2).sum() / ((s - 1) * (d - 1))
    variance = (max(a.var(ddof=1) * d, rest) + max(b.var(ddof=1) * s, rest) - rest) / (s * d)
    own = stats.moment(b, 3) / d**2
    mixed = sum(a[i] * b[j] * e[i, j] for i in range(s) for j in range(d)) / ((s - 1) * (d - 1)) / (s * d)
    z = stats.norm.isf(level)
    return (own * (1 + 2 * z**2) / 6 + mixed * (1 + z**2)) / variance


@pytest.mark.parametrize("seeds", [3, 6])
@pytest.mark.parametrize("level", [0.05, 0.0186])
def test_equivalence_widens_the_longer_side_by_the_third_moments(seeds, level):
    """Seeds that differ most where the effect is largest; the other end is the plain interval's."""
    rng = np.random.default_rng(seeds)
    b, a = rng.exponential(1, 12), rng.normal(0, 1, (seeds, 1))
    pairs = table(b + a * (1 + b) + rng.normal(0, 0.1, (seeds, 12)))
    shift = by_hand(pairs, level)
    assert shift > 0
    plain, wide = mean_difference(pairs, confidence=1 - 2 * level), xs.equivalence_interval(pairs, level=level)
    assert (wide.low, wide.high) == pytest.approx((plain.low, plain.high + shift), rel=1e-12)
    assert wide.method == plain.method + ", widened for skewness"
    assert dataclasses.replace(wide, high=plain.high, method=plain.method) == plain
    turned = xs.equivalence_interval(dataclasses.replace(pairs, baseline=pairs.treatment, treatment=pairs.baseline))
    straight = xs.equivalence_interval(pairs)
    assert (turned.low, turned.high) == pytest.approx((-straight.high, -straight.low), rel=1e-9)


def test_equivalence_is_never_narrower_and_symmetric_documents_leave_it():
    rng = np.random.default_rng(3)
    for seeds in (3, 4, 8):
        pairs = any_table(rng, seeds)
        plain, wide = mean_difference(pairs, confidence=0.9), xs.equivalence_interval(pairs)
        assert wide.low <= plain.low
        assert wide.high >= plain.high
    even = table(np.array([[1.0], [2.0], [4.0], [8.0], [9.0]]) + np.array([-3.0, -1.0, 1.0, 3.0]))
    plain, wide = mean_difference(even, confidence=0.9), xs.equivalence_interval(even)
    assert (wide.low, wide.high) == pytest.approx((plain.low, plain.high), rel=1e-12)


@pytest.mark.parametrize("x", [[[0.1, 0.3, 0.2]], [[0.1], [0.3], [0.2]], [[0.0] * 4] * 3, [[0.1]]])
def test_equivalence_is_the_plain_interval_where_there_are_not_both_seeds_and_documents(x):
    """One seed, one document, no spread."""
    assert xs.equivalence_interval(table(x)) == mean_difference(table(x), confidence=0.9)


@pytest.mark.parametrize("level", [0, 0.5, 0.95, math.nan])
def test_a_level_outside_0_to_one_half_is_refused(level):
    with pytest.raises(ValueError, match="level"):
        xs.equivalence_interval(table([[0.1, 0.2], [0.3, 0.5]]), level=level)


def test_a_one_sided_test_errs_in_5_percent_with_skewed_documents_and_the_plain_one_in_more():
    """60 documents with exponential effects, on which the seeds differ likewise: the truth above the upper end."""
    rng, missed, n = np.random.default_rng(12), np.zeros(2), 1500
    for _ in range(n):
        b = rng.exponential(1, 60)
        pairs = table(b + 0.3 * b * rng.normal(0, 1, (6, 1)) + rng.normal(0, 0.1, (6, 60)))
        missed += [mean_difference(pairs, confidence=0.9).high < 1, xs.equivalence_interval(pairs).high < 1]
    assert missed[0] / n > 0.075
    assert missed[1] / n < 0.05 + 3 * math.sqrt(0.05 * 0.95 / n)


def test_the_two_way_interval_is_the_primary_one_from_5_seeds_on():
    few, many = table([[1, 2, 3, 2], [2, 4, 5, 5], [3, 6, 7, 8]]), any_table(np.random.default_rng(0))
    assert len(many.seeds) > 4
    assert xs.two_way_interval(many) == mean_difference(many)
    assert xs.two_way_interval(few).method == "two-way t, seeds × documents"
    assert xs.two_way_interval(few).half_width < mean_difference(few).half_width


@pytest.mark.parametrize("x", [[[0.1, 0.2]], [[0.1], [0.2]]])
def test_a_two_way_interval_needs_both_ways(x):
    with pytest.raises(ValueError, match="2 seeds and 2 documents"):
        xs.two_way_interval(table(x))


@pytest.mark.parametrize("documents", [1, 3])
@pytest.mark.parametrize("moving", ["baseline", "treatment"])
def test_one_arm_that_moves_over_seeds_is_spread_enough(documents, moving):
    """A baseline without any chance in it, say: only where no arm moves are the seeds not in use."""
    still = np.ones((4, documents))
    other = still + np.arange(4)[:, None] / 10
    arms = {"baseline": still, "treatment": still, moving: other}
    items = tuple(str(k) for k in range(documents))
    e = mean_difference(PairTable((0, 1, 2, 3), items, weights=np.ones(documents), metric="m", unit=1.0, **arms))
    assert e.decidable
    assert "seeds in use" not in e.note


def test_a_negative_baseline_leaves_the_sign_of_the_relative_difference():
    """Of a log-likelihood of −2 that falls by 0.5 the relative difference is −25 %, not +25 %."""
    pairs = PairTable((0, 1, 2), ("a",), [[-2.0]] * 3, [[-2.5], [-2.4], [-2.6]], np.ones(1), "ll", 1.0)
    e = mean_difference(pairs)
    assert (e.mean, e.relative) == pytest.approx((-0.5, -0.25))


# --- nothing to estimate from ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "note", "p", "decidable"),
    [
        (table([[0.3]]), "not testable (n=1)", None, False),
        (table([[0.0]]), "not testable (n=1)", None, False),
        (table([[0.1], [0.1]], baseline=[[1.0], [2.0]]), "no spread: every seed gave the same diff", None, False),
        (table([[0.1], [0.1]]), "no spread: every seed gave the same result", None, False),
        (table([[0.1]] * 4, baseline=np.arange(1.0, 5)[:, None]), "no spread: every seed gave the same", None, False),
        (table([[0.0] * 5] * 4, baseline=MOVING), "no spread: every seed gave the same difference", 1.0, True),
        (table([[0.0] * 5] * 4), "no spread: every seed gave the same result; are the seeds in use?", 1.0, False),
        (table([[0.0]] * 4), "no spread: every seed gave the same result; are the seeds in use?", 1.0, False),
        (table([[0.1, 0.1, 0.1]]), "no spread: all differences are equal", None, False),
        (table([[0.1, 0.2, 0.1]] * 5), "no spread: every seed gave the same result", "a number", False),
    ],
    ids=[
        "one-number", "one-zero", "two-pairs", "two-still-pairs", "rounded", "equal-arms", "equal-still-arms",
        "equal-still-numbers", "one-seed-flat", "seeds-not-in-use",
    ],
)  # fmt: skip
def test_no_spread_is_said_and_never_nan(pairs, note, p, decidable):
    """F164: "not testable (n=1)" or "no spread", and no NaN."""
    for confidence in (0.9, 0.95):
        e = mean_difference(pairs, confidence=confidence)
        assert e.note.startswith(note)
        assert e.decidable is decidable
        assert 0 < e.p < 1 if p == "a number" else e.p == p
        json.dumps(dataclasses.asdict(e), allow_nan=False)
        if e.low is not None and p != "a number":
            assert e.standard_error == 0
            assert e.low == e.mean == e.high


def test_random_tables_of_every_size_give_no_nan():
    """F164"""
    rng = np.random.default_rng(8)
    for seeds, documents in itertools.product((1, 2, 3, 4, 5, 17), (1, 2, 3, 30)):
        pairs = table(rng.normal(size=(seeds, documents)) * rng.choice([0, 1e-300, 1e-12, 1, 1e12]))
        for result in (mean_difference(pairs), xs.sign_flip(pairs), xs.correlation(pairs)):
            if result is not None:
                json.dumps(dataclasses.asdict(result), allow_nan=False)


@pytest.mark.parametrize("confidence", [0, 1, 95, math.nan])
def test_a_confidence_outside_0_to_1_is_refused(confidence):
    with pytest.raises(ValueError, match="confidence"):
        mean_difference(table([[0.1, 0.2], [0.3, 0.5]]), confidence=confidence)


def test_intervals_over_one_thing_alone_need_two_of_it():
    with pytest.raises(ValueError, match="over seeds needs 2"):
        xs.seed_interval(table([[1, 2]]))
    with pytest.raises(ValueError, match="over documents needs 2"):
        xs.document_interval(table([[1], [2]]))


def test_the_headline_is_the_mean_and_no_best_seed_is_offered():
    """F053: one lucky seed of six does not lead; the mean does, and every seed is there to be shown."""
    x = [[0.01], [0.01], [-0.9], [0.02], [0.01], [0.02]]
    pairs = table(x)
    assert mean_difference(pairs).mean == pytest.approx(np.mean(x))
    assert pairs.differences == pytest.approx(np.ravel(x))
    names = [*dir(xs), *dir(xs.paired), *dir(xs.decide), *vars(PairTable), *xs.Estimate.__dataclass_fields__]
    assert not [name for name in names if "best" in name.lower()]


# --- beside the interval ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [1, 2, 3, 4, 6, 8, 10])
def test_sign_flip_agrees_with_scipy_and_with_counting_by_hand(seeds):
    rng = np.random.default_rng(seeds)
    d = rng.normal(0.5, 1, seeds)
    result = xs.sign_flip(table(d[:, None]))
    by_hand = [
        abs(sum(s * v for s, v in zip(signs, d, strict=True))) for signs in itertools.product((1, -1), repeat=seeds)
    ]
    assert result.p == sum(v >= abs(d.sum()) * (1 - 1e-12) for v in by_hand) / 2**seeds
    if seeds > 1:
        oracle = stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=np.inf)
        assert result.p == pytest.approx(oracle.pvalue, rel=1e-12)


@pytest.mark.parametrize(("seeds", "smallest"), [(1, 1), (2, 0.5), (4, 0.125), (6, 0.03125), (8, 0.0078125)])
def test_sign_flip_states_the_smallest_p_and_reaches_it(seeds, smallest):
    result = xs.sign_flip(table(np.arange(1.0, seeds + 1)[:, None]))
    assert (result.p, result.smallest) == (smallest, smallest)


def test_sign_flip_counts_equal_sums_as_equal():
    """±0.1 ±0.2 ±0.3: |sum| = 0.6 twice and, but for rounding, 0.4, 0.2, 0 twice each."""
    assert xs.sign_flip(table([[0.1], [0.2], [-0.3]])).p == 1
    assert xs.sign_flip(table([[0.0], [0.0], [0.0], [0.0]])).p == 1


def test_sign_flip_beyond_16_seeds_is_sampled_and_repeatable():
    rng = np.random.default_rng(9)
    d = rng.normal(0.4, 1, 18)
    result = xs.sign_flip(table(d[:, None]))
    assert result == xs.sign_flip(table(d[:, None]))
    signs = ((np.arange(2**18)[:, None] >> np.arange(18)) & 1) * 2 - 1
    exact = (np.abs(signs @ d) >= abs(d.sum()) - 1e-9).mean()
    assert 0.005 < exact < 0.995
    assert result.p == pytest.approx(exact, abs=5 * math.sqrt(exact / 99_999))  # two-sided: twice a tail's error
    assert result.smallest == 2e-5


def test_correlation_agrees_with_scipy_and_tells_what_pairing_saved():
    rng = np.random.default_rng(10)
    common = rng.normal(size=8)
    a, b = common + 0.5 * rng.normal(size=8), 2 * common + 0.5 * rng.normal(size=8)
    pairs = PairTable(tuple(range(8)), ("all",), a[:, None], b[:, None], np.ones(1), "bpb", 1.0)
    c = xs.correlation(pairs)
    oracle = stats.pearsonr(a, b)
    interval = oracle.confidence_interval(0.95)
    assert (c.r, c.low, c.high) == pytest.approx((oracle.statistic, interval.low, interval.high), rel=1e-9)
    unpaired = a.var(ddof=1) + b.var(ddof=1)
    assert c.saved == pytest.approx(1 - (b - a).var(ddof=1) / unpaired, rel=1e-9)
    assert c.saved_low < c.saved < c.saved_high
    assert c.n == 8


def test_correlation_is_given_from_six_seeds_on():
    rng = np.random.default_rng(11)
    a, b = rng.normal(size=(2, 6, 1))
    make = lambda n: PairTable(tuple(range(n)), ("all",), a[:n], b[:n], np.ones(1), "bpb", 1.0)  # noqa: E731
    assert [xs.correlation(make(n)) is None for n in (1, 2, 5, 6)] == [True, True, True, False]


def test_partners_that_move_as_one_have_correlation_one_and_a_still_arm_has_none():
    moving = np.arange(1.0, 8)[:, None]
    c = xs.correlation(PairTable(tuple(range(7)), ("all",), moving, moving + 1, np.ones(1), "bpb", 1.0))
    assert (c.r, c.high, c.saved) == pytest.approx((1, 1, 1))
    assert (
        xs.correlation(PairTable(tuple(range(7)), ("all",), moving * 0 + 0.1, moving, np.ones(1), "bpb", 1.0)) is None
    )


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quartets", [6, 7, 9, 15, 40, 101])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_ratio_interval_is_that_of_the_sign_test(quartets, confidence):
    """The oracle inverts scipy's quantile test, an independent implementation of the same order statistics."""
    rng = np.random.default_rng(quartets)
    a, b = rng.lognormal(0, 0.1, (2, 2 * quartets))
    r = xs.ratio_estimate(a.tolist(), b.tolist(), confidence=confidence)
    ratios = [(b[2 * k] + b[2 * k + 1]) / (a[2 * k] + a[2 * k + 1]) for k in range(quartets)]
    oracle = stats.quantile_test(ratios, p=0.5).confidence_interval(confidence)
    assert r.median == pytest.approx(np.median(ratios), rel=1e-12)
    assert (r.low, r.high) == pytest.approx((oracle.low, oracle.high), rel=1e-12)
    assert (r.n, r.note) == (quartets, "")
    assert r.coverage >= confidence


@pytest.mark.parametrize(("quartets", "covers"), [(1, 0), (2, 0.5), (3, 0.75), (5, 0.9375)])
def test_too_few_quartets_say_what_their_range_covers(quartets, covers):
    a, b = [1.0] * 2 * quartets, [1.0 + 0.01 * k for k in range(2 * quartets)]
    r = xs.ratio_estimate(a, b)
    assert r.coverage == covers
    assert "too few for 95" in r.note
    assert r.low <= r.median <= r.high


def test_a_steady_drift_leaves_the_ratio_alone():
    """Blocks A B B A on a machine that slows down steadily: b takes 1.25 times as long as a in every quartet."""
    clock = [1 + 0.01 * k for k in range(4 * 8)]
    a = [t for k, t in enumerate(clock) if k % 4 in (0, 3)]
    b = [1.25 * t for k, t in enumerate(clock) if k % 4 in (1, 2)]
    r = xs.ratio_estimate(a, b)
    assert (r.low, r.median, r.high) == pytest.approx((1.25, 1.25, 1.25), rel=1e-12)


@pytest.mark.parametrize(
    ("a", "b"),
    [([], []), ([1.0], [1.0]), ([1.0, 1.0], [1.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0, 1.0], [1.0, math.nan])],
    ids=["none", "odd", "unequal", "zero", "nan"],
)
def test_blocks_that_are_no_quartets_are_refused(a, b):
    with pytest.raises(ValueError, match="block"):
        xs.ratio_estimate(a, b)


@pytest.mark.parametrize(("k", "n"), [(0, 6), (1, 6), (3, 6), (6, 6), (1, 1)])
def test_divergence_interval_solves_its_two_tail_equations(k, n):
    """Clopper–Pearson: at the ends, k or more and k or fewer events each have probability 2.5 %."""
    low, high = xs.clopper_pearson(k, n)
    assert low == 0 if k == 0 else stats.binom.sf(k - 1, n, low) == pytest.approx(0.025, rel=1e-6)
    assert high == 1 if k == n else stats.binom.cdf(k, n, high) == pytest.approx(0.025, rel=1e-6)


@pytest.mark.parametrize(("k", "n"), [(-1, 4), (5, 4), (0, 0)])
def test_an_impossible_count_is_refused(k, n):
    with pytest.raises(ValueError, match="runs"):
        xs.clopper_pearson(k, n)
