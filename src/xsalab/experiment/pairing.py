"""Is this a pair? And the table of pairs that the statistics eat.

Two runs are a pair when everything that a fingerprint holds agrees, but for the declared factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..stats import PairTable
from .design import (
    Cell,
    Combination,
    Contrast,
    Experiment,
    Metric,
    config_differences,
    declared_factors,
    ours,
    tables_of,
    undeclared,
)
from .store import RunFolder, RunStore

# What else a declared factor changes by its nature: fingerprint entry -> factors that explain it.
EXPLAINS: dict[str, tuple[str, ...]] = {
    "start": ("model.", "train.dtype"),
    "rows": ("train.batch_tokens", "train.tokens", "model.context", "data."),
    "corpus": ("data.", "model.vocab_size"),
    "evaluation": ("data.", "model.vocab_size", "eval."),
    "environment.threads": ("train.threads",),
    "environment.device": ("train.device",),
    "environment.kernel": ("train.attention", "train.compile", "train.dtype", "train.device"),
}


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted name -> both values, over two fingerprints. Of starts and plugins, the names that both have."""
    found = config_differences(a["config"], b["config"])
    apart = ("config", "start", "plugins")
    rest = {key: {k: v for k, v in side.items() if k not in apart} for key, side in (("a", a), ("b", b))}
    found |= config_differences(rest["a"], rest["b"])
    for part in ("start", "plugins"):
        for name in sorted(a[part].keys() & b[part].keys()):
            if a[part][name] != b[part][name]:
                found[f"{part}.{name}"] = (a[part][name], b[part][name])
    return found


