"""Heat maps: one scale for all arms, differences that are differences, and text that can be read on its colour."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from xsalab.drawing import DARK, LIGHT, Colours
from xsalab.heatmaps import DIVERGING, SEQUENTIAL, _brief, _Ramp, colour_at, heat_maps, luminance, prediction_plot

A = [[0.1, 0.2], [0.3, 0.4]]
B = [[0.1, 0.5], [0.2, None]]


def cells(svg: str) -> dict[tuple[str, str], tuple[str, str]]:
    """(map, place) -> (value as told, colour)."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for group in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}g"):
        if "data-name" in group.attrib:
            for rect in group.iter("{http://www.w3.org/2000/svg}rect"):
                place, _, value = (rect[0].text or "").partition(": ")
                found[group.attrib["data-name"], place] = value, rect.get("fill", "none")
    return found


def test_every_cell_has_its_value_and_its_difference() -> None:
    found = cells(heat_maps({"base": A, "arm": B}, {"arm": "base"}, [], "label", "", False))
    assert len(found) == 3 * 4
    assert found["base", "layer 1, head 0"][0] == "0.300"
    assert found["arm − base", "layer 0, head 1"][0] == "+0.300"
    assert found["arm − base", "layer 1, head 0"][0] == "−0.100"
    assert found["arm", "layer 1, head 1"] == found["arm − base", "layer 1, head 1"] == ("not measured", "none")


def test_equal_values_have_one_colour_in_every_arm() -> None:
    found = cells(heat_maps({"base": A, "arm": B}, {"arm": "base"}, [], "label", "", False))
    assert found["base", "layer 0, head 0"] == found["arm", "layer 0, head 0"]
    assert found["base", "layer 0, head 1"] == found["arm", "layer 1, head 0"]
    assert found["base", "layer 0, head 1"][1] != found["base", "layer 0, head 0"][1]


def test_a_positive_control_does_not_stretch_the_scale_of_differences() -> None:
    far = [[9.0, 9.0], [9.0, 9.0]]
    baselines = {"arm": "base", "positive": "base"}
    arms = {"base": A, "arm": [[0.1, 0.25], [0.3, 0.4]], "positive": far}
    stretched, quiet = (cells(heat_maps(arms, baselines, names, "l", "", False)) for names in ([], ["positive"]))
    of = "arm − base", "layer 0, head 1"
    assert luminance_of(quiet[of][1]) < luminance_of(stretched[of][1])


def luminance_of(colour: str) -> float:
    return luminance((int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)))


@pytest.mark.parametrize("signed", [False, True])
def test_the_text_in_a_cell_has_a_contrast_of_at_least_4_5(signed: bool) -> None:
    """WCAG 2.2, 1.4.3: (L1 + 0.05) / (L2 + 0.05)."""
    ramp = _Ramp([-1.0, 1.0], signed)
    for step in range(101):
        fill, ink = ramp(-1 + step / 50)
        under = luminance_of(fill) + 0.05
        assert (1.05 / under if ink == "w" else under / 0.05) >= 4.5


def test_colours_survive_grey_print() -> None:
    """A size is darker the larger it is; a sign is as dark as the other one, so cells carry its mark."""
    shades = [luminance(colour_at(step / 20, SEQUENTIAL)) for step in range(21)]
    assert shades == sorted(shades, reverse=True)
    shades = [luminance(colour_at(step / 20, DIVERGING)) for step in range(21)]
    assert shades[:11] == sorted(shades[:11])
    assert shades[10:] == sorted(shades[10:], reverse=True)
    small = heat_maps({"base": [[0.0] * 12], "arm": [[-0.5] * 6 + [0.5] * 6]}, {"arm": "base"}, [], "l", "", False)
    wide = heat_maps({"b": [[0.0] * 40], "a": [[-0.5] * 20 + [0.5] * 20]}, {"a": "b"}, [], "l", "", False)
    assert len(re.findall(r">−\.50<", small)) + len(re.findall(">−<", small)) >= 6
    assert len(re.findall(r">−\.50<", wide)) + len(re.findall(">−<", wide)) >= 20


@pytest.mark.parametrize(
    ("value", "text"), [(0.12, ".12"), (-0.031, "−.03"), (1.24, "1.2"), (-12.4, "−12"), (0.0001, "0"), (23456, "2e4")]
)
def test_a_value_fits_its_cell(value: float, text: str) -> None:
    assert _brief(value) == text


def test_small_values_are_told_in_units_of_a_power_of_ten() -> None:
    svg = heat_maps({"a": [[0.0003, -0.0001]]}, {}, [], "label", "nats", True)
    assert "nats, × 1e−4" in svg
    assert ">3.0<" in svg
    assert ">−1.0<" in svg


def test_many_heads_and_many_arms_stay_inside_the_picture() -> None:
    arms = {f"arm {i}": [[0.1] * 16] * 24 for i in range(9)}
    svg = heat_maps(arms, {name: "arm 0" for name in arms if name != "arm 0"}, [], "label", "", False)
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width
        assert float(rect.attrib["y"]) + float(rect.attrib["height"]) <= height


def test_a_hostile_name_stays_text() -> None:
    """F170"""
    name = "</svg><script>alert(1)</script>"
    for svg in (
        heat_maps({name: A}, {}, [], name, name, False),
        prediction_plot([{"arm": name, "predicted": 0.1, "measured": 0.2}], Colours.of("", [name]), name),
    ):
        assert "<script" not in svg
        ElementTree.fromstring(svg)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_texts_of_the_page_have_a_contrast_of_at_least_4_5_and_lines_of_3(palette: dict[str, str]) -> None:
    for ground in ("page", "panel"):
        under = luminance_of(palette[ground]) + 0.05
        for name in ("ink", "muted", "c0", "c1", "c2", "c4", *(f"c{i}" for i in range(8)), "grey"):
            over = luminance_of(palette[name]) + 0.05
            least = 4.5 if name in ("ink", "muted", "c0", "c1", "c2", "c4") else 3.0
            assert max(over / under, under / over) >= least, (ground, name)


def test_crossed_arms_have_a_hue_for_the_first_factor_and_a_dash_for_the_second() -> None:
    crossed = {f"{a}-{o}": [a, o] for a in ("standard", "xsa", "learned") for o in ("hybrid", "adamw")}
    arms = [*crossed, "null", "positive", "null@standard-adamw", "positive@standard-adamw"]
    colours = Colours.of("standard-hybrid", arms, crossed)
    assert colours["xsa-hybrid"] == colours["xsa-adamw"] != colours["learned-hybrid"]
    assert colours.stroke("standard-hybrid") == "s-c0"
    assert colours.stroke("xsa-adamw") == "s-c1 dash"
    assert len({colours.stroke(arm) for arm in arms}) == len(arms)
    assert len({Colours.of("b", map(str, range(12))).stroke(str(i)) for i in range(12)}) == 12
