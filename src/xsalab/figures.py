"""The pictures of a report: plain values in, SVG text out.

The SVG is our own, a few lines a picture, and no plotting library's: a page with plotly in it weighs 4.8 MB and needs
a script, this one a tenth of that and none. Every mark carries a ``<title>``, which browsers show as its tooltip.
Colours are CSS variables, so that one picture serves light and dark pages; ``interval_svg`` puts in the light ones.

The palette (Okabe and Ito's, a little darker on white and lighter on black) can be told apart by the colour-blind; the
null control is grey and the positive control is grey and dashed, everywhere.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

LIGHT = {
    "ink": "#1f2933", "muted": "#5d6b7a", "line": "#d9dfe6", "page": "#ffffff", "panel": "#f6f8fa", "band": "#e3ecf4",
    "c0": "#0067a5", "c1": "#c4501b", "c2": "#00805e", "c3": "#a8478a", "c4": "#9a6b00", "c5": "#3d8fc4",
    "grey": "#8a95a1",
}  # fmt: skip
DARK = {
    "ink": "#e4e9ee", "muted": "#9aa7b4", "line": "#343d47", "page": "#14181d", "panel": "#1b2127", "band": "#233140",
    "c0": "#5db3ea", "c1": "#f0875a", "c2": "#3ecb9f", "c3": "#dd8fc4", "c4": "#e0b13f", "c5": "#9bd0f2",
    "grey": "#7f8b97",
}  # fmt: skip
STYLE = """
.fig{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-size:12.5px}
.fig text{fill:var(--ink)}
.fig .small{fill:var(--muted);font-size:11.5px}
.fig .strong{font-weight:600}
.fig .tag{font-weight:600;paint-order:stroke;stroke:var(--panel);stroke-width:5px;stroke-linejoin:round}
.fig .panel{fill:var(--panel)}
.fig .band{fill:var(--band)}
.fig .grid{stroke:var(--line);stroke-width:1}
.fig .zero{stroke:var(--ink);stroke-width:1.2}
.fig .bar{stroke:none;fill-opacity:.2}
.fig .mean{stroke-width:2.4}
.fig .dot{stroke:var(--page);stroke-width:1}
.fig .thin{fill:none;stroke-width:1.1;stroke-opacity:.6}
.fig .thick{fill:none;stroke-width:2.6}
.fig .dash{stroke-dasharray:5 3}
.fig .s-c0{stroke:var(--c0)} .fig .f-c0{fill:var(--c0)}
.fig .s-c1{stroke:var(--c1)} .fig .f-c1{fill:var(--c1)}
.fig .s-c2{stroke:var(--c2)} .fig .f-c2{fill:var(--c2)}
.fig .s-c3{stroke:var(--c3)} .fig .f-c3{fill:var(--c3)}
.fig .s-c4{stroke:var(--c4)} .fig .f-c4{fill:var(--c4)}
.fig .s-c5{stroke:var(--c5)} .fig .f-c5{fill:var(--c5)}
.fig .s-grey{stroke:var(--grey)} .fig .f-grey{fill:var(--grey)}
.fig .dot:hover{r:6px}
.fig .thin:hover{stroke-width:3;stroke-opacity:1}
"""
WIDTH = 720  # user units; the picture scales with its box
MARGIN = 18
POINTS = 400  # drawn of a curve
SETTLED = 0.25  # share of the steps that does not decide the vertical range: losses fall fast at first


def plain_number(value: float, digits: int = 3) -> str:
    """``digits`` significant digits, a true minus sign, a power of ten only where it must be."""
    if value == 0:
        return "0"
    places = digits - 1 - int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:.{max(places, 0)}f}".replace("-", "−") if -3 <= places <= 9 else _power(value, digits)


def _power(value: float, digits: int) -> str:
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa}e{int(exponent)}".replace("-", "−")


@dataclass(frozen=True)
class Colours:
    """The colour class of each arm, the same in every picture of a report."""

    by_arm: Mapping[str, str]

    @classmethod
    def of(cls, baseline: str, arms: Iterable[str]) -> Colours:
        """The baseline is the first colour, the controls are grey, the others follow in order."""
        controls = [arm for arm in arms if arm.partition("@")[0] in ("null", "positive", "twin")]
        others = [arm for arm in arms if arm != baseline and arm not in controls]
        found = {arm: f"c{1 + i % 5}" for i, arm in enumerate(others)}
        return cls({baseline: "c0", **dict.fromkeys(controls, "grey"), **found})

    def __getitem__(self, arm: str) -> str:
        return self.by_arm.get(arm, "c1")


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
    effects = [row for row in rows if row["kind"] == "effect"]
    null = [row for row in rows if row["kind"] == "null"]
    close, far = _by_size(effects)
    beside = ", and the null control: what no effect looks like here" if null else ""
    for title, chosen in (
        (f"Effects{beside}", [*close, *null]),
        ("Larger effects; on their own scale", far),
        ("At equal time", [row for row in rows if row["kind"] == "equal time"]),
        ("Positive control: known to hurt; on its own scale", [row for row in rows if row["kind"] == "positive"]),
    ):
        if chosen:
            drawn, height = _interval_panel(title, chosen, colours)
            parts.append(f'<g transform="translate(0 {top:g})">{drawn}</g>')
            top += height
    return _svg("".join(parts), top, f"Paired differences of {_metric(rows)}: intervals and every seed")


def _by_size(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Rows of about one size, and those that would squeeze them: where sizes, in order, jump tenfold."""
    sizes = {id(row): max((abs(value) for value in _extent(row)), default=0.0) for row in rows}
    ordered = sorted(size for size in sizes.values() if size)
    jump = next((after for before, after in itertools.pairwise(ordered) if after > 10 * before), math.inf)
    return [row for row in rows if sizes[id(row)] < jump], [row for row in rows if sizes[id(row)] >= jump]


