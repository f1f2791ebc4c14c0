"""The rule table, Holm by hand, power against simulated experiments, and the sentence."""

# An estimate's interval is None at one number alone; a test that meets None there fails, which is enough.
# pyright: reportOptionalOperand=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import get_args

import numpy as np
import pytest
from scipy import stats

from xsalab.stats import (
    Estimate,
    PairTable,
    Parts,
    Verdict,
    Word,
    decide,
    holm,
    mean_difference,
    minimum_detectable,
    sd_interval,
    seeds_needed,
    sentence,
)


def estimate(mean, half, *, confidence=0.95, n=6, sd=0.001, document_error=0.0, parts=(1, 0, 0), **other) -> Estimate:
    """An estimate with interval mean ± half."""
    fields = {
        "low": mean - half,
        "high": mean + half,
        "standard_error": half / 2.5,
        "df": n - 1.0,
        "p": 0.5,
        "items": 100,
        "method": "t over seeds",
        "relative": mean / 0.8,
        "baseline_mean": 0.8,
        "treatment_mean": 0.8 + mean,
        "metric": "bpb",
        "item_word": "documents",
        "decidable": n > 2,
    }
    parts = Parts(*parts)
    return Estimate(
        mean=mean, confidence=confidence, n=n, sd=sd, document_error=document_error, parts=parts, **(fields | other)
    )


def verdict(mean, half, *, margin=0.001, adjusted_p=None, lower_is_better=True, diverged=(0, 6), **other) -> Verdict:
    """The verdict on mean ± half, with the 90 % interval that t with 5 degrees of freedom makes of it."""
    narrower = half * float(stats.t.ppf(0.95, 5) / stats.t.ppf(0.975, 5))
    return decide(
        estimate(mean, half, **other),
        margin=margin,
        estimate90=estimate(mean, narrower, confidence=0.9, **other),
        adjusted_p=adjusted_p,
        lower_is_better=lower_is_better,
        diverged=diverged,
    )


@pytest.mark.parametrize(
    ("mean", "half", "options", "word"),
    [
        (-0.0031, 0.0012, {}, "better"),
        (+0.0031, 0.0012, {}, "worse"),
        (+0.0031, 0.0012, {"lower_is_better": False}, "better"),
        (-0.0031, 0.0012, {"lower_is_better": False}, "worse"),
        (-0.0006, 0.0003, {}, "better, below the margin"),
        (+0.0006, 0.0003, {}, "worse, below the margin"),
        (+0.0001, 0.0004, {}, "equivalent"),
        (+0.0001, 0.0010, {}, "equivalent"),  # the 95 % interval reaches beyond the margin, the 90 % one does not
        (+0.0001, 0.0020, {}, "inconclusive"),
        (-0.0009, 0.0010, {}, "inconclusive"),
        (-0.0031, 0.0012, {"adjusted_p": 0.049}, "better"),
        (-0.0031, 0.0012, {"adjusted_p": 0.05}, "inconclusive"),
        (-0.0006, 0.0003, {"adjusted_p": 0.051}, "equivalent"),
        (+0.0001, 0.0020, {"adjusted_p": 0.01}, "inconclusive"),  # Holm never adds a finding
        (-0.0031, 0.0012, {"n": 2}, "not decidable"),
        (-0.0001, 0.0002, {"n": 1}, "not decidable"),
        (-0.0031, 0.0012, {"decidable": False, "note": "no spread"}, "not decidable"),
        (-0.0031, 0.0012, {"diverged": (1, 6)}, "diverged"),
        (-0.0031, 0.0012, {"diverged": (1, 2), "n": 1}, "diverged"),
    ],
)
def test_rule_table(mean, half, options, word):
    v = verdict(mean, half, **options)
    assert str(v) == word
    assert v.word in get_args(Word)
    assert v.reason
    assert bool(v.advice) == (v.word in ("inconclusive", "not decidable", "diverged"))
    json.dumps(dataclasses.asdict(v), allow_nan=False)


