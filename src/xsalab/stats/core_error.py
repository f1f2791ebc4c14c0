"""How far the number of items alone lets CORE stray: its standard error, before any luck of training.

    CORE = mean over tasks of (accuracy − b) / (1 − b)                     (DCLM, arXiv 2406.11794)
    var(accuracy) = p (1 − p) / n                                          n independent items of one task
    SE(CORE)² = Σ p (1 − p) / (n (1 − b)²) / tasks²

For the difference of two models that answer the same items, var = (p + q − 2c − (p − q)²) / n with c the share of items
that both have right: less where their right answers go together. The tasks are taken as given. hellaswag is asked
twice, on the same items; taken as fully dependent, that would raise the SE by less than 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

CORRELATIONS = (0.7, 0.3)  # of two models' right answers on the items of a task: a stated range, not a measured one
LIFT = 0.3  # accuracies from guessing to this much above it


class CoreTask(NamedTuple):
    """Number of items, and the accuracy that the convention takes as guessing."""

    name: str
    items: int
    baseline: float


# The full tasks: items as DCLM's eval_meta_data.csv counts them (arc_challenge: 1,172, its test set; the file repeats
# the number of arc_easy), baselines from the same file, as nanochat's bundle has it.
CORE_TASKS = (
    CoreTask("hellaswag_zeroshot", 10_042, 0.25),
    CoreTask("jeopardy", 2_117, 0.0),
    CoreTask("bigbench_qa_wikidata", 20_321, 0.0),
    CoreTask("arc_easy", 2_376, 0.25),
    CoreTask("arc_challenge", 1_172, 0.25),
    CoreTask("copa", 100, 0.5),
    CoreTask("commonsense_qa", 1_221, 0.2),
    CoreTask("piqa", 1_838, 0.5),
    CoreTask("openbook_qa", 500, 0.25),
    CoreTask("lambada_openai", 5_153, 0.0),
    CoreTask("hellaswag", 10_042, 0.25),
    CoreTask("winograd", 273, 0.5),
    CoreTask("winogrande", 1_267, 0.5),
    CoreTask("bigbench_dyck_languages", 1_000, 0.0),
    CoreTask("agi_eval_lsat_ar", 230, 0.2),
    CoreTask("bigbench_cs_algorithms", 1_320, 0.0),
    CoreTask("bigbench_operators", 210, 0.0),
    CoreTask("bigbench_repeat_copy_logic", 32, 0.0),
    CoreTask("squad", 10_570, 0.0),
    CoreTask("coqa", 7_983, 0.0),
    CoreTask("boolq", 3_270, 0.62),
    CoreTask("bigbench_language_identification", 10_000, 0.091),
)


@dataclass(frozen=True)
class CoreError:
    """Standard errors from item counts. single: of one model's CORE; unpaired: of a difference where two models'
    answers have nothing in common; paired: the same at each of ``correlations``. Each of them (lowest, equal, highest):
    over all accuracies from guessing to ``lift`` above it, and in the middle where every task has the same centred
    accuracy, ``core``.
    """

    core: float
    lift: float
    correlations: tuple[float, ...]
    single: tuple[float, float, float]
    unpaired: tuple[float, float, float]
    paired: tuple[tuple[float, float, float], ...]


def core_error(accuracies: Sequence[float], tasks: Sequence[CoreTask] = CORE_TASKS) -> float:
    """SE of one model's CORE. accuracies: one a task, from 0 to 1. ValueError where they are not that."""
    _check(accuracies, tasks)
    return _error([p * (1 - p) for p in accuracies], tasks)


def core_difference_error(
    treatment: Sequence[float],
    baseline: Sequence[float],
    correlation: float = 0.0,
    tasks: Sequence[CoreTask] = CORE_TASKS,
) -> float:
    """SE of the difference of two models' CORE on the same items.

    correlation: of their right answers over a task's items, the same for all tasks; 0 gives the unpaired bound.
    ValueError where no two such models exist: at unlike accuracies the largest correlation is below 1.
    """
    _check(treatment, tasks)
    _check(baseline, tasks)
    if not 0 <= correlation <= 1:
        raise ValueError(f"correlation = {correlation}: from 0 to 1")
    variances: list[float] = []
    for p, q, task in zip(treatment, baseline, tasks, strict=True):
        covariance = correlation * math.sqrt(p * (1 - p) * q * (1 - q))
        if p * q + covariance > min(p, q) + 1e-12:
            raise ValueError(f"{task.name}: accuracies {p:g} and {q:g} cannot correlate by {correlation:g}")
        variances.append(max(0.0, p * (1 - p) + q * (1 - q) - 2 * covariance))
    return _error(variances, tasks)


def disagreement(accuracy: float, correlation: float) -> float:
    """The share of items that exactly one of two models of the same accuracy has right, at that correlation."""
    return 2 * accuracy * (1 - accuracy) * (1 - correlation)


def core_errors(
    core: float,
    tasks: Sequence[CoreTask] = CORE_TASKS,
    correlations: Sequence[float] = CORRELATIONS,
    lift: float = LIFT,
) -> CoreError:
    """The standard errors of a CORE of ``core``. Two compared models are taken to have equal accuracies.

    At equal accuracies and correlation r the variance of a difference is 2 (1 − r) times that of one model.
    ValueError unless 0 ≤ core ≤ 1 and the range of accuracies stays below 1.
    """
    if not 0 <= core <= 1:
        raise ValueError(f"core = {core}: from 0 to 1")
    if not lift > 0 or any(task.baseline + lift > 1 for task in tasks):
        raise ValueError(f"lift = {lift}: above 0, and no task's accuracy above 1")
    ends = [(task.baseline, task.baseline + lift) for task in tasks]
    least = [min(low * (1 - low), high * (1 - high)) for low, high in ends]  # p(1 − p) is concave
    middle = [min(max(0.5, low), high) for low, high in ends]
    equal = core_error([task.baseline + core * (1 - task.baseline) for task in tasks], tasks)
    single = _error(least, tasks), equal, core_error(middle, tasks)
    paired = tuple(_scaled(single, math.sqrt(2 * (1 - r))) for r in correlations)
    return CoreError(core, lift, tuple(correlations), single, _scaled(single, math.sqrt(2)), paired)


def _scaled(errors: tuple[float, float, float], factor: float) -> tuple[float, float, float]:
    low, equal, high = errors
    return low * factor, equal * factor, high * factor


def _error(variances: Sequence[float], tasks: Sequence[CoreTask]) -> float:
    """variances: of one item of each task."""
    found = (v / task.items / (1 - task.baseline) ** 2 for v, task in zip(variances, tasks, strict=True))
    return math.sqrt(math.fsum(found)) / len(tasks)


def _check(accuracies: Sequence[float], tasks: Sequence[CoreTask]) -> None:
    if len(accuracies) != len(tasks) or not tasks:
        raise ValueError(f"{len(accuracies)} accuracies for {len(tasks)} tasks: one for each, at least one")
    if wrong := [p for p in accuracies if not 0 <= p <= 1]:
        raise ValueError(f"accuracy {wrong[0]}: from 0 to 1")
