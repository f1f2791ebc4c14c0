"""The pictures: smoothing that does not bend a curve, every seed there, text that stays text."""

from __future__ import annotations

import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from xsalab import figures
from xsalab.figures import (
    Colours,
    Curve,
    choose_beta,
    curve_plot,
    difference,
    difference_plot,
    interval_groups,
    interval_plot,
    interval_svg,
    mean_curve,
    smooth,
)

COLOURS = Colours.of("standard", ["standard", "xsa", "null", "positive"])


def row(
    kind: str = "effect", treatment: str = "xsa", differences: tuple[float, ...] = (-0.003, 0.001, -0.002)
) -> dict[str, Any]:
    mean = sum(differences) / len(differences)
    return {
        "kind": kind, "treatment": treatment, "baseline": "standard", "label": f"{treatment} (all layers)",
        "seeds": list(range(len(differences))), "differences": list(differences), "margin": 0.002,
        "estimate": {"mean": mean, "low": mean - 0.002, "high": mean + 0.002, "confidence": 0.95},
        "verdict": {"text": "inconclusive"},
    }  # fmt: skip


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg.removeprefix('<?xml version="1.0" encoding="UTF-8"?>\n'))


def marks(svg: str, tag: str) -> list[ElementTree.Element]:
    return [element for element in parse(svg).iter() if element.tag.endswith("}" + tag)]


def title(element: ElementTree.Element) -> str:
    return next(child.text or "" for child in element if child.tag.endswith("title"))


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999])
def test_smoothing_leaves_a_constant_alone(beta: float) -> None:
    """F123: a constant loss of 5.0 is 5.0 at every step, the first ones among them."""
    assert smooth([5.0] * 300, beta) == pytest.approx([5.0] * 300, rel=1e-12)


def test_smoothing_is_the_weighted_mean_of_what_came_before() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    for n in range(1, len(values) + 1):
        weights = [0.7 ** (n - 1 - i) for i in range(n)]
        expected = sum(w * v for w, v in zip(weights, values[:n], strict=True)) / sum(weights)
        assert smooth(values[:n], 0.7)[-1] == pytest.approx(expected)


def test_smoothing_starts_at_the_first_value_and_ignores_the_future() -> None:
    assert smooth([7.0, 1.0, 2.0], 0.95)[0] == 7.0
    assert smooth([7.0, 1.0], 0.95) == smooth([7.0, 1.0, 100.0], 0.95)[:2]


@pytest.mark.parametrize("beta", [-0.1, 1.0, math.nan])
def test_a_beta_that_averages_nothing_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match="beta"):
        smooth([1.0], beta)


def test_beta_grows_with_the_length_and_stays_below_1() -> None:
    found = [choose_beta(steps) for steps in (1, 8, 64, 128, 1000, 10**6)]
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] == 0.99


def test_the_difference_of_equal_curves_is_zero_and_shared_steps_decide() -> None:
    a = Curve("xsa", 0, [0, 1, 2, 3], [4.0, 3.0, 2.5, 2.0])
    assert difference(a, Curve("standard", 0, a.steps, a.values), 0.9).values == [0.0] * 4
    cut = Curve("standard", 0, [0, 1], [4.0, 3.5])
    assert list(difference(a, cut, 0.0).steps) == [0, 1]
    assert difference(a, cut, 0.0).values == [0.0, -0.5]
    assert mean_curve([a, cut]).values == [4.0, 3.25]


def test_one_beta_for_all_curves_of_a_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[float] = []
    honest = figures.smooth
    monkeypatch.setattr(figures, "smooth", lambda values, beta: used.append(beta) or honest(values, beta))
    curves = [Curve(arm, seed, range(n), [1.0] * n) for arm in ("standard", "xsa") for seed, n in ((0, 50), (1, 20))]
    svg = curve_plot(curves, 0.8, COLOURS)
    assert used == [0.8] * 4
    assert "β = 0.8" in svg
    assert sorted(title(path) for path in marks(svg, "path")) == [
        "standard, seed 0", "standard, seed 1", "xsa, seed 0", "xsa, seed 1",
    ]  # fmt: skip


def test_curves_are_drawn_where_their_values_are() -> None:
    """A line twice as high is drawn higher, and a straight one straight."""
    low = Curve("standard", 0, range(10), [1.0] * 10)
    high = Curve("xsa", 0, range(10), [2.0] * 10)
    svg = curve_plot([low, high], 0.5, COLOURS)
    (matrix,) = [[float(n) for n in re.findall(r"-?[\d.]+", g.get("transform", ""))]
                 for g in marks(svg, "g") if g.get("transform", "").startswith("matrix")]  # fmt: skip
    paths = {title(path): path.attrib["d"] for path in marks(svg, "path")}
    values = {name: {float(y) for y in re.findall(r"[ML][\d.]+ ([\d.-]+)", d)} for name, d in paths.items()}
    assert values == {"standard, seed 0": {1.0}, "xsa, seed 0": {2.0}}, "the exact values, for the tooltips"
    heights = {name: {matrix[3] * y + matrix[5] for y in found} for name, found in values.items()}
    assert max(heights["xsa, seed 0"]) < min(heights["standard, seed 0"])


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    curve = Curve("standard", 0, range(10_001), [float(i) for i in range(10_001)])
    path = marks(curve_plot([curve], 0.0, COLOURS), "path")[0].attrib["d"]
    places = re.findall(r"[ML]([\d.]+) ", path)
    assert len(places) <= figures.POINTS + 1
    assert float(places[-1]) == max(float(place) for place in places)