def test_the_words_are_these_six():
    assert set(get_args(Word)) == {"better", "worse", "equivalent", "inconclusive", "not decidable", "diverged"}


def test_a_diverged_arm_gives_its_count_and_exact_interval():
    v = verdict(-0.1, 0.001, diverged=(1, 6))
    interval = stats.binomtest(1, 6).proportion_ci(0.95, method="exact")
    assert v.diverged_interval == pytest.approx((interval.low, interval.high))
    assert v.reason == "1 of 6 runs diverged (95 % interval 0 % to 64 %)"
    lost = decide(None, margin=0.001, estimate90=None, diverged=(6, 6))
    assert lost.word == "diverged"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"margin": 0}, "margin = 0"),
        ({"margin": math.nan}, "margin = nan"),
        ({"estimate": estimate(0, 1, confidence=0.9)}, "confidence 0.9"),
        ({"estimate90": estimate(0, 1)}, "confidence 0.95"),
        ({"estimate": None}, "no estimate"),
        ({"diverged": (3, 2)}, "3 of 2 runs"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_what_the_rule_is_not_written_for_is_refused(arguments, message):
    good = {"estimate": estimate(0, 1), "margin": 0.1, "estimate90": estimate(0, 1, confidence=0.9)} | arguments
    with pytest.raises(ValueError, match=message):
        decide(good.pop("estimate"), **good)


def test_without_the_90_percent_interval_equivalence_is_not_claimed():
    v = decide(estimate(0, 1e-6), margin=0.001, estimate90=None)
    assert (v.word, v.reason) == ("inconclusive", "the 95 % interval holds 0")


# --- advice ----------------------------------------------------------------------------------------------------------


def pairs(x, metric="bpb") -> PairTable:
    x = np.asarray(x, dtype=float)
    s, d = x.shape
    names = tuple(str(k) for k in range(d))
    return PairTable(tuple(range(s)), names, np.ones((s, d)), 1 + x, np.ones(d), metric, 1.0)


def judge(table: PairTable, margin: float) -> tuple[Estimate, Verdict]:
    e = mean_difference(table)
    return e, decide(e, margin=margin, estimate90=mean_difference(table, confidence=0.9))


def test_advice_is_a_range_of_seeds_and_blind_to_the_observed_difference():
    rng = np.random.default_rng(0)
    noise = np.linspace(-0.001, 0.001, 5)[:, None] + rng.normal(0, 0.001, (5, 400))
    noise -= noise.mean()
    advice = {judge(pairs(noise + shift), margin=0.0005)[1].advice for shift in (-0.0001, 0.0, 0.0001)}
    assert len(advice) == 1
    assert re.fullmatch(r"more seeds, (\d+) to (\d+) in all", advice.pop())


@pytest.mark.parametrize(("sd", "text"), [(0.5, 0.0), (1.0, 0.0), (1.0, 0.2)])
def test_the_advised_number_of_seeds_makes_the_interval_as_narrow_as_the_margin(sd, text):
    """Both ends of the range, by the definition: the width 2·t·√(sd²/n + text²) against the margin at n and n − 1."""
    v = verdict(0.3, 1.0, margin=1.0, n=5, sd=sd, document_error=text)
    fewest, most = map(int, re.findall(r"\d+", v.advice))
    for spread, n in zip(sd_interval(sd, 5), (fewest, most), strict=True):
        width = [2 * stats.t.ppf(0.975, k - 1) * math.hypot(spread / math.sqrt(k), text) for k in (n - 1, n)]
        assert width[1] <= 1.0
        assert width[0] > 1.0 or n == 6


def test_more_text_is_advised_where_no_seed_helps():
    rng = np.random.default_rng(1)
    noise = np.tile(rng.normal(0, 0.05, 100), (6, 1)) + rng.normal(0, 1e-4, (6, 100))
    e, v = judge(pairs(noise - noise.mean()), margin=0.001)
    assert e.parts.documents > 0.99
    assert v.word == "inconclusive"
    assert v.advice.startswith("more validation text, over ")
    assert "no number of seeds" in v.advice


def test_a_small_sample_of_text_and_of_seeds_are_both_named():
    v = verdict(0.0, 0.0020, sd=0.0004, document_error=0.0002, parts=(0.3, 0.6, 0.1))
    assert v.advice.startswith("more validation text, as 60 % of the variance is from it; or more seeds, ")


def test_a_hopeless_number_of_seeds_is_not_given_as_a_number():
    assert "over 1,000" in verdict(0.0, 2.0, margin=1e-6, sd=1.0).advice


def test_an_interval_narrower_than_the_margin_always_decides():
    """What the advice aims at is enough: wherever it lies, the word is not inconclusive."""
    for mean in np.linspace(-0.003, 0.003, 101):
        assert verdict(mean, 0.00049).word in ("better", "worse", "equivalent")


def test_sd_interval_has_the_chi_square_tails():
    low, high = sd_interval(2.0, 5)
    assert stats.chi2.cdf(4 * 4 / high**2, 4) == pytest.approx(0.025)
    assert stats.chi2.sf(4 * 4 / low**2, 4) == pytest.approx(0.025)
    with pytest.raises(ValueError, match="2 values"):
        sd_interval(1.0, 1)


# --- from data to word -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shift", "spread", "word"),
    [(-0.01, 0.001, "better"), (0.01, 0.001, "worse"), (0.0, 0.0002, "equivalent"), (0.0, 0.01, "inconclusive")],
)
def test_words_from_six_seeds_of_documents(shift, spread, word):
    noise = np.random.default_rng(2).normal(0, 1, (6, 50)) + np.linspace(-1, 1, 6)[:, None]
    e, v = judge(pairs(shift + spread * (noise - noise.mean())), margin=0.001)
    assert v.word == word
    assert e.mean == pytest.approx(shift, abs=1e-12)


