"""The cost of each arm, measured side by side in one process and stored with the experiment."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import digest, dump
from ..eval.throughput import busy_share, interleaved_step_times, median_of, saved_bytes
from ..files import write_atomic
from ..stats import ratio_estimate
from .building import batches, build_state, compute_dtype, open_corpus
from .design import Cell, Experiment, resolve, tested_arms
from .fingerprint import environment
from .plugins import import_plugins, read_plugins
from .store import RunStore

ROUNDS = 16
BUSY = 0.1  # share of the cores that others hold before we begin, above which the times are said to be unreliable
CONTROL = "timing control"  # the baseline once more, timed against itself


@dataclass(frozen=True)
class Cost:
    """Of one arm at one point against the baseline. ``low`` and ``high``: 95 % interval of the median ratio."""

    point: str
    arm: str
    ratio: float
    low: float
    high: float
    seconds: float  # median step
    saved_bytes: int
    saved_ratio: float


def measured_costs(experiment: Experiment, store: RunStore) -> dict[str, Any]:
    """What ``measure_costs`` stored; {} where nothing is, or where it was measured under other conditions."""
    path = store.folder / "timing.json"
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error}); delete it to measure again") from None
    return stored if stored.get("key") == _key(experiment) else {}


def _key(experiment: Experiment) -> str:
    cells = [
        Cell(point.name, arm, experiment.seeds[0]) for point in experiment.points for arm in tested_arms(experiment)
    ]
    runs = [resolve(experiment, cell) for cell in cells]
    return digest([dump(run) for run in runs])


def measure_costs(
    experiment: Experiment, store: RunStore, out: Path, tick: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Times every arm and the baseline against the baseline, A B C C B A, and stores the result.

    Run it while nothing else runs: what others hold of the machine is stored, and the report says when it is much.
    """
    others = busy_share()
    import_plugins(read_plugins(experiment.path, experiment.plugins))
    costs: list[dict[str, Any]] = []
    times_by_point: dict[str, Any] = {}
    arms = [experiment.baseline, *(arm for arm in tested_arms(experiment) if arm != experiment.baseline)]
    rounds = experiment.controls.rounds or ROUNDS
    total = rounds * len(experiment.points)
    threads = torch.get_num_threads()
    record: dict[str, Any] = {}
    for index, point in enumerate(experiment.points):
        configs = {arm: resolve(experiment, Cell(point.name, arm, experiment.seeds[0])) for arm in arms}
        configs[CONTROL] = configs[experiment.baseline]
        base = configs[experiment.baseline]
        torch.set_num_threads(base.train.threads)
        corpus = open_corpus(base.data, base.model.vocab_size, out)
        batch_of = batches(base, corpus.rows(base.model.context))
        states = {arm: build_state(config) for arm, config in configs.items()}
        saved = {arm: saved_bytes(state, batch_of(0), base.train.micro_rows) for arm, state in states.items()}
        times = interleaved_step_times(
            states, batch_of, rounds=rounds, warmup=min(2, rounds), micro_rows=base.train.micro_rows,
            tick=lambda done, _, index=index: tick(index * rounds + done, total),
        )  # fmt: skip
        for arm in configs:
            if arm == experiment.baseline:
                continue
            ratio = ratio_estimate(times[experiment.baseline], times[arm])
            costs.append(
                vars(
                    Cost(
                        point.name, arm, ratio.median, ratio.low, ratio.high, median_of(times[arm]), saved[arm],
                        saved[arm] / saved[experiment.baseline],
                    )
                )
            )  # fmt: skip
        times_by_point[point.name] = {
            "baseline_seconds": median_of(times[experiment.baseline]),
            "baseline_saved_bytes": saved[experiment.baseline],
            "seconds": times,
        }
        record = environment(base.train, compute_dtype(base), states[experiment.baseline].token_nats is not None)
    torch.set_num_threads(threads)
    content = {
        "key": _key(experiment), "rounds": rounds, "others": others, "busy": others is not None and others > BUSY,
        "costs": costs, "points": times_by_point, "environment": record,
    }  # fmt: skip
    write_atomic(store.folder / "timing.json", json.dumps(content, indent=1))
    return content
