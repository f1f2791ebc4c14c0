"""Experiments on disk as their runs would leave them, without training."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xsalab.config import dump
from xsalab.eval import ItemScore, TaskAnswers
from xsalab.experiment.answers import write_answers
from xsalab.experiment.design import Cell, Experiment, expand, resolve
from xsalab.experiment.outcome import outcome
from xsalab.experiment.reading import load_experiment
from xsalab.experiment.stages import as_run, begin_looks, decided, next_look, plan_equal_time
from xsalab.experiment.store import RunFolder, RunStore
from xsalab.experiment.timing import _key

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
HEAD = TOML.split("[arms.standard]")[0]
CROSSED = """
[factors.attention]
standard = { variant = "standard" }
xsa = { variant = "xsa" }
[factors.optimizer]
muon = { optim.kind = "hybrid" }
adamw = { optim.kind = "adamw" }
[controls]
twin = false
"""
ARMS = "[arms.standard]\n[arms.xsa]\nvariant = 'xsa'\n[controls]\ntwin = false\nnull = false\n"


DOSES = """
[factors]
attention = { xsa = { variant = "xsa" } }
alpha = [0.0, 0.25, 0.5, 0.75, 1.0]
[controls]
twin = false
null = false
"""


EQUAL = ARMS.replace("null = false", "null = false\n[equal_time]\nrerun = true\nslope = true")


Change = Callable[[Cell], Mapping[str, Any]]
Shift = Callable[[Cell], float]


def usual_shift(cell: Cell) -> float:
    return SHIFT.get(cell.arm, -0.003)


def fake(
    folder: Path,
    toml: str = TOML,
    change: Change = lambda cell: {},
    steps: int = 100,
    shift: Shift = usual_shift,
) -> tuple[Experiment, RunStore]:
    """An experiment whose runs are all finished, but for what ``change`` says of a cell's status."""
    path = folder / "paired.toml"
    path.write_text(toml, encoding="utf-8")
    experiment = load_experiment(path)
    store = RunStore.of(experiment, folder)
    store.folder.mkdir(parents=True)
    for cell in expand(experiment):
        status = {"state": "finished", "step": steps, "steps": steps, "resumes": 0, **change(cell)}
        if status["state"] != "waiting":
            fake_run(experiment, store, cell, status, shift)
    return experiment, store


def fake_run(
    experiment: Experiment, store: RunStore, cell: Cell, status: dict[str, Any], shift: Shift = usual_shift
) -> None:
    """The folder of one run as it would be left. ``shift``: what the cell adds to the level of its seed, in bpb."""
    noise = random.Random(f"{cell.point} {cell.arm.replace('twin', 'standard')} {cell.seed}")
    shared = random.Random(f"{cell.point} {cell.seed}").gauss(0, 0.01)
    level = 2.1 + shared + shift(cell) + noise.gauss(0, 0.002)
    run = store.run(cell)
    run.path.mkdir(parents=True)
    config = resolve(experiment, cell)
    environment = {"torch": "2", "device": "a processor", "threads": 1, "kernel": "sdpa"}
    entries = {"start": {"w": "1"}, "environment": environment, "code": "c", "machine": "m", "plugins": {}}
    run.write("fingerprint", {"config": dump(config), **entries})
    losses = [level * (0.75 + 2.2 * math.exp(-step / 12)) + noise.gauss(0, 0.03) for step in range(status["step"])]
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


def looked_at(folder: Path, shift: Callable[[Cell], float], most: int) -> tuple[Experiment, RunStore, dict[str, Any]]:
    """A sequential experiment taken to its end, its runs faked as each look asks for them."""
    toml = HEAD + '[primary]\ncontrast = "xsa - standard"\n' + ARMS
    written, store = fake(
        folder, toml.replace("seeds = [0, 1, 2, 3, 4, 5]", "seeds = [7, 3]"), lambda cell: {"state": "waiting"}
    )
    experiment: Experiment | None = begin_looks(written, store, most)
    while True:
        assert experiment is not None
        for seed in experiment.seeds:
            for arm in ("standard", "xsa"):
                cell = Cell("base", arm, seed)
                if store.run(cell).state == "waiting":
                    fake_run(experiment, store, cell, {"state": "finished", "step": 9, "steps": 9, "resumes": 0}, shift)
        content = outcome(experiment, store)
        if decided(content) or (further := next_look(experiment, store)) is None:
            return as_run(written, store), store, content
        experiment = further