def test_an_arm_equal_to_the_baseline_to_the_bit_is_equivalent():
    """α = 0 everywhere: no spread and no difference, of runs that do differ from seed to seed."""
    values = 0.8 + 0.01 * np.arange(4)[:, None] * np.ones(6)
    still = pairs(np.zeros((4, 6)))
    e, v = judge(dataclasses.replace(still, baseline=values, treatment=values), margin=0.001)
    assert v.word == "equivalent"
    assert sentence("xsa", "standard", e, v) == "xsa against standard: Δ bpb 0 ± 0 over 4 seeds, equivalent"


def test_equal_arms_that_no_seed_moves_decide_nothing():
    """Four times one run shows no equivalence."""
    _, v = judge(pairs(np.zeros((4, 6))), margin=0.001)
    assert v.word == "not decidable"
    assert v.reason == "no spread: every seed gave the same result; are the seeds in use?"


def test_seeds_that_repeat_one_number_decide_nothing():
    """F164: two (and more) pairs with one and the same difference."""
    _, v = judge(pairs(np.full((4, 1), 0.3)), margin=0.001)
    assert v.word == "not decidable"
    assert v.reason.startswith("no spread")


def test_one_pair_is_not_testable():
    """F164"""
    e, v = judge(pairs([[0.25]]), margin=0.001)
    assert (e.note, v.word) == ("not testable (n=1)", "not decidable")
    assert sentence("xsa", "standard", e, v) == "xsa against standard: Δ bpb +0.25 over 1 seed, not decidable"


# --- several contrasts, power ----------------------------------------------------------------------------------------


