"""Two sets of runs that exist, compared: the same table as a report, and under it what it cannot vouch for.

A side is an experiment's arm (``OUT/experiments/NAME:ARM``), a run folder or a folder of them, a log of another tool,
or a folder with one log a seed. Runs are paired by seed where both sides state seeds and nothing that is known of them
contradicts it; the runs of xsalab are then compared over seeds × documents, others over seeds alone. Without pairs the
interval is Welch's. One run a side decides nothing.

No statistics of its own but Welch's interval; verdicts and sentences are those of ``stats``.
"""

from __future__ import annotations

import errno
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text
from scipy import stats as scipy_stats  # pyright: ignore[reportMissingTypeStubs]

from .align import align
from .config import flat
from .experiment.design import config_differences
from .experiment.outcome import plus_minus
from .experiment.pairing import describe, differences, mismatch
from .experiment.store import RunFolder
from .figures import plain_number
from .interop.logs import (
    ALIASES,
    SHAPES,
    Log,
    Series,
    event_files,
    is_run_folder,
    read_logs,
    seed_in_name,
)
from .stats import Estimate, PairTable, Verdict, decide, mean_difference, sentence
from .stats.paired import LEAST_SEEDS, Parts

_scipy: Any = scipy_stats  # scipy comes without types

SUFFIXES = (".log", ".txt", ".out", ".csv", ".tsv", ".json", ".jsonl", ".ndjson")
MARGIN = 0.001  # of the baseline's value, as experiments have it by default
MACHINE = ("machine", "device", "world_size", "system", "instructions")
SOFTWARE = ("python", "torch", "numpy", "kernel", "threads", "code")
CONFIG = ("variant", "data", "model", "optim", "train", "eval")
NO_SPREAD = 8 * float(np.finfo(np.float64).eps)
FINGERPRINT = {"config", "start", "rows", "corpus", "evaluation", "environment", "code", "plugins"}
NO_TEXT = "they were scored on other validation text"


@dataclass(frozen=True, eq=False)
class Run:
    """One run of a side. seed: as stated, or as its file's name says (``named``); None where nothing does."""

    name: str
    log: Log
    seed: int | None
    named: bool = False
    folder: RunFolder | None = None

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Of a run that xsalab trained itself; {} for other logs, and where it is not there or not whole."""
        found = self.folder.read("fingerprint") if self.folder else {}
        return found if found.keys() >= FINGERPRINT else {}


@dataclass(frozen=True, eq=False)
class Side:
    """The runs of one arm, all of one configuration as far as they tell."""

    name: str
    spec: str
    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()

    def facts(self, name: str) -> list[Any]:
        """What its runs say of one thing, each value once."""
        return list(dict.fromkeys(run.log.facts[name] for run in self.runs if name in run.log.facts))


# Reading a side


def read_side(spec: str) -> Side:
    """The runs that ``spec`` names: PATH, or PATH:WHICH, an arm of an experiment or a run of a file that holds several.

    Raises ValueError where there are none, where a seed is there twice, or where two configurations would be pooled
    (F167); OSError where the path is not there.
    """
    path, which = Path(spec), ""
    if not path.exists() and ":" in spec:
        head, _, which = spec.rpartition(":")
        path = Path(head)
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "no such file or folder; give a log, a folder, or FOLDER:ARM", str(path))
    notes: list[str] = []
    if not path.is_dir():
        runs = [_of_log(log) for log in read_logs(path)]
        if which:
            runs = [run for run in runs if fnmatch(run.log.run, which)] or _none_called(path, which, runs)
    elif (path / "runs").is_dir():
        runs = _arm(path, which, notes)
    else:
        runs = _in_folder(path, which, notes)
    name = which.rpartition(".")[2] if which and (path / "runs").is_dir() else which or path.name or str(path)
    _refuse_mixture(spec, runs)
    return Side(name, spec, tuple(runs), tuple(notes))


def _none_called(path: Path, which: str, runs: Sequence[Run]) -> list[Run]:
    raise ValueError(f"{path}: no run {which!r}; it holds: {', '.join(run.log.run for run in runs)}")


def _of_log(log: Log) -> Run:
    if log.kind == "xsalab":
        folder = log.path
        return Run(folder.name, log, log.facts.get("seed"), folder=RunFolder(folder))
    stated = log.facts.get("seed")
    if isinstance(stated, int):
        return Run(log.run, log, stated)
    seed = seed_in_name(log.run)
    return Run(log.run, log, seed, named=seed is not None)


def _arm(path: Path, which: str, notes: list[str]) -> list[Run]:
    """The runs of one arm at one point of an experiment's folder."""
    cells = {tuple(folder.name.rsplit(".", 2)[:2]): None for folder in sorted((path / "runs").glob("*.*.s*"))}
    known = sorted({cell for cell in cells if len(cell) == 2})
    points = sorted({point for point, _ in known})
    names = ", ".join(arm if len(points) == 1 else f"{point}.{arm}" for point, arm in known) or "none yet"
    chosen = [cell for cell in known if which in (cell[1], ".".join(cell))]
    if len(chosen) != 1:
        many = f"{which!r} is there at several points" if chosen else "name one of its arms" if not which else "no arm"
        raise ValueError(f"{path}: {many}: write {path}:ARM, with ARM one of {names}")
    prefix = ".".join(chosen[0])
    return _run_folders(sorted((path / "runs").glob(f"{prefix}.s*")), notes)


