"""What a finished run is asked. Every evaluation returns rows, one an item; means are made in ``stats``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ItemScore:
    """One answer of one model: ``value`` over ``weight`` is the item's score, Σ value / Σ weight the task's.

    bpb: value in nats, weight in bytes. Tasks with right and wrong: value 0 or 1, weight 1, and ``options``
    holds each option's log-likelihood in nats over its ``lengths`` scored tokens. ``cut``: the prompt did not fit
    and was shortened.
    """

    task: str
    item: str
    value: float
    weight: float
    options: tuple[float, ...] = ()
    cut: bool = False
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class TaskAnswers:
    """What one model answered on one task of a benchmark.

    ``baseline``: what the benchmark's convention takes as guessing, a share below 1; ``chance``: what guessing gives
    on these very items. ``counts``: items that a stated rule touched, by rule: "cut", "skipped", …; 0 is left out.
    """

    task: str
    baseline: float
    chance: float
    scores: tuple[ItemScore, ...]
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """Share of items answered right."""
        return sum(score.value for score in self.scores) / sum(score.weight for score in self.scores)

    @property
    def centred(self) -> float:
        """(accuracy − baseline) / (1 − baseline): 0 for guessing by the benchmark's convention, 1 for all right."""
        return (self.accuracy - self.baseline) / (1 - self.baseline)

    def summary(self) -> dict[str, Any]:
        """The task in plain values, without its items."""
        return {
            "accuracy": self.accuracy, "items": len(self.scores), "chance": self.chance,
            "baseline": self.baseline, "centred": self.centred, "counts": dict(self.counts),
        }  # fmt: skip


def centred_mean(answers: Sequence[TaskAnswers]) -> float:
    """The benchmark's figure: the mean of its tasks' centred accuracies. ValueError where there is no task."""
    if not answers:
        raise ValueError("no task was scored: a benchmark's figure is a mean over its tasks")
    return sum(task.centred for task in answers) / len(answers)