def mismatch(a: Mapping[str, Any], b: Mapping[str, Any], factors: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """The differences that the declared factors do not cover; empty for a pair.

    Another machine of the same kind is none: it is reported, and no claim about time is made then.
    """
    found = undeclared(differences(a, b), factors)
    return {name: values for name, values in found.items() if name != "machine" and not _explained(name, factors)}


def _explained(name: str, factors: Sequence[str]) -> bool:
    if name.startswith("start.") and ".variant." in name:
        return True  # a variant's own parameters: their start is part of the variant, a factor of every pair
    for entry, causes in EXPLAINS.items():
        if name == entry or name.startswith(entry + "."):
            return any(factor == cause or factor.startswith(cause) for factor in factors for cause in causes)
    return False


def describe(found: Mapping[str, tuple[Any, Any]], limit: int = 4) -> str:
    """The first differences in words."""
    parts = [f"{name}: {_short(a)} against {_short(b)}" for name, (a, b) in list(found.items())[:limit]]
    return "; ".join(parts) + (f"; and {len(found) - limit} more" if len(found) > limit else "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


@dataclass(frozen=True)
class PairSet:
    """The seeds of one contrast that have all its runs, and what became of the others."""

    contrast: Contrast | Combination
    table: PairTable | None
    seeds: tuple[int, ...]  # of the table's rows
    unfinished: tuple[int, ...]  # seeds with a run that is not there yet
    diverged_treatment: tuple[int, ...]  # of a combination: seeds with any diverged run
    diverged_baseline: tuple[int, ...]
    differs: Mapping[str, tuple[Any, Any]]  # within the pairs: the declared factors in use


Scores = dict[str, tuple[float, float]]


def state_of(run: RunFolder) -> str:
    """The state of a run itself."""
    return run.state


@dataclass(frozen=True, eq=False)
class Joined:
    """The runs of several cells, seed by seed and document by document.

    ``values`` (T, S, D) float64: of each cell, the nats of each document; ``weights`` (D,): bytes. Where points were
    scored on different documents, say of other corpora, D is 1 and the value is the run's metric, with ``unit`` 1.
    ``states``: seed -> those of its runs in the order of the cells, of all seeds. ``seeds``: those with all runs.
    """

    seeds: tuple[int, ...]
    items: tuple[str, ...]
    values: NDArray[np.float64]
    weights: NDArray[np.float64]
    unit: float
    states: Mapping[int, tuple[str, ...]]
    differs: Mapping[str, tuple[Any, Any]]
    metric: Metric = field(default_factory=Metric)
    item_word: str = "documents"  # of the items in words; "totals" where they are the runs' metrics


def join(
    experiment: Experiment,
    store: RunStore,
    cells: Sequence[tuple[str, str]],
    scores: Callable[[RunFolder], Scores] = RunFolder.scores,
    *,
    metric: Metric | None = None,
    state: Callable[[RunFolder], str] = state_of,
    checked: bool = False,
) -> Joined:
    """The finished runs of ``cells``, (point, arm), for each seed that has them all.

    scores: reads those of a run; a caller with many contrasts gives one that remembers. metric: what the scores are
    of, by default the experiment's. state: how far a run is with it; a "finished" one has scores. checked: these runs
    were joined before, by their own scores.
    Raises ValueError where a run is of another configuration or plugin than the others of its arm, where two runs that
    stand as partners are no pair, naming the field, or where they were scored on different documents.
    """
    states: dict[int, tuple[str, ...]] = {}
    rows: dict[int, list[Scores]] = {}
    differs: dict[str, tuple[Any, Any]] = {}
    code: dict[str, str] = {}
    for seed in experiment.seeds:
        of_seed = [Cell(point, arm, seed) for point, arm in cells]
        runs = [store.run(cell) for cell in of_seed]
        states[seed] = tuple(state(run) for run in runs)
        for run, cell, reached in zip(runs, of_seed, states[seed], strict=True):
            if reached in ("finished", "diverged") and not checked:
                check_run(run, tables_of(experiment, cell))
                check_code(run, code)
        if set(states[seed]) == {"finished"}:
            for cell, run in zip(of_seed[:-1], runs[:-1], strict=True) if not checked else ():
                differs |= check_pair(run, runs[-1], _factors_between(experiment, cell, of_seed[-1]))
            rows[seed] = [scores(run) for run in runs]
    metric = metric or experiment.metric
    if not rows:
        return Joined((), (), np.empty((len(cells), 0, 0)), np.empty(0), metric.unit, states, differs, metric,
                      metric.item_word)  # fmt: skip
    first = next(iter(rows.values()))
    expected = [_weights(found) for found in first]
    for seed, of_seed in rows.items():
        for (_, arm), weights, found in zip(cells, expected, of_seed, strict=True):
            if other := first_other(_weights(found), weights, f"seed {seed}", f"seed {next(iter(rows))}"):
                raise ValueError(f"{arm}, seed {seed}: scored on other {metric.item_word}: {other}")
    word = metric.item_word
    if all(weights == expected[0] for weights in expected):
        items = list(expected[0])
        values = [[[found[item][0] for item in items] for found in of_seed] for of_seed in rows.values()]
        weights, unit = np.array([expected[0][item] for item in items]), metric.unit
    elif len({point for point, _ in cells}) == 1:
        k = next(k for k, weights in enumerate(expected) if weights != expected[0])
        one, two = cells[0][1], cells[k][1]
        other = first_other(expected[0], expected[k], one, two)
        raise ValueError(f"{one} and {two}, seed {next(iter(rows))}: scored on different {word}: {other}")
    else:
        items, weights, unit, word = [f"all {word}"], np.ones(1), 1.0, "totals"
        values = [[[_of_run(found, metric)] for found in of_seed] for of_seed in rows.values()]
    table = np.array(values).transpose(1, 0, 2)
    return Joined(tuple(rows), tuple(items), table, weights, unit, states, differs, metric, word)


def _weights(scores: Scores) -> dict[str, float]:
    return {item: weight for item, (_, weight) in scores.items()}


def first_other(a: Mapping[str, float], b: Mapping[str, float], one: str, two: str) -> str:
    """The first item that only one of two has, or that they weigh otherwise; "" where there is none."""
    for item in (*b, *a):
        if item not in a or item not in b:
            return f"{item!r} is in {one if item in a else two} alone"
        if a[item] != b[item]:
            return f"{item!r} has weight {a[item]:.12g} in {one}, {b[item]:.12g} in {two}"
    return ""


def _of_run(scores: Scores, metric: Metric) -> float:
    """The metric of one run."""
    return sum(value for value, _ in scores.values()) / sum(weight for _, weight in scores.values()) / metric.unit


def pairs(
    experiment: Experiment,
    store: RunStore,
    contrast: Contrast | Combination,
    *,
    scores: Callable[[RunFolder], Scores] = RunFolder.scores,
    scale: Mapping[str, float] | None = None,
    metric: Metric | None = None,
    state: Callable[[RunFolder], str] = state_of,
    checked: bool = False,
) -> PairSet:
    """The table of a contrast, and the seeds that it lacks. scale: point -> a factor on the weights of its terms.

    scores, metric, state, checked: as for ``join``, which says what is raised.
    """
    terms = contrast.terms
    cells = [(term.point, term.arm) for term in terms]
    joined = join(experiment, store, cells, scores, metric=metric, state=state, checked=checked)
    lost: dict[str, list[int]] = {"unfinished": [], "treatment": [], "baseline": []}
    for seed, states in joined.states.items():
        if "diverged" in states:
            alone = isinstance(contrast, Contrast) and states[0] != "diverged"
            lost["baseline" if alone else "treatment"].append(seed)
        elif seed not in joined.seeds:
            lost["unfinished"].append(seed)
    weights = [term.weight * (scale[term.point] if scale else 1.0) for term in terms]
    return PairSet(
        contrast,
        weighted_sum(joined, weights) if joined.seeds else None,
        joined.seeds,
        tuple(lost["unfinished"]),
        tuple(lost["treatment"]),
        tuple(lost["baseline"]),
        joined.differs,
    )


def weighted_sum(joined: Joined, weights: Sequence[float]) -> PairTable:
    """The table whose differences are Σ weights · values; ``weights`` (T,) add up to 0.

    Two arms stand there as they are. Of more cells the baseline is the mean of the negative ones, by weight, and the
    treatment that plus the sum.
    """
    signs = np.asarray(weights, dtype=np.float64)
    if signs.tolist() == [1.0, -1.0]:
        treatment, baseline = joined.values
    else:
        negative = np.minimum(signs, 0)
        baseline = np.tensordot(negative / negative.sum(), joined.values, 1)
        treatment = baseline + np.tensordot(signs, joined.values, 1)
    return PairTable(
        seeds=joined.seeds, items=joined.items, treatment=treatment, baseline=baseline,
        weights=joined.weights, metric=joined.metric.name, unit=joined.unit, item_word=joined.item_word,
    )  # fmt: skip


def _factors_between(experiment: Experiment, a: Cell, b: Cell) -> tuple[str, ...]:
    """In what two runs of a contrast may differ: their arms' declared factors, and what their points set."""
    factors = declared_factors(experiment, a.arm, b.arm)
    if a.point != b.point:
        factors += tuple(name for p in experiment.points if p.name in (a.point, b.point) for name, _ in p.sets)
    return factors


def check_run(run: RunFolder, expected: Mapping[str, Any]) -> None:
    """ValueError where a run is of another configuration than the experiment says: it would be pooled in its name."""
    if found := ours(config_differences(run.fingerprint()["config"], expected)):
        raise ValueError(
            f"{run.path}: holds a run of another configuration: {describe(found)}. "
            "Give the experiment as it was run (--set too), or delete that folder and run it again"
        )


def check_code(run: RunFolder, code: dict[str, str]) -> None:
    """ValueError where a plugin's text is not that of the runs before, which ``code`` collects by file name.

    Of a command, the files that it names.
    """
    content = run.fingerprint()
    kind = "file" if "command" in content["config"] else "plugin"
    for name, text in content["plugins"].items():
        if code.setdefault(name, text) != text:
            raise ValueError(
                f"{run.path}: trained with another text of {kind} {name} (SHA-256 {text} against {code[name]}). "
                "Delete the older runs' folders and run them again"
            )


def check_pair(treatment: RunFolder, baseline: RunFolder, factors: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """The differences of two runs, all of them declared. ValueError naming the others."""
    a, b = treatment.fingerprint(), baseline.fingerprint()
    if found := mismatch(a, b, factors):
        raise ValueError(
            f"{treatment.path.name} and {baseline.path.name} are no pair: {describe(found)}. "
            "Declare the field in the arm, or run both again"
        )
    return {name: values for name, values in differences(a, b).items() if not name.startswith("start.")}


def twin_agrees(experiment: Experiment, store: RunStore) -> bool | None:
    """Whether the cell that was run twice agrees to the bit in weights and losses; None while a run is missing."""
    point, seed = experiment.points[0].name, experiment.seeds[0]
    first, second = (store.run(Cell(point, arm, seed)) for arm in (experiment.baseline, "twin"))
    if first.state != "finished" or second.state != "finished":
        return None

    def numbers(run: RunFolder) -> list[Mapping[str, Any]]:
        return [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in run.metrics()]

    same_weights = first.status["weights"] == second.status["weights"]
    if experiment.command:  # its digest is over the metric's series and the scores; other metrics may tell the time
        return same_weights
    return same_weights and numbers(first) == numbers(second) and first.scores() == second.scores()
