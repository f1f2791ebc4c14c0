"""The pictures for a paper: what ``outcome`` says, drawn by matplotlib as SVG, one file a figure.

Text stays text, fonts are 8 points at the width of a page or a column, and the same content gives the same bytes: no
date, fixed ids. Colours are those of the page (figures.py), and line styles tell apart what shares one. matplotlib is
the optional extra ``xsalab[paper]``; it is imported where it draws, through its objects, without pyplot's state.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import figures
from .drawing import LIGHT, Colours, plain_number
from .files import make_folder, write_atomic

Row = Mapping[str, Any]
MAPS = (  # drawn: a map of each measure and point would fill a paper
    "cos_before", "removed", "self_over_uniform", "first_weight", "reach", "alpha", "alpha_gradient",
)  # fmt: skip
PAGE, COLUMN = 7.0, 3.4  # inches
MOST = 6  # panels side by side
STYLE: Any = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7, "axes.linewidth": 0.6, "lines.linewidth": 1.2, "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": LIGHT["muted"], "legend.frameon": False,
    "svg.fonttype": "none", "svg.hashsalt": "xsalab", "text.parse_math": False, "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"], "savefig.facecolor": "white",
}  # fmt: skip
DASHES = {"": "-", "dash": "--", "dot": ":"}


@dataclass(frozen=True)
class Picture:
    """``svg``: a whole file. ``name``: its name without ending. ``alt``: what it shows, in words."""

    name: str
    section: str
    alt: str
    svg: bytes


def write_figures(folder: Path, pictures: Sequence[Picture]) -> list[Path]:
    """Writes one NAME.svg a picture, each whole or not at all. ValueError where the folder cannot be written."""
    paths = [folder / f"{picture.name}.svg" for picture in pictures]
    try:
        make_folder(folder)
        for path, picture in zip(paths, pictures, strict=True):
            write_atomic(path, picture.svg)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"--figures {folder}: cannot write there ({error.strerror}); choose another folder") from None
    return paths


def paper_figures(content: Row, curves: Mapping[tuple[str, str], Sequence[figures.Curve]]) -> list[Picture]:
    """All pictures that the content has data for, in the order of the report.

    content: as ``outcome`` gives it; curves: (point, arm) -> training losses, as ``report.losses`` gives them.
    ValueError naming the extra where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--figures: matplotlib draws them; install it with: pip install 'xsalab[paper]'") from None
    pen = Pen(content, Colours.of(content["baseline"], content["arms"], content["crossed"]))
    with matplotlib.rc_context(STYLE):
        found = [picture for point in content["points"] for picture in _of_point(pen, point, curves)]
        found += _stability(pen)
        found += [picture for rates in content.get("rates", ()) for picture in _rates(pen, rates)]
    order = ("intervals", "curves", "mechanism", "stability", "rates")
    return sorted(found, key=lambda picture: order.index(picture.section))


@dataclass(frozen=True)
class Pen:
    """The content, and each arm's colour and line."""

    content: Row
    colours: Colours

    def colour(self, arm: str) -> str:
        return LIGHT[self.colours[arm]]

    def line(self, arm: str) -> dict[str, Any]:
        """A control lies behind the arms."""
        dash = DASHES.get(self.colours.dashes.get(arm, ""), "-.")
        return {"color": self.colour(arm), "linestyle": dash, "zorder": 1.5 if _is_control(arm) else 2.5}

    def where(self, point: str) -> str:
        return f" at {point}" if len(self.content["points"]) > 1 else ""

    def name(self, point: str, *parts: str) -> str:
        """A file's name."""
        words = [*parts, *([point] if len(self.content["points"]) > 1 else [])]
        return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words)).strip("-.")


def _is_control(arm: str) -> bool:
    return arm.partition("@")[0] in ("null", "positive", "twin")


