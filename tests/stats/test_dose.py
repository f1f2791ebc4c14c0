"""The dose–response curve: by hand at three doses, numpy.polyfit, Fieller's quadratic, coverage, and every odd case."""

# pyright: reportOptionalOperand=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import stats

from xsalab.stats import DoseResponse, DoseTable, dose_response, mean_difference

FIVE = (0.0, 0.25, 0.5, 0.75, 1.0)


def table(means, *, doses=FIVE, seeds=6, items=1, sd=0.0, rng=0, **other) -> DoseTable:
    """Runs with the given mean at each dose, a level of each seed that pairing takes out, and normal noise."""
    draw = np.random.default_rng(rng)
    level, noise = draw.normal(0, 0.1, (seeds, 1, items)), draw.normal(0, sd, (seeds, len(doses), items))
    fields = {"metric": "val_bpb", "unit": 1.0, "weights": np.ones(items), "values": level + noise}
    fields["values"] += np.reshape(means, (1, -1, 1))
    return DoseTable(doses, tuple(range(seeds)), tuple(f"d{i}" for i in range(items)), **(fields | other))


def parabola(b1, b2, doses=FIVE):
    return [1 + b1 * a + b2 * a * a for a in doses]


def json_ready(response: DoseResponse) -> None:
    json.dumps(dataclasses.asdict(response), allow_nan=False)


def test_three_doses_by_hand():
    """Through (0, 0), (½, −3), (1, −4): b1 = −8, b2 = 4; the curve meets the points, so its form is not tested."""
    response = dose_response(table([5, 2, 1], doses=(0, 0.5, 1), sd=0.0))
    assert response.b1.mean == pytest.approx(-8)
    assert response.b2.mean == pytest.approx(4)
    assert [point.mean for point in response.points] == pytest.approx([0, -3, -4])
    assert response.curve.delta[0] == pytest.approx(0)
    assert response.curve.delta[25] == pytest.approx(-3)
    assert response.curve.delta[-1] == pytest.approx(-4)
    assert response.lack_of_fit is None
    assert "all points" in response.fit


def test_coefficients_are_those_of_polyfit_on_the_means():
    """Least squares is linear: fitting each seed and document and averaging is fitting the averages."""
    unit, weights = math.log(2), np.array([3.0, 7.0, 2.0])
    t = table(parabola(-1, 0.7), items=3, sd=0.2, unit=unit, weights=weights)
    response = dose_response(t)
    means = t.values.sum(axis=2).mean(axis=0) / (unit * weights.sum())
    b2, b1, _ = np.polyfit(FIVE, means, 2)
    assert response.b1.mean == pytest.approx(b1)
    assert response.b2.mean == pytest.approx(b2)
    assert response.curve.delta == pytest.approx(np.polyval([b2, b1, 0], response.curve.doses))


def test_an_interval_of_a_coefficient_is_that_of_its_combination_over_seeds():
    """One document: the plain t interval of the seeds' own polyfit coefficients."""
    t = table(parabola(-1, 0.7), sd=0.2)
    slopes = [np.polyfit(FIVE, t.values[s, :, 0], 2)[1] for s in range(6)]
    half = stats.t.ppf(0.975, 5) * np.std(slopes, ddof=1) / math.sqrt(6)
    b1 = dose_response(t).b1
    assert (b1.low, b1.high) == pytest.approx((np.mean(slopes) - half, np.mean(slopes) + half))


def test_points_are_the_two_way_intervals_of_plain_pairs():
    t = table(parabola(-1, 0.7), items=4, sd=0.2)
    point = dose_response(t).points[3]
    plain = mean_difference(t.combination([-1, 0, 0, 1, 0]))
    assert (point.mean, point.low, point.high) == pytest.approx((plain.mean, plain.low, plain.high))
    assert point.mean == pytest.approx((t.values[:, 3] - t.values[:, 0]).mean())


