"""The pictures of a report: plain values in, SVG text out.

The SVG is our own, a few lines a picture, and no plotting library's: a page with plotly in it weighs 4.8 MB, this one
a tenth of that. Every mark carries a ``<title>``, which browsers show as its tooltip; page.js adds toggling and zoom.
``interval_svg`` puts in fixed colours, for papers. Colours, scales and the pieces are in drawing.py.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .drawing import (
    LIGHT,
    MARGIN,
    STYLE,
    WIDTH,
    Colours,
    Scale,
    dot,
    escape,
    line,
    of_arm,
    plain_number,
    shorten,
    svg,
    text,
    title,
)

POINTS = 400  # drawn of a curve
SETTLED = 0.25  # share of the steps that does not decide the vertical range: losses fall fast at first


@dataclass(frozen=True)
class Curve:
    """One run's values by step, or one pair's; both sequences of one length."""

    arm: str
    seed: int
    steps: Sequence[int]
    values: Sequence[float]


# Smoothing: done here, when drawing; only raw values are stored.


def smooth(values: Sequence[float], beta: float) -> list[float]:
    """The bias-corrected exponential average, started at the first value: m ← β m + (1 − β) x, divided by 1 − β^(i+1).

    A constant gives itself at every step. Raises ValueError unless 0 ≤ β < 1.
    """
    if not 0 <= beta < 1:
        raise ValueError(f"beta = {beta}: must be at least 0 and below 1")
    average, weight, found = 0.0, 0.0, []
    for value in values:
        average = beta * average + (1 - beta) * value
        weight = beta * weight + (1 - beta)  # 1 − β^(i+1), summed as the average is: a constant stays exact
        found.append(average / weight)
    return found


def choose_beta(steps: int) -> float:
    """A β that averages over about a twentieth of the steps: 0 for the shortest runs, at most 0.99."""
    return round(min(0.99, max(0.0, 1 - 20 / max(steps, 1))), 2)


def smoothed(curve: Curve, beta: float) -> Curve:
    """The curve's exponential average, started at its own first point."""
    return Curve(curve.arm, curve.seed, curve.steps, smooth(curve.values, beta))


def difference(treatment: Curve, baseline: Curve, beta: float) -> Curve:
    """Smoothed treatment − smoothed baseline at the steps that both have."""
    base = dict(zip(baseline.steps, smooth(baseline.values, beta), strict=True))
    rows = [(s, v - base[s]) for s, v in zip(treatment.steps, smooth(treatment.values, beta), strict=True) if s in base]
    return Curve(treatment.arm, treatment.seed, [s for s, _ in rows], [v for _, v in rows])


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean at the steps that all curves have."""
    shared = sorted(set.intersection(*(set(curve.steps) for curve in curves))) if curves else []
    tables = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    return Curve("mean", -1, shared, [math.fsum(table[s] for table in tables) / len(tables) for s in shared])


# The pictures


def interval_plot(rows: Sequence[Mapping[str, Any]], colours: Colours | None = None) -> str:
    """The contrasts of one point: each a bar (95 % interval), a line (mean) and one dot a seed; SVG text.

    rows: as ``outcome`` gives them. The effects and the null control share a scale, which the positive control would
    squeeze: it stands below on its own, and so do effects that are many times larger than the others, an optimizer's
    beside a variant's. The band is ± margin, the line is no difference.
    """
    colours = colours or Colours.of("", [row["treatment"] for row in rows])
    parts, top = [], 0.0
    for heading, chosen in interval_groups(rows):
        drawn, height = _interval_panel(heading, chosen, colours)
        parts.append(f'<g transform="translate(0 {top:g})">{drawn}</g>')
        top += height
    return svg("".join(parts), top, f"Paired differences of {_metric(rows)}: intervals and every seed")


Group = tuple[str, list[Mapping[str, Any]]]


def interval_groups(rows: Sequence[Mapping[str, Any]]) -> list[Group]:
    """Heading and rows of each panel: what is about one size, so that no interval is squeezed by another one."""
    null = [row for row in rows if row["kind"] == "null"]
    effects = [row for row in rows if row["kind"] == "effect"]
    explored = [row for row in effects if row.get("exploratory")]
    close, far = _by_size([row for row in effects if row not in explored])
    explored, further = _by_size(explored)
    beside = ", and the null control: what no effect looks like here" if null else ""
    groups: list[Group] = [
        (f"Effects{beside}", [*close, *null]),
        ("Larger effects; on their own scale", far),
        ("Exploratory: outside the declared family", explored),
        ("Exploratory, larger; on their own scale", further),
        ("At equal time", [row for row in rows if row["kind"] == "equal time"]),
        ("Positive control: known to hurt; on its own scale", [row for row in rows if row["kind"] == "positive"]),
    ]
    return [(heading, chosen) for heading, chosen in groups if chosen]


def _by_size(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Rows of about one size, and those that would squeeze them: where sizes, in order, jump tenfold."""
    sizes = {id(row): max((abs(value) for value in _extent(row)), default=0.0) for row in rows}
    ordered = sorted(size for size in sizes.values() if size)
    jump = next((after for before, after in itertools.pairwise(ordered) if after > 10 * before), math.inf)
    return [row for row in rows if sizes[id(row)] < jump], [row for row in rows if sizes[id(row)] >= jump]


