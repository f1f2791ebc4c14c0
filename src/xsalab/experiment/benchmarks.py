"""Benchmarks of an experiment: from the answers beside its runs to levels, contrasts, tests and sentences.

As plain values, like ``outcome``. A benchmark's figure is the mean over its tasks of the centred accuracy; its
contrasts are those of the experiment, with the two-way interval over seeds and over items within tasks
(stats/items.py). One task has McNemar's exact test. The held-out loss of fine-tuning is a metric like bits per byte,
over conversations.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..stats import Estimate, PairTable, Verdict, mean_difference, sentence
from ..stats.items import mcnemar, noise_sentence
from ..stats.looks import Looks
from .analyses import estimate_row, plain
from .answers import BENCHMARKS
from .asked import Answers, Asked, asked_losses, asked_tasks, check_same, check_tuned, read_losses, read_tasks
from .design import Cell, Contrast, Experiment, combinations, contrasts, expand
from .judging import adjusted_ps, is_exploratory, judge
from .pairing import PairSet, pairs
from .store import RunFolder, RunStore

RULES = {
    "skipped": "left out, as they cannot be asked",
    "cut": "shortened to the limit",
    "beyond context": "longer than the context that the model was trained on",
    "tied": "with equally likely best options, the first taken",
    "no own token": "with a choice that has no token of its own, scored from one token earlier",
    "merged": "whose answer begins within a token of the prompt",
    "from all": "with examples drawn from outside the items asked",
    "unfinished": "whose answer did not end within the tokens allowed",
    "no number": "answered without a final number",
}


def benchmarks(experiment: Experiment, store: RunStore, looks: Looks | None = None) -> list[dict[str, Any]]:
    """Everything that is said of each benchmark that any run has answered; [] where none has.

    looks: the levels of a sequential experiment. The runs are taken to be pairs, as ``outcome`` has found before.
    Raises ValueError naming two runs of a point that answered other items, were asked otherwise, or fine-tuned so.
    """
    cells = [cell for cell in expand(experiment) if cell.arm != "twin" and store.run(cell).state == "finished"]
    tuned = {cell: RunFolder(store.run(cell).path / "sft") for cell in cells}
    diverged = frozenset(tuned[cell].path.parent for cell in cells if tuned[cell].state == "diverged")
    check_tuned(experiment, store, [cell for cell in cells if tuned[cell].state == "finished"])
    every: list[tuple[Asked, Answers]] = []
    for name, words in BENCHMARKS.items():
        for folder, of in ((name, words), (f"sft/{name}", f"{words} after fine-tuning")):
            answers = {}
            for cell in cells:
                owner = store.run(cell) if folder == name else tuned[cell]
                answers[cell] = read_tasks(store.run(cell).path / folder, owner.status.get("weights", ""))
            check_same(experiment, store, of, answers)
            every.append(
                (asked_tasks(store, folder, of, answers, diverged if folder != name else frozenset()), answers)
            )
    losses = {cell: read_losses(tuned[cell]) for cell in cells}
    check_same(experiment, store, "fine-tuning", losses)
    every.append((asked_losses(store, losses, diverged), losses))
    told = [(asked, answers) for asked, answers in every if any(answers.values()) or asked.broken]
    return [_told(experiment, store, asked, answers, looks) for asked, answers in told]


def _told(
    experiment: Experiment, store: RunStore, asked: Asked, answers: Answers, looks: Looks | None
) -> dict[str, Any]:
    """One benchmark as plain values."""
    scores = {cell: asked.scores[store.run(cell).path].values() for cell in asked.answers}
    figures = {
        cell: sum(value for value, _ in found) / sum(weight for _, weight in found) / asked.metric.unit
        for cell, found in scores.items()
    }
    rows = _contrasts(experiment, store, asked, looks)
    combined = [row for row in rows if "words" in row]
    return {
        "folder": asked.folder,
        "name": asked.metric.name,
        "partial": asked.partial,
        "lower_is_better": asked.metric.lower_is_better,
        "item_word": asked.metric.item_word,
        "item_count": max(map(len, scores.values()), default=0),
        "margin": asked.margin,
        "levels": [{"point": point, "arm": arm, **found} for (point, arm), found in _over_seeds(figures).items()],
        "tasks": _tasks(experiment, asked) if asked.task_of else [],
        "contrasts": [row for row in rows if "words" not in row],
        "combinations": combined,
        "counts": _counts(asked),
        "missing": _missing(experiment, store, asked, answers),
    }


def _over_seeds(values: Mapping[Cell, float]) -> dict[tuple[str, str], dict[str, Any]]:
    """(point, arm) -> number, mean and standard deviation of its seeds."""
    found: dict[tuple[str, str], list[float]] = {}
    for cell, value in values.items():
        found.setdefault((cell.point, cell.arm), []).append(value)
    return {
        place: {
            "n": len(of), "mean": statistics.fmean(of), "sd": statistics.stdev(of) if len(of) > 1 else None,
        }
        for place, of in found.items()
    }  # fmt: skip


def _tasks(experiment: Experiment, asked: Asked) -> list[dict[str, Any]]:
    """Of each task at each point: its items, what guessing gives, and each arm's accuracy."""
    found: list[dict[str, Any]] = []
    for point in experiment.points:
        cells = [cell for cell in asked.answers if cell.point == point.name]
        for name in asked.answers[cells[0]] if cells else ():
            task = asked.answers[cells[0]][name]
            levels = _over_seeds({cell: asked.answers[cell][name].accuracy for cell in cells})
            found.append(
                {
                    "point": point.name, "task": name, "item_count": len(task.items), "baseline": task.baseline,
                    "chance": task.chance, "arms": {arm: level for (_, arm), level in levels.items()},
                }
            )  # fmt: skip
    return found


