"""What goes beyond a difference: dose and response, equal time, time to a target. As plain values, like ``outcome``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..stats import (
    DoseTable,
    Estimate,
    TargetTime,
    dose_response,
    equal_time_by_slope,
    time_ratio,
    time_to_target,
)
from .design import Cell, Experiment, steps_of, tested_arms
from .pairing import Joined, Scores, join, weighted_sum
from .stages import equal_time_ratios, shorter_name
from .store import RunFolder, RunStore

LEAST_DOSES = 3


def remembered_scores() -> Callable[[RunFolder], Scores]:
    """Reads a run's scores from disk once, however many contrasts it is part of."""
    known: dict[Path, Scores] = {}

    def scores(run: RunFolder) -> Scores:
        if run.path not in known:
            known[run.path] = run.scores()
        return known[run.path]

    return scores


def plain(value: Any) -> Any:
    """Dataclasses and named tuples as tables, tuples as lists: what JSON has."""
    if dataclasses.is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(item) for name, item in cast(Any, value)._asdict().items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in cast(Sequence[Any], value)]
    return value


def estimate_row(estimate: Estimate) -> dict[str, Any]:
    """An estimate as a table, with the number that stands behind ±."""
    return {**plain(estimate), "half_width": estimate.half_width}


# Dose and response


def dose_responses(
    experiment: Experiment, store: RunStore, scores: Callable[[RunFolder], Scores], confidence: float
) -> list[dict[str, Any]]:
    """The curve of every factor of at least three numbers, at each point and each setting of the other factors."""
    found: list[dict[str, Any]] = []
    by_levels = {levels: arm for arm, levels in experiment.levels.items()}
    for index, factor in enumerate(experiment.factors):
        if factor.values is None or len(factor.values) < LEAST_DOSES:
            continue
        others = dict.fromkeys((*levels[:index], *levels[index + 1 :]) for levels in experiment.levels.values())
        for point, setting in itertools.product(experiment.points, others):
            arms = [by_levels[(*setting[:index], level, *setting[index:])] for level in factor.levels]
            joined = join(experiment, store, [(point.name, arm) for arm in arms], scores)
            under = [
                level
                for level, other in zip(setting, _without(experiment.factors, index), strict=True)
                if len(other.levels) > 1
            ]
            row: dict[str, Any] = {"factor": factor.name, "point": point.name, "under": under, "arms": arms}
            row |= _lost(joined)
            if joined.seeds:
                word = "α" if factor.name == "alpha" else factor.name
                table = DoseTable(
                    factor.values, joined.seeds, joined.items, joined.values.transpose(1, 0, 2), joined.weights,
                    joined.metric.name, joined.unit, 0, joined.item_word, word,
                )  # fmt: skip
                response = dose_response(table, confidence=confidence)
                row |= plain(response)
                row["points"] = [estimate_row(estimate) for estimate in response.points]
                row["seed_values"] = [weighted_sum(joined, _against_first(k, len(arms))).differences.tolist()
                                      for k in range(1, len(arms))]  # fmt: skip
            found.append(row)
    return found


def _against_first(k: int, count: int) -> list[float]:
    return [(i == k) - (i == 0) + 0.0 for i in range(count)]


def _without(values: Sequence[Any], index: int) -> list[Any]:
    return [*values[:index], *values[index + 1 :]]


def _lost(joined: Joined) -> dict[str, list[int]]:
    return {
        "seeds": list(joined.seeds),
        "diverged": [seed for seed, states in joined.states.items() if "diverged" in states],
        "unfinished": [
            seed for seed, states in joined.states.items() if seed not in joined.seeds and "diverged" not in states
        ],
    }


# Equal time