def _run_folders(folders: Sequence[Path], notes: list[str]) -> list[Run]:
    runs, waiting = [], []
    for folder in folders:
        state = RunFolder(folder).state
        if is_run_folder(folder) and state in ("finished", "diverged"):
            runs.append(_of_log(read_logs(folder)[0]))
        else:
            waiting.append(f"{folder.name} ({state})")
    if waiting:
        notes.append(f"left out, as not finished: {', '.join(waiting)}")
    if not runs:
        raise ValueError(f"{folders[0].parent}: no finished run: {', '.join(waiting)[:300]}")
    return sorted(runs, key=lambda run: -1 if run.seed is None else run.seed)


def _in_folder(path: Path, which: str, notes: list[str]) -> list[Run]:
    if is_run_folder(path) or event_files(path):
        return _run_folders([path], notes) if is_run_folder(path) else [_of_log(read_logs(path)[0])]
    inside = [child for child in sorted(path.iterdir()) if not child.name.startswith(".")]
    inside = [child for child in inside if not which or fnmatch(child.name, which)]
    folders = [child for child in inside if child.is_dir()]
    if own := [child for child in folders if (child / "status.json").is_file() or is_run_folder(child)]:
        return _run_folders(own, notes)
    events = [child for child in folders if event_files(child)]
    files = [child for child in inside if child.is_file() and child.suffix.lower() in SUFFIXES]
    if not events and not files:
        called = f" called {which!r}" if which else ""
        raise ValueError(
            f"{path}: no logs{called} in this folder: neither run folders, TensorBoard folders nor {' '.join(SUFFIXES)}"
        )
    if events and files:
        raise ValueError(f"{path}: holds event folders and log files: give one kind, in a folder of its own")
    return [_of_log(log) for child in (events or files) for log in read_logs(child)]


def _refuse_mixture(spec: str, runs: Sequence[Run]) -> None:
    """F167: a mean over two configurations is the mean of nothing."""
    first = runs[0]
    for run in runs[1:]:
        if run.log.kind != first.log.kind:
            raise ValueError(f"{spec}: logs of two kinds, {first.log.kind} and {run.log.kind}: give one kind a side")
        found: dict[str, tuple[Any, Any]] = {}
        if run.folder is not None:
            found = config_differences(_settings(first), _settings(run))
            plugins = [other.fingerprint.get("plugins", {}) for other in (first, run)]
            found |= {f"plugin {name}": value for name, value in config_differences(*plugins).items()}
        else:
            a, b = first.log.facts, run.log.facts
            found = {name: (a[name], b[name]) for name in (*SHAPES, "dtype") if name in a and name in b
                     and a[name] != b[name]}  # fmt: skip
        if found:
            raise ValueError(
                f"{spec}: two configurations on one side: {first.name} and {run.name} differ in {describe(found)}. "
                "A mean over both says nothing; give one of them"
            )
    seeds = [run.seed for run in runs if run.seed is not None]
    if twice := [run.name for run in runs if run.seed is not None and seeds.count(run.seed) > 1]:
        raise ValueError(f"{spec}: one seed, several runs: {', '.join(twice)}: one run would count twice; leave it out")