def interval_svg(rows: Sequence[Mapping[str, Any]], colours: Colours | None = None) -> str:
    """``interval_plot`` as a file of its own, for papers: fixed colours on white, no variables."""
    svg = interval_plot(rows, colours)
    style = re.sub(r"var\(--(\w+)\)", lambda match: LIGHT[match[1]], STYLE)
    head, body = svg.split(">", 1)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}><style>{style}</style>{body}\n'


def _interval_panel(title: str, rows: Sequence[Mapping[str, Any]], colours: Colours) -> tuple[str, float]:
    spread = [value for row in rows for value in _extent(row)]
    margin = max((row["margin"] for row in rows if "margin" in row), default=0.0)
    widest = max((abs(value) for value in spread), default=0.0)
    reach = min(margin, 3 * widest) if widest else margin
    x = _Scale.around([0.0, *spread, -reach, reach], MARGIN + 6, WIDTH - MARGIN - 6)
    parts: list[str] = []
    y = head = 48.0
    for row in rows:
        drawn, height = _interval_row(row, x, y, colours[row["treatment"]])
        parts.append(drawn)
        y += height
    left, right = (max(x(-margin), MARGIN), min(x(margin), WIDTH - MARGIN)) if margin else (0, 0)
    under = [
        _text(MARGIN, 16, title, "strong"),
        f'<rect class="panel" x="{MARGIN}" y="{head - 8:g}" width="{WIDTH - 2 * MARGIN}" height="{y - head + 8:g}"/>',
    ]
    if margin:
        under.append(
            f'<rect class="band" x="{left:.1f}" y="{head - 8:g}" width="{right - left:.1f}" height="{y - head + 8:g}">'
            f"<title>{_escape(f'margin: ± {plain_number(margin, 2)} {_metric(rows, short=True)}')}</title></rect>"
        )
    for tick in x.ticks():
        under.append(_line(x(tick), head - 8, x(tick), y, "zero" if tick == 0 else "grid"))
        under.append(_text(x(tick), y + 15, x.label(tick), "small", "middle"))
    fewer, more = ("fewer bits", "more bits") if _metric(rows, short=True) == "bpb" else ("lower", "higher")
    left_word, right_word = ("better", "worse") if rows[0].get("lower_is_better", True) else ("worse", "better")
    under.append(_text(MARGIN, 34, f"← {fewer}: {left_word}", "small"))
    under.append(_text(WIDTH - MARGIN, 34, f"{right_word}: {more} →", "small", "end"))
    band = f"; shaded: ± margin, {plain_number(margin, 2)}" if margin else ""
    under.append(_text(WIDTH / 2, y + 32, f"Δ {_metric(rows)}, treatment − baseline{band}", "small", "middle"))
    return "".join(under + parts), y + 52


