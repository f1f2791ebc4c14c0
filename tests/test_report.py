"""The report says what the outcome says, of any experiment: whole, half done, broken, hostile.

The experiments here are written to disk as runs would leave them, without training; ``outcome`` reads them as it
reads real ones.
"""

from __future__ import annotations

import io
import json
import math
import random
import re
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from xsalab.config import dump
from xsalab.eval import ItemScore
from xsalab.experiment import outcome as outcome_module
from xsalab.experiment.design import Cell, Experiment, expand, load_experiment, resolve
from xsalab.experiment.outcome import outcome, plus_minus
from xsalab.experiment.store import RunStore
from xsalab.report import embed, print_outcome, write_report

HOSTILE = "</script><script>alert(1)</script>"
TOML = f"""# a comment with {HOSTILE} & "quotes"
name = "paired"
seeds = [0, 1, 2, 3, 4, 5]
[model]
depth = 2
width = 64
heads = 2
context = 128
vocab_size = 512
[train]
tokens = 204800
batch_tokens = 2048
[arms.standard]
[arms.xsa]
variant = "xsa"
[arms.half]
variant = "xsa"
alpha = 0.5
[controls]
positive = {{ "optim.lr_scale" = 0.5 }}
"""
SHIFT = {"standard": 0.0, "twin": 0.0, "xsa": -0.006, "half": -0.001, "null": 0.0, "positive": 0.05}
DOCUMENTS = 40
Change = Callable[[Cell], Mapping[str, Any]]


def fake(folder: Path, toml: str = TOML, change: Change = lambda cell: {}, steps: int = 100) -> tuple[Experiment, RunStore]:
    """An experiment whose runs are all finished, but for what ``change`` says of a cell's status."""
    path = folder / "paired.toml"
    path.write_text(toml, encoding="utf-8")
    experiment = load_experiment(path)
    store = RunStore.of(experiment, folder)
    store.folder.mkdir(parents=True)
    for cell in expand(experiment):
        status = {"state": "finished", "step": steps, "steps": steps, "resumes": 0, **change(cell)}
        if status["state"] != "waiting":
            _write_run(experiment, store, cell, status)
    return experiment, store


def _write_run(experiment: Experiment, store: RunStore, cell: Cell, status: dict[str, Any]) -> None:
    noise = random.Random(f"{cell.point} {cell.arm.replace('twin', 'standard')} {cell.seed}")
    shared = random.Random(f"{cell.point} {cell.seed}").gauss(0, 0.01)
    level = 2.1 + shared + SHIFT.get(cell.arm, -0.003) + noise.gauss(0, 0.002)
    run = store.run(cell)
    run.path.mkdir(parents=True)
    config = resolve(experiment, cell)
    environment = {"torch": "2", "device": "a processor", "threads": 1, "kernel": "sdpa"}
    run.write("fingerprint", {"config": dump(config), "start": {"w": "1"}, "environment": environment})
    losses = [
        level * (0.75 + 2.2 * math.exp(-step / 12)) + noise.gauss(0, 0.03) for step in range(status["step"])
    ]
    rows = [{"step": step, "loss": loss, "grad_norm": 0.4} for step, loss in enumerate(losses)]
    if status["state"] == "diverged":
        rows.append({"step": len(rows), "loss": None, "grad_norm": None})
    run.path.joinpath("metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if status["state"] == "finished":
        scores = [
            ItemScore("bpb", f"d{i}", (level + 0.1 * math.sin(i) + noise.gauss(0, 0.004)) * size * math.log(2), size)
            for i, size in enumerate(range(100, 100 + DOCUMENTS))
        ]
        run.write_scores(scores)
        bits = sum(score.value for score in scores) / math.log(2) / sum(score.weight for score in scores)
        seconds = {"start": 1.0, "training": 61.0, "evaluation": 0.25}
        status = {**status, "val_bpb": bits, "seconds": seconds, "weights": f"{cell.seed}"}
    run.write("status", status)