def _settings(run: Run) -> dict[str, Any]:
    assert run.folder is not None, "only xsalab's own runs have a configuration"
    settings = dict(flat(run.folder.read("config").get("config", {})))
    settings.pop("seed", None)
    return settings


# What a run ends with


@dataclass(frozen=True, eq=False)
class Curve:
    """A run's metric on xsalab's steps. planned: the steps it was to take, None where it does not say."""

    run: Run
    series: Series
    diverged: bool
    planned: int | None
    later: int  # the last step that anything was logged at

    @property
    def last(self) -> int:
        return int(self.series.steps[-1])

    @property
    def complete(self) -> bool | None:
        """Whether the last value is of the run's end; None where nothing tells."""
        if self.diverged:
            return None
        if self.planned is not None:
            return self.last >= self.planned - 1
        return False if self.later > self.last + 1 else None


def _curves(side: Side, metric: str, said: list[str]) -> list[Curve]:
    found = []
    for run in side.runs:
        log, name = run.log, run.log.name_of(metric)
        series = log.pick(metric)  # names those that are there where this one is not
        if len(series) and name is not None and _is_loss(name):
            aligned = align(log, metric=metric)
            series = aligned.logged if aligned.train is None else aligned.train
            if aligned.train is None:
                said.append(f"{run.name}: {name}: smoothing and step convention unknown, taken as logged")
            elif aligned.smoothing is not None and aligned.smoothing.form != "none":
                said.append(f"{run.name}: {name} was {aligned.smoothing}; compared un-smoothed")
        broken = log.facts.get("state") == "diverged" or not len(series)
        for watched in (name, log.name_of("loss")):
            if watched is not None and watched in log.not_finite:
                seen = log.series.get(watched)
                broken |= seen is None or log.not_finite[watched][-1] > seen.steps[-1]
        planned = log.facts.get("steps")
        later = max((int(other.steps[-1]) for other in log.series.values()), default=0)
        found.append(Curve(run, series, broken, planned if isinstance(planned, int) else None, later))
    return found


def _is_loss(name: str) -> bool:
    return name.lower() in ALIASES["loss"]


# Welch


def welch(treatment: Sequence[float], baseline: Sequence[float], *, metric: str, confidence: float = 0.95) -> Estimate:
    """Difference of the means of runs that are no pairs, with Welch's t interval (scipy's).

    n is the smaller number of runs; with one run on a side there is no interval, with fewer than 3 nothing is decided.
    sd: what the differences of n pairs would need for the same standard error, as the advice on seeds wants it.
    Raises ValueError for no runs and for values that are not finite.
    """
    a, b = (np.asarray(side, dtype=np.float64) for side in (treatment, baseline))
    if not len(a) or not len(b) or not np.isfinite(a).all() or not np.isfinite(b).all():
        raise ValueError(f"{metric}: Welch's interval needs finite values on both sides, got {len(a)} and {len(b)}")
    n, mean, base = min(len(a), len(b)), float(a.mean() - b.mean()), float(b.mean())
    estimate = Estimate(
        mean=mean, low=None, high=None, standard_error=None, df=None, p=None, n=n, items=1, confidence=confidence,
        method="no interval, one run a side", parts=Parts(0.0, 0.0, 0.0), document_error=0.0, sd=None,
        relative=mean / base if base else None, baseline_mean=base, treatment_mean=float(a.mean()), metric=metric,
        item_word="runs", decidable=False, note="not testable (n=1)",
    )  # fmt: skip
    if n < 2:
        return estimate
    rounding = NO_SPREAD * float(max(np.abs(a).max(), np.abs(b).max()))
    if max(np.ptp(a), np.ptp(b)) <= rounding:
        equal = abs(mean) <= rounding
        mean = 0.0 if equal else mean
        return replace(
            estimate, mean=mean, low=mean, high=mean, standard_error=0.0, p=1.0 if equal else None, sd=0.0,
            method="Welch t over seeds, not paired", decidable=equal and n >= LEAST_SEEDS,
            note="no spread: the runs of a side are equal",
        )  # fmt: skip
    test = _scipy.ttest_ind(a, b, equal_var=False)
    interval = test.confidence_interval(confidence)
    error = math.sqrt(float(a.var(ddof=1)) / len(a) + float(b.var(ddof=1)) / len(b))
    return replace(
        estimate, low=float(interval.low), high=float(interval.high), standard_error=error, df=float(test.df),
        p=max(float(test.pvalue), sys.float_info.min), sd=error * math.sqrt(n), parts=Parts(1.0, 0.0, 0.0),
        method="Welch t over seeds, not paired", decidable=n >= LEAST_SEEDS, note="",
    )  # fmt: skip


