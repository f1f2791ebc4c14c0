"""THE REPORT: one page, one table for the terminal, and summary.json. It prints what ``outcome`` says.

No statistics here. Figures are inline SVG; a content policy forbids everything but the page's own style and its one
script (page.js, by its hash), without which the page reads as well; every text from outside (names, TOML, messages)
goes through jinja2's escaping.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import __version__, figures, sections
from .config import flat
from .drawing import DARK, LIGHT, STYLE, Colours, plain_number
from .experiment.design import Cell, Experiment, tables_of
from .experiment.outcome import plus_minus
from .experiment.store import RunStore
from .experiment.timing import CONTROL
from .files import write_atomic

NAMES = {
    "null": "null control",
    "positive": "positive control",
    "twin": "twin",
    CONTROL: "timing control",
}
READINGS = {
    "better": "Trained the same way on the same text, {arm} predicts unseen text better than {base}: it needs {size} "
    "fewer bits for each byte, and the {ci} interval of the difference lies wholly below zero.",
    "worse": "Trained the same way on the same text, {arm} predicts unseen text worse than {base}: it needs {size} "
    "more bits for each byte, and the {ci} interval of the difference lies wholly above zero.",
    "equivalent": "Whatever the difference between {arm} and {base} is, it is smaller than the margin of {margin} that "
    "was declared before the runs as too small to matter: the {ci90} interval lies inside it.",
    "inconclusive": "These runs do not say whether {arm} is better or worse than {base}. The interval holds zero and "
    "reaches beyond the margin of {margin}. That is not the same as “no difference”: the experiment is too small "
    "to see.",
    "not decidable": "Nothing can be said about {arm} against {base}: {reason}. The numbers below are what was "
    "measured, not evidence.",
    "diverged": "At least one run of {arm} broke down while training: its loss or gradient stopped being a finite "
    "number. A mean over the other runs would flatter it, so there is no verdict on its quality: {reason}.",
}
NOT_AFTER_ADJUSTMENT = (
    "Taken alone the interval of {arm} against {base} excludes zero. It is one of several contrasts that share an "
    "error of 5 %, and among them it does not pass: in so many comparisons one such interval is no rare event. It is a "
    "hint, not a verdict."
)
READING_OF_COMMAND = (
    "Run by the same command with the same seeds, {arm} has a {side} {metric} than {base}, by {size}, and the 95 % "
    "interval of the difference excludes zero. What was not checked stands under matched conditions."
)
BELOW_MARGIN = (
    " The difference is real, but smaller than the margin of {margin} that was declared before the runs as "
    "too small to matter."
)


def write_report(experiment: Experiment, store: RunStore, content: Mapping[str, Any]) -> Path:
    """Writes report.html, summary.json and intervals.svg into the experiment's folder, each whole or not at all.

    ``content`` is what ``outcome(experiment, store)`` gave.

    Works while runs are missing. With several points there is one intervals-POINT.svg for each.
    """
    colours = Colours.of(content["baseline"], content["arms"], content["crossed"])
    for point in content["points"]:
        rows = [row for row in content["contrasts"] if row["point"] == point]
        name = "intervals.svg" if len(content["points"]) == 1 else f"intervals-{point}.svg"
        if rows:
            write_atomic(store.folder / name, figures.interval_svg(rows, colours))
    write_atomic(store.folder / "summary.json", json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False))
    settings = dict(flat(tables_of(experiment, Cell(content["points"][0], content["baseline"], experiment.seeds[0]))))
    page = render(content, losses(experiment, store), settings, experiment.path.name)
    path = store.folder / "report.html"
    write_atomic(path, page)
    return path


Losses = Mapping[tuple[str, str], Sequence[figures.Curve]]


def losses(experiment: Experiment, store: RunStore) -> Losses:
    """(point, arm) -> one curve of raw training losses a seed that has any. A diverged run's ends before it broke."""
    found: dict[tuple[str, str], list[figures.Curve]] = {}
    for point in experiment.points:
        for arm in experiment.arms:
            for seed in experiment.seeds:
                rows = store.run(Cell(point.name, arm, seed)).metrics()
                name = "loss" if any("loss" in row for row in rows) else experiment.primary.metric
                rows = [row for row in rows if row.get(name) is not None and math.isfinite(row[name])]
                if rows:
                    curve = figures.Curve(arm, seed, [row["step"] for row in rows], [row[name] for row in rows])
                    found.setdefault((point.name, arm), []).append(curve)
    return found


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("xsalab", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bpb": bpb, "plus_minus": plus_minus, "percent": percent, "number": plain_number, "ratio": ratio,
        "seed_difference": seed_difference, "bytes": byte_count, "clock": clock, "p": p_value, "setting": setting,
        "details": figures.details, "count": "{:,}".format, "figure": benchmark_figure, "guessing": guessing,
        "ends": least_to_most, "interval": interval, "zip": zip,
    }  # fmt: skip
    return environment.get_template("page.html.j2")


