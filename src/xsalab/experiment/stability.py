"""How an experiment's runs behaved while they trained: spikes, gradient norms, breakdowns, growth of the logits.

From the runs' stored metrics and diagnoses alone; nothing is run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..stats import clopper_pearson
from ..stats.stability import EARLY, FIRST, judge
from .design import Experiment, expand
from .mechanism import stored
from .store import RunFolder, RunStore

Row = dict[str, Any]


def stability(experiment: Experiment, store: RunStore) -> tuple[list[Row], list[Row]]:
    """(a row each point and arm, a row each run that has begun). The twin is left out: it is another run's copy.

    Of an arm, ``low`` and ``high`` are the exact 95 % interval (Clopper–Pearson) of the share that diverges, over the
    runs that have ended; ``nonfinite`` counts runs. ``logit_growth`` is the mean over runs of the largest attention
    logit at the last diagnosis less that at the first, where those are two. None is what is not known: of a run too
    short to be judged, its spikes too.
    """
    cells = [cell for cell in expand(experiment) if cell.arm != "twin"]
    runs = [
        {"name": cell.name, "point": cell.point, "arm": cell.arm, "seed": cell.seed, **_run(store.run(cell))}
        for cell in cells
    ]
    arms = [
        _arm(point, arm, [run for run in runs if (run["point"], run["arm"]) == (point, arm)])
        for point, arm in dict.fromkeys((cell.point, cell.arm) for cell in cells)
    ]
    begun = [{key: run[key] for key in run if key != "state"} for run in runs if run["state"] != "waiting"]
    return arms, begun


def _run(run: RunFolder) -> Row:
    status, metrics = run.status, run.metrics()
    losses = [(row["step"], row["loss"]) for row in metrics if _finite(row.get("loss"))]
    norms = [row["grad_norm"] for row in metrics if _finite(row.get("grad_norm"))]
    judged = judge([loss for _, loss in losses])
    found, long_enough = judged.spikes(), len(losses) > FIRST
    return {
        "state": status["state"],
        "spikes": len(found) if long_enough else None,
        "largest_z": float(judged.z[EARLY:].max()) if long_enough else None,
        "spike_steps": [losses[index][0] for index in found],
        "grad_norm_median": statistics.median(norms) if norms else None,
        "largest_grad_norm": max(norms, default=None),
        "nonfinite": status.get("step") if status["state"] == "diverged" else None,
        **_logits(run),
    }


def _logits(run: RunFolder) -> Row:
    """The largest attention logit of any layer and head, at the first and the last diagnosis and over all of them."""
    rows = [
        row for row in stored(run.path, "mechanism", ("step", "start", "end", "logit")) if _finite(row.get("logit"))
    ]
    context = max((row["end"] for row in rows), default=0)
    largest: dict[int, float] = {}
    for row in rows:
        if (row["start"], row["end"]) == (0, context):
            largest[row["step"]] = max(row["logit"], largest.get(row["step"], -math.inf))
    steps = sorted(largest)
    return {
        "first_logit": largest[steps[0]] if steps else None,
        "last_logit": largest[steps[-1]] if len(steps) > 1 else None,
        "largest_logit": max(largest.values(), default=None),
    }


def _arm(point: str, arm: str, runs: Sequence[Mapping[str, Any]]) -> Row:
    states = [run["state"] for run in runs]
    finished, diverged = states.count("finished"), states.count("diverged")
    low, high = clopper_pearson(diverged, finished + diverged) if finished + diverged else (None, None)
    spikes = [run["spikes"] for run in runs if run["spikes"] is not None]
    growth = [run["last_logit"] - run["first_logit"] for run in runs if run["last_logit"] is not None]
    return {
        "point": point,
        "arm": arm,
        "runs": len(runs),
        "finished": finished,
        "diverged": diverged,
        "low": low,
        "high": high,
        "spikes": sum(spikes) if spikes else None,
        "runs_with_spikes": sum(count > 0 for count in spikes) if spikes else None,
        "largest_z": _largest(runs, "largest_z"),
        "largest_grad_norm": _largest(runs, "largest_grad_norm"),
        "nonfinite": sum(run["nonfinite"] is not None for run in runs),
        "largest_logit": _largest(runs, "largest_logit"),
        "logit_growth": statistics.fmean(growth) if growth else None,
    }


def _largest(runs: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return max((run[key] for run in runs if run[key] is not None), default=None)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