# The comparison


def compare(
    a: str, b: str, *, metric: str = "val_bpb", lower_is_better: bool = True, margin: float = MARGIN
) -> dict[str, Any]:
    """A against B, the baseline, JSON-ready. margin: relative to B's mean.

    Raises ValueError for what cannot be read or must not be pooled, and where a run is on both sides.
    """
    if not 0 < margin < 1:
        raise ValueError(f"--margin {margin}: a share of the baseline's value, above 0 and below 1")
    sides = read_side(a), read_side(b)
    if sides[0].name == sides[1].name:
        sides = replace(sides[0], name=a), replace(sides[1], name=b)
    own = [{(run.log.path.resolve(), run.log.run) for run in side.runs} for side in sides]
    if both := own[0] & own[1]:
        raise ValueError(f"{next(iter(both))[0]}: the same run on both sides; there is nothing to compare")
    said: list[str] = [f"{side.name}: {note}" for side in sides for note in side.notes]
    curves = [_curves(side, metric, said) for side in sides]
    metric = _metric_name(metric)
    seeds, why = _pairing(sides)
    differs, other_text = _differences(sides, seeds)
    blocked = NO_TEXT if other_text and metric == "val_bpb" else _other_units(sides, metric)
    whole = [[curve for curve in column if not curve.diverged] for column in curves]
    plan = _Plan(sides, curves, whole, seeds, metric, lower_is_better, margin, blocked)
    rows = [plan.at(None)]
    ends = {curve.last for column in whole for curve in column}
    if len(ends) > 1:
        rows += plan.at_last_common_step(said)
    for side, column in zip(sides, curves, strict=True):
        said += _of_curves(side, column)
    said = [*_vouch(sides, seeds, why, metric, rows[0], differs), *dict.fromkeys(said)]
    return {
        "metric": metric, "lower_is_better": lower_is_better, "margin": margin,
        "sides": [_side(side, column) for side, column in zip(sides, curves, strict=True)],
        "comparisons": rows,
        "differs": {name: [repr(left), repr(right)] for name, (left, right) in differs.items()},
        "checked": _checked(seeds, differs, sides),
        "cannot_vouch": said,
    }  # fmt: skip


def _metric_name(metric: str) -> str:
    return next((name for name, known in ALIASES.items() if metric.lower() in (name, *known)), metric)


def _pairing(sides: tuple[Side, Side]) -> tuple[tuple[int, ...], str]:
    """The seeds of the pairs; none, and why, where the runs are no pairs."""
    columns = [[run.seed for run in side.runs if run.seed is not None] for side in sides]
    for side, column in zip(sides, columns, strict=True):
        if len(column) < len(side.runs):
            return (), f"{side.name} does not state its seeds"
    common = tuple(sorted(set(columns[0]) & set(columns[1])))
    fewest = min(len(column) for column in columns)
    if not common:
        return (), "no seed in common"
    if len(common) < min(fewest, LEAST_SEEDS):
        return (), f"only {_count(len(common), 'seed')} in common"
    for seed in common:
        a, b = (next(run for run in side.runs if run.seed == seed) for side in sides)
        if a.fingerprint and b.fingerprint:
            factors = list(config_differences(a.fingerprint["config"], b.fingerprint["config"]))
            found = mismatch(a.fingerprint, b.fingerprint, factors)
            if wrong := [name for name in found if name.startswith(("start.", "rows", "corpus"))]:
                kinds = dict.fromkeys(name.partition(".")[0] for name in wrong)
                words = {"start": "first weights", "rows": "batches", "corpus": "training text"}
                return (), f"seed {seed} has other {' and other '.join(words[kind] for kind in kinds)} on each side"
        else:
            for name in ("batch_tokens", "context", "vocab_size"):
                left, right = a.log.facts.get(name), b.log.facts.get(name)
                if left is not None and right is not None and left != right:
                    return (), f"{name} {left} against {right}: one seed is not one order of the data"
    return common, ""