def render(content: Mapping[str, Any], curves: Losses, settings: Mapping[str, Any], file: str) -> str:
    """The page as HTML text. settings: the baseline's resolved configuration by dotted name. file: the TOML's name."""
    colours = Colours.of(content["baseline"], content["arms"], content["crossed"])
    beta = figures.choose_beta(max((curve.steps[-1] + 1 for group in curves.values() for curve in group), default=1))
    return _template().render(
        o=content,
        version=__version__,
        file=file,
        settings=settings,
        points=[_point(content, curves, point, colours, beta) for point in content["points"]],
        over=_over_points(content),
        ci90=confidence90(content),
        style=Markup(_variables() + STYLE),
        script=Markup(script()),
        script_hash=base64.b64encode(hashlib.sha256(script().encode()).digest()).decode(),
        mechanism=sections.mechanism(content, colours),
        rates=sections.rates(content),
        steps_differ=any("steps" in field for row in content["contrasts"] for field in row["differs"]),
        data=embed(content),
        states=_states(content),
        names=_names(content),
    )


def _names(content: Mapping[str, Any]) -> dict[str, str]:
    """What controls are called: "null control", and "null control of ARM" where it is a further arm's."""
    further = [arm.partition("@") for arm in content["arms"]]
    return NAMES | {f"{kind}@{of}": f"{NAMES[kind]} of {of}" for kind, at, of in further if at and kind in NAMES}


def _variables() -> str:
    light, dark = (";".join(f"--{name}:{value}" for name, value in colours.items()) for colours in (LIGHT, DARK))
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


@lru_cache(maxsize=1)
def script() -> str:
    """page.js as it stands in the page; the content policy allows it by its hash and no other."""
    return resources.files("xsalab").joinpath("page.js").read_text(encoding="utf-8")


