"""The loader's share of a training step: python bench/loader.py [FILE.toml] prints one JSON value.

Prepares the experiment's corpus in a temporary folder, asks for many batches without training, then trains a few
steps of the baseline. The share is that of the medians; it must stay below 1 %. Times are only worth something
on a machine that does nothing else.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from xsalab.eval.throughput import busy_share
from xsalab.experiment.building import batches, build_state
from xsalab.experiment.design import Cell, resolve
from xsalab.experiment.fleet import begin_experiment
from xsalab.experiment.reading import load_experiment
from xsalab.train import train_step

BATCHES, STEPS, WARMUP = 200, 10, 2


def main() -> None:
    """Measures and prints."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / "experiments" / "quick.toml")
    others, experiment = busy_share(), load_experiment(path)
    config = resolve(experiment, Cell(experiment.points[0].name, experiment.baseline, experiment.seeds[0]))
    torch.set_num_threads(config.train.threads)
    with tempfile.TemporaryDirectory() as home:
        _, corpora = begin_experiment(experiment, Path(home), all_shards=True)
        rows = corpora[0].rows(config.model.context)
        batch_of = batches(config, rows)
        loading = []
        for step in range(BATCHES):
            begin = time.perf_counter()
            batch_of(step)
            loading.append(time.perf_counter() - begin)
        state, schedule = build_state(config), config.optim.schedule_over(config.train.steps)
        steps = [
            train_step(
                state, batch_of(step), schedule, micro_rows=config.train.micro_rows, clip=config.optim.clip
            ).seconds
            for step in range(WARMUP + STEPS)
        ][WARMUP:]
    batch, step = statistics.median(loading), statistics.median(steps)
    found = {
        "experiment": path.name,
        "rows": len(rows),
        "batch_rows": config.train.batch_rows(config.model.context),
        "context": config.model.context,
        "batch_seconds": batch,
        "slowest_batch_seconds": max(loading),  # the first of an epoch draws its permutation
        "step_seconds": step,
        "share": batch / (batch + step),
        "others": others,
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
