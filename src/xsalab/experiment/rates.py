"""A sweep of a learning rate: a factor of numbers under ``optim.``, such as ``optim.lr_scale``, crossed with others.

Two comparisons. At equal rates they are the simple effects that the experiment has anyway. Best against best is the
fairer one where arms want different rates, and it must not be made on the runs that chose the rates: of S seeds, each
seed's difference is taken at the rates that were best on the other S − 1 (leave one out), and where these did not all
choose alike the interval is widened for it (stats/chosen.py). A rate is a candidate where the other seeds all finished;
a run that diverged at a rate so chosen counts as one that diverged.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..stats import PairTable, decide, equivalence_interval, mean_difference, sentence
from ..stats.chosen import widened_for_choice
from ..stats.looks import Looks
from .analyses import estimate_row
from .design import Cell, Experiment
from .judging import margin_of
from .pairing import Joined, Scores, join, weighted_sum
from .store import RunFolder, RunStore

NEAR = 0.05  # of the best mean: within it a rate still trains as well
RULE = (
    "The widest range of rates is the unbroken one around the best in which every seed finished and the mean is within "
    "5 % of the row's own best."
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """The runs of one setting of the other factors, rate by rate, the lowest first.

    ``states`` and ``values``: rate's index -> seed -> how far the run is, and its metric where it has finished.
    ``sign``: −1 where a larger metric is better.
    """

    words: str
    rates: tuple[float, ...]
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    states: tuple[Mapping[int, str], ...]
    values: tuple[Mapping[int, float], ...]
    sign: int

    def best(self, seeds: Sequence[int]) -> int | None:
        """Index of the rate with the best mean over these seeds, of those at which they all finished."""
        usable = [k for k, states in enumerate(self.states) if seeds and all(states[s] == "finished" for s in seeds)]
        return min(usable, key=lambda k: self.sign * self.mean(k, seeds), default=None)

    def mean(self, k: int, seeds: Sequence[int]) -> float:
        """Of the metric at the rate of index ``k``; these seeds have finished there."""
        return statistics.fmean(self.values[k][seed] for seed in seeds)


def rate_sweeps(
    experiment: Experiment,
    store: RunStore,
    contrasts: Sequence[Mapping[str, Any]],
    scores: Callable[[RunFolder], Scores] = RunFolder.scores,
    looks: Looks | None = None,
) -> list[Row]:
    """One table a point for each factor of at least two numbers under ``optim.``; [] where there is none.

    contrasts: the rows that ``outcome`` has of them; those at equal rates are named and quoted, not made again.
    scores, looks: as for ``outcome``. Raises ValueError where two runs that stand as partners are no pair.
    """
    found: list[Row] = []
    by_levels = {levels: arm for arm, levels in experiment.levels.items()}
    for index, factor in enumerate(experiment.factors):
        if factor.values is None or len(factor.values) < 2 or not factor.name.startswith("optim."):
            continue
        ordered = sorted(zip(factor.values, factor.levels, strict=True))
        settings = dict.fromkeys((*levels[:index], *levels[index + 1 :]) for levels in by_levels)
        others = [other for i, other in enumerate(experiment.factors) if i != index]
        for point in experiment.points:
            sweeps: dict[tuple[str, ...], Sweep] = {}
            for setting in settings:
                words = [level for level, other in zip(setting, others, strict=True) if len(other.levels) > 1]
                arms = {rate: by_levels[(*setting[:index], level, *setting[index:])] for rate, level in ordered}
                sweeps[setting] = _sweep(experiment, store, point.name, arms, ", ".join(words) or "all")
            against = [
                (sweeps[setting], sweeps[(*setting[:i], other.levels[0], *setting[i + 1 :])])
                for i, other in enumerate(others)
                for setting in settings
                if setting[i] != other.levels[0]
            ]
            compared = [_best_against_best(experiment, store, point.name, *two, scores, looks) for two in against]
            found.append(
                {
                    "point": point.name,
                    "factor": factor.name,
                    "rates": [rate for rate, _ in ordered],
                    "rows": [_row(sweep, experiment.metric.name) for sweep in sweeps.values()],
                    "rule": RULE,
                    "equal_rate": [row for two in against for row in _equal_rate(*two, point.name, contrasts)],
                    "best_against_best": {**compared[0], "further": compared[1:]} if compared else None,
                }
            )
    return found


def _sweep(experiment: Experiment, store: RunStore, point: str, arms: Mapping[float, str], words: str) -> Sweep:
    states: list[dict[int, str]] = []
    values: list[dict[int, float]] = []
    for arm in arms.values():
        of_seed = {seed: store.run(Cell(point, arm, seed)).status for seed in experiment.seeds}
        states.append({seed: status["state"] for seed, status in of_seed.items()})
        finished = {seed: status for seed, status in of_seed.items() if status["state"] == "finished"}
        values.append({seed: float(_value(status)) for seed, status in finished.items()})
    sign = 1 if experiment.metric.lower_is_better else -1
    return Sweep(words, tuple(arms), tuple(arms.values()), experiment.seeds, tuple(states), tuple(values), sign)


def _value(status: Mapping[str, Any]) -> Any:
    return status["val_bpb"] if "val_bpb" in status else status["value"]


def _row(sweep: Sweep, metric: str) -> Row:
    every = [list(values.values()) for values in sweep.values]
    means = [statistics.fmean(values) if values else None for values in every]
    whole = [k for k, values in enumerate(every) if len(values) == len(sweep.seeds)]
    best, widest = sweep.best(sweep.seeds), None
    words = f"{sweep.words}: at no rate has every seed finished"
    if best is not None:
        top = sweep.mean(best, sweep.seeds)
        near = [k for k in whole if sweep.sign * (sweep.mean(k, sweep.seeds) - top) <= NEAR * abs(top)]
        widest = [sweep.rates[k] for k in _unbroken(near, best)]
        words = f"{sweep.words}: best at {sweep.rates[best]:g} ({metric} {top:.4f})"
        if _at_edge(sweep, best):
            side = "lowest" if best == 0 else "highest"
            words += f", the {side} rate tried, so it is not known to be the best"
        words += f"; within {100 * NEAR:.0f} % of it from {widest[0]:g} to {widest[1]:g}"
        words += f"; every seed finished up to {sweep.rates[max(_unbroken(whole, best))]:g}"
    return {
        "levels": sweep.words,
        "arms": list(sweep.arms),
        "means": means,
        "sds": [statistics.stdev(values) if len(values) > 1 else None for values in every],
        "finished": [len(values) for values in every],
        "diverged": [list(states.values()).count("diverged") for states in sweep.states],
        "best": None if best is None else sweep.rates[best],
        "edge": best is not None and _at_edge(sweep, best),
        "widest": widest,
        "sentence": words,
    }


def _unbroken(indices: Sequence[int], around: int) -> tuple[int, int]:
    """First and last of the run of successive ``indices`` that holds ``around``."""
    low = high = around
    while low - 1 in indices:
        low -= 1
    while high + 1 in indices:
        high += 1
    return low, high


def _at_edge(sweep: Sweep, k: int) -> bool:
    return k in (0, len(sweep.rates) - 1)


def _equal_rate(
    treatment: Sweep, baseline: Sweep, point: str, contrasts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The contrasts of two settings at each rate, by name, with what the table of contrasts says of them."""
    kept = ("name", "point", "treatment", "baseline", "seeds", "estimate", "verdict", "sentence", "exploratory")
    known = {(row["point"], row["name"]): row for row in contrasts}
    found: list[Row] = []
    for rate, arm, base in zip(treatment.rates, treatment.arms, baseline.arms, strict=True):
        row = known.get((point, f"{arm} - {base}"), {"name": f"{arm} - {base}", "point": point})
        found.append({"rate": rate, **{key: row[key] for key in kept if key in row}})
    return found


