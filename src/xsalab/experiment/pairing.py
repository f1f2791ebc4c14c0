"""Is this a pair? And the table of pairs that the statistics eat.

Two runs are a pair when everything that a fingerprint holds agrees, but for the declared factors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..stats import PairTable
from .design import (
    Cell,
    Contrast,
    Experiment,
    as_tables,
    config_differences,
    declared_factors,
    resolve,
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
    """The pairs of one contrast: those that have both runs, and what became of the others."""

    contrast: Contrast
    table: PairTable | None
    seeds: tuple[int, ...]  # of the table's rows
    unfinished: tuple[int, ...]  # seeds whose treatment or baseline is not there yet
    diverged_treatment: tuple[int, ...]
    diverged_baseline: tuple[int, ...]
    differs: Mapping[str, tuple[Any, Any]]  # within the pairs: the declared factors in use


def pairs(experiment: Experiment, store: RunStore, contrast: Contrast) -> PairSet:
    """Joins the runs of a contrast on (point, seed) and document.

    Raises ValueError where a run is of another configuration or plugin than the others of its arm, where two
    runs that stand as partners are no pair, naming the field, or where they were scored on different documents.
    """
    factors = declared_factors(experiment, contrast.treatment, contrast.baseline)
    seeds: list[int] = []
    rows: list[tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]] = []
    lost: dict[str, list[int]] = {"unfinished": [], "treatment": [], "baseline": []}
    differs: dict[str, tuple[Any, Any]] = {}
    code: dict[str, str] = {}
    for seed in experiment.seeds:
        treatment, baseline = (
            store.run(Cell(contrast.point, arm, seed)) for arm in (contrast.treatment, contrast.baseline)
        )
        states = treatment.state, baseline.state
        for run, arm, state in zip((treatment, baseline), (contrast.treatment, contrast.baseline), states, strict=True):
            if state in ("finished", "diverged"):
                check_run(run, as_tables(resolve(experiment, Cell(contrast.point, arm, seed))))
                check_code(run, code)
        if "diverged" in states:
            lost["treatment" if states[0] == "diverged" else "baseline"].append(seed)
            continue
        if states != ("finished", "finished"):
            lost["unfinished"].append(seed)
            continue
        differs |= check_pair(treatment, baseline, factors)
        seeds.append(seed)
        rows.append((treatment.scores(), baseline.scores()))
    table = _table(contrast, seeds, rows) if rows else None
    return PairSet(
        contrast,
        table,
        tuple(seeds),
        tuple(lost["unfinished"]),
        tuple(lost["treatment"]),
        tuple(lost["baseline"]),
        differs,
    )


def check_run(run: RunFolder, expected: Mapping[str, Any]) -> None:
    """ValueError where a run is of another configuration than the experiment says: it would be pooled in its name."""
    if found := config_differences(run.read("fingerprint")["config"], expected):
        raise ValueError(
            f"{run.path}: holds a run of another configuration: {describe(found)}. "
            "Give the experiment as it was run (--set too), or delete that folder and run it again"
        )


def check_code(run: RunFolder, code: dict[str, str]) -> None:
    """ValueError where a plugin's text is not that of the runs before, which ``code`` collects by file name."""
    for name, text in run.read("fingerprint")["plugins"].items():
        if code.setdefault(name, text) != text:
            raise ValueError(
                f"{run.path}: trained with another text of plugin {name} (SHA-256 {text} against {code[name]}). "
                "Delete the older runs' folders and run them again"
            )


def check_pair(treatment: RunFolder, baseline: RunFolder, factors: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """The differences of two runs, all of them declared. ValueError naming the others."""
    a, b = treatment.read("fingerprint"), baseline.read("fingerprint")
    for run, content in ((treatment, a), (baseline, b)):
        if "config" not in content:
            raise ValueError(f"{run.path}: fingerprint.json is missing; delete the run's folder to run it again")
    if found := mismatch(a, b, factors):
        raise ValueError(
            f"{treatment.path.name} and {baseline.path.name} are no pair: {describe(found)}. "
            "Declare the field in the arm, or run both again"
        )
    return {name: values for name, values in differences(a, b).items() if not name.startswith("start.")}


def _table(contrast: Contrast, seeds: Sequence[int], rows: Sequence[Any]) -> PairTable:
    items = list(rows[0][0])
    weights = np.array([rows[0][0][item][1] for item in items])
    expected = {item: rows[0][0][item][1] for item in items}
    for seed, sides in zip(seeds, rows, strict=True):
        for arm, side in zip((contrast.treatment, contrast.baseline), sides, strict=True):
            if {item: weight for item, (_, weight) in side.items()} != expected:
                raise ValueError(f"{arm}, seed {seed}: scored on other documents than the rest of its contrast")
    values = [np.array([[side[item][0] for item in items] for side in column]) for column in zip(*rows, strict=True)]
    return PairTable(
        seeds=tuple(seeds), items=tuple(items), treatment=values[0], baseline=values[1],
        weights=weights, metric="val_bpb", unit=math.log(2),
    )  # fmt: skip


def twin_agrees(experiment: Experiment, store: RunStore) -> bool | None:
    """Whether the cell that was run twice agrees to the bit in weights and losses; None while a run is missing."""
    point, seed = experiment.points[0].name, experiment.seeds[0]
    first, second = (store.run(Cell(point, arm, seed)) for arm in (experiment.baseline, "twin"))
    if first.state != "finished" or second.state != "finished":
        return None

    def numbers(run: RunFolder) -> list[Mapping[str, Any]]:
        return [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in run.metrics()]

    same_weights = first.status["weights"] == second.status["weights"]
    return same_weights and numbers(first) == numbers(second) and first.scores() == second.scores()