def equal_times(
    experiment: Experiment,
    store: RunStore,
    costs: Mapping[str, Any],
    scores: Callable[[RunFolder], Scores],
    confidence: float,
) -> list[dict[str, Any]]:
    """Of each arm against the baseline at each point: Δ by the baseline's slope, and the time to the target.

    From complete runs alone. The comparison with the slower arm trained again is one of ``contrasts``, of the kind
    "equal time". [] where the experiment asks for no equal time.
    """
    wanted = experiment.equal_time
    if not (wanted.rerun or wanted.slope):
        return []
    planned = {(ratio["point"], ratio["arm"]): ratio for ratio in equal_time_ratios(store)}
    measured = {(cost["point"], cost["arm"]): cost for cost in costs.get("costs", [])}
    found: list[dict[str, Any]] = []
    for point, arm in itertools.product(experiment.points, tested_arms(experiment)):
        cost = planned.get((point.name, arm)) or measured.get((point.name, arm))
        if arm == experiment.baseline or cost is None:
            continue
        row: dict[str, Any] = {"point": point.name, "arm": arm, "baseline": experiment.baseline}
        row |= {key: cost[key] for key in ("ratio", "low", "high")}
        if wanted.slope:
            row["slope"] = _by_slope(experiment, store, point.name, arm, cost, scores, confidence)
        row["target"] = _target(experiment, store, point.name, arm, costs)
        found.append(row)
    return found


def _by_slope(
    experiment: Experiment,
    store: RunStore,
    point: str,
    arm: str,
    cost: Mapping[str, Any],
    scores: Callable[[RunFolder], Scores],
    confidence: float,
) -> dict[str, Any] | None:
    baseline = experiment.baseline
    shorter = shorter_name(experiment)
    joined = join(experiment, store, [(point, arm), (point, baseline), (point, shorter)], scores)
    if not joined.seeds:
        return None
    steps = steps_of(experiment, point, shorter) / steps_of(
        experiment, point, baseline
    )  # whole steps: not quite the share
    estimate = equal_time_by_slope(
        weighted_sum(dataclasses.replace(joined, values=joined.values[:2]), (1.0, -1.0)), joined.values[2],
        ratio=cost["ratio"], ratio_low=cost["low"], ratio_high=cost["high"], share=steps,
        confidence=confidence,
    )  # fmt: skip
    return {**plain(estimate), **_lost(joined)}


def _target(
    experiment: Experiment, store: RunStore, point: str, arm: str, costs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Seconds to the target of both arms, over the seeds that have every complete run of both; None without times."""
    sides = {side: _complete_runs(experiment, point, side) for side in (arm, experiment.baseline)}
    seconds = _step_seconds(experiment, point, costs)
    names = [name for runs in sides.values() for name in runs]
    values: dict[int, dict[str, float]] = {}
    for seed in experiment.seeds:
        status = {name: store.run(Cell(point, name, seed)).status for name in names}
        if all(run["state"] == "finished" for run in status.values()):
            values[seed] = {name: run["val_bpb"] for name, run in status.items()}
    if not values or arm not in seconds:
        return None
    base = [of[experiment.baseline] for of in values.values()]
    target = experiment.equal_time.target or sum(base) / len(base)
    times: dict[str, TargetTime] = {}
    for side, runs in sides.items():
        ordered = sorted(runs, key=lambda name: runs[name])
        table = np.array([[of[name] for name in ordered] for of in values.values()])
        times[side] = time_to_target(
            [runs[name] for name in ordered], table, target, seconds[side], seeds=tuple(values)
        )
    ratio = time_ratio(times[arm], times[experiment.baseline])
    return {
        "target": target, "treatment": plain(times[arm]), "baseline": plain(times[experiment.baseline]),
        "ratio": plain(ratio),
    }  # fmt: skip


def _complete_runs(experiment: Experiment, point: str, arm: str) -> dict[str, int]:
    """The arm and its further runs -> their numbers of steps, one run for a number."""
    found: dict[int, str] = {}
    for name, other in experiment.arms.items():
        if name == arm or (other.of == arm and point in other.steps):
            found.setdefault(steps_of(experiment, point, name), name)
    return {name: steps for steps, name in found.items()}


def _step_seconds(experiment: Experiment, point: str, costs: Mapping[str, Any]) -> dict[str, float]:
    """Seconds a step of each arm that was timed: the baseline's times the ratio, which is what was measured well."""
    timed = costs.get("points", {}).get(point)
    if timed is None:
        return {}
    base = timed["baseline_seconds"]
    ratios = {cost["arm"]: cost["ratio"] for cost in costs["costs"] if cost["point"] == point}
    return {experiment.baseline: base, **{arm: ratio * base for arm, ratio in ratios.items()}}
