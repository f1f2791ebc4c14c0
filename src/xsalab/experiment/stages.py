"""What is decided while an experiment runs: more seeds at fixed looks, more runs for equal time.

declared.json      what the experiment is about, written before the first run and never after
sequential.json    the looks, all seeds up to the cap, and how many of them were reached; written before the first run
equal_time.json    the step-time ratios as measured, and the further runs that follow from them; written once

They are facts of the experiment from then on: every verb reads them through ``as_run``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from ..config import build, config, dump
from ..files import write_atomic
from ..stats.looks import looks_up_to
from .design import Arm, Experiment, expand, steps_of, tested_arms
from .store import RunStore
from .timing import measured_costs

DECIDED = ("better", "worse", "equivalent", "diverged")


def as_run(experiment: Experiment, store: RunStore) -> Experiment:
    """The experiment with the seeds and further runs that were decided since its file was written."""
    path = store.folder / "sequential.json"
    if path.is_file():
        known = _read_looks(path)
        expected = _seeds_up_to(experiment, known.looks[-1], path)
        if expected != known.seeds:
            raise ValueError(
                f"{experiment.path}: seeds = {list(experiment.seeds)}: the experiment began with {list(known.seeds)}; "
                "restore them, or give the experiment another name"
            )
        experiment = dataclasses.replace(experiment, seeds=expected[: known.reached], looks=known.looks)
    return _with_further_runs(experiment, store)


def _with_further_runs(experiment: Experiment, store: RunStore) -> Experiment:
    arms = dict(experiment.arms)
    if experiment.equal_time.slope:
        share, baseline = experiment.equal_time.share, experiment.baseline
        shorter = {p.name: max(1, round(share * steps_of(experiment, p.name, baseline))) for p in experiment.points}
        name = shorter_name(experiment)
        arms[name] = _further(experiment, name, baseline, "", shorter)
    for name, further in _read_planned(store.folder / "equal_time.json").arms.items():
        if further.of in arms and further.against in arms:
            arms[name] = _further(experiment, name, further.of, further.against, further.steps)
    return dataclasses.replace(experiment, arms=arms)


def shorter_name(experiment: Experiment) -> str:
    """The baseline's run of a share of its steps: "standard@90", without a dot, as it names a folder."""
    return f"{experiment.baseline}@{100 * experiment.equal_time.share:g}".replace(".", "_")


def _further(experiment: Experiment, name: str, of: str, against: str, steps: Mapping[str, int]) -> Arm:
    return dataclasses.replace(experiment.arms[of], name=name, of=of, against=against, steps=dict(steps))


@config
class _Looks:
    """sequential.json. ``before``: runs that had ended when the looks were declared."""

    looks: tuple[int, ...]
    seeds: tuple[int, ...]
    reached: int
    before: int = 0

    def __post_init__(self) -> None:
        if not self.looks or self.reached not in self.looks or len(self.seeds) != self.looks[-1]:
            raise ValueError("looks, seeds and reached do not belong together")


@config
class _Ratio:
    point: str
    arm: str
    ratio: float
    low: float
    high: float
    steps: int


@config
class _Further:
    of: str
    against: str
    steps: Mapping[str, int]


@config
class _Planned:
    """equal_time.json."""

    ratios: tuple[_Ratio, ...] = ()
    arms: Mapping[str, _Further] = field(default_factory=dict[str, _Further])


def _read_looks(path: Path) -> _Looks:
    return build(_Looks, _table(path), f"{path}: damaged; give the experiment another name")


def _read_planned(path: Path) -> _Planned:
    if not path.is_file():
        return _Planned()
    return build(_Planned, _table(path), f"{path}: damaged; delete it to plan these runs again")