def _differences(sides: tuple[Side, Side], seeds: Sequence[int]) -> tuple[dict[str, tuple[Any, Any]], bool]:
    """What differs between partners, or between the first runs; and whether the validation text is one of it."""
    found: dict[str, tuple[Any, Any]] = {}
    partners = [[next(run for run in side.runs if run.seed == seed) for side in sides] for seed in seeds]
    for a, b in partners or [[side.runs[0] for side in sides]]:
        if a.fingerprint and b.fingerprint:
            one = differences(a.fingerprint, b.fingerprint)
            if not seeds:  # another seed has another start and other batches by its nature
                one = {name: value for name, value in one.items() if name not in ("seed", "rows")}
            starts = [name for name in one if name.startswith("start.")]
            if starts and seeds:
                found["start"] = (f"{len(starts)} tensors", "differ")
            found |= {name: value for name, value in one.items() if name not in starts}
        else:
            names = dict.fromkeys((*SHAPES, "dtype", *MACHINE, *SOFTWARE))
            facts = a.log.facts, b.log.facts
            found |= {
                name: (facts[0][name], facts[1][name])
                for name in names
                if name in facts[0] and name in facts[1] and facts[0][name] != facts[1][name]
            }
    return found, "evaluation" in found


def _other_units(sides: tuple[Side, Side], metric: str) -> str:
    vocabularies = [side.facts("vocab_size") for side in sides]
    if "bpb" not in metric and "loss" in metric and all(vocabularies) and vocabularies[0] != vocabularies[1]:
        return f"a loss for each token of vocabularies of {vocabularies[0][0]} and {vocabularies[1][0]} tokens"
    return ""


