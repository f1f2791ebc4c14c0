"""What is decided while an experiment runs: more seeds at fixed looks, more runs for equal time.

sequential.json    the looks, all seeds up to the cap, and how many of them were reached; written before the first run
equal_time.json    the step-time ratios as measured, and the further runs that follow from them; written once

Both are facts of the experiment from then on: every verb reads them through ``as_run``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..files import write_atomic
from ..stats.looks import looks_up_to
from .design import Arm, Cell, Experiment, resolve, tested_arms
from .store import RunStore
from .timing import measured_costs

DECIDED = ("better", "worse", "equivalent", "diverged")


def as_run(experiment: Experiment, store: RunStore) -> Experiment:
    """The experiment with the seeds and further runs that were decided since its file was written."""
    if looks := _read(store.folder / "sequential.json"):
        expected = _seeds_up_to(experiment, looks["looks"][-1], store.folder / "sequential.json")
        if list(expected) != looks["seeds"]:
            raise ValueError(
                f"{experiment.path}: seeds = {list(experiment.seeds)}: the experiment began with {looks['seeds']}; "
                "restore them, or give the experiment another name"
            )
        seeds = expected[: looks["reached"]]
        experiment = dataclasses.replace(experiment, seeds=seeds, looks=tuple(looks["looks"]))
    return _with_further_runs(experiment, store)


def _with_further_runs(experiment: Experiment, store: RunStore) -> Experiment:
    arms = dict(experiment.arms)
    if experiment.equal_time.slope:
        share, baseline = experiment.equal_time.share, experiment.baseline
        shorter = {p.name: max(1, round(share * _steps(experiment, p.name, baseline))) for p in experiment.points}
        name = shorter_name(experiment)
        arms[name] = _further(experiment, name, baseline, "", shorter)
    if stored := _read(store.folder / "equal_time.json"):
        for name, arm in stored["arms"].items():
            if arm["of"] in arms and arm["against"] in arms:
                arms[name] = _further(experiment, name, arm["of"], arm["against"], arm["steps"])
    return dataclasses.replace(experiment, arms=arms)


def shorter_name(experiment: Experiment) -> str:
    """The baseline's run of a share of its steps: "standard@90", without a dot, as it names a folder."""
    return f"{experiment.baseline}@{100 * experiment.equal_time.share:g}".replace(".", "_")


def _further(experiment: Experiment, name: str, of: str, against: str, steps: Mapping[str, int]) -> Arm:
    return dataclasses.replace(experiment.arms[of], name=name, of=of, against=against, steps=dict(steps))


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); delete it, and give the experiment another name") from None


def _steps(experiment: Experiment, point: str, arm: str) -> int:
    return resolve(experiment, Cell(point, arm, experiment.seeds[0])).train.steps


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
    if known := _read(path):
        if known["looks"][-1] != max_seeds:
            raise ValueError(
                f"--max-seeds {max_seeds}: this experiment was begun with a cap of {known['looks'][-1]} seeds, and its "
                "boundaries hold for that cap alone; give the same, or another name to the experiment"
            )
        return as_run(experiment, store)
    looks = looks_up_to(max_seeds)
    _write_looks(path, looks, _seeds_up_to(experiment, max_seeds, path), looks[0])
    return as_run(experiment, store)


def next_look(experiment: Experiment, store: RunStore) -> Experiment | None:
    """The experiment with the seeds of the look after this one; None at the cap."""
    later = [look for look in experiment.looks if look > len(experiment.seeds)]
    if not later:
        return None
    path = store.folder / "sequential.json"
    known = _read(path)
    _write_looks(path, experiment.looks, known["seeds"], later[0])
    return dataclasses.replace(experiment, seeds=tuple(known["seeds"][: later[0]]))


def _write_looks(path: Path, looks: tuple[int, ...], seeds: Any, reached: int) -> None:
    content = {"looks": list(looks), "seeds": list(seeds), "reached": reached}
    write_atomic(path, json.dumps(content, indent=1))


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


def decided(content: Mapping[str, Any]) -> bool:
    """Whether ``outcome`` gives the primary contrast a verdict at every point."""
    rows = [row for row in (*content["contrasts"], *content["combinations"]) if row["primary"]]
    return bool(rows) and all(row.get("verdict", {}).get("word") in DECIDED for row in rows)


# Equal time


def plan_equal_time(experiment: Experiment, store: RunStore, costs: Mapping[str, Any]) -> Experiment:
    """Adds the further runs of equal time: the slower of an arm and the baseline again, its steps divided by the ratio.

    costs: what ``measure_costs`` stored. The ratios are taken once, on a quiet machine: a later measurement changes no
    run. A ratio that does not change the number of steps asks for no run.
    """
    path = store.folder / "equal_time.json"
    if not experiment.equal_time.rerun or path.is_file() or costs["busy"]:
        return _with_further_runs(experiment, store)
    arms: dict[str, dict[str, Any]] = {}
    ratios: list[dict[str, Any]] = []
    for cost in costs["costs"]:
        if cost["arm"] not in tested_arms(experiment):
            continue
        point, arm, ratio = cost["point"], cost["arm"], cost["ratio"]
        slower, faster = (arm, experiment.baseline) if ratio > 1 else (experiment.baseline, arm)
        steps = _steps(experiment, point, slower)
        fewer = max(1, round(steps / max(ratio, 1 / ratio)))
        name = f"{slower}@equal-time" if slower == arm else f"{slower}@equal-time-{arm}"
        ratios.append({key: cost[key] for key in ("point", "arm", "ratio", "low", "high")} | {"steps": fewer})
        if fewer < steps:
            arms.setdefault(name, {"of": slower, "against": faster, "steps": {}})["steps"][point] = fewer
    write_atomic(path, json.dumps({"ratios": ratios, "arms": arms}, indent=1))
    return _with_further_runs(experiment, store)


def usable_costs(experiment: Experiment, store: RunStore) -> bool:
    """Whether the step times need no measuring: they are there, and quiet where runs are still to follow from them."""
    costs = measured_costs(experiment, store)
    waits = experiment.equal_time.rerun and not (store.folder / "equal_time.json").is_file()
    return bool(costs) and not (waits and costs["busy"])


def equal_time_ratios(store: RunStore) -> list[dict[str, Any]]:
    """The step-time ratios that the further runs were planned with."""
    return _read(store.folder / "equal_time.json").get("ratios", [])