def interval_svg(rows: Sequence[Mapping[str, Any]], colours: Colours | None = None) -> str:
    """``interval_plot`` as a file of its own, for papers: fixed colours on white, no variables."""
    style = re.sub(r"var\(--(\w+)\)", lambda match: LIGHT[match[1]], STYLE)
    head, body = interval_plot(rows, colours).split(">", 1)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}><style>{style}</style>{body}\n'


def _interval_panel(heading: str, rows: Sequence[Mapping[str, Any]], colours: Colours) -> tuple[str, float]:
    spread = [value for row in rows for value in _extent(row)]
    margin = max((row["margin"] for row in rows if "margin" in row), default=0.0)
    widest = max((abs(value) for value in spread), default=0.0)
    reach = min(margin, 3 * widest) if widest else margin
    x = Scale.around([0.0, *spread, -reach, reach], MARGIN + 6, WIDTH - MARGIN - 6)
    parts: list[str] = []
    y = head = 48.0
    for row in rows:
        drawn, height = _interval_row(row, x, y, colours[row["treatment"]])
        parts.append(of_arm(row["treatment"], drawn))
        y += height
    left, right = (max(x(-margin), MARGIN), min(x(margin), WIDTH - MARGIN)) if margin else (0, 0)
    under = [
        text(MARGIN, 16, heading, "strong"),
        f'<rect class="panel" x="{MARGIN}" y="{head - 8:g}" width="{WIDTH - 2 * MARGIN}" height="{y - head + 8:g}"/>',
    ]
    if margin:
        under.append(
            f'<rect class="band" x="{left:.1f}" y="{head - 8:g}" width="{right - left:.1f}" height="{y - head + 8:g}">'
            f"<title>{escape(f'margin: ± {plain_number(margin, 2)} {_metric(rows, short=True)}')}</title></rect>"
        )
    for tick in x.ticks():
        under.append(line(x(tick), head - 8, x(tick), y, "zero" if tick == 0 else "grid"))
        under.append(text(x(tick), y + 15, x.label(tick), "small", "middle"))
    fewer, more = ("fewer bits", "more bits") if _metric(rows, short=True) == "bpb" else ("lower", "higher")
    left_word, right_word = ("better", "worse") if rows[0].get("lower_is_better", True) else ("worse", "better")
    under.append(text(MARGIN, 34, f"← {fewer}: {left_word}", "small"))
    under.append(text(WIDTH - MARGIN, 34, f"{right_word}: {more} →", "small", "end"))
    band = f"; shaded: ± margin, {plain_number(margin, 2)}" if margin else ""
    under.append(text(WIDTH / 2, y + 32, f"Δ {_metric(rows)}, treatment − baseline{band}", "small", "middle"))
    return "".join(under + parts), y + 52


