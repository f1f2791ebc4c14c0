"""Pictures of the mechanism: layer × head maps arm beside arm, and what was predicted against what was measured.

All arms of one measure share a colour scale, and so do the differences. One hue from light to dark for sizes, two
hues for signs: both hold for the colour-blind, and as the value stands in each cell that has room for it, in grey.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .drawing import MARGIN, Colours, Scale, dot, escape, line, of_arm, plain_number, shorten, svg, text, title

SEQUENTIAL = ((244, 248, 252), (158, 197, 229), (46, 124, 181), (8, 48, 96))
DIVERGING = ((12, 71, 130), (122, 176, 220), (246, 246, 244), (238, 168, 118), (150, 58, 12))
WIDE = 960.0  # these pictures take the whole page
LARGEST_CELL, LEAST_CELL_WITH_TEXT = 26, 19
GAP = 22
COLUMNS = 6
LEAST_WIDTH = 124.0  # room for the name of an arm
CONTROLS = {"null": "null control", "positive": "positive control"}  # each stands beside the arm whose control it is
Map = Sequence[Sequence[float | None]]  # one row a layer, one value a head


def colour_at(share: float, stops: Sequence[tuple[int, int, int]]) -> tuple[int, int, int]:
    """Between the stops, for a share from 0 to 1; beyond, the end."""
    place = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    index = min(int(place), len(stops) - 2)
    part = place - index
    low, high = stops[index], stops[index + 1]
    return (
        round(low[0] + part * (high[0] - low[0])),
        round(low[1] + part * (high[1] - low[1])),
        round(low[2] + part * (high[2] - low[2])),
    )


def luminance(colour: tuple[int, int, int]) -> float:
    """Relative luminance of an sRGB colour, 0 to 1 (WCAG 2.2)."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


class _Ramp:
    """Values of one scale -> colours. A signed scale has zero in its middle."""

    def __init__(self, values: Sequence[float], signed: bool) -> None:
        self.signed = signed
        top = max((abs(value) for value in values), default=1.0) or 1.0
        self.low, self.high = (-top, top) if signed else (min(values, default=0.0), max(values, default=1.0))
        if self.low == self.high:
            self.high = self.low + 1.0
        # Small values stand in the cells in units of a power of ten, which the bar of colours names.
        self.power = math.floor(math.log10(top)) if top < 0.095 else 0

    def __call__(self, value: float) -> tuple[str, str]:
        """The colour as hex, and "w" or "b": white or black, whichever can be read on it."""
        share = (value - self.low) / (self.high - self.low)
        colour = colour_at(share, DIVERGING if self.signed else SEQUENTIAL)
        return "#{:02x}{:02x}{:02x}".format(*colour), "w" if luminance(colour) < 0.179 else "b"