def _contrasts(experiment: Experiment, store: RunStore, asked: Asked, looks: Looks | None) -> list[dict[str, Any]]:
    """A row for each contrast of which there is an estimate or a diverged run. The others stay in Holm's family."""
    found: list[PairSet] = []
    for contrast in (*contrasts(experiment), *combinations(experiment)):
        pair = pairs(
            experiment, store, contrast,
            scores=lambda run: dict(asked.scores[run.path]), metric=asked.metric, state=asked.state, checked=True,
        )  # fmt: skip
        if pair.table is not None and asked.task_of and pair.table.item_word == asked.metric.item_word:
            strata = tuple(asked.task_of[item] for item in pair.table.items)
            pair = replace(pair, table=replace(pair.table, strata=strata))
        found.append(pair)
    confidence = 1 - looks.two_sided if looks else 0.95
    estimates = [mean_difference(pair.table, confidence=confidence) if pair.table else None for pair in found]
    adjusted = adjusted_ps(experiment, found, estimates)
    rows: list[dict[str, Any]] = []
    for pair, estimate, p in zip(found, estimates, adjusted, strict=True):
        margin = asked.margin if asked.task_of or estimate is None else asked.margin * abs(estimate.baseline_mean)
        lower = asked.metric.lower_is_better
        verdict = judge(experiment, pair, estimate, margin=margin, lower_is_better=lower, adjusted_p=p, looks=looks)
        if estimate is not None or verdict is not None:
            rows.append(_row(experiment, asked, pair, estimate, verdict, p, confidence))
    return rows


def _row(
    experiment: Experiment,
    asked: Asked,
    pair: PairSet,
    estimate: Estimate | None,
    verdict: Verdict | None,
    adjusted: float | None,
    confidence: float,
) -> dict[str, Any]:
    contrast = pair.contrast
    row: dict[str, Any] = {
        **plain(contrast), "name": contrast.name, "seeds": list(pair.seeds),
        "exploratory": is_exploratory(experiment, contrast), "adjusted_p": adjusted, "sentence": "",
    }  # fmt: skip
    row.pop("terms", None)
    if isinstance(contrast, Contrast):
        left, right = contrast.treatment, contrast.baseline
    else:
        left, _, right = contrast.words.partition(" against ")
    if verdict is not None:
        row["verdict"] = {**vars(verdict), "text": str(verdict)}
    if estimate is not None:
        assert pair.table is not None, "an estimate is of a table"
        row |= {"estimate": estimate_row(estimate), "differences": pair.table.differences.tolist()}
        if isinstance(contrast, Contrast) and asked.task_of:
            row["tasks"] = [_task_row(asked, contrast, pair.seeds, task, confidence) for task in _names(asked)]
    per = "doubling" if contrast.kind == "trend" else ""
    if estimate is None or not asked.task_of:
        if verdict is not None:
            metric = asked.metric.name + (f" for each {per}" if per else "")
            row["sentence"] = sentence(left, right, estimate, verdict, metric=metric)
        return row
    text = f"{left} against {right}: {noise_sentence(estimate, per=per, adjusted_p=adjusted)}"
    if verdict is not None and verdict.word == "diverged":
        text += f", on condition that both runs finish: {verdict.reason}"
    elif verdict is not None and contrast.kind != "null":
        text += f": {verdict}"
    row["sentence"] = text
    return row