def embed(content: Mapping[str, Any]) -> Markup:
    """JSON for a script element of a data type: nothing in it can end the element or begin another one."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _point(content: Mapping[str, Any], curves: Losses, point: str, colours: Colours, beta: float) -> dict[str, Any]:
    """What the page shows of one point: the rows of its tables, and its pictures."""
    rows = [row for row in content["contrasts"] if row["point"] == point]
    of = {arm: curves.get((point, arm), []) for arm in content["arms"]}
    shown = [curve for arm in content["arms"] if arm != "twin" for curve in of[arm]]
    title = "training loss, nats per token" if content["engine"] == "xsalab" else "loss, as the command reported it"
    pictures = []
    for row in rows:
        if row["kind"] != "effect":
            continue
        effect = _pairs_of(of[row["treatment"]], of[row["baseline"]], row["seeds"], beta)
        nulls = [other for other in rows if other["kind"] == "null"]
        null = next((other for other in nulls if other["baseline"] == row["baseline"]), nulls[0] if nulls else None)
        behind = _pairs_of(of[null["treatment"]], of[null["baseline"]], null["seeds"], beta) if null else []
        behind_name = "" if null is None else f" Grey: the null control of {null['baseline']}, rounding alone."
        svg = figures.difference_plot(effect, behind, beta, colours, title)
        name = f"{row['treatment']} − {row['baseline']}"
        table = sections.numbers(sections.over_seeds([*effect, *behind], colours))
        pictures.append({"title": name, "svg": Markup(svg), "behind": behind_name, "table": table})
    decided = [row for row in rows if row["kind"] == "effect" and "verdict" in row]
    first = [row for row in decided if row["primary"]] or decided[:1]
    combined = [row for row in content["combinations"] if row["point"] == point]
    return {
        "name": point,
        "effects": [row for row in rows if row["kind"] == "effect"],
        "controls": [row for row in rows if row["kind"] in ("null", "positive")],
        "equal_time": [row for row in rows if row["kind"] == "equal time"],
        "rows": rows,
        "readings": [_reading(content, row) for row in first],
        "others": [_reading(content, row) for row in decided if row not in first],
        "combined": combined,
        "combined_plot": _combined_plot(combined),
        "means": _cell_means(content, point),
        "doses": [
            {**row, "svg": Markup(figures.dose_plot(row))}
            for row in content["doses"]
            if row["point"] == point and "curve" in row
        ],
        "levels": {level["arm"]: level for level in content["levels"] if level["point"] == point},
        "costs": {cost["arm"]: cost for cost in content["costs"].get("costs", []) if cost["point"] == point},
        "runs": {(run["arm"], run["seed"]): run for run in content["runs"] if run["point"] == point},
        "intervals": Markup(figures.interval_plot(rows, colours)) if rows else "",
        "curves": Markup(figures.curve_plot(shown, beta, colours, title)),
        "curve_table": sections.numbers(
            sections.over_seeds([figures.smoothed(curve, beta) for curve in shown if curve.values], colours)
        ),
        "legend": sections.legend([arm for arm in content["arms"] if arm != "twin" and of[arm]], colours),
        "times": _training_times(content, point),
        "differences": pictures,
    }


def _training_times(content: Mapping[str, Any], point: str) -> list[dict[str, Any]]:
    """Of each arm: how long its finished runs took on the clock, from least to most, other work included."""
    found: list[dict[str, Any]] = []
    for arm in content["arms"]:
        runs = [run for run in content["runs"] if (run["point"], run["arm"], run["state"]) == (point, arm, "finished")]
        runs = [run for run in runs if "training" in run.get("seconds", {})]
        if runs:
            seconds = [run["seconds"]["training"] for run in runs]
            steps = [run["steps"] for run in runs if "steps" in run]  # a command does not tell
            ends = {"least": min(seconds), "most": max(seconds), "steps": [min(steps), max(steps)] if steps else None}
            found.append({"arm": arm, "runs": len(seconds), **ends})
    return found


def _over_points(content: Mapping[str, Any]) -> dict[str, Any]:
    """What goes over several points: means and trends, each with its own picture, as their units differ."""
    rows = [row for row in content["combinations"] if not row["point"]]
    pictures = [_combined_plot([row for row in rows if row["kind"] == kind]) for kind in ("mean", "trend")]
    return {"rows": rows, "plots": [picture for picture in pictures if picture]}


def _combined_plot(rows: Sequence[Mapping[str, Any]]) -> Markup | str:
    """The interval picture of contrasts of more than two cells; they share one scale, so they share one unit."""
    shown = []
    for row in rows:
        left, _, right = row["words"].partition(" against ")
        shown.append({**row, "kind": "effect", "treatment": row["name"], "label": left, "baseline": right})
    if not any("estimate" in row for row in shown):
        return ""
    return Markup(figures.interval_plot(shown, Colours.of("", [row["name"] for row in shown])))


def _cell_means(content: Mapping[str, Any], point: str) -> list[dict[str, Any]]:
    """Of the crossed arms at a point: the level of each factor, and the mean over seeds."""
    levels = {level["arm"]: level for level in content["levels"] if level["point"] == point}
    return [{"levels": chosen, **levels[arm]} for arm, chosen in content["crossed"].items() if arm in levels]


def _pairs_of(
    treatment: Sequence[figures.Curve], baseline: Sequence[figures.Curve], seeds: Sequence[int], beta: float
) -> list[figures.Curve]:
    base = {curve.seed: curve for curve in baseline}
    return [figures.difference(curve, base[curve.seed], beta) for curve in treatment if curve.seed in seeds]


def _reading(content: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, str]:
    """The verdict word in plain words, with what would help."""
    verdict = row["verdict"]
    low, high = (row.get("estimate", {}).get(end) for end in ("low", "high"))
    alone = verdict["word"] == "inconclusive" and low is not None and not low <= 0 <= high
    reading = NOT_AFTER_ADJUSTMENT if alone else READINGS[verdict["word"]]
    text = reading + (BELOW_MARGIN if verdict["below_margin"] else "")
    if content["engine"] == "command" and verdict["word"] in ("better", "worse"):
        side = "lower" if (verdict["word"] == "better") == content["lower_is_better"] else "higher"
        text = text.replace(READINGS[verdict["word"]], READING_OF_COMMAND)
        text = text.replace("{side}", side).replace("{metric}", content["metric"])
    margin = f"{100 * content['primary']['margin']:g} % of the baseline's {_named(content)}"
    if content["primary"]["absolute"]:
        margin = f"{content['primary']['margin']:g}"
    relative = row["estimate"]["relative"] if "estimate" in row else None
    size = "" if relative is None else percent(abs(relative), signed=False)
    names = {
        "arm": row["treatment"],
        "base": row["baseline"],
        "ci": _confidence(content),
        "ci90": confidence90(content),
    }
    return {
        "contrast": f"{row['treatment']} against {row['baseline']}",
        "word": verdict["word"],
        "verdict": verdict["text"],
        "text": text.format(**names, margin=margin, reason=verdict["reason"], size=size),
        "reason": verdict["reason"],
        "advice": verdict["advice"],
    }


def _named(content: Mapping[str, Any]) -> str:
    """The metric in a sentence."""
    return "bits per byte" if content["engine"] == "xsalab" else content["metric"]


def _states(content: Mapping[str, Any]) -> str:
    """ "15 of 17 runs finished, 1 running, 1 waiting" """
    states = [run["state"] for run in content["runs"]]
    others = [f"{states.count(state)} {state}" for state in dict.fromkeys(states) if state != "finished"]
    return ", ".join([f"{states.count('finished')} of {len(states)} runs finished", *others])


# Numbers in words


def bpb(value: float, spread: float | None = None) -> str:
    """Four to six decimals, as many as the spread deserves."""
    places = 4 if not spread else max(4, min(6, 1 - int(f"{spread:.1e}".partition("e")[2])))
    return f"{value:.{places}f}"


def benchmark_figure(value: float) -> str:
    """ "−0.0123": four decimals, as benchmarks are published."""
    return f"{round(value, 4) + 0.0:.4f}".replace("-", "−")


def guessing(tasks: Sequence[Mapping[str, Any]]) -> float:
    """The figure of a model that guesses at random."""
    return sum((task["chance"] - task["baseline"]) / (1 - task["baseline"]) for task in tasks) / len(tasks)


def least_to_most(ends: Sequence[int]) -> str:
    """ "3", or "0 to 3" where runs differ."""
    return f"{ends[0]:,}" if ends[0] == ends[1] else f"{ends[0]:,} to {ends[1]:,}"


def interval(estimate: Mapping[str, Any]) -> str:
    """ "−0.0043 to −0.0019": two digits of the half width decide how many there are; "none" where there is none."""
    if estimate["low"] is None:
        return "none"
    half = (estimate["high"] - estimate["low"]) / 2
    places = max(0, 1 - int(f"{half:.1e}".partition("e")[2])) if half else 6
    return " to ".join(f"{round(estimate[end], places) + 0.0:.{places}f}" for end in ("low", "high")).replace("-", "−")


def seed_difference(value: float) -> str:
    """ "−0.003100": six decimals for every seed, so that a column can be read down."""
    return f"{value:+.6f}".replace("-", "−")


def percent(share: float, digits: int = 2, signed: bool = True) -> str:
    """ "−0.32 %" """
    if abs(share) < 1e-7:
        return "0 %"
    sign = "+" if signed and share > 0 else ""
    return f"{sign}{plain_number(100 * share, digits)} %"


def ratio(value: float) -> str:
    """ "× 1.012" """
    return f"× {value:.3f}"


def byte_count(value: float) -> str:
    """ "14.7 MB" """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} bytes"


def clock(seconds: float) -> str:
    """ "2 h 05 min", "3 min 20 s", "2.6 s", "64 ms" """
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def p_value(value: float | None) -> str:
    """ "0.031"; "not testable" where there is none."""
    if value is None:
        return "not testable"
    return "below 0.0001" if value < 1e-4 else f"{value:.2g}"


def setting(value: Any) -> str:
    """A configuration value, or the repr of one, as a reader writes it: nothing there is "not set"."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if text in ("None", "null", ""):
        return "not set"
    return re.sub(r"\bnan\b", "not a number", text)