def _metric(rows: Sequence[Mapping[str, Any]], short: bool = False) -> str:
    """What the rows compare, which is the same for all of an experiment; by default our own engine's bits per byte."""
    name = rows[0].get("metric", "bpb") if rows else "bpb"
    return "bits per byte" if name == "bpb" and not short else name


def _extent(row: Mapping[str, Any]) -> list[float]:
    estimate = row.get("estimate") or {}
    found = [*row.get("differences", ()), *(estimate.get(key) for key in ("mean", "low", "high"))]
    return [value for value in found if value is not None and math.isfinite(value)]


def _interval_row(row: Mapping[str, Any], x: _Scale, y: float, colour: str) -> tuple[str, float]:
    estimate, differences = row.get("estimate") or {}, row.get("differences", [])
    lane = min(7.0, 56 / max(len(differences), 1))
    height = max(20.0, lane * (len(differences) + 1))
    verdict = row.get("verdict", {}).get("text", "")
    name = {"null": "null control", "positive": "positive control"}.get(row["kind"])
    label = f"{name}: {details(row)}" if name else f"{row['label']} − {row['baseline']}"
    parts = [_text(MARGIN + 8, y + 9, _shorten(label, 70), "tag")]
    parts.append(_text(WIDTH - MARGIN - 8, y + 9, verdict if row["kind"] != "null" else "", "small", "end"))
    y += 18
    if estimate.get("low") is not None:
        low, high = x(estimate["low"]), x(estimate["high"])
        ends = f"{plain_number(estimate['low'])} to {plain_number(estimate['high'])}"
        tip = f"{100 * estimate['confidence']:.0f} % interval: {ends}"
        parts.append(
            f'<rect class="bar f-{colour}" x="{low:.1f}" y="{y:.1f}" width="{max(high - low, 1):.1f}" '
            f'height="{height:.1f}" rx="3"><title>{_escape(tip)}</title></rect>'
        )
    if estimate:
        at = x(estimate["mean"])
        parts.append(_line(at, y, at, y + height, f"mean s-{colour}", f"mean: {plain_number(estimate['mean'])}"))
    else:
        parts.append(
            _text(WIDTH / 2, y + 14, "no finished pair yet" if not verdict else "no finished pair", "small", "middle")
        )
    first = y + (height - lane * (len(differences) - 1)) / 2
    for i, (seed, value) in enumerate(zip(row["seeds"], differences, strict=True)):
        tip = f"seed {seed}: {plain_number(value)} {_metric([row], short=True)}"
        parts.append(
            f'<circle class="dot f-{colour}" cx="{x(value):.1f}" cy="{first + lane * i:.1f}" r="4">'
            f"<title>{_escape(tip)}</title></circle>"
        )
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
    x, y = _Scale.around(doses, left, right), _Scale.around([0.0, *bounds], bottom, top)
    parts = [f'<rect class="panel" x="{left:g}" y="{top:g}" width="{right - left:g}" height="{bottom - top:g}"/>']
    for tick in y.ticks():
        parts.append(_line(left, y(tick), right, y(tick), "zero" if tick == 0 else "grid"))
        parts.append(_text(left - 8, y(tick) + 4, y.label(tick), "small", "end"))
    parts += [_text(x(dose), bottom + 16, plain_number(dose), "small", "middle") for dose in doses]
    at = [x(dose) for dose in curve["doses"]]
    if None not in curve["low"]:
        edge = [(px, y(high)) for px, high in zip(at, curve["high"], strict=True)]
        edge += reversed([(px, y(low)) for px, low in zip(at, curve["low"], strict=True)])
        outline = " ".join(f"{px:.1f},{py:.1f}" for px, py in edge)
        tip = "95 % band of the curve, dose by dose"
        parts.append(f'<polygon class="bar f-c0" points="{outline}"><title>{tip}</title></polygon>')
    line = " ".join(f"{px:.1f},{y(delta):.1f}" for px, delta in zip(at, curve["delta"], strict=True))
    parts.append(f'<polyline class="thick s-c0" points="{line}" fill="none"/>')
    for index, (dose, point) in enumerate(zip(doses, points, strict=True)):
        if point["low"] is not None and index in seeds:
            tip = f"{word} = {plain_number(dose)}: {plain_number(point['low'])} to {plain_number(point['high'])}"
            parts.append(_line(x(dose), y(point["low"]), x(dose), y(point["high"]), "mean s-c1", tip))
        for seed, value in zip(row["seeds"], seeds.get(index, ()), strict=False):
            tip = f"{word} = {plain_number(dose)}, seed {seed}: {plain_number(value)} bpb"
            parts.append(
                f'<circle class="dot f-c1" cx="{x(dose) + 9:.1f}" cy="{y(value):.1f}" r="3.5">'
                f"<title>{_escape(tip)}</title></circle>"
            )
    for low, high in row["minimum"]["within"]:
        wide = max(x(high) - x(low), 8)  # a single dose is to be seen as well
        parts.append(
            f'<rect class="bar f-c2" x="{(x(low) + x(high) - wide) / 2:.1f}" y="{bottom + 24:g}" width="{wide:.1f}" '
            f'height="7" rx="3"><title>{_escape(row["minimum"]["words"])}</title></rect>'
        )
    parts.append(_text(left, 18, f"Δ bits per byte against {word} = {plain_number(row['reference'])}", "strong"))
    caption = f"{word}; green: where the lowest point can lie (95 %)"
    parts.append(_text((left + right) / 2, bottom + 50, caption, "small", "middle"))
    return _svg("".join(parts), bottom + 60, f"Dose and response: difference of bits per byte by {word}")