def timed(folder: Path, ratio: float, others: float = 0.0) -> tuple[Experiment, RunStore]:
    """Both arms of 100 steps finished; the step-time ratio of the treatment as if measured."""
    experiment, store = fake(folder, HEAD + EQUAL)
    cost = {"point": "base", "arm": "xsa", "ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01, "seconds": 2.0}
    cost |= {"saved_bytes": 1, "saved_ratio": 1.0}
    costs = {
        "key": _key(experiment), "rounds": 16, "others": others, "busy": others > 0.1, "costs": [cost],
        "points": {"base": {"baseline_seconds": 2.0, "baseline_saved_bytes": 1}}, "environment": {},
    }  # fmt: skip
    (store.folder / "timing.json").write_text(json.dumps(costs), encoding="utf-8")
    experiment = plan_equal_time(as_run(experiment, store), store, costs)
    for cell in [Cell("base", arm, seed) for arm in experiment.arms for seed in experiment.seeds]:
        steps = experiment.arms[cell.arm].steps
        if steps:
            status = {"state": "finished", "step": steps["base"], "steps": steps["base"], "resumes": 0}
            lost = 0.001 * (100 - steps["base"])  # bpb for the steps left out, of both arms
            fake_run(experiment, store, cell, status, lambda cell, lost=lost: lost)
    return experiment, store


TASKS = {"arc_easy": (0.25, 0.25, 0.4, 120), "lambada": (0.0, 0.0, 0.1, 60), "boolq": (0.62, 0.5, 0.55, 24)}


def fake_answers(
    store: RunStore,
    cell: Cell,
    folder: str = "core",
    gain: float = 0.0,
    tasks: Mapping[str, tuple[float, float, float, int]] = TASKS,
    key: str = "k",
    counts: Mapping[str, int] | None = None,
) -> list[TaskAnswers]:
    """Writes a run's answers: name -> (baseline, chance, accuracy, items). ``gain``: on the accuracy, in the mean.

    An item is easier or harder for all runs alike, and a little for an arm.
    """
    found: list[TaskAnswers] = []
    for task, (baseline, chance, accuracy, items) in tasks.items():
        scores: list[ItemScore] = []
        for i in range(items):
            shared = random.Random(f"{task} {i}").gauss(0, 0.25)
            own = random.Random(f"{task} {i} {cell}").random()
            scores.append(ItemScore(task, f"line {i}", float(own < accuracy + gain + shared), 1.0))
        found.append(TaskAnswers(task, baseline, chance, tuple(scores), dict(counts or {})))
        write_answers(store.run(cell).path / folder, found[-1], key)
    return found


def fake_tuned(
    store: RunStore, cell: Cell, shift: float = 0.0, state: str = "finished", sft: Mapping[str, Any] | None = None
) -> None:
    """A fine-tuned run with the nats and bytes of 30 held-out conversations. ``sft``: other settings of its own."""
    noise = random.Random(f"tuned {cell}")
    run = RunFolder(store.run(cell).path / "sft")
    run.path.mkdir(parents=True, exist_ok=True)
    if state == "finished":
        run.write_scores(
            [
                ItemScore("chat", f"c{i}", (1.2 + shift + noise.gauss(0, 0.01)) * size * math.log(2), size)
                for i, size in enumerate(range(50, 80))
            ]
        )
    base = store.run(cell).fingerprint()
    config = {**base["config"], "sft": {"sources": ["chat.jsonl"], "steps": 5, **(sft or {})}}
    run.write("fingerprint", {**base, "config": config, "start": {}})
    run.write("status", {"state": state, "step": 5, "steps": 5, **({"val_bpb": 1.2} if state == "finished" else {})})
