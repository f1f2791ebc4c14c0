"""What an experiment's runs answered: one benchmark, read from the files beside the runs and checked to be the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..stats.items import centred_values
from .answers import one_way, read_answers
from .design import Cell, Experiment, Metric, declared_factors
from .pairing import Scores, describe, first_other, mismatch
from .store import RunFolder, RunStore

MARGIN = 0.01  # of a benchmark's figure: a smaller difference does not matter
LOSS_MARGIN = 0.001  # of the held-out loss of fine-tuning, a share of the baseline's
TASKS = {"core": 22, "chatcore": 5}  # folder -> tasks of the benchmark as it is published
SHAPES_KEYS = ("model.context", "model.vocab_size", "data.")  # fields that change how an item is asked


@dataclass(frozen=True, eq=False)
class Task:
    """What one run answered on one task: ``values`` and ``weights`` (n,), an entry an item."""

    key: str
    baseline: float
    chance: float
    counts: Mapping[str, int]
    items: tuple[str, ...]
    values: NDArray[np.float64]
    weights: NDArray[np.float64]

    @property
    def accuracy(self) -> float:
        return float(self.values.sum() / self.weights.sum())


Answers = dict[Cell, dict[str, Task]]


@dataclass(frozen=True, eq=False)
class Asked:
    """One benchmark, as far as the runs have answered it. ``folder``: under a run's.

    answers: of the runs that answered every task. scores: the same item by item, as a metric of the run. diverged: runs
    whose fine-tuning diverged. task_of: item -> task; empty for a loss, which has none. partial: the benchmark as it is
    published has more tasks.
    """

    folder: str
    metric: Metric
    answers: Answers
    scores: Mapping[Path, Scores]
    diverged: frozenset[Path] = frozenset()
    task_of: Mapping[str, str] = field(default_factory=dict[str, str])
    partial: bool = False

    @property
    def margin(self) -> float:
        """Absolute, or of a loss a share of the baseline's."""
        return MARGIN if self.task_of else LOSS_MARGIN

    @property
    def broken(self) -> bool:
        """Whether fine-tuning is all that can be spoken of, as a run of it diverged."""
        return self.folder == "sft" and bool(self.diverged)

    def state(self, run: RunFolder) -> str:
        if run.path in self.diverged:
            return "diverged"
        return "waiting" if run.state == "finished" and run.path not in self.scores else run.state


def read_tasks(folder: Path, weights: str) -> dict[str, Task]:
    """The tasks of a benchmark's folder; ``weights`` are those that the run has now.

    Raises ValueError where answers are of other weights, or its tasks were asked with other settings.
    """
    stored = read_answers(folder)
    if old := [task for task, found in stored.items() if found.weights not in ("", weights)]:
        raise ValueError(
            f"{folder}: the answers to {old[0]} are of other weights than the run has now; ask it again, or delete them"
        )
    one_way(stored, folder)
    found: dict[str, Task] = {}
    for key, _, _, given in stored.values():
        values = np.array([[score.value, score.weight] for score in given.scores]).T
        items = tuple(score.item for score in given.scores)
        found[given.task] = Task(key, given.baseline, given.chance, given.counts, items, *values)
    return found


def read_losses(tuned: RunFolder) -> dict[str, Task]:
    """The held-out conversations of a fine-tuned run, as one task without right and wrong."""
    if tuned.state != "finished":
        return {}
    scores = tuned.scores()
    return {"held-out conversations": Task("", 0.0, 0.0, {}, tuple(scores), *np.array(list(scores.values())).T)}