def test_the_reference_moves_the_curve_and_does_not_bend_it():
    t = table(parabola(-1, 0.7), sd=0.2)
    first, last = dose_response(t), dose_response(dataclasses.replace(t, reference=4))
    assert last.reference == 1.0
    assert last.points[0].baseline_mean == pytest.approx(last.points[2].baseline_mean) == t.values[:, 4].mean()
    assert last.b2.mean == pytest.approx(first.b2.mean)
    shift = np.array(first.curve.delta) - np.array(last.curve.delta)
    assert np.ptp(shift) == pytest.approx(0, abs=1e-12)
    assert last.curve.delta[-1] == pytest.approx(0, abs=1e-12)
    assert np.array(last.minimum.within) == pytest.approx(np.array(first.minimum.within), abs=1e-6)


def test_doses_in_another_order_and_another_unit_give_the_same_curve():
    t = table(parabola(-1, 0.7), sd=0.2)
    order = [3, 0, 4, 2, 1]
    other = dose_response(
        dataclasses.replace(t, doses=[1000 * FIVE[k] for k in order], values=t.values[:, order], reference=1)
    )
    plain = dose_response(t)
    assert other.b1.mean * 1000 == pytest.approx(plain.b1.mean)
    assert other.curve.delta == pytest.approx(plain.curve.delta)
    assert np.array(other.minimum.within) / 1000 == pytest.approx(np.array(plain.minimum.within), abs=1e-5)


def test_lack_of_fit_is_the_cubic_contrast_and_sees_a_cubic():
    """Five equal steps: the weights are −1, 2, 0, −2, 1 (tables of orthogonal polynomials), in units of its top."""
    t = table(parabola(-1, 0.7), sd=0.001)
    w = np.array([-1, 2, 0, -2, 1])
    expected = (t.values[:, :, 0].mean(axis=0) @ w) / (w @ w) * 2
    response = dose_response(t)
    assert response.lack_of_fit.mean == pytest.approx(expected)
    assert "describes" in response.fit
    bent = dose_response(table([a**3 for a in FIVE], sd=0.001))
    cubic = np.polyfit(FIVE, [a**3 for a in FIVE], 2)
    assert bent.lack_of_fit.mean == pytest.approx(
        np.abs(np.array(FIVE) ** 3 - np.polyval(cubic, FIVE)).max(), abs=0.005
    )
    assert "not enough" in bent.fit


@pytest.mark.parametrize("rng", range(5))
def test_minimum_set_is_fiellers(rng):
    """One document and a clear parabola: (b1 + 2 b2 a)² = t² · (v11 + 4 a v12 + 4 a² v22), solved as a quadratic."""
    t = table(parabola(-1, 1), sd=0.03, rng=rng)
    of_seeds = np.array([np.polyfit(FIVE, t.values[s, :, 0], 2)[1::-1] for s in range(6)])  # b1, b2
    b1, b2 = of_seeds.mean(axis=0)
    v = np.cov(of_seeds.T) / 6 * stats.t.ppf(0.975, 5) ** 2
    roots = np.sort(np.roots([4 * (b2**2 - v[1, 1]), 4 * (b1 * b2 - v[0, 1]), b1**2 - v[0, 0]]))
    ((low, high),) = dose_response(t).minimum.within
    assert (low, high) == pytest.approx(tuple(roots), abs=1e-5)
    assert dose_response(t).minimum.dose == pytest.approx(-b1 / (2 * b2))


@pytest.mark.slow
@pytest.mark.parametrize(("b1", "b2", "where"), [(-1, 1, 0.5), (-0.4, 1, 0.2), (-1, 0.3, 1.0), (0.0, 1.0, 0.0)])
def test_the_true_minimum_is_in_the_set(b1, b2, where):
    """200 experiments of 6 seeds: at least 0.95 of the sets hold it, within a binomial error of 3.5 sd."""
    held = 0
    for rng in range(200):
        within = dose_response(table(parabola(b1, b2), sd=0.15, rng=rng), grid=7).minimum.within
        held += any(low - 1e-9 <= where <= high + 1e-9 for low, high in within)
    assert held / 200 >= 0.95 - 3.5 * math.sqrt(0.05 * 0.95 / 200)