def test_holm_by_hand():
    """Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1: 0.02, 0.03, 0.06, 0.04; the last may not be below 0.06."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]).tolist() == [1, 1]
    assert holm([0.03]).tolist() == [0.03]
    assert holm([]).tolist() == []


@pytest.mark.parametrize("p", [[0.1, math.nan], [-0.1], [1.1]])
def test_holm_refuses_what_is_no_p(p):
    with pytest.raises(ValueError, match="from 0 to 1"):
        holm(p)


@pytest.mark.parametrize(
    ("n", "alpha", "power"), [(3, 0.05, 0.8), (4, 0.05, 0.9), (6, 0.05, 0.8), (12, 0.01, 0.8), (4, 0.2, 0.3)]
)
def test_the_smallest_detectable_effect_is_found_that_often(n, alpha, power):
    """40,000 t tests of that effect; the band is 4 standard errors of the count."""
    effect = minimum_detectable(0.3, n, alpha=alpha, power=power)
    x = np.random.default_rng(n).normal(effect, 0.3, (40_000, n))
    found = (stats.ttest_1samp(x, 0, axis=1).pvalue < alpha).mean()
    assert found == pytest.approx(power, abs=4 * math.sqrt(power * (1 - power) / 40_000))


def test_detectable_effects_are_finite_and_fall_with_seeds():
    effects = [minimum_detectable(1.0, n, power=0.95) for n in (2, 3, 4, 6, 8, 12, 24, 100, 999)]
    assert np.isfinite(effects).all()
    assert effects == sorted(effects, reverse=True)
    assert effects[-1] == pytest.approx((stats.norm.ppf(0.975) + stats.norm.ppf(0.95)) / math.sqrt(999), rel=0.01)
    assert minimum_detectable(0.0, 4) == 0


def test_seeds_needed_inverts_the_smallest_detectable_effect():
    for effect in (0.3, 0.9, 2.0):
        n = seeds_needed(1.0, effect)
        assert minimum_detectable(1.0, n) <= effect
        assert n == 3 or minimum_detectable(1.0, n - 1) > effect
    assert seeds_needed(1.0, 100.0) == 3
    assert seeds_needed(1.0, 0.001) is None


@pytest.mark.parametrize(
    "arguments",
    [{"n": 1}, {"sd": -1.0}, {"sd": math.nan}, {"alpha": 0.0}, {"power": 1.0}, {"alpha": 0.9}],
    ids=lambda a: f"{a}",
)
def test_impossible_power_questions_are_refused(arguments):
    good = {"sd": 1.0, "n": 6, "alpha": 0.05, "power": 0.8} | arguments
    with pytest.raises(ValueError):
        minimum_detectable(good.pop("sd"), good.pop("n"), **good)
    with pytest.raises(ValueError, match="effect"):
        seeds_needed(1.0, 0.0)


# --- the sentence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (-0.00312, 0.00119, "−0.0031 ± 0.0012"),
        (+0.00312, 0.00119, "+0.0031 ± 0.0012"),
        (-0.01551, 0.00999, "−0.016 ± 0.010"),
        (+0.0, 0.00041, "+0.00000 ± 0.00041"),
        (-12.3456, 3.21, "−12.3 ± 3.2"),
        (-1234.56, 321.0, "−1235 ± 321"),
    ],
)
def test_two_digits_of_the_half_width_and_the_sign_always(mean, half, text):
    e = estimate(mean, half)
    v = Verdict("better", "")
    assert sentence("XSA (α = 1, all layers)", "standard", e, v) == (
        f"XSA (α = 1, all layers) against standard: Δ bpb {text} over 6 seeds, better"
    )


def test_sentences_of_the_other_words():
    say = lambda v, e, **kw: sentence("xsa", "standard", e, v, **kw)  # noqa: E731
    e = estimate(-0.0006, 0.0003)
    assert say(verdict(-0.0006, 0.0003), e) == (
        "xsa against standard: Δ bpb −0.00060 ± 0.00030 over 6 seeds, better, below the margin"
    )
    assert say(Verdict("inconclusive", ""), e, metric="validation bpb").startswith(
        "xsa against standard: Δ validation bpb"
    )
    five = estimate(-0.0031, 0.0012, n=5)
    assert say(verdict(-0.0031, 0.0012, n=5, diverged=(1, 6)), five) == (
        "xsa against standard: 1 of 6 runs diverged (95 % interval 0 % to 64 %); "
        "Δ bpb −0.0031 ± 0.0012 over 5 seeds, on condition that both runs finish"
    )
    lost = decide(None, margin=0.001, estimate90=None, diverged=(2, 2))
    assert say(lost, None).endswith("; no pair finished")


def test_one_seed_says_that_its_interval_is_over_documents():
    e, v = judge(pairs([[-0.003, -0.001, -0.002, -0.004]]), margin=0.001)
    assert sentence("xsa", "standard", e, v) == (
        "xsa against standard: Δ bpb −0.0025 ± 0.0021 (documents only) over 1 seed, not decidable"
    )


# --- looks while seeds are added -------------------------------------------------------------------------------------


def at_look(mean, half, *, level=0.0172, equivalence_level=0.0186, **other) -> Verdict:
    """The verdict of one look on mean ± half, with an equivalence interval a tenth narrower."""
    return decide(
        estimate(mean, half, confidence=1 - level),
        estimate90=estimate(mean, 0.9 * half, confidence=1 - 2 * equivalence_level),
        margin=0.001,
        level=level,
        equivalence_level=equivalence_level,
        **other,
    )


@pytest.mark.parametrize(
    ("mean", "half", "word", "reason"),
    [
        (-0.0031, 0.0012, "better", "the 98.3 % interval excludes 0 (nominal level of each look)"),
        (0.0001, 0.0004, "equivalent", "the 96.3 % interval lies inside ± 0.001 (nominal level of each look)"),
        (
            0.0001, 0.0020, "inconclusive",
            "the 98.3 % interval holds 0 and the 96.3 % interval reaches beyond ± 0.001 (nominal level of each look)",
        ),
    ],
)  # fmt: skip
def test_a_look_names_the_confidence_it_decides_by(mean, half, word, reason):
    v = at_look(mean, half)
    assert (str(v), v.reason) == (word, reason)


def test_a_look_compares_holms_p_with_its_own_level():
    assert at_look(-0.0031, 0.0012, adjusted_p=0.0171).word == "better"
    assert at_look(-0.0031, 0.0012, adjusted_p=0.0173).word == "inconclusive"


def test_the_default_levels_are_those_of_one_look():
    assert at_look(-0.0031, 0.0012, level=0.05, equivalence_level=0.05) == verdict(-0.0031, 0.0012)


def test_a_look_advises_for_its_wider_interval():
    """A higher confidence needs more seeds for an interval no wider than the margin."""
    advised = [re.findall(r"more seeds, (\d+)", v.advice) for v in (at_look(0.0001, 0.002), verdict(0.0001, 0.002))]
    many, few = (int(seeds) for (seeds,) in advised)
    assert many > few


@pytest.mark.parametrize("levels", [{"level": 0.0}, {"level": 0.5}, {"equivalence_level": 1.0}])
def test_impossible_levels_are_refused(levels):
    with pytest.raises(ValueError, match=next(iter(levels))):
        at_look(-0.0031, 0.0012, **levels)


def test_an_interval_of_another_look_is_refused():
    with pytest.raises(ValueError, match=r"confidence 0.95; the rule is written for 0.98"):
        decide(estimate(0.1, 0.01), margin=0.001, estimate90=None, level=0.02)


def test_what_fails_by_adjustment_alone_is_told_so() -> None:
    """Its interval excludes 0: the family is what costs it the verdict, and the advice says so first."""
    lost = verdict(-0.0031, 0.0012, adjusted_p=0.05)
    assert lost.word == "inconclusive"
    assert lost.advice.startswith("new runs of a smaller declared family, as the interval alone excludes 0")
    assert "smaller declared family" not in verdict(-0.0031, 0.0062, adjusted_p=0.5).advice