# Best against best


def _best_against_best(
    experiment: Experiment,
    store: RunStore,
    point: str,
    treatment: Sweep,
    baseline: Sweep,
    scores: Callable[[RunFolder], Scores],
    looks: Looks | None,
) -> Row:
    sides = treatment, baseline
    ended = [seed for seed in experiment.seeds if all(_ended(side, seed) for side in sides)]
    chosen = [{seed: side.best([other for other in ended if other != seed]) for seed in ended} for side in sides]
    both = [seed for seed in ended if all(of[seed] is not None for of in chosen)]
    diverged = [
        [seed for seed, k in of.items() if k is not None and side.states[k][seed] == "diverged"]
        for side, of in zip(sides, chosen, strict=True)
    ]
    paired = [seed for seed in both if not any(seed in lost for lost in diverged)]
    left, right = (f"{side.words} at its best rate" for side in sides)
    row: Row = {
        "name": f"{left} - {right}",
        "point": point,
        "treatment": treatment.words,
        "baseline": baseline.words,
        "metric": experiment.metric.name,
        "seeds": paired,
        "unfinished": [seed for seed in experiment.seeds if seed not in ended],
        "diverged_treatment": diverged[0],
        "diverged_baseline": diverged[1],
        "chosen_treatment": _rates(treatment, chosen[0]),
        "chosen_baseline": _rates(baseline, chosen[1]),
        "exploratory": True,
        "words": _in_words(sides, chosen),
        "estimate": None,
        "verdict": None,
    }
    lost = diverged[0] or diverged[1]
    if not paired and not lost:
        why = "the best rate of a seed is chosen on other seeds, so it takes two whose runs have all ended"
        for side, of in zip(sides, chosen, strict=True):
            if len(ended) > 1 and all(k is None for k in of.values()):
                why = f"{side.words} has no rate at which all the other seeds finished"
        row["sentence"] = f"{left} against {right}: not compared; {why}"
        return row
    table = _table(experiment, store, point, sides, chosen, paired, scores) if paired else None
    level, one_sided = (looks.two_sided, looks.one_sided) if looks else (0.05, 0.05)
    estimate, narrow = None, None
    if table is not None:
        estimate, narrow = mean_difference(table, confidence=1 - level), equivalence_interval(table, level=one_sided)
        if any(len(set(of.values())) > 1 for of in chosen):
            estimate, narrow = widened_for_choice(estimate, len(ended)), widened_for_choice(narrow, len(ended))
    margin = margin_of(experiment, estimate) if estimate else 1.0
    verdict = decide(
        estimate,
        margin=margin,
        estimate90=narrow,
        lower_is_better=experiment.metric.lower_is_better,
        diverged=(len(lost), len(paired) + len(lost)),
        level=level,
        equivalence_level=one_sided,
    )
    if lost and not diverged[0]:
        whose = f" runs of {baseline.words} diverged"
        verdict = replace(verdict, reason=verdict.reason.replace(" runs diverged", whose))
    if estimate is not None and table is not None:
        row |= {"estimate": estimate_row(estimate), "margin": margin, "differences": table.differences.tolist()}
    row["verdict"] = {**vars(verdict), "text": str(verdict)}
    row["sentence"] = sentence(left, right, estimate, verdict, metric=experiment.metric.name)
    return row


