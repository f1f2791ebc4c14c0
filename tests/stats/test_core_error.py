"""The standard error of CORE from item counts, against hand reckoning, simulation and the files of the benchmark."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from xsalab.stats.core_error import (
    CORE_TASKS,
    CoreTask,
    core_difference_error,
    core_error,
    core_errors,
    disagreement,
)

TWO = (CoreTask("a", 100, 0.5), CoreTask("b", 64, 0.0))


def test_two_tasks_by_hand() -> None:
    """Sqrt(0.75·0.25 / (100·0.25) + 0.2·0.8 / 64) / 2 = sqrt(0.0075 + 0.0025) / 2 = 0.05."""
    assert core_error([0.75, 0.2], TWO) == pytest.approx(0.05, rel=1e-12)
    assert core_difference_error([0.75, 0.2], [0.75, 0.2], 0.0, TWO) == pytest.approx(0.05 * math.sqrt(2), rel=1e-12)
    assert core_difference_error([0.75, 0.2], [0.75, 0.2], 0.5, TWO) == pytest.approx(0.05, rel=1e-12)
    assert core_difference_error([0.75, 0.2], [0.75, 0.2], 1.0, TWO) == 0.0


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_the_errors_are_the_spread_of_simulated_answers(correlation: float) -> None:
    """Items answered at random with the stated accuracies and correlation stray by what the formulas say."""
    draw = np.random.default_rng(5)
    first, second = [0.6, 0.1], [0.55, 0.12]
    trials = 20_000
    figures = np.zeros((2, trials))
    for p, q, task in zip(first, second, TWO, strict=True):
        both = p * q + correlation * math.sqrt(p * (1 - p) * q * (1 - q))
        counts = draw.multinomial(task.items, [both, p - both, q - both, 1 - p - q + both], size=trials)
        for model, right in enumerate((counts[:, 0] + counts[:, 1], counts[:, 0] + counts[:, 2])):
            figures[model] += (right / task.items - task.baseline) / (1 - task.baseline) / len(TWO)
    assert figures[0].std() == pytest.approx(core_error(first, TWO), rel=0.02)
    difference = core_difference_error(first, second, correlation, TWO)
    assert (figures[0] - figures[1]).std() == pytest.approx(difference, rel=0.02)


def test_disagreement_is_the_share_of_items_that_one_alone_has_right() -> None:
    """The per-item variance of a difference at equal accuracies is the share of items on which they differ."""
    task = (CoreTask("a", 1, 0.0),)
    for p, r in ((0.3, 0.5), (0.5, 0.0), (0.9, 0.8)):
        assert disagreement(p, r) == pytest.approx(core_difference_error([p], [p], r, task) ** 2, rel=1e-9)


def test_the_range_holds_every_accuracy_in_it() -> None:
    """No accuracies from guessing to 0.3 above it give an error outside the range, and corners reach its ends."""
    found = core_errors(0.15)
    draw = np.random.default_rng(6)
    for shares in [draw.random(len(CORE_TASKS)) for _ in range(300)]:
        error = core_error([t.baseline + 0.3 * s for t, s in zip(CORE_TASKS, shares, strict=True)])
        assert found.single[0] <= error <= found.single[2]
    grid = np.linspace(0, 0.3, 301)
    ends = [(t.baseline + grid) * (1 - t.baseline - grid) for t in CORE_TASKS]
    for pick, value in ((np.min, found.single[0]), (np.max, found.single[2])):
        variance = sum(pick(e) / t.items / (1 - t.baseline) ** 2 for e, t in zip(ends, CORE_TASKS, strict=True))
        assert value == pytest.approx(math.sqrt(variance) / 22, rel=1e-4)
    assert found.single[0] < found.single[1] < found.single[2]
    assert found.unpaired[1] == pytest.approx(math.sqrt(2) * found.single[1], rel=1e-12)
    for r, paired in zip(found.correlations, found.paired, strict=True):
        same = [t.baseline + 0.15 * (1 - t.baseline) for t in CORE_TASKS]
        assert paired[1] == pytest.approx(core_difference_error(same, same, r), rel=1e-9)


def test_a_task_asked_twice_hardly_matters() -> None:
    """Hellaswag's two tasks share their items; as one item answered alike, the error grows by less than 1 %."""
    for core in (0.1, 0.3):
        p = 0.25 + core * 0.75
        more = 2 * p * (1 - p) / 10_042 / 0.75**2 / 22**2
        error = core_errors(core).single[1]
        assert math.sqrt(error**2 + more) / error < 1.01


def test_the_table_is_that_of_the_benchmark(shared_data: Path) -> None:
    """Names and order of the tasks, item counts and baselines as the bundle's own files have them."""
    bundle = shared_data / "core_bundle"
    lines = (bundle / "core.yaml").read_text(encoding="utf-8").splitlines()
    labels = [line.split(": ")[1] for line in lines if line.strip().startswith("label:")]
    with (bundle / "eval_meta_data.csv").open(encoding="utf-8", newline="") as file:
        known = {row["Eval Task"]: row for row in csv.DictReader(file)}
    assert [task.name for task in CORE_TASKS] == labels
    for task in CORE_TASKS:
        assert task.baseline == pytest.approx(float(known[task.name]["Random baseline"]) / 100, abs=1e-12), task.name
        if task.name != "arc_challenge":  # there the file repeats the number of arc_easy
            assert task.items == int(known[task.name]["#datapoints"]), task.name


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: core_error([0.5], TWO), "1 accuracies for 2 tasks"),
        (lambda: core_error([0.5, 1.5], TWO), "accuracy 1.5"),
        (lambda: core_difference_error([0.5, 0.5], [0.5, 0.5], -0.1, TWO), "correlation = -0.1"),
        (lambda: core_difference_error([0.9, 0.5], [0.1, 0.5], 0.9, TWO), "a: accuracies 0.9 and 0.1 cannot correlate"),
        (lambda: core_errors(1.2), "core = 1.2"),
        (lambda: core_errors(0.2, lift=0.6), "lift = 0.6"),
    ],
)
def test_what_cannot_be_is_refused(call: object, words: str) -> None:
    """Named, with the value."""
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]