def curve_plot(
    curves: Sequence[Curve], beta: float, colours: Colours, title: str = "training loss, nats per token"
) -> str:
    """Training loss by step: one thin line a run, one colour an arm, all smoothed with the same β; SVG text."""
    drawn = [smoothed(curve, beta) for curve in curves if curve.values]
    lines = [
        (
            _thin(curve),
            f"thin s-{colours[curve.arm]}{' dash' if curve.arm == 'positive' else ''}",
            f"{curve.arm}, seed {curve.seed}",
        )
        for curve in sorted(drawn, key=lambda curve: curve.arm not in ("null", "positive"))
    ]
    legend = [
        (arm, f"s-{colours[arm]}{' dash' if arm == 'positive' else ''}") for arm in dict.fromkeys(c.arm for c in curves)
    ]
    return _line_chart(lines, legend, title, _smoothing(beta), zero=False)


def difference_plot(
    effect: Sequence[Curve],
    null: Sequence[Curve],
    beta: float,
    colours: Colours,
    title: str = "training loss, nats per token",
) -> str:
    """Paired differences of smoothed losses by step (see ``difference``): seeds thin, their mean thick; SVG text.

    effect: one curve a pair of the treatment. null: those of the null control, in grey behind.
    """
    lines, legend = [], []
    for curves, name in ((null, "null control"), (effect, "")):
        curves = [curve for curve in curves if curve.values]
        if not curves:
            continue
        arm, colour = curves[0].arm, colours[curves[0].arm]
        lines += [(_thin(curve), f"thin s-{colour}", f"{name or arm}, seed {curve.seed}") for curve in curves]
        mean = mean_curve(curves)
        lines.append(
            (_thin(mean), f"thick s-{colour}", f"{name or arm}: mean of {len(curves)} pair{'s' * (len(curves) > 1)}")
        )
        legend.insert(0, (f"{name or arm}: mean thick, seeds thin", f"s-{colour}"))
    return _line_chart(lines, legend, f"Δ {title}: below 0 is better", _smoothing(beta), zero=True)


def _smoothing(beta: float) -> str:
    return f"exponential average, bias-corrected, β = {beta:g} for all curves" if beta else "not smoothed (β = 0)"