def _clean(text: str) -> str:
    """XML has no way to write most control characters."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\N{REPLACEMENT CHARACTER}", str(text))


def _of_point(pen: Pen, point: str, curves: Mapping[tuple[str, str], Sequence[figures.Curve]]) -> Iterable[Picture]:
    rows = [row for row in pen.content["contrasts"] if row["point"] == point]
    yield from _intervals(pen, point, rows)
    yield from _losses(pen, point, rows, curves)
    for found in pen.content.get("mechanism", ()):
        if found["point"] == point:
            yield from _heat_maps(pen, found)
            yield from _profiles(pen, found)
            yield from _over_training(pen, found)
            yield from _geometry(pen, found)


def _sheet(count: int, across: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure of ``count`` panels, ``across`` a line; width of the whole and height of one line in inches."""
    from matplotlib.figure import Figure

    across = max(1, min(across, count))
    lines = math.ceil(count / across)
    figure = Figure(figsize=(width, height * lines), layout="constrained")
    axes = figure.subplots(lines, across, squeeze=False)
    flat = [axis for line in axes for axis in line]
    for axis in flat[count:]:
        axis.set_axis_off()
    return figure, flat[:count]


def _picture(figure: Any, name: str, section: str, alt: str) -> Picture:
    buffer = io.BytesIO()
    metadata = {"Date": None, "Creator": None, "Title": _clean(alt)}
    figure.savefig(buffer, format="svg", metadata=metadata)
    svg = buffer.getvalue().decode("utf-8")
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)  # hundredths of a point do
    svg = "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"
    return Picture(name, section, alt, svg.encode("utf-8"))


def _table(values: Sequence[Sequence[float | None]]) -> Any:
    """Rows of numbers as a masked array: what is not there is masked."""
    return np.ma.masked_invalid(np.array([[np.nan if v is None else float(v) for v in row] for row in values]))


def _band(axis: Any, steps: Sequence[float], values: Sequence[Sequence[float | None]], label: str, line: Row) -> None:
    """Mean over seeds, and a band from the lowest seed to the highest."""
    table = _table(values)
    if table.count() == 0:
        return
    mean = table.mean(axis=0)
    alone = len(steps) == 1
    axis.plot(steps, mean, label=_clean(label), marker="o" if alone else None, markersize=3, **line)
    if len(values) > 1:
        low, high = table.min(axis=0), table.max(axis=0)
        axis.fill_between(steps, low, high, color=line["color"], alpha=0.15, linewidth=0)


# Quality


def _intervals(pen: Pen, point: str, rows: Sequence[Row]) -> Iterable[Picture]:
    """The panels of the page: what shares a scale."""
    told = [row for row in rows if "estimate" in row]
    groups = [group for _, group in figures.interval_groups(told)]
    if not groups:
        return
    from matplotlib.figure import Figure

    counts = [len(group) for group in groups]
    figure = Figure(figsize=(PAGE, 0.33 * sum(counts) + 0.75 * len(groups)), layout="constrained")
    axes = figure.subplots(len(groups), 1, squeeze=False, gridspec_kw={"height_ratios": [n + 0.6 for n in counts]})
    for axis, group in zip(axes[:, 0], groups, strict=True):
        margin = max((row.get("margin") or 0.0 for row in group), default=0.0)
        widest = max(abs(value) for row in group for value in _extent(row))
        if margin and margin <= 3 * widest:
            axis.axvspan(-margin, margin, color=LIGHT["band"], linewidth=0, zorder=0)
        axis.axvline(0, color=LIGHT["ink"], linewidth=0.8, zorder=1)
        for place, row in enumerate(group):
            _interval(axis, place, row, pen.colour(row["treatment"]))
        axis.set_yticks(range(len(group)), [_clean(f"{row['treatment']} − {row['baseline']}") for row in group])
        axis.set_ylim(len(group) - 0.5, -0.5)
        axis.tick_params(axis="y", length=0)
        axis.locator_params(axis="x", nbins=6)
    confidence = f"{100 * pen.content['confidence']:.3g} %"
    side = "below" if pen.content["lower_is_better"] else "above"
    axes[-1, 0].set_xlabel(
        _clean(f"Δ {pen.content['metric']}, treatment − baseline ({side} 0 is better; bar: {confidence} interval)")
    )
    names = ", ".join(f"{row['treatment']} − {row['baseline']}" for group in groups for row in group)
    alt = f"Paired differences of {pen.content['metric']}{pen.where(point)}, every seed a dot, bars are intervals: "
    yield _picture(figure, pen.name(point, "intervals"), "intervals", alt + names)