# The terminal


def terminal_table(content: Mapping[str, Any], say: Callable[[str], str] = str) -> Table:
    """The first table of the page: arms against their baseline, then the controls. Fits 80 columns.

    say: applied to every text, for a terminal that cannot write them all.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("arm", min_width=8, max_width=20, overflow="fold")
    own, metric = content["engine"] == "xsalab", content["metric"]
    level = f"val {metric}" if own else metric
    for name in (say(level), say(f"Δ {metric} ± {_confidence(content)}"), say("Δ %"), *(["time"] if own else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", min_width=12)
    levels = {(level["point"], level["arm"]): level for level in content["levels"]}
    costs = {(cost["point"], cost["arm"]): cost for cost in content["costs"].get("costs", [])}

    def shown(value: float) -> str:
        return bpb(value) if own else f"{value:.5g}".replace("-", "−")

    def add(*values: str, style: str = "") -> None:
        if not own:  # step times of a command are not measured
            values = (*values[:4], *values[5:])
        table.add_row(*(Text(say(value)) for value in values), style=style)

    for point in content["points"]:
        if len(content["points"]) > 1:
            add(point, style="bold")
        level = levels.get((point, content["baseline"]))
        add(content["baseline"], shown(level["mean"]) if level else "", "", "", "", "baseline")
        for row in (row for row in content["contrasts"] if row["point"] == point):
            estimate, cost = row.get("estimate"), costs.get((point, row["treatment"]))
            against = "" if row["baseline"] == content["baseline"] else f" − {row['baseline']}"
            add(
                str(NAMES.get(row["treatment"], row["treatment"])) + against,
                shown(estimate["treatment_mean"]) if estimate else "",
                plus_minus(estimate["mean"], estimate["half_width"]) if estimate else "",
                percent(estimate["relative"]) if estimate and estimate["relative"] is not None else "",
                ratio(cost["ratio"]) if cost else "",
                _verdict(row),
                style="" if row["kind"] == "effect" else "dim",
            )
        if control := costs.get((point, CONTROL)):
            add("timing control", "", "", "", ratio(control["ratio"]), "", style="dim")
    if content["twin"] is not None:
        add("twin", "", "", "", "", "identical" if content["twin"] else "differs", style="dim")
    return table


def combined_table(content: Mapping[str, Any], say: Callable[[str], str] = str) -> Table:
    """Main effects, interactions, means and trends over points. Fits 80 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("contrast", min_width=24, max_width=40, overflow="fold")
    table.add_column(say(f"Δ {content['metric']} ± {_confidence(content)}"), justify="right", no_wrap=True)
    table.add_column("verdict", min_width=12)
    for row in content["combinations"]:
        estimate = row.get("estimate")
        where = f"{row['point']}: " if row["point"] and len(content["points"]) > 1 else ""
        cells = [where + row["words"], plus_minus(estimate["mean"], estimate["half_width"]) if estimate else ""]
        table.add_row(*(Text(say(cell)) for cell in (*cells, _verdict(row))))
    return table


