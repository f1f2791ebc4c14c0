"""What every picture of a report is made of: colours, scales, pieces of SVG, numbers as text.

Colours are CSS variables, so that one picture serves light and dark pages. The palette (Okabe and Ito's, a little
darker on white and lighter on black, and two more) can be told apart by the colour-blind; the null control is grey
and the positive control is grey and dashed, everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape as html_escape

LIGHT = {
    "ink": "#1f2933", "muted": "#556270", "line": "#d9dfe6", "page": "#ffffff", "panel": "#f6f8fa", "band": "#e3ecf4",
    "c0": "#0067a5", "c1": "#b8470f", "c2": "#007a59", "c3": "#a8478a", "c4": "#8a6000", "c5": "#3d8fc4",
    "c6": "#5b3fa0", "c7": "#8c1c4b", "grey": "#7d8894",
}  # fmt: skip
DARK = {
    "ink": "#e4e9ee", "muted": "#9aa7b4", "line": "#343d47", "page": "#14181d", "panel": "#1b2127", "band": "#233140",
    "c0": "#5db3ea", "c1": "#f0875a", "c2": "#3ecb9f", "c3": "#dd8fc4", "c4": "#e0b13f", "c5": "#9bd0f2",
    "c6": "#b09cf0", "c7": "#f7a1bf", "grey": "#8d99a5",
}  # fmt: skip
HUES = 8
DASHES = ("", "dash", "dot", "dashdot")
STYLE = (
    """
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
.fig .ring{fill:none;stroke:var(--ink);stroke-width:1.6}
.fig .thin{fill:none;stroke-width:1.3;stroke-opacity:.6}
.fig .thick{fill:none;stroke-width:2.6}
.fig .plot .bar{fill-opacity:.14}
.fig .plot path{vector-effect:non-scaling-stroke}
.fig .dash{stroke-dasharray:6 4}
.fig .dot-line{stroke-dasharray:1.5 3.5;stroke-linecap:round}
.fig .dashdot{stroke-dasharray:8 3.5 1.5 3.5}
.fig .cells text{font-size:9px;text-anchor:middle;fill:#000;pointer-events:none} .fig .cells .w{fill:#fff}
"""
    + "\n".join(
        f".fig .s-{name}{{stroke:var(--{name})}} .fig .f-{name}{{fill:var(--{name})}}"
        for name in (*(f"c{i}" for i in range(HUES)), "grey")
    )
    + """
.fig circle.dot:hover{r:6px}
.fig .thin:hover,.fig .thin.hot{stroke-width:3;stroke-opacity:1}
"""
)
WIDTH = 720  # user units; the picture scales with its box
MARGIN = 18


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
    """The colour class of each arm, the same in every picture of a report, and its dash."""

    by_arm: Mapping[str, str]
    dashes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, baseline: str, arms: Iterable[str], crossed: Mapping[str, Sequence[str]] | None = None) -> Colours:
        """The baseline is the first colour, the controls are grey, the others follow in order.

        Of crossed arms (arm -> its level of each factor) the first factor is the hue and the others are the dash:
        what is compared under two optimizers has one colour.
        """
        arms, crossed = list(arms), crossed or {}
        first = crossed.get(baseline)
        hues: dict[str, str] = {} if first is None else {first[0]: "c0"}
        others: dict[tuple[str, ...], str] = {} if first is None else {tuple(first[1:]): ""}
        colours, dashes = {baseline: "c0"}, {baseline: ""}
        controls: list[str] = []  # arms whose controls these are, in order
        count = 0
        for arm in arms:
            kind, _, of = arm.partition("@")
            if kind in ("null", "positive", "twin"):
                if of not in controls:
                    controls.append(of)
                colours[arm] = "grey"
                dashes[arm] = DASHES[(kind == "positive") + 2 * (controls.index(of) % 2)]
            elif arm in crossed and first is not None:
                level, rest = crossed[arm][0], tuple(crossed[arm][1:])
                colours[arm] = hues.setdefault(level, f"c{len(hues) % HUES}")
                dashes[arm] = others.setdefault(rest, DASHES[len(others) % len(DASHES)])
            elif arm != baseline:
                colours[arm] = f"c{1 + count % (HUES - 1)}"
                dashes[arm] = DASHES[count // (HUES - 1) % len(DASHES)]
                count += 1
        return cls(colours, dashes)

    def __getitem__(self, arm: str) -> str:
        return self.by_arm.get(arm, "c1")

    def stroke(self, arm: str) -> str:
        """The classes of a line of this arm."""
        dash = self.dashes.get(arm, "")
        return f"s-{self[arm]} {'dot-line' if dash == 'dot' else dash}".rstrip()


@dataclass(frozen=True)
class Scale:
    """A linear map from values to places."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float) -> Scale:
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


def svg(body: str, height: float, name: str, width: float = WIDTH) -> str:
    """The whole picture. ``name`` says to those who cannot see it what it shows."""
    return (
        f'<svg class="fig" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(name)}">{body}</svg>'
    )


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    if not words:
        return ""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, style: str, tip: str = "") -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}">{title(tip)}</line>'


def dot(x: float, y: float, style: str, tip: str, radius: float = 4) -> str:
    return f'<circle class="dot f-{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{title(tip)}</circle>'


def of_arm(arm: str, body: str) -> str:
    """Marks that the page's legends show and hide with the arm."""
    return f'<g data-arm="{escape(arm)}">{body}</g>'


def title(tip: str) -> str:
    return f"<title>{escape(tip)}</title>" if tip else ""


def shorten(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")  # XML has no way to write these


def escape(words: str) -> str:
    return html_escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", words), quote=True)
