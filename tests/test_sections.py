"""The tables beside the pictures hold what the pictures show."""

from __future__ import annotations

from xsalab import figures, sections
from xsalab.drawing import Colours

COLOURS = Colours.of("base", ["base", "arm"])


def test_two_lines_of_one_arm_keep_their_own_ranges() -> None:
    """The updates of an arm are compared with two others: each row has its own name, mean and range over seeds."""
    near, far = [[0.9, 0.8], [0.7, 0.6]], [[0.1, 0.2], [0.3, 0.4]]
    lines = [
        line
        for name, values in (("arm with base", near), ("arm with other", far))
        for line in figures.band_lines("arm", [0, 10], [1, 2], values, COLOURS, name)
    ]
    assert {line.arm for line in lines} == {"arm"}, "the legend hides and shows by arm"
    assert all(line.name in line.tip for line in lines)
    rows = {row["name"]: row["cells"] for row in sections.numbers(lines)["rows"]}
    assert rows == {
        "arm with base": [("0.8000", "0.7000 to 0.9000"), ("0.7000", "0.6000 to 0.8000")],
        "arm with other": [("0.2000", "0.1000 to 0.3000"), ("0.3000", "0.2000 to 0.4000")],
    }


def test_a_line_is_called_by_its_arm_where_nothing_else_is_said() -> None:
    lines = figures.band_lines("arm", [0], [1], [[0.5]], COLOURS)
    assert [(line.arm, line.name, line.tip) for line in lines] == [("arm", "arm", "arm: mean of 1 seed")]