def _extent(row: Row) -> list[float]:
    estimate = row["estimate"]
    return [
        v for v in (*row.get("differences", ()), estimate["mean"], estimate["low"], estimate["high"]) if v is not None
    ]


def _interval(axis: Any, place: float, row: Row, colour: str) -> None:
    estimate = row["estimate"]
    if estimate["low"] is not None:
        axis.plot([estimate["low"], estimate["high"]], [place] * 2, color=colour, alpha=0.3, linewidth=6,
                  solid_capstyle="butt")  # fmt: skip
    axis.plot([estimate["mean"]], [place], marker="|", color=colour, markersize=11, markeredgewidth=1.8)
    values = row.get("differences", ())
    spread = [place + 0.24 * (i / max(len(values) - 1, 1) - 0.5) for i in range(len(values))]
    axis.plot(values, spread, linestyle="", marker="o", markersize=2.6, color=colour, markeredgecolor="white",
              markeredgewidth=0.3)  # fmt: skip


def _losses(
    pen: Pen, point: str, rows: Sequence[Row], curves: Mapping[tuple[str, str], Sequence[figures.Curve]]
) -> Iterable[Picture]:
    """Training losses, and paired differences of each effect: mean over seeds, band from lowest to highest."""
    of = {arm: [c for c in curves.get((point, arm), ()) if c.values] for arm in pen.content["arms"] if arm != "twin"}
    beta = figures.choose_beta(max((c.steps[-1] + 1 for group in of.values() for c in group), default=1))
    said = "training loss, nats per token" if pen.content["engine"] == "xsalab" else "loss, as the command reported it"
    note = f"smoothed alike, β = {beta:g}" if beta else "not smoothed"
    shown = {arm: [figures.smoothed(curve, beta) for curve in group] for arm, group in of.items() if group}
    if not shown:
        return
    figure, (axis,) = _sheet(1, 1, PAGE, 3.0)
    for arm, group in shown.items():
        _curves(axis, group, arm, pen.line(arm))
    _settle(axis)
    axis.set_xlabel(f"step ({note})")
    axis.set_ylabel(said)
    axis.legend(ncols=2)
    alt = f"Training losses{pen.where(point)} by step, mean over seeds with the range of the seeds: {', '.join(shown)}"
    yield _picture(figure, pen.name(point, "losses"), "curves", alt)
    panels: list[tuple[Row, list[figures.Curve]]] = []
    for row in rows:
        base = {curve.seed: curve for curve in of.get(row["baseline"], ())}
        pairs = [c for c in of.get(row["treatment"], ()) if c.seed in row["seeds"] and c.seed in base]
        if row["kind"] == "effect" and pairs:
            panels.append((row, [figures.difference(curve, base[curve.seed], beta) for curve in pairs]))
    if not panels:
        return
    figure, axes = _sheet(len(panels), 3, PAGE, 1.9)
    for axis, (row, group) in zip(axes, panels, strict=True):
        axis.axhline(0, color=LIGHT["ink"], linewidth=0.6)
        _curves(axis, group, row["treatment"], pen.line(row["treatment"]), thin=True)
        _settle(axis)
        axis.set_title("\n".join(_wrapped(_clean(f"{row['treatment']} − {row['baseline']}"), 30)), fontsize=7)
    figure.supxlabel(f"step ({note})", fontsize=8)
    figure.supylabel(f"Δ {said}", fontsize=8)
    names = ", ".join(f"{row['treatment']} − {row['baseline']}" for row, _ in panels)
    alt = f"Paired differences of the training loss{pen.where(point)} by step, seeds thin, range shaded: {names}"
    yield _picture(figure, pen.name(point, "differences"), "curves", alt)