def _metric(rows: Sequence[Mapping[str, Any]], short: bool = False) -> str:
    """What the rows compare, which is the same for all of an experiment; by default our own engine's bits per byte."""
    name = rows[0].get("metric", "bpb") if rows else "bpb"
    return "bits per byte" if name == "bpb" and not short else name


def _extent(row: Mapping[str, Any]) -> list[float]:
    estimate = row.get("estimate") or {}
    found = [*row.get("differences", ()), *(estimate.get(key) for key in ("mean", "low", "high"))]
    return [value for value in found if value is not None and math.isfinite(value)]


def _interval_row(row: Mapping[str, Any], x: Scale, y: float, colour: str) -> tuple[str, float]:
    estimate, differences = row.get("estimate") or {}, row.get("differences", [])
    lane = min(7.0, 56 / max(len(differences), 1))
    height = max(20.0, lane * (len(differences) + 1))
    verdict = row.get("verdict", {}).get("text", "")
    name = {"null": "null control", "positive": "positive control"}.get(row["kind"])
    if name and "@" in row["treatment"]:
        name = f"{name} of {row['baseline']}"
    label = f"{name}: {details(row)}" if name else f"{row['label']} − {row['baseline']}"
    if len(label) > 70:
        label = f"{row['treatment']} − {row['baseline']}"
    parts = [text(MARGIN + 8, y + 9, shorten(label, 70), "tag")]
    parts.append(text(WIDTH - MARGIN - 8, y + 9, verdict if row["kind"] != "null" else "", "small", "end"))
    y += 18
    if estimate.get("low") is not None:
        low, high = x(estimate["low"]), x(estimate["high"])
        ends = f"{plain_number(estimate['low'])} to {plain_number(estimate['high'])}"
        tip = f"{100 * estimate['confidence']:.0f} % interval: {ends}"
        parts.append(
            f'<rect class="bar f-{colour}" x="{low:.1f}" y="{y:.1f}" width="{max(high - low, 1):.1f}" '
            f'height="{height:.1f}" rx="3">{title(tip)}</rect>'
        )
    if estimate:
        at = x(estimate["mean"])
        parts.append(line(at, y, at, y + height, f"mean s-{colour}", f"mean: {plain_number(estimate['mean'])}"))
    else:
        parts.append(
            text(WIDTH / 2, y + 14, "no finished pair yet" if not verdict else "no finished pair", "small", "middle")
        )
    first = y + (height - lane * (len(differences) - 1)) / 2
    for i, (seed, value) in enumerate(zip(row["seeds"], differences, strict=True)):
        tip = f"seed {seed}: {plain_number(value)} {_metric([row], short=True)}"
        parts.append(dot(x(value), first + lane * i, colour, tip))
    return "".join(parts), height + 34


def details(row: Mapping[str, Any]) -> str:
    """What the label of a contrast adds to the arm's name: "all layers" of "xsa (all layers)"."""
    return row["label"].removeprefix(f"{row['treatment']} (").removesuffix(")")