def _table(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: damaged: no table")
    return content


# Looks


def begin_looks(experiment: Experiment, store: RunStore, max_seeds: int) -> Experiment:
    """Declares the looks up to ``max_seeds``, or goes on with those that were declared before.

    ValueError without a primary contrast to decide, and where another cap was declared: the boundaries hold for one.
    """
    path = store.folder / "sequential.json"
    if not experiment.primary.contrast:
        raise ValueError(
            f"{experiment.path}: primary.contrast is empty: --until-decided needs the contrast that is to be decided"
        )
    if path.is_file():
        if (cap := _read_looks(path).looks[-1]) != max_seeds:
            raise ValueError(
                f"--max-seeds {max_seeds}: this experiment was begun with a cap of {cap} seeds, and its "
                "boundaries hold for that cap alone; give the same, or another name to the experiment"
            )
        return as_run(experiment, store)
    looks = looks_up_to(max_seeds)
    ended = sum(store.run(cell).state in ("finished", "diverged") for cell in expand(experiment))
    _write_looks(path, _Looks(looks, _seeds_up_to(experiment, max_seeds, path), looks[0], ended))
    return as_run(experiment, store)


def runs_before_looks(store: RunStore) -> int:
    """How many runs had ended when the looks were declared: 0 where they were declared before the first."""
    path = store.folder / "sequential.json"
    return _read_looks(path).before if path.is_file() else 0


def next_look(experiment: Experiment, store: RunStore) -> Experiment | None:
    """The experiment with the seeds of the look after this one; None at the cap."""
    later = [look for look in experiment.looks if look > len(experiment.seeds)]
    if not later:
        return None
    path = store.folder / "sequential.json"
    known = dataclasses.replace(_read_looks(path), reached=later[0])
    _write_looks(path, known)
    return dataclasses.replace(experiment, seeds=known.seeds[: later[0]])


def _write_looks(path: Path, known: _Looks) -> None:
    write_atomic(path, json.dumps(dump(known), indent=1))


def _seeds_up_to(experiment: Experiment, count: int, path: Path) -> tuple[int, ...]:
    """The file's seeds first, then the smallest numbers that are not among them."""
    given = experiment.seeds
    if len(given) > count:
        raise ValueError(
            f"{experiment.path}: seeds = {list(given)}: more than the cap of {count} ({path.name}); "
            "raise --max-seeds or list fewer"
        )
    others = (seed for seed in range(2 * count) if seed not in given)
    return (*given, *(seed for seed, _ in zip(others, range(count - len(given)), strict=False)))


# What was declared


def declare(experiment: Experiment, store: RunStore) -> None:
    """Stores what the experiment is about, as long as no run has begun."""
    if not any((store.folder / "runs").glob("*")):
        write_atomic(store.folder / "declared.json", json.dumps(_declaration(experiment), indent=1))


def changed_since(experiment: Experiment, store: RunStore) -> dict[str, tuple[Any, Any]]:
    """Field -> (declared before the runs, now), of what was changed; {} where nothing is known of it."""
    path = store.folder / "declared.json"
    if not path.is_file():
        return {}
    before, now = _table(path), _declaration(experiment)
    return {name: (before.get(name), value) for name, value in now.items() if before.get(name) != value}


def _declaration(experiment: Experiment) -> dict[str, Any]:
    primary = {f"primary.{name}": value for name, value in dump(experiment.primary).items()}
    return {**primary, "baseline": experiment.baseline, "lower_is_better": experiment.metric.lower_is_better}


def decided(content: Mapping[str, Any]) -> bool:
    """Whether ``outcome`` gives the primary contrast a verdict at every point."""
    rows = [row for row in (*content["contrasts"], *content["combinations"]) if row["primary"]]
    return bool(rows) and all(row.get("verdict", {}).get("word") in DECIDED for row in rows)


# Equal time


def plan_equal_time(experiment: Experiment, store: RunStore, costs: Mapping[str, Any]) -> Experiment:
    """Adds the further runs of equal time: the slower of an arm and the baseline again, its steps divided by the ratio.

    costs: what ``measure_costs`` stored. The ratio of an arm is taken once, on a quiet machine: a later measurement
    changes no run. A ratio that does not change the number of steps asks for no run.
    """
    path = store.folder / "equal_time.json"
    if not experiment.equal_time.rerun or costs["busy"]:
        return _with_further_runs(experiment, store)
    known = _read_planned(path)
    arms, ratios = dict(known.arms), list(known.ratios)
    taken = {(ratio.point, ratio.arm) for ratio in ratios}
    for cost in costs["costs"]:
        if cost["arm"] not in tested_arms(experiment) or (cost["point"], cost["arm"]) in taken:
            continue
        point, arm, ratio = cost["point"], cost["arm"], cost["ratio"]
        slower, faster = (arm, experiment.baseline) if ratio > 1 else (experiment.baseline, arm)
        steps = steps_of(experiment, point, slower)
        fewer = max(1, round(steps / max(ratio, 1 / ratio)))
        name = f"{slower}@equal-time" if slower == arm else f"{slower}@equal-time-{arm}"
        ratios.append(_Ratio(point, arm, ratio, cost["low"], cost["high"], fewer))
        if fewer < steps:
            others = arms[name].steps if name in arms else {}
            arms[name] = _Further(slower, faster, {**others, point: fewer})
    write_atomic(path, json.dumps(dump(_Planned(tuple(ratios), arms)), indent=1))
    return _with_further_runs(experiment, store)


def usable_costs(experiment: Experiment, store: RunStore) -> bool:
    """Whether the step times need no measuring: they are there, and quiet where runs are still to follow from them."""
    costs = measured_costs(experiment, store)
    waits = experiment.equal_time.rerun and len(equal_time_ratios(store)) < len(costs.get("costs", ())) - 1
    return bool(costs) and not (waits and costs["busy"])


def equal_time_ratios(store: RunStore) -> list[dict[str, Any]]:
    """The step-time ratios that the further runs were planned with."""
    return [vars(ratio) for ratio in _read_planned(store.folder / "equal_time.json").ratios]