@dataclass(frozen=True, eq=False)
class _Plan:
    """What each comparison needs: everything but the step at which it is made."""

    sides: tuple[Side, Side]
    curves: Sequence[Sequence[Curve]]
    whole: Sequence[Sequence[Curve]]  # without the diverged ones
    seeds: tuple[int, ...]
    metric: str
    lower_is_better: bool
    margin: float
    blocked: str  # why no verdict can be given whatever the numbers; "" where one can

    def at_last_common_step(self, said: list[str]) -> list[dict[str, Any]]:
        shared = set.intersection(*(set(c.series.steps.tolist()) for column in self.whole for c in column))
        if not shared:
            said.append("the runs end at different steps and have no step in common: only their ends are compared")
            return []
        return [self.at(max(shared))]

    def at(self, step: int | None) -> dict[str, Any]:
        """The row of the table at a step, or at the end of each run."""
        values = [[self._value(curve, step) for curve in column] for column in self.whole]
        seeds = [seed for seed in self.seeds if all(seed in [c.run.seed for c in column] for column in self.whole)]
        lost = len(self.curves[0]) - len(self.whole[0]), len(self.curves[0])
        estimate, estimate90 = None, None
        if all(values):
            estimate, estimate90 = (self._estimate(step, seeds, values, share) for share in (0.95, 0.90))
        row: dict[str, Any] = {
            "at": "the end of each run" if step is None else f"step {step}, the last common one",
            "step": step, "paired": bool(seeds), "seeds": seeds, "treatment_values": values[0],
            "baseline_values": values[1], "margin": None, "differences": None, "estimate": None,
            "notes": self._notes(step),
        }  # fmt: skip
        verdict = self._verdict(estimate, estimate90, lost, row)
        row["verdict"] = {**vars(verdict), "text": str(verdict)}
        names = [side.name for side in self.sides]
        if estimate is None and verdict.word != "diverged":
            row["sentence"] = f"{names[0]} against {names[1]}: {verdict.reason}, {verdict}"
        else:
            row["sentence"] = sentence(names[0], names[1], estimate, verdict, metric=self.metric)
        return row

    def _verdict(
        self, estimate: Estimate | None, estimate90: Estimate | None, lost: tuple[int, int], row: dict[str, Any]
    ) -> Verdict:
        if estimate is None:
            if lost[0]:
                return decide(None, margin=1.0, estimate90=None, diverged=lost)
            return Verdict("not decidable", f"every run of {self.sides[1].name} diverged", "a baseline that finishes")
        margin = self.margin * (abs(estimate.baseline_mean) or abs(estimate.treatment_mean) or 1.0)
        row["margin"] = margin
        row["estimate"] = {**vars(estimate), "parts": estimate.parts._asdict(), "half_width": estimate.half_width}
        if row["paired"]:
            row["differences"] = self._table(row["step"], row["seeds"]).differences.tolist()
        if self.blocked:
            return Verdict("not decidable", self.blocked, "runs that are scored in one way")
        return decide(
            estimate, margin=margin, estimate90=estimate90, lower_is_better=self.lower_is_better, diverged=lost
        )

    def _value(self, curve: Curve, step: int | None) -> float:
        value = float(curve.series.values[-1]) if step is None else curve.series.at(step)
        assert value is not None, "the step is common to all"
        return value

    def _estimate(
        self, step: int | None, seeds: Sequence[int], values: Sequence[Sequence[float]], confidence: float
    ) -> Estimate:
        if not seeds:
            return welch(*values, metric=self.metric, confidence=confidence)
        return mean_difference(self._table(step, seeds), confidence=confidence)

    def _table(self, step: int | None, seeds: Sequence[int]) -> PairTable:
        """Documents where both sides have their scores at this step, else one value a run."""
        columns = [[next(c for c in column if c.run.seed == seed) for seed in seeds] for column in self.whole]
        if self.metric == "val_bpb" and step is None and (scores := _scores(columns)) is not None:
            items = tuple(scores[0][0])
            values = [np.array([[run[item][0] for item in items] for run in column]) for column in scores]
            weights = np.array([scores[0][0][item][1] for item in items])
            return PairTable(tuple(seeds), items, values[1], values[0], weights, self.metric, math.log(2))
        values = [np.array([[self._value(curve, step)] for curve in column]) for column in columns]
        return PairTable(
            tuple(seeds), ("run",), values[1], values[0], np.ones(1), self.metric, 1.0, item_word="logged values"
        )

    def _notes(self, step: int | None) -> list[str]:
        ends = [sorted({curve.last for curve in column}) for column in self.whole]
        if step is None and ends[0] != ends[1]:
            words = [f"{side.name} at step {_range(end)}" for side, end in zip(self.sides, ends, strict=True) if end]
            return [f"unequal budgets, {' against '.join(words)}: the longer one has taken more steps"]
        early = [side.name for side, column in zip(self.sides, self.whole, strict=True)
                 if step is not None and any(curve.last > step for curve in column)]  # fmt: skip
        if early:
            return [
                f"{' and '.join(early)} read before the end, while the learning rate is still high: unfair to "
                f"{'them' if len(early) > 1 else 'it'}"
            ]
        return []


def _scores(columns: Sequence[Sequence[Curve]]) -> list[list[dict[str, tuple[float, float]]]] | None:
    """The documents' scores of all runs; None where a run has none, or they are of other documents."""
    found: list[list[dict[str, tuple[float, float]]]] = []
    for column in columns:
        rows = []
        for curve in column:
            folder = curve.run.folder
            if folder is None or not curve.run.fingerprint or not (folder.path / "scores.parquet").is_file():
                return None
            rows.append(folder.scores())
        found.append(rows)
    first = {item: weight for item, (_, weight) in found[0][0].items()}
    same = all({item: weight for item, (_, weight) in run.items()} == first for rows in found for run in rows)
    return found if same and first else None


# What it cannot vouch for