def _ended(sweep: Sweep, seed: int) -> bool:
    return all(states[seed] in ("finished", "diverged") for states in sweep.states)


def _rates(sweep: Sweep, chosen: Mapping[int, int | None]) -> dict[str, float | None]:
    """Seed -> the rate chosen for it; None where no rate had all the other seeds finished."""
    return {str(seed): None if k is None else sweep.rates[k] for seed, k in chosen.items()}


def _table(
    experiment: Experiment,
    store: RunStore,
    point: str,
    sides: Sequence[Sweep],
    chosen: Sequence[Mapping[int, int | None]],
    seeds: Sequence[int],
    scores: Callable[[RunFolder], Scores],
) -> PairTable:
    """Row s pairs the runs of seed s at the two rates chosen for it."""
    joined: list[Joined] = []
    for seed in seeds:
        arms = [side.arms[k] for side, of in zip(sides, chosen, strict=True) if (k := of[seed]) is not None]
        cells = [(point, arm) for arm in arms]
        joined.append(join(replace(experiment, seeds=(seed,)), store, cells, scores))
        if joined[-1].items != joined[0].items or not np.array_equal(joined[-1].weights, joined[0].weights):
            raise ValueError(
                f"{experiment.path}: seeds {seeds[0]} and {seed} were scored on other {joined[0].item_word}; "
                "delete the older runs' folders and run them again"
            )
    values = np.concatenate([one.values for one in joined], axis=1)
    return weighted_sum(replace(joined[0], seeds=tuple(seeds), values=values), (1.0, -1.0))


def _in_words(sides: Sequence[Sweep], chosen: Sequence[Mapping[int, int | None]]) -> str:
    """How the rates were chosen, and what that does to the interval."""
    words = (
        "The rate of each seed is the one that was best on the other seeds, so the choice flatters neither side. "
        "Exploratory: no contrast that the experiment declared."
    )
    if any(len(set(of.values())) > 1 for of in chosen):
        words += " The seeds do not all choose alike; the interval is widened for the runs that their choices share."
    for sweep, of in zip(sides, chosen, strict=True):
        best = sorted({k for k in of.values() if k is not None})
        if best:
            words += f" {sweep.words}: its best rate is {' or '.join(f'{sweep.rates[k]:g}' for k in best)}."
        if any(_at_edge(sweep, k) for k in best):
            words += f" {sweep.words}: the best rate is at the end of those tried; a better one may lie beyond."
    return words
