"""What the diagnostics of an experiment's runs say, as plain values for heat maps, curves and profiles by position.

Of every arm but the twin, from the runs that finished and were diagnosed at their end; the others are named in
``left_out``. Only the columns that are shown are read, and the sketches one seed at a time: 100 runs take seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..optim.geometry import SKETCH
from .design import Cell, Contrast, Experiment, contrasts, resolve
from .mechanism_grids import MEASURES, Run, alike, finished_runs
from .mechanism_words import prediction, sentences
from .store import RunStore, read_parquet

WHOLE = ("rank_after", "alpha", "alpha_gradient")  # measured over the whole context alone
GEOMETRY: dict[str, tuple[str, str]] = {
    "stable_rank": ("stable rank of the weight", ""),
    "update_stable_rank": ("stable rank of the update", ""),
    "update_spread": ("spread of the update's singular values: standard deviation over mean", ""),
    "update_ratio": ("norm of the update over that of the weight", ""),
}


def mechanism_tables(experiment: Experiment, store: RunStore) -> list[dict[str, Any]]:
    """One entry a point that has a finished and diagnosed run, JSON-ready; [] where nothing was measured.

    A mean over a value that is missing is missing: null. ``left_out``: names of runs that are in no heat map, as they
    have not finished or were not diagnosed at their end, or in no curve, as they were diagnosed at other steps than
    most runs of their arm.
    A run that was diagnosed on other rows than most, or took other steps than its arm, is left out of both.
    ValueError naming a file that is no whole diagnosis.
    """
    found = [_at_point(experiment, store, point.name) for point in experiment.points]
    return [entry for entry in found if entry is not None]


def _at_point(experiment: Experiment, store: RunStore, point: str) -> dict[str, Any] | None:
    finished, left_out = finished_runs(experiment, store, point)
    arms, others = alike(finished)
    left_out += others
    if not arms:
        return None
    main = arms.get(experiment.baseline) or next(iter(arms.values()))
    layers, heads, _ = main[0].end.values["alpha"].shape
    tables: dict[str, dict[str, Any]] = {}
    for arm, runs in arms.items():
        tables[arm], other = _arm(runs)
        left_out += other
    ends = {
        arm: {run.seed: {name: run.end.whole(name) for name in MEASURES} for run in runs} for arm, runs in arms.items()
    }
    return {
        "point": point,
        "layers": layers,
        "heads": heads,
        "context": main[0].end.ranges[0][1],
        "rows": main[0].end.rows,
        "steps": main[0].steps,
        "measures": {
            name: {"label": label, "unit": unit, "signed": signed} for name, (label, unit, signed) in MEASURES.items()
        },
        "arms": tables,
        "cosines": _cosines(experiment, point, arms),
        "geometry_measures": {name: {"label": label, "unit": unit} for name, (label, unit) in GEOMETRY.items()},
        "sentences": sentences(experiment, point, ends),
        "prediction": prediction(experiment, store, point, ends),
        "left_out": sorted(set(left_out)),
    }


# One arm


def _arm(runs: Sequence[Run]) -> tuple[dict[str, Any], list[str]]:
    """The tables of an arm, and the names of its runs that are in no curve."""
    final: dict[str, Any] = {}
    for name in MEASURES:
        values = np.stack([run.end.whole(name) for run in runs])
        spread = plain(values.std(axis=0, ddof=1)) if len(runs) > 1 else None
        final[name] = {"mean": plain(values.mean(axis=0)), "sd": spread}
    kept, steps, other = _of_equal_steps(runs, lambda run: run.grids)
    curves = {
        name: {
            "steps": list(steps),
            "seeds": [run.seed for run in kept],
            "values": [[plain(run.grids[step].whole(name).mean()) for step in steps] for run in kept],
        }
        for name in MEASURES
    }
    positions = {
        name: [plain(run.end.values[name][..., 1:].mean(axis=(0, 1))) for run in runs]
        for name in MEASURES
        if name not in WHOLE
    }
    geometry, without = _geometry(runs)
    table = {
        "seeds": [run.seed for run in runs],
        "final": final,
        "curves": curves,
        "positions": {"ranges": [list(span) for span in runs[0].end.ranges[1:]], "values": positions},
        "geometry": geometry,
    }
    return table, other + without


def _geometry(runs: Sequence[Run]) -> tuple[dict[str, Any], list[str]]:
    """Means over the matrices that are not zero: at step 0 some are."""
    kept, steps, other = _of_equal_steps(runs, lambda run: run.geometry)
    if not steps:
        return {}, other
    values: dict[str, list[list[float | None]]] = {name: [] for name in GEOMETRY}
    for run in kept:
        tables = [read_parquet(run.geometry[step], tuple(GEOMETRY)) for step in steps]
        for name in GEOMETRY:
            columns = [np.asarray(table[name].to_numpy()).astype(np.float64) for table in tables]
            there = [column[np.isfinite(column)] for column in columns]
            values[name].append([float(column.mean()) if len(column) else None for column in there])
    seeds = [run.seed for run in kept]
    return {name: {"steps": list(steps), "seeds": seeds, "values": values[name]} for name in GEOMETRY}, other


def _of_equal_steps(
    runs: Sequence[Run], measured: Callable[[Run], Mapping[int, Any]]
) -> tuple[list[Run], tuple[int, ...], list[str]]:
    """The runs that were measured at the same steps as most are, those steps, and the names of the other runs."""
    steps = Counter(tuple(measured(run)) for run in runs).most_common(1)[0][0]
    kept = [run for run in runs if tuple(measured(run)) == steps]
    return kept, steps, [run.name for run in runs if run not in kept]


def plain(values: Any) -> Any:
    """An array as nested lists, a number as a float; None for what is no number."""
    if isinstance(values, np.ndarray) and values.ndim:
        return [plain(value) for value in values]
    return float(values) if math.isfinite(values) else None


# Arm against arm


class _Sketches(NamedTuple):
    matrices: list[str]
    rows: NDArray[np.float64]  # (matrices, SKETCH)


def _cosines(experiment: Experiment, point: str, arms: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """Of the updates of two arms that one contrast compares, where their models have one shape.

    The null control's are the reference: what rounding alone leaves of the updates' agreement.
    """
    pairs = [
        contrast for contrast in contrasts(experiment)
        if contrast.point == point and contrast.kind in ("effect", "null") and _one_shape(experiment, contrast)
    ]  # fmt: skip
    kept = {arm: _of_equal_steps(runs, lambda run: run.geometry) for arm, runs in arms.items()}
    by_seed = {arm: {run.seed: run for run in runs} for arm, (runs, _, _) in kept.items()}
    pairs = [pair for pair in pairs if pair.treatment in kept and pair.baseline in kept]
    steps = {pair: [s for s in kept[pair.treatment][1] if s in kept[pair.baseline][1]] for pair in pairs}
    values: dict[Contrast, dict[int, list[float | None]]] = {pair: {} for pair in pairs if steps[pair]}
    counts: dict[Contrast, int] = {}
    for seed in experiment.seeds:
        known: dict[Path, _Sketches] = {}  # of this seed alone: those of all runs may be gigabytes
        for pair, found in values.items():
            if seed not in by_seed[pair.treatment] or seed not in by_seed[pair.baseline]:
                continue
            sides = by_seed[pair.treatment][seed].geometry, by_seed[pair.baseline][seed].geometry
            both = [[_sketches(side[step], known) for side in sides] for step in steps[pair]]
            counts[pair] = len(set(both[-1][0].matrices) & set(both[-1][1].matrices))
            found[seed] = [_cosine(a, b) for a, b in both]
    return [
        {
            "arm": pair.treatment,
            "baseline": pair.baseline,
            "kind": pair.kind,
            "steps": steps[pair],
            "seeds": list(found),
            "values": list(found.values()),
            "matrices": counts[pair],
            "words": _error_in_words(pair, counts[pair]),
        }
        for pair, found in values.items()
        if found and counts[pair]
    ]


def _one_shape(experiment: Experiment, contrast: Contrast) -> bool:
    """Whether the sketches can be compared: a matrix of another shape is sketched with other signs and places."""
    arms = contrast.treatment, contrast.baseline
    return len({resolve(experiment, Cell(contrast.point, arm, experiment.seeds[0])).model for arm in arms}) == 1


def _sketches(path: Path, known: dict[Path, _Sketches]) -> _Sketches:
    if path not in known:
        table = read_parquet(path, ("matrix", "sketch"))
        numbers = table["sketch"].combine_chunks().flatten().to_numpy()
        known[path] = _Sketches(table["matrix"].to_pylist(), numbers.reshape(table.num_rows, -1))
    return known[path]


def _cosine(a: _Sketches, b: _Sketches) -> float | None:
    """Mean over the matrices that both have and both moved; None where there is none."""
    places = {name: place for place, name in enumerate(b.matrices)}
    common = [(place, places[name]) for place, name in enumerate(a.matrices) if name in places]
    left, right = (side.rows[[pair[i] for pair in common]] for i, side in enumerate((a, b)))
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    moved = (norms > 0) & np.isfinite(norms)
    return float(((left[moved] * right[moved]).sum(axis=1) / norms[moved]).mean()) if moved.any() else None


def _error_in_words(pair: Contrast, matrices: int) -> str:
    """What the numbers are, and how wrong a sketch makes them."""
    each = 1 / math.sqrt(SKETCH)
    said = (
        f"cosine of the updates of {pair.treatment} and {pair.baseline} at equal steps and seed, mean over {matrices} "
        f"matrices, from sketches: the error is at most about {each:.2g} for a matrix and "
        f"{each / math.sqrt(matrices):.2g} for the mean"
    )
    return f"{said}; the same training but for rounding, which is the reference" if pair.kind == "null" else said