def _vouch(
    sides: tuple[Side, Side], seeds: Sequence[int], why: str, metric: str, end: Mapping[str, Any],
    differs: Mapping[str, Any],
) -> list[str]:  # fmt: skip
    said: list[str] = []
    sizes = [len(side.runs) for side in sides]
    if not seeds:
        interval = "; the interval is for independent runs" if end["estimate"] and min(sizes) > 1 else ""
        said.append(f"not paired: {why}{interval}")
    elif left := [f"{side.name} {sorted(run.seed for run in side.runs if run.seed not in seeds)}" for side in sides  # pyright: ignore
                  if len(side.runs) > len(seeds)]:  # fmt: skip
        said.append(f"left out, as their seed has no partner: {'; '.join(left)}")
    for side, size in zip(sides, sizes, strict=True):
        if size == 1:
            said.append(f"one run of {side.name}: nothing is known of the spread between its seeds")
        if any(run.named for run in side.runs):
            said.append(f"{side.name}: seeds are those of the files' names, which the logs do not confirm")
    own = all(run.fingerprint for side in sides for run in side.runs)
    changes = dict.fromkeys("variant" if name.startswith("variant.") else name for name in differs
                            if own and name.partition(".")[0] in CONFIG)  # fmt: skip
    if len(changes) > 1:
        said.append(f"one change: the sides differ in {', '.join(changes)}, and Δ is of all of these together")
    for words, names in (("another machine", MACHINE), ("other software", SOFTWARE)):
        for name in names:
            values = [side.facts(name) for side in sides]
            if all(values) and (values[0] != values[1] or len(values[0]) > 1):
                shown = " against ".join(", ".join(str(value) for value in column) for column in values)
                said.append(f"{words}: {name} {shown}: run the baseline again beside it; no claim about time is made")
        silent = [side.name for side in sides if not any(side.facts(name) for name in names)]
        if silent:
            kind = words.removeprefix("another ").removeprefix("other ")
            said.append(f"the {kind} is not stated by {' nor by '.join(silent)}")
    for name in ("steps", "tokens", "batch_tokens", "vocab_size", "context", "parameters"):
        values = [side.facts(name) for side in sides]
        if all(values) and values[0] != values[1]:
            said.append(f"{name}: {values[0][0]:,} against {values[1][0]:,}")
        elif not own and name in ("tokens", "vocab_size", "batch_tokens") and not all(values):
            who = " and ".join(side.name for side, value in zip(sides, values, strict=True) if not value)
            said.append(f"{name}: not stated by {who}")
    if not own:
        said.append("shared first weights and the order of the data: logs do not tell")
        said.append("the same validation text, scored in the same way: logs do not tell")
        said.append("one configuration a side, and one change between the sides: only what the logs state was compared")
    estimate = end["estimate"]
    if estimate is not None and estimate["items"] == 1:
        said.append("no scores of single documents: the interval is over runs only, another text may say otherwise")
    if _is_loss(metric):
        said.append("a training loss is of one batch: it says less than a validation value")
    return said


def _checked(seeds: Sequence[int], differs: Mapping[str, Any], sides: tuple[Side, Side]) -> str:
    """What agrees within all pairs of runs whose fingerprints tell; "" where there are none."""
    if not seeds or not all(run.fingerprint for side in sides for run in side.runs):
        return ""
    words = {
        "start": "first weights that both have", "rows": "batches", "corpus": "training text",
        "evaluation": "validation text", "environment": "software, device and threads", "code": "xsalab's code",
        "machine": "machine",
    }  # fmt: skip
    same = [text for name, text in words.items() if not any(found.partition(".")[0] == name for found in differs)]
    return f"the runs of each seed agree in {', '.join(same)}" if same else ""


def _of_curves(side: Side, curves: Sequence[Curve]) -> list[str]:
    said: list[str] = []
    early = [curve for curve in curves if curve.complete is False]
    if early:
        ends = sorted({curve.last for curve in early})
        planned = f" of {early[0].planned}" if early[0].planned else f", but the log goes on to {early[0].later}"
        said.append(
            f"{side.name}: the last value is at step {_range(ends)}{planned}: a curve read before its end still has a "
            "high learning rate, and a comparison there is unfair"
        )
    if any(curve.complete is None and not curve.diverged for curve in curves):
        said.append(f"{side.name}: the log does not say how many steps were planned: its last value may not be the end")
    if len({curve.last for curve in curves if not curve.diverged}) > 1:
        said.append(f"{side.name}: its own runs end at different steps")
    for curve in curves:
        if curve.diverged:
            said.append(f"{side.name}: {curve.run.name} diverged and is in no mean")
        said += [f"{curve.run.name}: {note}" for note in curve.run.log.notes]
    return said