def _names(asked: Asked) -> list[str]:
    return list(next(iter(asked.answers.values())))


def _task_row(asked: Asked, contrast: Contrast, seeds: Sequence[int], task: str, confidence: float) -> dict[str, Any]:
    """One task of a contrast: its difference in accuracy, and McNemar's test of all seeds and of each."""
    arms = contrast.treatment, contrast.baseline
    runs = [[asked.answers[Cell(contrast.point, arm, seed)][task] for seed in seeds] for arm in arms]
    items, weights = runs[0][0].items, runs[0][0].weights
    places = [[{item: i for i, item in enumerate(run.items)} for run in side] for side in runs]
    treatment, baseline = (
        np.array([run.values[[place[item] for item in items]] for run, place in zip(side, of, strict=True)])
        for side, of in zip(runs, places, strict=True)
    )
    table = PairTable(tuple(seeds), items, baseline, treatment, weights, "accuracy", 1.0, "items")
    estimate = mean_difference(table, confidence=confidence)
    shares = treatment / weights, baseline / weights
    return {
        "task": task, "mean": estimate.mean, "low": estimate.low, "high": estimate.high,
        "mcnemar": plain(mcnemar(*shares)),
        "by_seed": [plain(mcnemar(a, b)) for a, b in zip(*shares, strict=True)],
    }  # fmt: skip


def _counts(asked: Asked) -> list[dict[str, Any]]:
    """What rules touched: rule, what it means, and of each task the least and most items over all runs."""
    given = [task.counts for tasks in asked.answers.values() for task in tasks.values()]
    rules = {rule for counts in given for rule, count in counts.items() if count}
    found: list[dict[str, Any]] = []
    for rule in [*(rule for rule in RULES if rule in rules), *sorted(rules - RULES.keys())]:
        counts = {name: [tasks[name].counts.get(rule, 0) for tasks in asked.answers.values()] for name in _names(asked)}
        tasks = {name: [min(of), max(of)] for name, of in counts.items() if any(of)}
        found.append({"rule": rule, "words": RULES.get(rule, "whose answer ended so"), "tasks": tasks})
    return found


def _missing(experiment: Experiment, store: RunStore, asked: Asked, answers: Answers) -> list[str]:
    """How many finished runs of each arm have no answers, or not all of them."""
    names = {task for tasks in answers.values() for task in tasks}
    none: list[str] = []
    some: list[str] = []
    for point, arm in itertools.product(experiment.points, experiment.arms):
        cells = [cell for cell in answers if (cell.point, cell.arm) == (point.name, arm)]
        lacking = [cell for cell in cells if store.run(cell).path not in {*asked.scores, *asked.diverged}]
        where = f"{arm} at {point.name}" if len(experiment.points) > 1 else arm
        begun = [cell for cell in lacking if answers[cell]]
        if len(begun) < len(lacking):
            none.append(f"{where} {len(lacking) - len(begun)} of {len(cells)}")
        if begun:
            some.append(f"{where} {len(begun)} of {len(cells)} ({begun[0].name}: {len(answers[begun[0]])} tasks)")
    found = [f"finished runs without answers: {', '.join(none)}"] if none else []
    if some:
        found.append(f"finished runs that have not answered all {len(names)} tasks, left out: {', '.join(some)}")
    return found