def _curves(axis: Any, group: Sequence[figures.Curve], label: str, line: Row, thin: bool = False) -> None:
    shared = figures.mean_curve(group).steps
    every = max(1, -(-len(shared) // figures.POINTS))
    steps = [step for i, step in enumerate(shared) if i % every == 0 or i == len(shared) - 1]
    if not steps:
        return
    tables = [dict(zip(curve.steps, curve.values, strict=True)) for curve in group]
    values = [[table[step] for step in steps] for table in tables]
    if thin:
        for row in values:
            axis.plot(steps, row, color=line["color"], alpha=0.35, linewidth=0.5)
    _band(axis, steps, values, label, line)


def _settle(axis: Any) -> None:
    """The first quarter of the steps does not decide the vertical range: losses fall fast at first."""
    lines = [line.get_xydata() for line in axis.get_lines() if len(line.get_xdata()) > 2]
    last = max((line[-1, 0] for line in lines), default=0)
    settled = [y for line in lines for x, y in line if x >= figures.SETTLED * last and math.isfinite(y)]
    if settled:
        low, high = min(settled), max(settled)
        room = 0.08 * (high - low) or abs(high) * 0.1 or 1e-3
        axis.set_ylim(low - room, high + room)


# Mechanism


def _heat_maps(pen: Pen, found: Row) -> Iterable[Picture]:
    """Of the most telling measures: layer × head for every arm, and below the differences of the effects."""
    arms = [arm for arm in found["arms"] if not _is_control(arm)] or list(found["arms"])
    effects = [
        (row["treatment"], row["baseline"])
        for row in pen.content["contrasts"]
        if (row["point"], row["kind"]) == (found["point"], "effect") and {row["treatment"], row["baseline"]} <= {*arms}
    ]
    effects = list(dict.fromkeys(effects))
    for name, measure in ((name, measure) for name, measure in found["measures"].items() if name in MAPS):
        maps = {arm: _table(found["arms"][arm]["final"][name]["mean"]) for arm in arms if _has(found, arm, name)}
        maps = {arm: table for arm, table in maps.items() if table.count()}
        if not maps:
            continue
        moved = {f"{a} − {b}": maps[a] - maps[b] for a, b in effects if a in maps and b in maps}
        moved = {title: table for title, table in moved.items() if table.count()}
        across = min(MOST, max(len(maps), len(moved)))
        tall = min(2.2, 0.75 + 0.1 * found["layers"])
        blocks = [block for block in (maps, moved) if block]
        lines = [math.ceil(len(block) / across) for block in blocks]
        from matplotlib.figure import Figure

        figure = Figure(figsize=(max(COLUMN, 0.4 + 1.1 * across), tall * sum(lines) + 0.5), layout="constrained")
        axes = figure.subplots(sum(lines), across, squeeze=False)
        first = 0
        for block, count in zip(blocks, lines, strict=True):
            part = [axis for line in axes[first : first + count] for axis in line]
            _maps(figure, part, block, block is moved or measure["signed"])
            first += count
        words = _axis_label(measure) + ("; below: differences" if moved else "")
        figure.suptitle("\n".join(_wrapped(words, int(15 * figure.get_figwidth()))), fontsize=8)
        figure.supxlabel("head", fontsize=8)
        figure.supylabel("layer", fontsize=8)
        alt = f"{measure['label']} by layer and head{pen.where(found['point'])}: {', '.join(maps)}"
        alt += f"; differences {', '.join(moved)}" if moved else ""
        yield _picture(figure, pen.name(found["point"], "map", name), "mechanism", alt)


def _has(found: Row, arm: str, name: str) -> bool:
    return name in found["arms"][arm].get("final", {})


def _axis_label(measure: Row) -> str:
    return _clean(measure["label"] + (f" [{measure['unit']}]" if measure.get("unit") else ""))


def _maps(figure: Any, axes: Sequence[Any], block: Mapping[str, Any], signed: bool) -> None:
    """One colour scale for all; signed values are symmetric about 0. A head without a value is grey."""
    low = min(float(table.min()) for table in block.values())
    high = max(float(table.max()) for table in block.values())
    if signed:
        high = max(abs(low), abs(high)) or 1e-12
        low = -high
    elif low == high:
        low, high = low - (abs(low) * 0.01 or 1e-12), high + (abs(high) * 0.01 or 1e-12)
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    colours = colormaps["PuOr_r" if signed else "viridis"].resampled(21)  # a bar of more would become a raster
    drawn = None
    for axis, (title, table) in zip(axes, block.items(), strict=False):
        axis.set_facecolor(LIGHT["line"])
        cells = np.arange(table.shape[1] + 1) - 0.5, np.arange(table.shape[0] + 1) - 0.5
        drawn = axis.pcolormesh(*cells, table, vmin=low, vmax=high, cmap=colours,
                                edgecolors="white", linewidth=0.3)  # fmt: skip
        axis.set_ylim(table.shape[0] - 0.5, -0.5)
        axis.set_xticks(range(0, table.shape[1], max(1, table.shape[1] // 4)))
        axis.set_yticks(range(0, table.shape[0], max(1, table.shape[0] // 6)))
        axis.set_title(_clean(title).replace(" − ", "\n− "), fontsize=7)
        axis.tick_params(length=0)
    for axis in axes[len(block) :]:
        axis.set_axis_off()
    bar = figure.colorbar(drawn, ax=list(axes), shrink=0.9, pad=0.02, aspect=14)
    bar.ax.tick_params(labelsize=6)
    bar.solids.set_edgecolor("face")
    bar.locator = MaxNLocator(4)
    bar.outline.set_linewidth(0.4)


def _wrapped(text: str, most: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= most:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _panels(
    pen: Pen,
    found: Row,
    measures: Mapping[str, Row],
    curve: Callable[[Row, str], tuple[Sequence[float], Sequence[Sequence[float | None]]] | None],
    name: str,
    along: str,
    what: str,
    log: bool = False,
) -> Iterable[Picture]:
    """A panel a measure, a line an arm. curve: (arm's entry, measure) -> (x, values [seed][x]), None: not there."""
    drawn: dict[str, dict[str, tuple[Any, Any]]] = {}
    for measure in measures:
        for arm, entry in found["arms"].items():
            if arm.partition("@")[0] == "positive":  # the null controls stay: they show what no effect looks like
                continue
            values = curve(entry, measure)
            if values is not None and len(values[0]) > 1 and _table(values[1]).count():
                drawn.setdefault(measure, {})[arm] = values
    if not drawn:
        return
    figure, axes = _sheet(len(drawn), 4, PAGE, 1.6)
    for axis, (measure, of) in zip(axes, drawn.items(), strict=True):
        for arm, (x, values) in of.items():
            _band(axis, x, values, arm, pen.line(arm))
        axis.set_title("\n".join(_wrapped(_axis_label(measures[measure]), 30)), fontsize=6.5)
        axis.tick_params(labelsize=6)
        if log:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
    _legend(figure, axes)
    figure.supxlabel(along, fontsize=8)
    arms = ", ".join(dict.fromkeys(arm for of in drawn.values() for arm in of))
    labels = ", ".join(measures[measure]["label"] for measure in drawn)
    alt = f"{what}{pen.where(found['point'])}, mean over seeds with the range of the seeds ({arms}): {labels}"
    yield _picture(figure, pen.name(found["point"], name), "mechanism", alt)


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    """One for all panels, above them."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(list(entries.values()), list(entries), loc="outside upper center", ncols=min(5, len(entries)))


def _profiles(pen: Pen, found: Row) -> Iterable[Picture]:
    def curve(entry: Row, measure: str) -> Any:
        places = entry.get("positions") or {}
        values = (places.get("values") or {}).get(measure)
        if not values:
            return None
        return [max(1.0, (start + end) / 2) for start, end in places["ranges"]], values

    along = "position in the context (middle of each range)"
    yield from _panels(pen, found, found["measures"], curve, "positions", along, "Profiles by position", log=True)


def _over_training(pen: Pen, found: Row) -> Iterable[Picture]:
    def curve(entry: Row, measure: str) -> Any:
        values = (entry.get("curves") or {}).get(measure)
        return (values["steps"], values["values"]) if values else None

    yield from _panels(pen, found, found["measures"], curve, "training", "step", "The mechanism over training")


def _geometry(pen: Pen, found: Row) -> Iterable[Picture]:
    def curve(entry: Row, measure: str) -> Any:
        values = (entry.get("geometry") or {}).get(measure)
        return (values["steps"], values["values"]) if values else None

    measures = found.get("geometry_measures") or {}
    yield from _panels(pen, found, measures, curve, "geometry", "step", "Geometry of the updates")
    cosines = [row for row in found.get("cosines") or () if len(row["steps"]) > 1 and _table(row["values"]).count()]
    if not cosines:
        return
    figure, (axis,) = _sheet(1, 1, PAGE, 2.4)
    axis.axhline(0, color=LIGHT["ink"], linewidth=0.6)
    for row in cosines:
        _band(axis, row["steps"], row["values"], f"{row['arm']} with {row['baseline']}", pen.line(row["arm"]))
    axis.set_xlabel("step")
    axis.set_ylabel("cosine of the arms' updates")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right center")
    names = ", ".join(f"{row['arm']} with {row['baseline']}" for row in cosines)
    alt = f"Cosine of the arms' updates at equal steps{pen.where(found['point'])}: {names}"
    yield _picture(figure, pen.name(found["point"], "cosines"), "mechanism", alt)


# Stability


def _stability(pen: Pen) -> Iterable[Picture]:
    """The share of runs that diverged with its exact interval, and the largest z-score of a loss, arm by arm."""
    rows = [row for row in pen.content["stability"] if row.get("low") is not None and row.get("arm") != "twin"]
    if not rows:
        return
    many = len(pen.content["points"]) > 1
    names = [_clean(f"{row['arm']}, {row['point']}" if many and "point" in row else row["arm"]) for row in rows]
    known = any(row.get("largest_z") is not None for row in rows)
    figure, axes = _sheet(1 + known, 2, PAGE if known else COLUMN, 0.19 * len(rows) + 0.7)
    left, right = axes[0], axes[-1]
    for place, row in enumerate(rows):
        colour = pen.colour(row["arm"])
        ended = row["finished"] + row["diverged"]
        left.plot([row["low"], row["high"]], [place] * 2, color=colour, alpha=0.35, linewidth=5, solid_capstyle="butt")
        if ended:
            left.plot([row["diverged"] / ended], [place], marker="o", markersize=3.5, color=colour)
        if row.get("largest_z") is not None:
            right.plot([row["largest_z"]], [place], marker="o", markersize=3.5, color=colour)
    for axis in axes:
        axis.set_yticks(range(len(rows)), names if axis is left else [""] * len(rows))
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.tick_params(axis="y", length=0)
        axis.grid(axis="y", color=LIGHT["line"], linewidth=0.4)
        axis.set_axisbelow(True)
    left.set_xlim(-0.03, 1.03)
    left.set_xlabel("share of runs that diverged (95 % interval)")
    if known:
        right.set_xlim(left=0)
        right.set_xlabel("largest z-score of a training loss")
    more = ", and the largest z-score of a training loss" if known else ""
    alt = f"Share of runs that diverged with exact intervals{more}: {', '.join(names)}"
    yield _picture(figure, "stability", "stability", alt)


def _rates(pen: Pen, rates: Row) -> Iterable[Picture]:
    """The metric by learning rate, a line for each setting of the other factors."""
    if not any(mean is not None for row in rates["rows"] for mean in row["means"]):
        return
    figure, (axis,) = _sheet(1, 1, COLUMN, 2.6)
    palette = [LIGHT[f"c{i}"] for i in range(6)]
    for number, row in enumerate(rates["rows"]):
        shown = [i for i, mean in enumerate(row["means"]) if mean is not None]
        dash = [*DASHES.values()][number // 6 % len(DASHES)]
        line = {"color": palette[number % 6], "linestyle": dash, "marker": "o", "markersize": 3}
        axis.errorbar([rates["rates"][i] for i in shown], [row["means"][i] for i in shown],
                      yerr=[row["sds"][i] or 0.0 for i in shown], capsize=2, elinewidth=0.7,
                      label=_clean(row["levels"]), **line)  # fmt: skip
    if all(rate > 0 for rate in rates["rates"]):
        axis.set_xscale("log", base=2)
        axis.set_xticks(rates["rates"], [plain_number(rate) for rate in rates["rates"]])
        axis.minorticks_off()
    axis.set_xlabel(_clean(rates["factor"]))
    axis.set_ylabel(_clean(f"{pen.content['metric']} (bars: sd over seeds)"))
    axis.legend()
    names = ", ".join(str(row["levels"]) for row in rates["rows"])
    alt = f"{pen.content['metric']} by {rates['factor']}{pen.where(rates['point'])}: {names}"
    yield _picture(figure, pen.name(rates["point"], "rates"), "rates", alt)