def check_same(experiment: Experiment, store: RunStore, name: str, answers: Answers) -> None:
    """ValueError naming two runs of a point that were asked other items, or in another way."""
    first: dict[tuple[str, str], Cell] = {}
    for cell, task in ((cell, task) for cell, tasks in answers.items() for task in tasks):
        other = first.setdefault((cell.point, task), cell)
        a, b = answers[other][task], answers[cell][task]
        one, two = store.run(other).path.name, store.run(cell).path.name
        items = [dict(zip(side.items, side.weights.tolist(), strict=True)) for side in (a, b)]
        if different := first_other(items[0], items[1], one, two):
            raise ValueError(
                f"{store.folder}: {one} and {two}, {name}, {task}: scored on other items: {different}. "
                "Ask both runs again, the same items"
            )
        factors = declared_factors(experiment, other.arm, cell.arm)
        explained = any(factor.startswith(SHAPES_KEYS) for factor in factors)
        if a.baseline != b.baseline or (a.key != b.key and not explained):
            raise ValueError(
                f"{store.folder}: {one} and {two}, {name}, {task}: asked with other settings (key {a.key[:12]} against "
                f"{b.key[:12]}, baseline {a.baseline:g} against {b.baseline:g}). Ask both runs again in one way"
            )


def check_tuned(experiment: Experiment, store: RunStore, cells: Sequence[Cell]) -> None:
    """ValueError naming two fine-tuned runs of a point that were not fine-tuned alike.

    Of one seed, all must agree but what the arms declare; over seeds, the conversations and the settings of [sft],
    and within an arm no declaration excuses a difference.
    """
    first: dict[tuple[str, str, int | str], Cell] = {}
    found = {cell: RunFolder(store.run(cell).path / "sft").fingerprint() for cell in cells}
    shared = {
        cell: {
            "config": {"sft": of["config"]["sft"]}, "start": {}, "plugins": {},
            **{name: of[name] for name in ("corpus", "evaluation") if name in of},
        }
        for cell, of in found.items()
    }  # fmt: skip
    for cell in cells:
        for kind, which, prints in (("seed", cell.seed, found), ("arm", cell.arm, shared), ("all", "", shared)):
            other = first.setdefault((cell.point, kind, which), cell)
            factors = () if kind == "arm" else declared_factors(experiment, other.arm, cell.arm)
            if differ := mismatch(prints[other], prints[cell], factors):
                raise ValueError(
                    f"{store.folder}: {other.name} and {cell.name} were not fine-tuned alike: {describe(differ)}. "
                    "Delete RUN/sft of the older ones and run again"
                )


def asked_tasks(store: RunStore, folder: str, name: str, answers: Answers, diverged: frozenset[Path]) -> Asked:
    names = sorted({task for tasks in answers.values() for task in tasks})
    whole = {cell: tasks for cell, tasks in answers.items() if names and len(tasks) == len(names)}
    scores: dict[Path, Scores] = {}
    task_of: dict[str, str] = {}
    for cell, tasks in whole.items():
        labels = [task for task in names for _ in tasks[task].items]
        items = [f"{task}: {item}" for task in names for item in tasks[task].items]
        values, weights = (
            np.concatenate([getattr(tasks[task], side) for task in names]) for side in ("values", "weights")
        )
        values, weights = centred_values(values, weights, labels, {task: tasks[task].baseline for task in names})
        pair = zip(values.tolist(), weights.tolist(), strict=True)
        scores[store.run(cell).path] = dict(zip(items, pair, strict=True))
        task_of |= dict(zip(items, labels, strict=True))
    full = TASKS.get(folder.removeprefix("sft/"), len(names))
    partial = len(names) != full
    words = f"{name} ({len(names)} of {full} tasks)" if partial else name
    return Asked(folder, Metric(words, 1.0, False, "items"), whole, scores, diverged, task_of, partial)


def asked_losses(store: RunStore, losses: Answers, diverged: frozenset[Path]) -> Asked:
    whole = {cell: tasks for cell, tasks in losses.items() if tasks}
    scores: dict[Path, Scores] = {}
    for cell, tasks in whole.items():
        (task,) = tasks.values()
        pair = zip(task.values.tolist(), task.weights.tolist(), strict=True)
        scores[store.run(cell).path] = dict(zip(task.items, pair, strict=True))
    return Asked("sft", Metric("chat bpb", math.log(2), True, "conversations"), whole, scores, diverged)