def dose_plot(row: Mapping[str, Any]) -> str:
    """Δ by dose: the fitted curve with its band, each dose's mean with its interval, one dot a seed; SVG text.

    row: of ``outcome``'s "doses". The bar at the bottom is where the curve's minimum can lie.
    """
    doses, points, curve = row["doses"], row["points"], row["curve"]
    word = "α" if row["factor"] == "alpha" else row["factor"]
    others = [index for index, dose in enumerate(doses) if dose != row["reference"]]
    seeds = dict(zip(others, row["seed_values"], strict=True))
    bounds = [
        value for values in (curve["low"], curve["high"], curve["delta"]) for value in values if value is not None
    ]
    bounds += [point[end] for point in points for end in ("low", "high") if point[end] is not None]
    bounds += [value for values in seeds.values() for value in values]
    left, right, top, bottom = MARGIN + 64, WIDTH - MARGIN, 30.0, 330.0
    x, y = Scale.around(doses, left, right), Scale.around([0.0, *bounds], bottom, top)
    parts = [f'<rect class="panel" x="{left:g}" y="{top:g}" width="{right - left:g}" height="{bottom - top:g}"/>']
    for tick in y.ticks():
        parts.append(line(left, y(tick), right, y(tick), "zero" if tick == 0 else "grid"))
        parts.append(text(left - 8, y(tick) + 4, y.label(tick), "small", "end"))
    parts += [text(x(dose), bottom + 16, plain_number(dose), "small", "middle") for dose in doses]
    at = [x(dose) for dose in curve["doses"]]
    if None not in curve["low"]:
        edge = [(px, y(high)) for px, high in zip(at, curve["high"], strict=True)]
        edge += reversed([(px, y(low)) for px, low in zip(at, curve["low"], strict=True)])
        outline = " ".join(f"{px:.1f},{py:.1f}" for px, py in edge)
        tip = "95 % band of the curve, dose by dose"
        parts.append(f'<polygon class="bar f-c0" points="{outline}"><title>{tip}</title></polygon>')
    fitted = " ".join(f"{px:.1f},{y(delta):.1f}" for px, delta in zip(at, curve["delta"], strict=True))
    parts.append(f'<polyline class="thick s-c0" points="{fitted}" fill="none"/>')
    for index, (dose, point) in enumerate(zip(doses, points, strict=True)):
        if point["low"] is not None and index in seeds:
            tip = f"{word} = {plain_number(dose)}: {plain_number(point['low'])} to {plain_number(point['high'])}"
            parts.append(line(x(dose), y(point["low"]), x(dose), y(point["high"]), "mean s-c1", tip))
        for seed, value in zip(row["seeds"], seeds.get(index, ()), strict=False):
            tip = f"{word} = {plain_number(dose)}, seed {seed}: {plain_number(value)} bpb"
            parts.append(dot(x(dose) + 9, y(value), "c1", tip, 3.5))
    for low, high in row["minimum"]["within"]:
        wide = max(x(high) - x(low), 8)  # a single dose is to be seen as well
        parts.append(
            f'<rect class="bar f-c2" x="{(x(low) + x(high) - wide) / 2:.1f}" y="{bottom + 24:g}" width="{wide:.1f}" '
            f'height="7" rx="3">{title(row["minimum"]["words"])}</rect>'
        )
    parts.append(text(left, 18, f"Δ bits per byte against {word} = {plain_number(row['reference'])}", "strong"))
    caption = f"{word}; green: where the lowest point can lie (95 %)"
    parts.append(text((left + right) / 2, bottom + 50, caption, "small", "middle"))
    return svg("".join(parts), bottom + 60, f"Dose and response: difference of bits per byte by {word}")


# Curves. Paths are in the units of the data: page.js reads exact values from them, and zooms by a matrix.


@dataclass(frozen=True)
class Line:
    """One line of a chart, or the outline of a band where ``upper`` is there.

    style: its classes. tip: what its tooltip says before the value. name: what a table calls it.
    """

    arm: str
    steps: Sequence[float]
    values: Sequence[float]
    style: str
    tip: str
    upper: Sequence[float] = ()
    name: str = ""


def curve_plot(
    curves: Sequence[Curve], beta: float, colours: Colours, name: str = "training loss, nats per token"
) -> str:
    """Training loss by step: one thin line a run, one colour an arm, all smoothed with the same β; SVG text."""
    drawn = [smoothed(curve, beta) for curve in curves if curve.values]
    lines = [
        _drawn(curve, f"thin {colours.stroke(curve.arm)}", f"{curve.arm}, seed {curve.seed}")
        for curve in sorted(drawn, key=lambda curve: curve.arm.partition("@")[0] not in ("null", "positive"))
    ]
    return line_chart(lines, name, _smoothing(beta))