def test_a_loss_that_explodes_stays_a_number() -> None:
    svg = curve_plot([Curve("xsa", 0, range(4), [2.0, 3.0, 1e30, 1e300])], 0.0, COLOURS)
    assert not re.search(r"nan|inf\b|e\+", svg)


def test_no_losses_is_said() -> None:
    assert "No losses" in curve_plot([], 0.0, COLOURS)
    assert "No losses" in difference_plot([], [], 0.0, COLOURS)


def test_differences_show_the_seeds_the_mean_and_the_null_behind() -> None:
    pairs = [Curve("xsa", seed, [0, 1, 2], [0.1, -0.1 * seed, -0.2]) for seed in (0, 1)]
    null = [Curve("null", 0, [0, 1, 2], [0.0, 0.01, -0.01])]
    drawn = [title(path) for path in marks(difference_plot(pairs, null, 0.5, COLOURS), "path")]
    assert drawn == [
        "null control, seed 0", "null control: mean of 1 pair", "xsa, seed 0", "xsa, seed 1", "xsa: mean of 2 pairs",
    ]  # fmt: skip


def test_every_seed_is_a_dot_inside_its_axis_in_the_order_of_its_value() -> None:
    values = (-0.003, 0.001, -0.002, 0.004)
    dots = marks(interval_plot([row(differences=values)], COLOURS), "circle")
    assert [title(dot).split(":")[0] for dot in dots] == ["seed 0", "seed 1", "seed 2", "seed 3"]
    places = [float(dot.attrib["cx"]) for dot in dots]
    assert sorted(range(4), key=lambda i: places[i]) == sorted(range(4), key=lambda i: values[i])
    assert all(0 < place < figures.WIDTH for place in places)
    steps = (places[3] - places[0]) / 0.007, (places[1] - places[2]) / 0.003
    assert steps[0] == pytest.approx(steps[1], rel=0.01), "one linear scale"


def test_the_positive_control_has_a_scale_of_its_own() -> None:
    alone = marks(interval_plot([row()], COLOURS), "circle")
    beside = marks(interval_plot([row(), row("positive", "positive", (0.5, 0.6))], COLOURS), "circle")
    assert [dot.attrib["cx"] for dot in alone] == [dot.attrib["cx"] for dot in beside[:3]]
    assert len(beside) == 5


@pytest.mark.parametrize("missing", ["estimate", "interval", "margin"])
def test_what_is_not_there_is_not_drawn(missing: str) -> None:
    entry = row()
    if missing == "estimate":
        entry = {k: v for k, v in entry.items() if k not in ("estimate", "differences", "margin")} | {"seeds": []}
    elif missing == "interval":
        entry["estimate"] |= {"low": None, "high": None}
    else:
        del entry["margin"]
    svg = interval_plot([entry], COLOURS)
    assert not re.search(r"nan|None", svg)
    assert ("no finished pair" in svg) == (missing == "estimate")


def test_equal_differences_still_make_a_picture() -> None:
    entry = row(differences=(0.0, 0.0))
    entry["estimate"] |= {"low": 0.0, "high": 0.0}
    entry["margin"] = 0.0
    assert len(marks(interval_plot([entry], COLOURS), "circle")) == 2


def test_the_file_for_papers_has_fixed_colours_and_is_whole_xml() -> None:
    """F170: a label is text in it, control characters included."""
    entry = row() | {"label": 'xsa (</svg><script>alert(1)</script>\x01 & "q")'}
    svg = interval_svg([entry, row("null", "null")], COLOURS)
    assert "var(" not in svg
    assert not marks(svg, "script")
    assert any("</svg><script>alert(1)</script>" in (text.text or "") for text in marks(svg, "text"))


def test_arms_keep_their_colours_and_controls_are_grey() -> None:
    colours = Colours.of("standard", ["standard", "a", "b", "null", "positive", "twin"])
    assert [colours[arm] for arm in ("standard", "a", "b", "null", "positive")] == ["c0", "c1", "c2", "grey", "grey"]


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(0.0, 3, "0"), (-0.00312, 2, "−0.0031"), (1234.5, 2, "1234"), (9.99, 2, "10"), (1e-12, 2, "1.0e−12")],
)
def test_numbers_are_plain(value: float, digits: int, text: str) -> None:
    assert figures.plain_number(value, digits) == text


def test_what_was_only_explored_does_not_squeeze_the_declared_effects() -> None:
    """An exploratory contrast forty times as large has a panel of its own; controls stay with what they are beside."""
    declared, null = row(differences=(-0.01, 0.02)), row("null", "null", (0.001, 0.002))
    explored = {**row(differences=(0.4, 0.5)), "exploratory": True}
    tiny = {**row(differences=(0.001, 0.002)), "exploratory": True}
    groups = interval_groups([declared, explored, tiny, null])
    assert [chosen for _, chosen in groups] == [[declared, null], [tiny], [explored]]
    assert interval_groups([declared]) == [("Effects", [declared])]
    assert interval_groups([]) == []