def _thin(curve: Curve) -> Curve:
    """At most about POINTS of the points, the last one among them."""
    every = -(-len(curve.steps) // POINTS) or 1
    keep = sorted({*range(0, len(curve.steps), every), len(curve.steps) - 1})
    return Curve(curve.arm, curve.seed, [curve.steps[i] for i in keep], [curve.values[i] for i in keep])


def _line_chart(
    lines: Sequence[tuple[Curve, str, str]], legend: Sequence[tuple[str, str]], name: str, note: str, zero: bool
) -> str:
    lines = [line for line in lines if line[0].steps]
    if not lines:
        return _svg(_text(MARGIN, 22, "No losses recorded yet.", "small"), 36, name)
    last = max(curve.steps[-1] for curve, _, _ in lines)
    settled = [
        v for curve, _, _ in lines for s, v in zip(curve.steps, curve.values, strict=True) if s >= SETTLED * last
    ]
    settled = settled or [v for curve, _, _ in lines for v in curve.values]
    head, drawn_legend = _legend(legend)
    left, right, bottom = MARGIN + 50.0, WIDTH - MARGIN + 0.0, head + 270
    y = _Scale.around([*settled, *([0.0] if zero else [])], bottom, head)
    x = _Scale(0, max(last, 1), left, right)
    parts = [
        drawn_legend,
        _text(MARGIN, head - 10, name, "small"),
        _text(WIDTH - MARGIN, head - 10, note, "small", "end"),
    ]
    parts.append(f'<rect class="panel" x="{left:g}" y="{head:g}" width="{right - left:g}" height="{bottom - head:g}"/>')
    for tick in y.ticks():
        parts.append(_line(left, y(tick), right, y(tick), "zero" if zero and tick == 0 else "grid"))
        parts.append(_text(left - 7, y(tick) + 4, y.label(tick), "small", "end"))
    for tick in x.ticks():
        parts.append(_text(x(tick), bottom + 16, x.label(tick), "small", "middle"))
    parts.append(_text((left + right) / 2, bottom + 32, "step", "small", "middle"))
    # A nested svg clips what leaves the frame, without an id that could clash with another picture's.
    parts.append(
        f'<svg x="{left:g}" y="{head:g}" width="{right - left:g}" height="{bottom - head:g}" overflow="hidden">'
    )
    for curve, style, tip in lines:
        path = " ".join(
            f"{'M' if i == 0 else 'L'}{x(s) - left:.1f} {_clamp(y(v) - head):.1f}"
            for i, (s, v) in enumerate(zip(curve.steps, curve.values, strict=True))
        )
        parts.append(f'<path class="{style}" d="{path}"><title>{_escape(tip)}</title></path>')
    parts.append("</svg>")
    return _svg("".join(parts), bottom + 42, name)


def _clamp(value: float) -> float:
    """Far outside the frame is outside: a diverging loss must not become a number that no browser reads."""
    return max(-5000.0, min(5000.0, value))


def _legend(entries: Sequence[tuple[str, str]]) -> tuple[float, str]:
    """Where the frame begins, and the entries, broken into lines where they do not fit."""
    x, y, parts = float(MARGIN), 14.0, []
    for label, style in entries:
        label = _shorten(label, 60)
        width = 36 + 7.0 * len(label)
        if x > MARGIN and x + width > WIDTH - MARGIN:
            x, y = MARGIN, y + 20
        parts.append(_line(x, y - 4, x + 22, y - 4, f"thick {style}"))
        parts.append(_text(x + 28, y, label))
        x += width + 10
    return y + 32, "".join(parts)


# Drawing


@dataclass(frozen=True)
class _Scale:
    """A linear map from values to places."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float) -> _Scale:
        """Holds all values and a little room at both ends."""
        low, high = min(values), max(values)
        room = 0.06 * (high - low) or abs(high) * 0.1 or 1e-3
        return cls(low - room, high + room, start, end)

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def step(self) -> float:
        rough = (self.high - self.low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)

    def ticks(self) -> list[float]:
        """Round values, 0 being exactly 0."""
        first, last = math.ceil(self.low / self.step), math.floor(self.high / self.step)
        return [i * self.step for i in range(first, last + 1)]

    def label(self, value: float) -> str:
        places = max(0, -math.floor(math.log10(self.step) + 1e-9))
        return f"{value:,.{places}f}".replace("-", "−") if value else "0"


def _svg(body: str, height: float, name: str) -> str:
    return (
        f'<svg class="fig" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{_escape(name)}">{body}</svg>'
    )


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escape(text)}</text>' if text else ""
    )


def _line(x1: float, y1: float, x2: float, y2: float, style: str, tip: str = "") -> str:
    title = f"<title>{_escape(tip)}</title>" if tip else ""
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}">{title}</line>'


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")  # XML has no way to write these


def _escape(text: str) -> str:
    return escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text), quote=True)