def benchmark_table(content: Mapping[str, Any], say: Callable[[str], str] = str) -> Table:
    """Every benchmark: each arm's figure and difference. Fits 80 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("benchmark, arm", min_width=14, max_width=28, overflow="fold")
    for name in ("figure", say(f"Δ ± {_confidence(content)}")):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", min_width=12)

    def add(*values: str, style: str = "") -> None:
        table.add_row(*(Text(say(value)) for value in values), style=style)

    for bench in content["benchmarks"]:
        for point in content["points"]:
            levels = [level for level in bench["levels"] if level["point"] == point]
            if levels:
                add(bench["name"] + (f", {point}" if len(content["points"]) > 1 else ""), "", "", "", style="bold")
            for level in levels:
                figure = benchmark_figure(level["mean"]) if bench["tasks"] else bpb(level["mean"], level["sd"])
                name = str(NAMES.get(level["arm"], level["arm"]))
                own = [c for c in bench["contrasts"] if (c["point"], c["treatment"]) == (point, level["arm"])]
                for row in own:
                    estimate = row.get("estimate")
                    delta = plus_minus(estimate["mean"], estimate["half_width"]) if estimate else ""
                    against = "" if row["baseline"] == content["baseline"] else f" − {row['baseline']}"
                    style = "" if row["kind"] == "effect" else "dim"
                    add(f"  {name}{against}", figure, delta, _verdict(row), style=style)
                if not own:
                    add(f"  {name}", figure, "", "baseline" if level["arm"] == content["baseline"] else "")
    return table


def benchmark_lines(content: Mapping[str, Any]) -> list[str]:
    """The sentences of the effects, and what is missing or was touched by a rule, a line each."""
    lines: list[str] = []
    many = len(content["points"]) > 1
    for bench in content["benchmarks"]:
        rows = [*bench["contrasts"], *bench["combinations"]]
        for row in (row for row in rows if row["kind"] not in ("null", "positive") and row["sentence"]):
            lines.append(f"{row['point']}: {row['sentence']}" if many and row["point"] else row["sentence"])
        lines += [f"{bench['name']}: {text}" for text in bench["missing"]]
        for count in bench["counts"]:
            tasks = ", ".join(f"{task} {least_to_most(ends)}" for task, ends in count["tasks"].items())
            lines.append(f"{bench['name']}, {count['rule']}, items {count['words']}: {tasks}")
    return lines


def _confidence(content: Mapping[str, Any]) -> str:
    return f"{100 * content['confidence']:.3g} %"


def confidence90(content: Mapping[str, Any]) -> str:
    """Of the interval that the two one-sided tests of equivalence make: "90 %", wider at a look."""
    looks = content["sequential"]
    return f"{100 * (1 - 2 * looks['one_sided']):.3g} %" if looks else "90 %"


def further_lines(content: Mapping[str, Any]) -> list[str]:
    """Dose and response, and equal time, a line each."""
    lines: list[str] = []
    many = len(content["points"]) > 1
    for row in content["doses"]:
        if "minimum" in row:
            place = ", ".join([*([row["point"]] if many else []), *row["under"]])
            lines.append(f"{row['factor']}{f' ({place})' if place else ''}: {row['minimum']['words']}; {row['fit']}")
    for row in content["equal_time"]:
        where = f"{row['point']}: " if many else ""
        start = (
            f"{where}{row['arm']} at equal time (step time × {row['ratio']:.3f}, {row['low']:.3f} to {row['high']:.3f})"
        )
        for contrast in content["contrasts"]:
            sides = {contrast["treatment"].partition("@")[0], contrast["baseline"].partition("@")[0]}
            again = contrast["kind"] == "equal time" and contrast["point"] == row["point"] and row["arm"] in sides
            if again and "sentence" in contrast:
                lines.append(f"{start}, trained again: {contrast['sentence']}")
        if slope := row.get("slope"):
            half = None if slope["low"] is None else (slope["high"] - slope["low"]) / 2
            middle = slope["mean"] if half is None else (slope["high"] + slope["low"]) / 2
            lines.append(f"{start}, by the baseline's slope: Δ bpb {plus_minus(middle, half)}; {slope['words']}")
        if target := row.get("target"):
            lines.append(f"{start}, time to {target['target']:.4f} bpb: {target['ratio']['words']}")
    return lines


def _verdict(row: Mapping[str, Any]) -> str:
    """The word of a contrast. The null control is a picture of the noise, not a gate: it has none."""
    if "verdict" not in row:
        return "exploratory" if row["exploratory"] and "estimate" in row else "no pair yet"
    return "" if row["kind"] == "null" else row["verdict"]["text"]


SPELLED = str.maketrans({"−": "-", "±": "+/-", "×": "x", "Δ": "d", "α": "alpha", "β": "beta"})


def print_outcome(content: Mapping[str, Any], console: Console) -> None:
    """The table, the headline and the warnings; a sentence is one line where the console is no terminal.

    What a console of another encoding than UTF-8 cannot write is spelled out.
    """
    encoding = console.encoding or "utf-8"

    def say(text: str) -> str:
        if encoding.lower().startswith("utf"):
            return text
        return text.translate(SPELLED).encode(encoding, "replace").decode(encoding)

    def line(text: str, style: str = "") -> None:
        console.print(Text(say(text), style=style), soft_wrap=not console.is_terminal)

    console.print(terminal_table(content, say))
    line("")
    if content["combinations"]:
        console.print(combined_table(content, say))
        line("")
    if content["benchmarks"]:
        console.print(benchmark_table(content, say))
        line("")
    for text in content["headline"]:
        line(text, "bold")
    for text in benchmark_lines(content):
        line(text)
    for text in further_lines(content):
        line(text)
    for row in content["contrasts"]:
        if row["kind"] == "effect" and row.get("verdict", {}).get("advice"):
            verdict = row["verdict"]
            where = f"{row['point']}: " if len(content["points"]) > 1 else ""
            name = row["treatment"] if row["baseline"] == content["baseline"] else row["name"]
            line(f"{where}{name}: {verdict['reason']}; what would help: {verdict['advice']}")
    for index, text in enumerate(content["unchecked"]):
        line(f"not checked: {text}" if index == 0 else f"             {text}", "dim")
    if not content["complete"]:
        line(f"incomplete: {_states(content)}", "yellow")
    for warning in content["warnings"]:
        line(f"warning: {warning}", "yellow")