def difference_plot(
    effect: Sequence[Curve],
    null: Sequence[Curve],
    beta: float,
    colours: Colours,
    name: str = "training loss, nats per token",
) -> str:
    """Paired differences of smoothed losses by step (see ``difference``): seeds thin, their mean thick; SVG text.

    effect: one curve a pair of the treatment. null: those of the null control, in grey behind.
    """
    lines: list[Line] = []
    for curves, called in ((null, "null control"), (effect, "")):
        curves = [curve for curve in curves if curve.values]
        if not curves:
            continue
        arm, style = curves[0].arm, f"s-{colours[curves[0].arm]}"
        lines += [_drawn(curve, f"thin {style}", f"{called or arm}, seed {curve.seed}") for curve in curves]
        mean = mean_curve(curves)
        tip = f"{called or arm}: mean of {len(curves)} pair{'s' * (len(curves) > 1)}"
        lines.append(_drawn(Curve(arm, -1, mean.steps, mean.values), f"thick {style}", tip))
    return line_chart(lines, f"Δ {name}: below 0 is better", _smoothing(beta), zero=True)


def band_lines(
    arm: str,
    steps: Sequence[float],
    seeds: Sequence[int],
    values: Sequence[Sequence[float | None]],
    colours: Colours,
    name: str = "",
) -> list[Line]:
    """The range over seeds as a band, and their mean as a line; values: a row a seed, one value a step.

    A step at which a seed has no value is left out of both, and a band of one seed is none. name: where the arm's does
    not say which of several lines of an arm it is.
    """
    whole = [
        (step, [v for v in column if v is not None])
        for step, column in zip(steps, zip(*values, strict=True), strict=True)
    ]
    whole = [(step, column) for step, column in whole if len(column) == len(seeds) and column]
    if not whole:
        return []
    name = name or arm
    at = [step for step, _ in whole]
    count = f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"
    mean = [math.fsum(column) / len(column) for _, column in whole]
    middle = Line(arm, at, mean, f"thick {colours.stroke(arm)}", f"{name}: mean of {count}", name=name)
    if len(seeds) < 2:
        return [middle]
    low, high = [min(column) for _, column in whole], [max(column) for _, column in whole]
    return [Line(arm, at, low, f"bar f-{colours[arm]}", f"{name}: range over {count}", high, name), middle]


def _smoothing(beta: float) -> str:
    return f"exponential average, bias-corrected, β = {beta:g} for all curves" if beta else "not smoothed (β = 0)"