def _range(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _side(side: Side, curves: Sequence[Curve]) -> dict[str, Any]:
    values = [float(curve.series.values[-1]) for curve in curves if not curve.diverged]
    return {
        "name": side.name, "spec": side.spec, "kind": side.runs[0].log.kind,
        "mean": statistics.fmean(values) if values else None,
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "facts": dict(side.runs[0].log.facts),
        "runs": [
            {"name": curve.run.name, "seed": curve.run.seed, "planned": curve.planned, "diverged": curve.diverged,
             "last_step": curve.last if len(curve.series) else None,
             "value": None if curve.diverged else float(curve.series.values[-1])}
            for curve in curves
        ],
    }  # fmt: skip


def _count(n: int, word: str) -> str:
    return f"{n} {word}" + ("" if n == 1 else "s")


# The terminal


def terminal_table(content: Mapping[str, Any], say: Callable[[str], str] = str) -> Table:
    """Baseline and treatment for each comparison, as a report has it. say: applied to every text."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    found.add_column("arm", min_width=8, max_width=24, overflow="fold")
    for name in ("runs", content["metric"], f"Δ {content['metric']} ± 95 %", "Δ %"):
        found.add_column(say(name), justify="right", no_wrap=True)
    found.add_column("verdict", min_width=12)
    treatment, baseline = (side["name"] for side in content["sides"])
    for row in content["comparisons"]:
        estimate = row["estimate"]
        if len(content["comparisons"]) > 1:
            found.add_row(Text(say(f"at {row['at']}"), style="bold"))
        for name, side in ((baseline, "baseline"), (treatment, "treatment")):
            count = len(row["seeds"]) or len(row[f"{side}_values"])
            cells = [name, str(count), f"{estimate[f'{side}_mean']:.4f}" if estimate else "", "", "", side]
            if side == "treatment":
                cells[3] = plus_minus(estimate["mean"], estimate["half_width"]) if estimate else ""
                cells[4] = _percent(estimate["relative"]) if estimate else ""
                cells[5] = row["verdict"]["text"]
            found.add_row(*(Text(say(cell)) for cell in cells))
    return found


def _percent(share: float | None) -> str:
    if share is None:
        return ""
    return "0 %" if abs(share) < 1e-7 else f"{'+' if share > 0 else ''}{plain_number(100 * share, 2)} %"


def lines(content: Mapping[str, Any]) -> list[str]:
    """What stands under the table: the sentences with their reasons, what differs, and what cannot be vouched for."""
    found: list[str] = []
    several = len(content["comparisons"]) > 1
    for row in content["comparisons"]:
        found.append(f"{row['at']}: {row['sentence']}" if several else row["sentence"])
        verdict, estimate = row["verdict"], row["estimate"]
        if estimate is not None:
            method = f"{estimate['method']}, {_count(estimate['n'], 'pair')}" if row["paired"] else estimate["method"]
            found.append(f"  {verdict['reason']} ({method})" if verdict["word"] != "diverged" else f"  ({method})")
        if verdict["advice"]:
            found.append(f"  what would help: {verdict['advice']}")
        found += [f"  {note}" for note in row["notes"]]
        if row["differences"] is not None:
            pairs = zip(row["seeds"], row["differences"], strict=True)
            shown = ", ".join(f"{seed}: {value:+.6f}".replace("-", "−") for seed, value in pairs)
            found.append(f"  difference of each seed: {shown}")
        else:
            for side, values in zip(content["sides"], (row["treatment_values"], row["baseline_values"]), strict=True):
                found.append(f"  {side['name']}: {', '.join(f'{value:.6f}' for value in values) or 'no value'}")
    if content["differs"]:
        found.append("the sides differ in:")
        found += [f"  {name}: {a} against {b}" for name, (a, b) in content["differs"].items()]
    if content["checked"]:
        found.append(f"checked: {content['checked']}")
    if content["cannot_vouch"]:
        found.append("what this cannot vouch for:")
    return found + [f"  - {text}" for text in content["cannot_vouch"]]
