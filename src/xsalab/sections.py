"""What the page shows of the mechanism, of rates, and beside every picture: rows and SVG out of ``outcome``'s values.

Nothing is estimated here. A mean over seeds, and their range, are what a band is drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from . import figures
from .drawing import Colours, plain_number
from .heatmaps import heat_maps, prediction_plot

# Shown without a choice, and in print; the first ones of what is there fill up to COUNT.
TELLING = ("cos_before", "cos_after", "self_weight", "reach", "alpha_gradient")
COUNT = 5
OVER_TRAINING = ("cos_before", "self_weight", "reach", "alpha_gradient")  # and by position
SMALL = 440.0  # width of a picture that stands beside another
AT = 6  # steps of a table of numbers

Content = Mapping[str, Any]
Table = dict[str, Any]


def legend(arms: Sequence[str], colours: Colours) -> list[dict[str, str]]:
    """The entries by which a reader shows and hides an arm in every picture."""
    return [{"arm": arm, "stroke": colours.stroke(arm)} for arm in arms]


def numbers(lines: Sequence[figures.Line], digits: int = 4) -> Table:
    """What bands and their means show, at a few steps: the table beside a picture.

    {"steps": [...], "rows": [{"name", "cells": [(mean, range or "")]}]}
    """
    steps = sorted({step for entry in lines for step in entry.steps})
    if len(steps) > AT:
        steps = [steps[round(index * (len(steps) - 1) / (AT - 1))] for index in range(AT)]
    bands = {entry.name: entry for entry in lines if entry.upper}
    rows: list[dict[str, Any]] = []
    for entry in lines:
        if entry.upper:
            continue
        middle = dict(zip(entry.steps, entry.values, strict=True))
        band = bands.get(entry.name)
        ends = dict(zip(band.steps, zip(band.values, band.upper, strict=True), strict=True)) if band else {}
        cells: list[tuple[str, str]] = []
        for step in steps:
            mean = plain_number(middle[step], digits) if step in middle else ""
            spread = " to ".join(plain_number(end, digits) for end in ends[step]) if step in ends else ""
            cells.append((mean, spread))
        rows.append({"name": entry.name, "cells": cells})
    return {"steps": [f"{step:g}" for step in steps], "rows": rows}


def over_seeds(curves: Sequence[figures.Curve], colours: Colours) -> list[figures.Line]:
    """Mean and range of curves that are one an arm and seed, at the steps that all of an arm's seeds have."""
    lines: list[figures.Line] = []
    for arm in dict.fromkeys(curve.arm for curve in curves):
        own = [curve for curve in curves if curve.arm == arm and curve.steps]
        if not own:
            continue
        tables = [dict(zip(curve.steps, curve.values, strict=True)) for curve in own]
        shared = sorted(set.intersection(*(set(table) for table in tables)))
        values = [[table[step] for step in shared] for table in tables]
        lines += figures.band_lines(arm, shared, [curve.seed for curve in own], values, colours)
    return lines


def mechanism(content: Content, colours: Colours) -> list[dict[str, Any]]:
    """One entry a point that has diagnoses: pictures, tables and sentences."""
    return [_mechanism(content, entry, colours) for entry in content.get("mechanism") or []]


def _mechanism(content: Content, entry: Mapping[str, Any], colours: Colours) -> dict[str, Any]:
    rows = [row for row in content["contrasts"] if row["point"] == entry["point"]]
    arms = {arm: found for arm, found in entry["arms"].items() if arm.partition("@")[0] != "twin"}
    tested = {arm: found for arm, found in arms.items() if arm.partition("@")[0] != "positive"}
    shown = _chosen(entry["measures"], TELLING, COUNT)
    over_training, over_positions = (
        {name: entry["measures"][name] for name in _chosen(there, OVER_TRAINING, len(OVER_TRAINING))}
        for there in (
            [name for name in entry["measures"] if any(name in found["curves"] for found in tested.values())],
            [
                name
                for name in entry["measures"]
                if any(name in (found.get("positions") or {"values": ()})["values"] for found in tested.values())
            ],
        )
    )
    prediction = entry.get("prediction")
    return {
        "point": entry["point"],
        "steps": entry["steps"],
        "left_out": entry.get("left_out") or [],
        "layers": entry["layers"],
        "heads": entry["heads"],
        "context": entry["context"],
        "sentences": entry.get("sentences", []),
        "legend": legend(list(tested), colours),
        "maps": [
            {**_map(name, measure, arms, rows, entry["layers"]), "more": name not in shown}
            for name, measure in sorted(entry["measures"].items(), key=lambda item: item[0] not in shown)
        ],
        "curves": _over_training(tested, "curves", over_training, colours),
        "positions": _positions(tested, over_positions, colours),
        "geometry": _over_training(tested, "geometry", entry.get("geometry_measures", {}), colours),
        "cosines": _cosines(entry.get("cosines", []), colours),
        "prediction": prediction
        and {**prediction, "svg": Markup(prediction_plot(prediction["rows"], colours, prediction["words"]))},
    }


def _chosen(measures: Iterable[str], first: Sequence[str], count: int) -> list[str]:
    chosen = [name for name in first if name in measures]
    return [*chosen, *(name for name in measures if name not in chosen)][:count]