def heat_maps(
    arms: Mapping[str, Map], baselines: Mapping[str, str], quiet: Sequence[str], label: str, unit: str, signed: bool
) -> str:
    """One map an arm, and under each the difference from its baseline; SVG text.

    arms: arm -> (layers, heads) values, None where there is none. baselines: arm -> its baseline, for those that have
    one. quiet: arms that do not stretch the scale of differences, positive controls: their colours end where it ends.
    """
    layers, heads = len(next(iter(arms.values()))), len(next(iter(arms.values()))[0])
    difference = {arm: _less(arms[arm], arms[base]) for arm, base in baselines.items() if arm in arms and base in arms}
    scale = _Ramp([v for found in arms.values() for row in found for v in row if v is not None], signed)
    loud = {arm: found for arm, found in difference.items() if arm not in quiet} or difference
    apart = _Ramp([v for found in loud.values() for row in found for v in row if v is not None], True)
    groups = [
        [base, *(arm for arm, of in baselines.items() if of == base and arm in difference)]
        for base in dict.fromkeys(base for arm, base in baselines.items() if arm in difference)
    ]
    drawn = {arm for group in groups for arm in group}
    if alone := [arm for arm in arms if arm not in drawn]:
        groups.append(alone)
    left, room = float(MARGIN), WIDE - 2 * MARGIN
    most = max(len(group) for group in groups)
    columns = -(-most // -(-most // COLUMNS))  # rows of about equal length
    cell = max(3.0, min(LARGEST_CELL, (room / columns - GAP) / heads))
    across = max(cell * heads + GAP, LEAST_WIDTH)
    columns = max(1, min(columns, int((room + GAP) / across)))
    down = cell * layers
    parts, y = [], 0.0
    seen: set[str] = set()
    for group in groups:
        for first in range(0, len(group), columns):
            some = group[first : first + columns]
            pairs = [arm for arm in some if arm in difference and arm not in seen]
            for column, arm in enumerate(some):
                x = left + column * across
                called = CONTROLS.get(arm.partition("@")[0], arm)
                body = text(x, y + 16, shorten(called, int(across / 6.6)), "small")
                body += _cells(arms[arm], scale, x, y + 24, cell, arm, signed)
                if arm in pairs:
                    words = f"{arm} − {baselines[arm]}"
                    body += text(x, y + 24 + down + 15, "difference", "small")
                    body += _cells(difference[arm], apart, x, y + 24 + down + 22, cell, words, True)
                parts.append(of_arm(arm, body))
            if pairs and first == 0 and some[0] not in pairs:  # under the baseline is room for what the colours mean
                wide = min(max(cell * heads, 96.0), 150.0)
                parts.append(_bar(scale, left, y + 24 + down + 22, wide, unit or "value"))
                parts.append(_bar(apart, left, y + 24 + down + 66, wide, "difference"))
            y += 24 + down + (max(22 + down, 110.0) if pairs else 0.0) + 14
            seen |= set(pairs)
    if not difference:
        parts.append(_bar(scale, left, y + 4, 150.0, unit or "value"))
        y += 46
    parts.append(
        text(
            left,
            y + 4,
            "Each map: heads from left to right, layers from top to bottom; the first one of each is 0.",
            "small",
        )
    )
    return svg("".join(parts), y + 14, label, WIDE)


def _less(values: Map, base: Map) -> Map:
    return [
        [None if a is None or b is None else a - b for a, b in zip(row, other, strict=True)]
        for row, other in zip(values, base, strict=True)
    ]


def _cells(values: Map, ramp: _Ramp, left: float, top: float, cell: float, name: str, signed: bool) -> str:
    """Cells of one map. A page has some thousands of them: their common style stands once, around them."""
    parts: list[str] = []
    size = f'width="{cell - 1:.3g}" height="{cell - 1:.3g}"'
    for layer, row in enumerate(values):
        for head, value in enumerate(row):
            x, y = left + head * cell, top + layer * cell
            where = f"layer {layer}, head {head}: "
            if value is None:
                where += "not measured"
                parts.append(f'<rect class="band" x="{x:.4g}" y="{y:.5g}" {size}>{title(where)}</rect>')
                continue
            fill, ink = ramp(value)
            sign = "+" if signed and value > 0 else ""
            where += sign + plain_number(value)
            parts.append(f'<rect x="{x:.4g}" y="{y:.5g}" {size} fill="{fill}">{title(where)}</rect>')
            shown = (
                _brief(value / 10.0**ramp.power)
                if cell >= LEAST_CELL_WITH_TEXT
                else ("−" if signed and value < 0 and cell > 7 else "")
            )
            if shown:
                white = ' class="w"' if ink == "w" else ""
                parts.append(f'<text x="{x + (cell - 1) / 2:.4g}" y="{y + cell / 2 + 2.6:.5g}"{white}>{shown}</text>')
    return f'<g class="cells" data-name="{escape(name)}">{"".join(parts)}</g>'


def _brief(value: float) -> str:
    """At most four characters or so: ".12", "−.03", "12"; the tooltip has the whole value."""
    size = abs(value)
    if size < 0.005:
        return "0"
    if size >= 9999.5:
        return f"{value:.0e}".replace("e+0", "e").replace("-", "−")
    places = 0 if size >= 9.95 else 1 if size >= 0.995 else 2
    shown = f"{value:.{places}f}".replace("-", "−")
    return shown.replace("0.", ".") if places == 2 else shown


def _bar(ramp: _Ramp, x: float, y: float, wide: float, words: str) -> str:
    """What the colours mean: their scale with its ends."""
    steps = 24
    if ramp.power:
        words += f", × 1e{ramp.power}".replace("-", "−")
    parts = [text(x, y + 8, words, "small")]
    for step in range(steps):
        fill, _ = ramp(ramp.low + (step + 0.5) / steps * (ramp.high - ramp.low))
        at = x + wide * step / steps
        parts.append(f'<rect x="{at:.1f}" y="{y + 13:.1f}" width="{wide / steps + 0.4:.2f}" height="8" fill="{fill}"/>')
    parts.append(text(x, y + 33, plain_number(ramp.low, 2), "small"))
    parts.append(text(x + wide, y + 33, plain_number(ramp.high, 2), "small", "end"))
    if ramp.signed and wide > 110:
        parts.append(text(x + wide / 2, y + 33, "0", "small", "middle"))
    return "".join(parts)


def prediction_plot(rows: Sequence[Mapping[str, Any]], colours: Colours, label: str) -> str:
    """Measured against predicted difference, a dot an arm with its name; SVG text.

    rows: {"arm", "predicted", "measured"}, in the same unit where the line of agreement is in the picture.
    """
    rows = [row for row in rows if all(math.isfinite(row[key]) for key in ("predicted", "measured"))]
    left, right, top, bottom = MARGIN + 62.0, 520.0, 30.0, 320.0
    x = Scale.around([0.0, *(row["predicted"] for row in rows)], left, right)
    y = Scale.around([0.0, *(row["measured"] for row in rows)], bottom, top)
    parts = [f'<rect class="panel" x="{left:g}" y="{top:g}" width="{right - left:g}" height="{bottom - top:g}"/>']
    for tick in y.ticks():
        parts.append(line(left, y(tick), right, y(tick), "zero" if tick == 0 else "grid"))
        parts.append(text(left - 7, y(tick) + 4, y.label(tick), "small", "end"))
    for tick in x.ticks():
        parts.append(line(x(tick), top, x(tick), bottom, "zero" if tick == 0 else "grid"))
        parts.append(text(x(tick), bottom + 16, x.label(tick), "small", "middle"))
    parts.append(text(MARGIN, 18, "measured difference", "strong"))
    parts.append(text((left + right) / 2, bottom + 34, "predicted difference", "small", "middle"))
    for row in rows:
        words = f"{row['arm']}: predicted {plain_number(row['predicted'])}, measured {plain_number(row['measured'])}"
        at, up = x(row["predicted"]), y(row["measured"])
        side, anchor = (-9, "end") if at > (left + right) / 2 else (9, "start")
        name = text(at + side, up + 4, shorten(row["arm"], 28), "small", anchor) if len(rows) <= 12 else ""
        parts.append(of_arm(row["arm"], dot(at, up, colours[row["arm"]], words, 5) + name))
    return svg("".join(parts), bottom + 44, label, 540)