def test_a_flat_curve_leaves_the_whole_range():
    minimum = dose_response(table([1] * 5, sd=0.1)).minimum
    assert minimum.within == ((0.0, 1.0),)
    assert minimum.words == "cannot be told: anywhere from α = 0 to 1"
    equal = dose_response(table([1] * 5, sd=0.0))  # all runs equal to the bit
    assert equal.minimum.within == ((0.0, 1.0),)
    assert equal.b1.mean == 0.0
    json_ready(equal)


@pytest.mark.parametrize(
    ("b1", "b2", "within", "words"),
    [
        (-1, 0.1, ((1.0, 1.0),), "the curve falls to α = 1: no minimum inside"),
        (+1, 0.1, ((0.0, 0.0),), "the curve rises from α = 0: no minimum inside"),
        (1, -1, ((0.0, 0.0), (1.0, 1.0)), "at an end, α = 0 or 1: no minimum inside"),
        (1, -1.5, ((1.0, 1.0),), "the curve falls to α = 1: no minimum inside"),
    ],
)
def test_a_clear_end_is_the_minimum(b1, b2, within, words):
    """A hill's top is no minimum although the slope there is 0, and of its two feet the lower one is."""
    minimum = dose_response(table(parabola(b1, b2), sd=0.005, rng=3)).minimum
    assert minimum.within == within
    assert minimum.words == words
    assert any(low <= minimum.dose <= high for low, high in minimum.within)


def test_a_plain_fall_rules_out_the_start_though_the_slope_there_is_hard_to_tell():
    response = dose_response(table(parabola(-0.5, 0), sd=0.15, rng=1))
    (low, high), *_ = response.minimum.within
    slope = response.b1  # at the reference dose, 0
    assert slope.low < 0 < slope.high
    assert low > 0
    assert high == 1.0


def test_a_minimum_sharper_than_the_grid_is_found():
    """Between two doses of the grid, where both neighbours are out."""
    minimum = dose_response(table(parabola(-0.33, 1), sd=1e-5)).minimum
    ((low, high),) = minimum.within
    assert low < minimum.dose < high < low + 0.001
    assert minimum.dose == pytest.approx(0.165, abs=1e-4)


def test_an_inner_minimum_in_words():
    minimum = dose_response(table(parabola(-1, 1), sd=0.03)).minimum
    (low, high), *_ = minimum.within
    assert 0.3 < low < minimum.dose < high < 0.7
    assert minimum.words == f"α anywhere from {low:.3g} to {high:.3g}"


@pytest.mark.parametrize(("seeds", "items"), [(1, 1), (1, 5), (2, 1), (2, 5)])
def test_two_seeds_or_fewer_decide_nothing(seeds, items):
    response = dose_response(table(parabola(-1, 0.1), seeds=seeds, items=items, sd=0.01))
    assert not response.minimum.decidable
    assert response.minimum.within == ((0.0, 1.0),)
    assert response.minimum.words.startswith("not decidable: ")
    assert f"{seeds} seed" in response.note
    assert response.points[4].mean == pytest.approx(-0.9, abs=0.1)
    assert (response.points[4].low is None) == (seeds == items == 1)
    json_ready(response)


def test_seeds_that_all_gave_the_same_curve_are_not_in_use():
    values = np.repeat(np.array(parabola(-1, 0.1))[None, :, None], 4, axis=0)
    response = dose_response(table([0] * 5, seeds=4, values=values))
    assert not response.minimum.decidable
    assert "no spread" in response.minimum.words
    json_ready(response)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"doses": (0, 1)}, "at least 3 doses"),
        ({"doses": (0, 0.5, 0.5, 0.75, 1)}, "each of them once"),
        ({"doses": (0, math.nan, 0.5, 0.75, 1)}, "finite"),
        ({"reference": 5}, "reference = 5"),
        ({"doses": (0, 0.5, 1)}, "shape"),
        ({"weights": [0.0]}, "no bytes"),
        ({"seeds": (0, 1, 1, 2, 3, 4)}, "twice"),
    ],
)
def test_mistakes_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dose_response(dataclasses.replace(table([1] * 5), **changes))


def test_a_diverged_seed_is_refused():
    values = np.ones((6, 5, 1))
    values[2, 1, 0] = math.nan
    with pytest.raises(ValueError, match="leave out the seed of a diverged run"):
        table([1] * 5, values=values)