def _map(
    name: str, measure: Mapping[str, Any], arms: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], layers: int
) -> dict[str, Any]:
    """The layer × head maps of one measure, and their numbers."""
    finals = {arm: found["final"][name]["mean"] for arm, found in arms.items() if name in found["final"]}
    baselines: dict[str, str] = {}
    for row in rows:
        if row["kind"] in ("effect", "null", "positive"):
            baselines.setdefault(row["treatment"], row["baseline"])
    quiet = [arm for arm in finals if arm.partition("@")[0] == "positive" or arm in baselines.values()]
    label = f"{measure['label']} by layer and head, arm beside arm, with the difference from the baseline under each"
    drawn = heat_maps(finals, baselines, quiet, label, measure["unit"], measure["signed"]) if finals else ""
    table = [
        {"arm": arm, "layer": layer, "values": ["" if v is None else plain_number(v) for v in values[layer]]}
        for arm, values in finals.items()
        for layer in range(layers)
    ]
    return {"name": name, "label": measure["label"], "unit": measure["unit"], "svg": Markup(drawn), "table": table}


def _picture(lines: Sequence[figures.Line], measure: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    unit = f", {measure['unit']}" if measure["unit"] else ""
    name = f"{measure['label']}{unit}"
    label = f"{name}, by {options.get('word', 'step')}: the mean over seeds of each arm, and their range"
    drawn = figures.line_chart(lines, name, settled=0.0, width=SMALL, height=190, label=label, **options)
    return {"name": name, "svg": Markup(drawn), "table": numbers(lines)}


def _over_training(
    arms: Mapping[str, Any], part: str, measures: Mapping[str, Any], colours: Colours
) -> list[dict[str, Any]]:
    """A picture a measure; none where it was measured at one step alone."""
    pictures: list[dict[str, Any]] = []
    for name, measure in measures.items():
        lines: list[figures.Line] = []
        for arm, found in arms.items():
            if series := found.get(part, {}).get(name):
                lines += figures.band_lines(arm, series["steps"], series["seeds"], series["values"], colours)
        if any(len(entry.steps) > 1 for entry in lines):
            pictures.append(_picture(lines, measure, zero=bool(measure.get("signed"))))
    return pictures


def _positions(arms: Mapping[str, Any], measures: Mapping[str, Any], colours: Colours) -> list[dict[str, Any]]:
    """Profiles over the position in the context, each range at the middle of its logarithm; the first position is 1."""
    pictures: list[dict[str, Any]] = []
    for name, measure in measures.items():
        lines: list[figures.Line] = []
        marks: list[tuple[float, str]] = []
        for arm, found in arms.items():
            profile = found.get("positions")
            if not profile or name not in profile["values"]:
                continue
            at = [round(math.log10((start + 1) * end) / 2, 6) for start, end in profile["ranges"]]
            called = [f"{start + 1}–{end}" if end - start > 1 else f"{end}" for start, end in profile["ranges"]]
            marks = list(zip(at, called, strict=True))
            lines += figures.band_lines(arm, at, found["seeds"], profile["values"][name], colours)
        if len(marks) > 1 and lines:
            picture = _picture(
                lines, measure, zero=bool(measure.get("signed")), word="position in the context", names=marks
            )
            places = {f"{place:g}": called for place, called in marks}
            picture["table"]["steps"] = [places[step] for step in picture["table"]["steps"]]
            pictures.append(picture)
    return pictures


def _cosines(rows: Sequence[Mapping[str, Any]], colours: Colours) -> dict[str, Any] | None:
    lines: list[figures.Line] = []
    for row in rows:
        pair = f"{row['arm']} with {row['baseline']}"  # an arm may be compared with two
        lines += figures.band_lines(row["arm"], row["steps"], row["seeds"], row["values"], colours, pair)
    if not any(entry.steps for entry in lines):
        return None
    name = "cosine of the update with the baseline’s at equal steps, mean over matrices"
    drawn = figures.line_chart(
        lines, name, zero=True, settled=0.0, height=220, label=f"{name}; the null control in grey"
    )
    pairs = list(dict.fromkeys((row["arm"], row["baseline"]) for row in rows))
    arms = list(dict.fromkeys(arm for arm, _ in pairs))
    return {"svg": Markup(drawn), "table": numbers(lines), "pairs": pairs, "legend": legend(arms, colours)}


def rates(content: Content) -> list[dict[str, Any]]:
    """One entry a point whose rates were swept, with its picture."""
    values = {(run["point"], run["arm"], run["seed"]): run for run in content["runs"]}
    found: list[dict[str, Any]] = []
    for entry in content.get("rates") or []:
        names = [row["levels"] if isinstance(row["levels"], str) else ", ".join(row["levels"]) for row in entry["rows"]]
        colours = Colours.of(names[0], names)
        series = [
            {
                "name": name,
                "colour": colours[name],
                "stroke": colours.stroke(name),
                "means": row["means"],
                "best": row["best"],
                "diverged": row["diverged"],
                "seeds": [
                    [
                        (seed, run["value"])
                        for seed in content["seeds"]
                        if (run := values.get((entry["point"], arm, seed))) and run["state"] == "finished"
                    ]
                    for arm in row["arms"]
                ],
            }
            for name, row in zip(names, entry["rows"], strict=True)
        ]
        label = f"{content['metric']} by {entry['factor']}: mean and seeds of {', '.join(names)}"
        drawn = figures.rates_plot(series, entry["rates"], entry["factor"], f"{content['metric']} by rate", label)
        found.append({**entry, "svg": Markup(drawn), "legend": legend(names, colours)})
    return found