def _drawn(curve: Curve, style: str, tip: str) -> Line:
    """At most about POINTS of the curve's points, the last one among them."""
    every = -(-len(curve.steps) // POINTS) or 1
    keep = sorted({*range(0, len(curve.steps), every), len(curve.steps) - 1} & {*range(len(curve.steps))})
    return Line(curve.arm, [curve.steps[i] for i in keep], [curve.values[i] for i in keep], style, tip)


def line_chart(
    lines: Sequence[Line],
    name: str,
    note: str = "",
    *,
    zero: bool = False,
    settled: float = SETTLED,
    width: float = WIDTH,
    height: float = 270,
    word: str = "step",
    names: Sequence[tuple[float, str]] = (),
    label: str = "",
) -> str:
    """Lines and bands over steps, or over ``word``; SVG text.

    zero: the chart holds zero and marks it. settled: the share of the steps that does not decide the vertical range.
    names: (place, name) of the marks of the horizontal axis where they are no round numbers; such a chart does not
    zoom. label: what the picture shows, for those who cannot see it.
    """
    label = label or name
    lines = [entry for entry in lines if entry.steps]
    if not lines:
        return svg(
            text(MARGIN, 22, "No losses recorded yet." if word == "step" else "Nothing recorded.", "small"),
            36,
            label,
            width,
        )
    first, last = min(entry.steps[0] for entry in lines), max(entry.steps[-1] for entry in lines)
    everything = [(s, v) for entry in lines for s, v in zip(entry.steps, entry.values, strict=True)]
    everything += [(s, v) for entry in lines for s, v in zip(entry.steps, entry.upper, strict=False)]
    # A loss that explodes, and is finite still, does not squeeze the others into a line.
    most = (50 * statistics.median_low([abs(v) for _, v in everything]) if settled else 0) or math.inf
    shown = [v for s, v in everything if s >= settled * last and abs(v) <= most]
    shown = shown or [v for _, v in everything if abs(v) <= most]
    under = bool(note) and 6.6 * (len(name) + len(note)) > width - 2 * MARGIN  # does the note need a line of its own?
    titles = textwrap.wrap(name, max(20, int((width - 2 * MARGIN) / 7.2)))
    head = 12.0 + 18 * (len(titles) + under)
    left, right, bottom = MARGIN + 50.0, width - MARGIN, head + height
    y = Scale.around([*shown, *([0.0] if zero else [])], bottom, head)
    x = Scale(first if names else 0, max(last, first + 1e-9 if names else 1), left, right)
    parts = [text(MARGIN, 18 * row, words, "strong") for row, words in enumerate(titles, 1)]
    place, anchor = (MARGIN, "start") if under else (width - MARGIN, "end")
    parts.append(text(place, 18 * (len(titles) + under), note, "small", anchor))
    parts.append(f'<rect class="panel" x="{left:g}" y="{head:g}" width="{right - left:g}" height="{height:g}"/>')
    parts.append(f'<g class="axes">{_axes(x, y, names)}</g>')
    parts.append(text((left + right) / 2, bottom + 32, word, "small", "middle"))
    # A nested svg clips what leaves the frame, without an id that could clash with another picture's.
    across, up = (right - left) / (x.high - x.low), -height / (y.high - y.low)
    zoom = "" if names else ' data-zoom=""'
    told = f' data-names="{escape("|".join(f"{place:g}={called}" for place, called in names))}"' if names else ""
    parts.append(
        f'<svg class="plot" x="{left:g}" y="{head:g}" width="{right - left:g}" height="{height:g}" overflow="hidden" '
        f'data-range="{x.low:.8g} {x.high:.8g} {y.low:.8g} {y.high:.8g}" data-word="{escape(word)}"{zoom}{told}>'
        f'<g transform="matrix({across:.8g} 0 0 {up:.8g} {-x.low * across:.8g} {height - y.low * up:.8g})">'
    )
    parts += [_path(entry, y) for entry in lines]
    parts.append("</g></svg>")
    return svg("".join(parts), bottom + 42, label, width)


def _axes(x: Scale, y: Scale, names: Sequence[tuple[float, str]]) -> str:
    """Grid lines and numbers; page.js draws them again when the chart is zoomed."""
    parts: list[str] = []
    for tick in y.ticks():
        parts.append(line(x.start, y(tick), x.end, y(tick), "zero" if tick == 0 else "grid"))
        parts.append(text(x.start - 7, y(tick) + 4, y.label(tick), "small", "end"))
    free = x.end + MARGIN
    for place, called in reversed(names or [(tick, x.label(tick)) for tick in x.ticks()]):
        half = 3.4 * len(called)
        at = min(x(place), x.end + MARGIN - half)
        if at + half <= free:  # a name that would touch the one after it is left out
            parts.append(text(at, y.start + 16, called, "small", "middle"))
            free = at - half - 6
    return "".join(parts)


def _path(entry: Line, y: Scale) -> str:
    """In units of the data. What is far outside the frame is clamped: no browser draws 1e300."""
    reach = 50 * (y.high - y.low)

    def places(steps: Sequence[float], values: Sequence[float]) -> list[str]:
        kept = (max(y.low - reach, min(y.high + reach, value)) for value in values)
        return [f"{step:g} {value:.5g}" for step, value in zip(steps, kept, strict=True)]

    d = "M" + "L".join(places(entry.steps, entry.values))
    if entry.upper:
        d += "L" + "L".join(reversed(places(entry.steps, entry.upper))) + "Z"
    return f'<path class="{entry.style}" data-arm="{escape(entry.arm)}" d="{d}">{title(entry.tip)}</path>'


def rates_plot(series: Sequence[Mapping[str, Any]], rates: Sequence[float], factor: str, name: str, label: str) -> str:
    """The metric by rate on a log axis: a line of means, a dot a seed, a ring at the best, a cross where runs diverged.

    series: {"name", "arms" (one a rate), "colour", "means", "best", "seeds": [[(seed, value), ...] a rate],
    "diverged": [count a rate]}. What is worse than half as much again as the best is drawn at the upper edge.
    """
    values = [value for entry in series for cell in entry["seeds"] for _, value in cell]
    if not values:
        return svg(text(MARGIN, 22, "No run is finished yet.", "small"), 36, label)
    most = min(max(values), min(values) + 0.5 * abs(min(values)))
    left, right, top, bottom = MARGIN + 58.0, WIDTH - MARGIN - 12.0, 44.0, 320.0
    y = Scale.around([min(values), most], bottom, top + 18)
    x = Scale.around([math.log(rate) for rate in rates], left, right)
    parts = [text(MARGIN, 18, name, "strong")]
    parts.append(f'<rect class="panel" x="{left:g}" y="{top:g}" width="{right - left:g}" height="{bottom - top:g}"/>')
    for tick in y.ticks():
        parts.append(line(left, y(tick), right, y(tick), "grid"))
        parts.append(text(left - 8, y(tick) + 4, y.label(tick), "small", "end"))
    parts += [text(x(math.log(rate)), bottom + 16, f"{rate:g}", "small", "middle") for rate in rates]
    parts.append(text((left + right) / 2, bottom + 34, f"{factor}, logarithmic", "small", "middle"))
    for number, entry in enumerate(series):
        shift = 9.0 * (number - (len(series) - 1) / 2)
        at = [x(math.log(rate)) + shift for rate in rates]
        places = [(px, y(min(m, most))) for px, m in zip(at, entry["means"], strict=True) if m is not None]
        marks: list[str] = []
        if len(places) > 1:
            path = "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
            marks.append(f'<path class="thick {entry["stroke"]}" d="M{path}">{title(entry["name"] + ": means")}</path>')
        columns = zip(at, rates, entry["means"], entry["seeds"], entry["diverged"], strict=True)
        for px, rate, mean, cell, lost in columns:
            where = f"{entry['name']}, {factor} {rate:g}"
            for seed, value in cell:
                tip = f"{where}, seed {seed}: {plain_number(value, 5)}{' (beyond the edge)' * (value > most)}"
                marks.append(dot(px, y(min(value, most)), entry["colour"], tip, 3.5))
            if lost:
                cross = f"M{px - 5:.1f} {top + 5:.1f}l10 10m0 -10l-10 10"
                tip = title(f"{where}: {lost} run{'s' * (lost > 1)} diverged")
                marks.append(f'<path class="thick s-{entry["colour"]}" d="{cross}">{tip}</path>')
            if rate == entry["best"] and mean is not None:
                tip = title(f"{entry['name']}: best at {factor} {rate:g}, mean {plain_number(mean, 5)}")
                marks.append(f'<circle class="ring" cx="{px:.1f}" cy="{y(min(mean, most)):.1f}" r="9">{tip}</circle>')
        parts.append(of_arm(entry["name"], "".join(marks)))
    return svg("".join(parts), bottom + 44, label)
